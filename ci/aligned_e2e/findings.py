"""What the fault stages find, as values that cross processes and go into the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ORACLE_LIMIT", "Agreement", "CaughtBy", "Finding"]

CaughtBy = Literal["bits", "trace", "plan", "refusal", "fingerprint", "attestation"]

ORACLE_LIMIT = 1e-3
"""Greatest mean difference of logprobs between float32 implementations that counts as the same architecture."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one sabotage.

    Attributes:
        name: What went wrong.
        caught: Whether it was found, in the expected way and place.
        caught_by: By what; None if nothing noticed.
        located_layer: Where the first difference is; None if no row differs.
        located_op: Likewise.
        detail: The words of what caught it.
    """

    name: str
    caught: bool
    caught_by: CaughtBy | None
    located_layer: int | None
    located_op: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the small model is from transformers'.

    Attributes:
        mean_abs_logprob_diff: With float32 on both sides.
        quantised_mean_abs_logprob_diff: With the real rounding on our side.
        control_mean_abs_logprob_diff: With float32 and a planted mistake in the architecture: must be far off.
        tokens: Logprobs compared.
        tokens_past_topk_threshold: Those for which the indexer left entries out.
    """

    mean_abs_logprob_diff: float
    quantised_mean_abs_logprob_diff: float
    control_mean_abs_logprob_diff: float
    tokens: int
    tokens_past_topk_threshold: int

    @property
    def problems(self) -> list[str]:
        """Why this is no agreement; empty if it is one."""
        found = []
        # Not "greater than": a NaN is a problem too.
        if not self.mean_abs_logprob_diff <= ORACLE_LIMIT:
            found.append(f"oracle: mean |logprob difference| {self.mean_abs_logprob_diff:.2e}, limit {ORACLE_LIMIT}")
        if not self.control_mean_abs_logprob_diff > ORACLE_LIMIT:
            found.append(f"oracle: a planted mistake moved logprobs by {self.control_mean_abs_logprob_diff:.2e} only")
        if not self.tokens_past_topk_threshold:
            found.append("oracle: no token lies past the top-k threshold")
        return found

    @property
    def summary(self) -> str:
        """One line for people."""
        return (
            f"transformers' DeepseekV4ForCausalLM over {self.tokens} tokens, mean |logprob difference|: "
            f"{self.mean_abs_logprob_diff:.1e} in float32, {self.quantised_mean_abs_logprob_diff:.3f} with our "
            f"rounding, {self.control_mean_abs_logprob_diff:.3f} with a planted mistake"
        )

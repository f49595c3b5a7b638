"""Expert capacity: how many rows an expert has room for. A constant of the deployment, never of the batch."""

from __future__ import annotations

from dataclasses import dataclass

from bi_kernels.runtime.checks import check_value

__all__ = ["ExpertCapacity"]

# DeepGEMM's masked product is known to go wrong below 64 rows per expert (deepseek-ai/DeepGEMM issue 268).
_ROW_FLOOR = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCapacity:
    """Sizes of the masked expert layout. Build it with :meth:`from_model`.

    Attributes:
        num_experts: Experts of a layer, over all ranks.
        top_k: Experts per token.
        world_size: Ranks of the expert-parallel group.
        tokens_per_rank: Tokens that one rank may dispatch in one slice; equal on every rank.
    """

    num_experts: int
    top_k: int
    world_size: int
    tokens_per_rank: int

    @classmethod
    def from_model(
        cls, *, num_experts: int, top_k: int, max_tokens_per_rank: int, world_size: int = 1
    ) -> ExpertCapacity:
        """Capacity from constants of the model and the deployment.

        Args:
            num_experts: Experts of a layer, a multiple of ``world_size``.
            top_k: Experts per token.
            max_tokens_per_rank: Tokens per rank and slice that the deployment fixes; rounded up to a multiple of 64.
            world_size: Ranks of the expert-parallel group.

        Raises:
            ArgumentError: A number is not positive, or the experts do not divide among the ranks.
        """
        for name, value in (
            ("num_experts", num_experts),
            ("top_k", top_k),
            ("max_tokens_per_rank", max_tokens_per_rank),
            ("world_size", world_size),
        ):
            check_value(name, value >= 1, "a positive number", value, "Take it from the model or the deployment.")
        check_value("top_k", top_k <= num_experts, f"at most {num_experts}", top_k, "Use the model's top_k.")
        check_value(
            "world_size",
            num_experts % world_size == 0,
            f"a divisor of {num_experts} experts",
            world_size,
            "Choose a number of ranks that divides the experts.",
        )
        rounded = -(-max_tokens_per_rank // _ROW_FLOOR) * _ROW_FLOOR
        return cls(num_experts=num_experts, top_k=top_k, world_size=world_size, tokens_per_rank=rounded)

    @property
    def num_local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.world_size

    @property
    def rows_per_expert(self) -> int:
        """Rows of each expert in the masked layout: every rank may send all its tokens to one expert."""
        return self.world_size * self.tokens_per_rank

    @property
    def expected_m(self) -> int:
        """DeepGEMM's hint: rows per expert of a full slice, if routing were uniform."""
        return -(-self.rows_per_expert * self.top_k // self.num_experts)

    def first_expert(self, rank: int) -> int:
        """First expert of ``rank``.

        Raises:
            ArgumentError: There is no such rank.
        """
        check_value("rank", 0 <= rank < self.world_size, f"0 to {self.world_size - 1}", rank, "Use the EP rank.")
        return rank * self.num_local_experts

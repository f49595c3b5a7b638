"""The fault stages of a run: sabotages, the oracle, and the index of reported faults."""

from __future__ import annotations

import concurrent.futures
import importlib.util
from dataclasses import dataclass, replace

from bi_kernels.runtime.errors import BlockedError, Blocker

from .cases import load_cases
from .checkpoint import make_checkpoint
from .config import Deployment, ModelConfig
from .findings import Agreement, Finding
from .oracle import compare_with_transformers
from .report import Report
from .sabotage import run_all
from .sides import OLD_SEED
from .workers import Workers

__all__ = ["FaultStages", "require_transformers"]

_TEXTS = ((2000, 480), (9000, 480))  # start and length in the book, past 4 * index_topk


def require_transformers() -> None:
    """Refuse before anything is computed where the oracle could not run.

    Raises:
        BlockedError: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        remedy = "nox -s aligned_e2e installs it; by hand: pip install -c ci/constraints/cpu.txt transformers."
        raise BlockedError("aligned_e2e, profile cpu", [Blocker("oracle", "transformers", "none", remedy)])


@dataclass(frozen=True, slots=True)
class FaultStages:
    """Stages that are running. Start them when the workers have got their longer jobs.

    Attributes:
        sabotages: Findings, one for each sabotage.
        oracle: What transformers' model says.
    """

    sabotages: concurrent.futures.Future[list[Finding]]
    oracle: concurrent.futures.Future[Agreement]

    @classmethod
    def start(cls, workers: Workers, config: ModelConfig, deployment: Deployment, book: list[int]) -> FaultStages:
        """Hand them to the workers."""
        return cls(
            workers.submit("sabotages", run_all, config.vocab_size, book),
            workers.submit("oracle", _ask_transformers, config, deployment, book),
        )

    def write_to(self, report: Report, workers: Workers) -> None:
        """Wait for them and put what they found into the report."""
        report.sabotages = workers.result(self.sabotages)
        report.oracle = workers.result(self.oracle)
        report.cases = load_cases()
        report.coverage["twelve_sabotages"] = len(report.sabotages) >= 12


def _ask_transformers(config: ModelConfig, deployment: Deployment, book: list[int]) -> Agreement:
    # A limit that real activations reach, so that the clamp is compared too.
    config = replace(config, swiglu_limit=1.0)
    texts = [book[start : start + length] for start, length in _TEXTS]
    return compare_with_transformers(config, deployment, make_checkpoint(config, OLD_SEED), texts)

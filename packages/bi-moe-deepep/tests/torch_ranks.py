"""One rank of a gloo group in its own process: ``torch_ranks.py FOLDER WORLD_SIZE RANK PROGRAM``.

Writes what the program returns to ``FOLDER/<rank>.pt``. Test modules read it, and this module's data, through
``runpy``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bi_kernels import Arch, ScaleFormat, per_block_quant_fp8
from bi_moe_deepep import (
    DispatchedTokens,
    StagedDispatcher,
    TorchTransport,
    Transport,
    combine_ordered,
    expert_mlp,
    plan_slices,
    select_experts,
    stage_tokens,
)

GENERATOR = torch.Generator().manual_seed(0)
NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, NUM_TOKENS = 8, 3, 128, 128, 29


def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [
        per_block_quant_fp8(torch.randn(n, k, generator=GENERATOR) / 11, scale_format=ScaleFormat.FLOAT32_CEIL_UE8M0)
        for _ in range(NUM_EXPERTS)
    ]
    return torch.stack([q for q, _ in parts]), torch.stack([s for _, s in parts])


W = (*weight(2 * INTERMEDIATE, HIDDEN), *weight(HIDDEN, INTERMEDIATE))
X = torch.randn(NUM_TOKENS, HIDDEN, generator=GENERATOR).bfloat16()
WEIGHTS, IDS = select_experts(torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=GENERATOR), top_k=TOP_K)
SHARES = {
    2: [[15, 14], [29, 0], [0, 29]],
    4: [[8, 7, 7, 7], [1, 0, 28, 0], [0, 0, 0, 29]],
}
CAPACITIES = (3, 7, 29, 64)


def without_dispatch() -> torch.Tensor:
    staged = stage_tokens(X, IDS, num_experts=NUM_EXPERTS, capacity=NUM_TOKENS)
    return combine_ordered(expert_mlp(staged.x, staged.counts, *W, arch=Arch.SM90), staged.slots, WEIGHTS)


def local_experts(transport: Transport) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    mine = [part.chunk(transport.world_size)[transport.rank] for part in W]
    return lambda x, counts: expert_mlp(x, counts, *mine, arch=Arch.SM90)


def layer(transport: Transport, shares: list[int], capacity: int) -> torch.Tensor:
    """This rank's part of the layer, with the tokens dealt out as ``shares`` says."""
    num_slices = plan_slices(max(shares), capacity=capacity).num_slices
    mine = [part.split(shares)[transport.rank] for part in (X, IDS, WEIGHTS)]
    dispatcher = StagedDispatcher(transport, num_experts=NUM_EXPERTS, capacity=capacity, num_slices=num_slices)
    return dispatcher.run(*mine, experts=local_experts(transport))[0]


class Ring:
    """Sums by rank in bfloat16, as a reduce-scatter does: the twin that must be noticed."""

    def __init__(self, transport: TorchTransport) -> None:
        self.inner = transport
        self.rank, self.world_size = transport.rank, transport.world_size

    def all_gather_ints(self, values: Any) -> list[tuple[int, ...]]:
        return self.inner.all_gather_ints(values)

    def low_latency_dispatch(self, *arguments: Any) -> DispatchedTokens:
        return self.inner.low_latency_dispatch(*arguments)

    def low_latency_combine(
        self, expert_out: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any
    ) -> torch.Tensor:
        owner = topk_idx // (NUM_EXPERTS // self.world_size)
        total = torch.zeros(len(topk_idx), HIDDEN, dtype=torch.bfloat16)
        for rank in range(self.world_size):
            of_rank = torch.where(owner == rank, topk_idx, -1)
            total += self.inner.low_latency_combine(expert_out, of_rank, topk_weights, handle)
        return total


def equal_bits(rank: int, world_size: int) -> dict[str, Any]:
    """Every distribution and capacity, with and without the checks on the host; and the twin."""
    found: dict[str, Any] = {}
    for shares in SHARES[world_size]:
        for capacity in CAPACITIES:
            if -(-max(shares) // capacity) > 5:
                continue  # as many slices as tokens is a matter of patience, not of another path
            found[f"{shares} {capacity}"] = layer(TorchTransport(), shares, capacity)
    shares = SHARES[world_size][0]
    found["verify=False"] = layer(TorchTransport(verify=False), shares, 7)
    found["twin"] = layer(Ring(TorchTransport()), shares, 29)
    return found


def attempt(program: Callable[[], Any]) -> str:
    try:
        return f"no error: {program()}"
    except Exception as error:  # the test looks at its words
        return f"{type(error).__name__}: {error}"


def refusals(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank is told; a new group for each, because a failed group stays failed."""
    found: dict[str, Any] = {}
    x, ids = X[:4], IDS[:4]

    found["capacity"] = attempt(lambda: TorchTransport().low_latency_dispatch(x, ids, (128, 256)[rank], NUM_EXPERTS))
    found["over"] = attempt(lambda: TorchTransport().low_latency_dispatch(X[: 3 + 6 * rank], IDS[: 3 + 6 * rank], 8, 8))
    found["staged"] = attempt(lambda: layer(TorchTransport(), [29, 0], 8)[:, :0].tolist() == [[]] * (29, 0)[rank])
    found["dispatcher"] = attempt(
        lambda: StagedDispatcher(
            TorchTransport(), num_experts=NUM_EXPERTS, capacity=(128, 256)[rank], num_slices=1
        ).run(x, ids, WEIGHTS[:4], experts=lambda x, counts: x)
    )

    class Corrupt(Ring):
        def low_latency_dispatch(self, *arguments: Any) -> DispatchedTokens:
            received = self.inner.low_latency_dispatch(*arguments)
            if rank == 1:
                received.counts[1] += 1
            return received

    found["corrupt"] = attempt(lambda: layer(Corrupt(TorchTransport()), [15, 14], 29))

    transport = TorchTransport(dist.new_group())
    found["calls"] = attempt(
        lambda: transport.all_gather_ints([1]) if rank else transport.low_latency_dispatch(x, ids, 8, NUM_EXPERTS)
    )
    found["after"] = attempt(lambda: transport.all_gather_ints([1]))

    found["ints"] = TorchTransport().all_gather_ints(range(rank + 1))
    only_rank_0 = dist.new_group([0])
    if rank == 0:
        found["control"] = attempt(lambda: TorchTransport(control_group=only_rank_0))
        found["alone"] = TorchTransport(only_rank_0).all_gather_ints([7])
    return found


def absent_rank(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 never joins. Rank 0 must be told in time."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    started = time.monotonic()
    if rank == 0:
        words = attempt(lambda: layer(TorchTransport(group, timeout=0.5), [29, 0], 29))
        return {"words": words, "seconds": time.monotonic() - started}
    time.sleep(1.5)
    return {}


def main(folder: str, world_size: str, rank: str, program: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=int(world_size), rank=int(rank))
    torch.save(globals()[program](int(rank), int(world_size)), f"{folder}/{rank}.pt")
    if program != "absent_rank":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

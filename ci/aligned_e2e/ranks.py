"""Expert parallelism over real processes: one engine for each rank, and every expert layer a collective among them."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import pathlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

import bi_moe_deepep as moe

from . import workers
from .prompts import Request
from .rollout import Plan, Schedule
from .sides import OLD_SEED, Served, Sides, make_engine, serve_on

__all__ = ["serve_ranks"]

_TIMEOUT = 600.0  # seconds; on a busy machine a rank may wait long for the others


def serve_ranks(sides: Sides, schedule: Schedule, shares: Sequence[int]) -> Served:
    """Serve every request with the old weights on several ranks over gloo, each a process.

    Attention and the shared expert are computed where the request is; routed experts live on one rank each.

    Args:
        sides: What rollout and actor agree on.
        schedule: How each rank batches its own requests.
        shares: Per rank, its share of the requests relative to the others'. A rank with 0 serves none: it lends its
            experts only.

    Returns:
        What all ranks drew, together. Steps are those of the busiest rank.
    """
    started = time.monotonic()
    owners = [rank for rank, share in enumerate(shares) for _ in range(share)]
    requests: list[list[Request]] = [[] for _ in shares]
    for i, request in enumerate(sides.requests):
        requests[owners[i % len(owners)]].append(request)
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(
            len(shares), mp_context=context, initializer=workers.connect, initargs=(workers.ticks(),)
        ) as pool,
    ):
        store = pathlib.Path(folder, "store").as_uri()
        futures = [
            pool.submit(_serve_rank, sides, schedule, mine, store, rank, len(shares))
            for rank, mine in enumerate(requests)
        ]
        served = [future.result() for future in futures]
    total = Plan(ranks=len(shares), empty_ranks=sum(not mine for mine in requests))
    for run in served:
        for name, value in asdict(run.plan).items():
            joined = max if name in {"steps", "largest_decode"} else int.__add__
            setattr(total, name, joined(getattr(total, name), value))
    return Served(
        {name: row for run in served for name, row in run.tokens.items()},
        {name: row for run in served for name, row in run.logprobs.items()},
        {name: row for run in served for name, row in run.digests.items()},
        total,
        round(time.monotonic() - started, 2),
    )


def _serve_rank(
    sides: Sides, schedule: Schedule, requests: Sequence[Request], store: str, rank: int, world_size: int
) -> Served:
    """One rank, in its own process."""
    torch.set_num_threads(1)
    model = sides.model(OLD_SEED)
    timeout = timedelta(seconds=_TIMEOUT)
    dist.init_process_group("gloo", init_method=store, world_size=world_size, rank=rank, timeout=timeout)
    model.join_group(moe.TorchTransport(timeout=_TIMEOUT))
    served = serve_on(make_engine(sides, model, schedule), requests)
    dist.destroy_process_group()
    return served

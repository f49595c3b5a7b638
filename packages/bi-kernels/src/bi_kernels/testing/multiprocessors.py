"""Run GPU work on some of the multiprocessors, to see whether their number shows in the bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["few_multiprocessors"]


@contextlib.contextmanager
def few_multiprocessors(count: int) -> Iterator[int]:
    """What is launched inside runs on a stream that owns ``count`` multiprocessors, rounded up by the driver.

    By a green context of this process; the GPU's settings stay as they are. A kernel that asks for the number of
    multiprocessors still hears of all of them, so that its grid is the same; how its blocks are spread is not.

    Args:
        count: At least 8 on Hopper, and fewer than the GPU has.

    Yields:
        How many the stream really has.

    Raises:
        RuntimeError: The driver refuses.
    """
    from cuda.bindings import driver as cu  # torch's CUDA builds bring it

    def call(function: Any, *arguments: Any) -> Any:
        status, *results = function(*arguments)
        if status != cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__}: expected CUDA_SUCCESS, got {status.name}. Update the driver.")
        return results

    torch.cuda.init()
    (device,) = call(cu.cuDeviceGet, torch.cuda.current_device())
    (every,) = call(cu.cuDeviceGetDevResource, device, cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    some, _, _ = call(cu.cuDevSmResourceSplitByCount, 1, every, 0, count)
    (description,) = call(cu.cuDevResourceGenerateDesc, some, 1)
    (context,) = call(
        cu.cuGreenCtxCreate, description, device, cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM.value
    )
    try:
        (stream,) = call(cu.cuGreenCtxStreamCreate, context, cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value, 0)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream))):
            yield int(some[0].sm.smCount)
        torch.cuda.synchronize()
        call(cu.cuStreamDestroy, stream)
    finally:
        call(cu.cuGreenCtxDestroy, context)

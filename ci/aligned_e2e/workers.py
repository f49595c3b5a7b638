"""Processes for independent runs, and one progress bar for all of them."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import multiprocessing.queues
import os
import queue
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from rich.progress import Progress, TaskID

__all__ = ["Workers", "advance", "connect", "ticks"]

P = ParamSpec("P")
R = TypeVar("R")

# Tensors of some megabytes come and go in every op. glibc would give their memory back to the system each time, and
# getting it anew costs more than the arithmetic. It reads these when a process starts.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": 1 << 30, "MALLOC_TRIM_THRESHOLD_": 1 << 32}

_ticks: multiprocessing.queues.Queue[int] | None = None  # set in a worker process


def advance() -> None:
    """One generated token more. Does nothing outside a worker."""
    if _ticks is not None:
        _ticks.put(1)


def connect(ticks: multiprocessing.queues.Queue[int] | None) -> None:
    """Send this process's generated tokens to a progress bar elsewhere."""
    global _ticks
    _ticks = ticks


def ticks() -> multiprocessing.queues.Queue[int] | None:
    """Where this process's generated tokens are counted, for the processes that it starts."""
    return _ticks


class Workers:
    """A pool of fresh processes, one for each core.

    Args:
        progress: Where the bar is shown.
    """

    def __init__(self, progress: Progress) -> None:
        for name, size in _MALLOC.items():
            os.environ.setdefault(name, str(size))
        context = multiprocessing.get_context("spawn")
        self._progress = progress
        self._ticks: multiprocessing.queues.Queue[int] = context.Queue()
        self._pool = concurrent.futures.ProcessPoolExecutor(
            max_workers=os.cpu_count(), mp_context=context, initializer=connect, initargs=(self._ticks,)
        )
        self.task = TaskID(0)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def track(self, title: str, tokens: int) -> TaskID:
        """Show a bar of so many tokens."""
        self.task = self._progress.add_task(title, total=tokens)
        return self.task

    def submit(
        self, title: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[R]:
        """Run a function in a worker; arguments and result cross as values. ``title`` is printed when it is done."""
        started = time.monotonic()
        future = self._pool.submit(function, *args, **kwargs)

        def announce(done: concurrent.futures.Future[R]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._progress.console.print(f"done after {time.monotonic() - started:4.0f} s: {title}")

        future.add_done_callback(announce)
        return future

    def result(self, future: concurrent.futures.Future[Any]) -> Any:
        """Wait for a result, moving the bar meanwhile. Raises what the function raised."""
        while not future.done():
            try:
                self._progress.advance(self.task, self._ticks.get(timeout=0.2))
            except queue.Empty:
                continue
        return future.result()

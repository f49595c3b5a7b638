"""The batch-invariance driver: a row alone and among neighbours, everywhere in batches of every kind of size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from .bitwise import first_difference

__all__ = [
    "BATCH_SIZES",
    "NEIGHBOURS",
    "QUICK_BATCH_SIZES",
    "BatchVarianceError",
    "assert_batch_invariant",
    "must_detect",
    "num_threads",
    "position_classes",
]

BATCH_SIZES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 513)
"""Both sides of every batch-size threshold that was seen to switch a kernel, a tile or a split."""

QUICK_BATCH_SIZES = (1, 2, 3, 17, 64, 65, 129)
"""For functions that take long: still one size below, at and above the common tile."""

NEIGHBOURS = ("random", "zero", "huge", "nan")
"""What the other rows of a batch may hold."""

Outputs = torch.Tensor | Sequence[torch.Tensor | None]
RowFunction = Callable[..., Outputs]


class BatchVarianceError(AssertionError):
    """A row's output depended on something other than that row.

    Attributes:
        batch_size: Rows in the batch.
        position: Where the row stood.
        neighbours: What stood around it: one of :data:`NEIGHBOURS`, ``"given"`` (the rows under test themselves) or
            ``"alone"``.
        output: Number of the output that changed, counting from 0.
        row: Which of the given rows it was.
    """

    def __init__(self, message: str, *, batch_size: int, position: int, neighbours: str, output: int, row: int) -> None:
        super().__init__(message)
        self.batch_size = batch_size
        self.position = position
        self.neighbours = neighbours
        self.output = output
        self.row = row


def position_classes(batch_size: int) -> tuple[int, ...]:
    """Every class of position in a batch: first, second, middle, last but one, last, both sides of each tile edge."""
    edges = [edge for tile in (8, 16, 32, 64, 128, 256, 512) for edge in (tile - 1, tile)]
    wanted = {0, 1, batch_size // 2, batch_size - 2, batch_size - 1, *edges}
    return tuple(sorted(p for p in wanted if 0 <= p < batch_size))


def assert_batch_invariant(
    fn: RowFunction,
    rows: torch.Tensor | Sequence[torch.Tensor],
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    positions: Sequence[int] | None = None,
    neighbours: Sequence[str] = NEIGHBOURS,
    repeats: int = 1,
) -> None:
    """Raise unless row ``i`` of every output is a function of row ``i`` of every input, bit for bit.

    Each given row is run alone first: that is what it must always be. Then, for each batch size and kind of
    neighbour, the rows are placed at every class of position, in two launches (even and odd places of the list of
    positions), so that the neighbours of one kind stand between them.

    Args:
        fn: Called as ``fn(*tensors)`` with the same number of tensors as ``rows``, ``batch_size`` rows each. Returns a
            tensor or a sequence of tensors (None entries are skipped), with ``batch_size`` rows each. Weights and
            settings belong in its closure. It may write to its arguments; they are fresh.
        rows: A tensor, or tensors with one common first dimension: the rows to test, at least one. Integer and bool
            tensors (positions, lengths, ids) must have valid values: neighbours take theirs from here too.
        batch_sizes: Sizes to run.
        positions: Positions to use where they fit; None for :func:`position_classes`.
        neighbours: Some of :data:`NEIGHBOURS`. *Random* rows are normal numbers times a power of two per row, *huge*
            ones are the dtype's largest numbers of both signs.
        repeats: Runs of each batch.

    Raises:
        BatchVarianceError: Naming batch size, position, neighbours, output, first differing coordinate, both values
            and both bit patterns.
        ValueError: Nothing to test, an unknown kind of neighbour, or an output without one row per input row.
    """
    tensors = (rows,) if isinstance(rows, torch.Tensor) else tuple(rows)
    unknown = set(neighbours) - set(NEIGHBOURS)
    if unknown:
        raise ValueError(f"neighbours: expected some of {NEIGHBOURS}, got {sorted(unknown)}")
    if not tensors or len({len(t) for t in tensors}) != 1 or not len(tensors[0]):
        raise ValueError(
            f"rows: expected tensors with one common first dimension > 0, got {[t.shape for t in tensors]}"
        )
    pool = len(tensors[0])

    alone = [_call(fn, [t[i : i + 1].clone() for t in tensors], 1) for i in range(pool)]
    for _ in range(repeats):
        for i in range(pool):
            _compare(_call(fn, [t[i : i + 1].clone() for t in tensors], 1), alone, {0: i}, 1, "alone")
        _compare(_call(fn, [t.clone() for t in tensors], pool), alone, {i: i for i in range(pool)}, pool, "given")

    turn = 0
    for size in batch_sizes:
        spots = [p for p in (position_classes(size) if positions is None else positions) if p < size]
        for kind in neighbours:
            for half in (spots[::2], spots[1::2]):
                placed = {p: (turn + number) % pool for number, p in enumerate(half)}
                turn += 1
                if placed:
                    batch = _batch(tensors, size, kind, placed, seed=turn)
                    for _ in range(repeats):
                        _compare(_call(fn, [t.clone() for t in batch], size), alone, placed, size, kind)


def must_detect(fn: RowFunction, rows: torch.Tensor | Sequence[torch.Tensor], **options: object) -> BatchVarianceError:
    """The twin of an invariance test: raise unless :func:`assert_batch_invariant` rejects ``fn``.

    Args:
        fn: An implementation that is batch-dependent on purpose.
        rows: As for :func:`assert_batch_invariant`; use the same rows and options as the test whose twin this is.
        **options: As for :func:`assert_batch_invariant`.

    Returns:
        The error, for a closer look.

    Raises:
        AssertionError: ``fn`` passed, so the test proves nothing.
    """
    try:
        assert_batch_invariant(fn, rows, **options)  # type: ignore[arg-type]
    except BatchVarianceError as error:
        return error
    raise AssertionError(
        f"{getattr(fn, '__name__', fn)} is batch-dependent on purpose, but these rows, batch sizes and neighbours do "
        "not show it: the invariance test has no teeth"
    )


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run the body with ``count`` intra-op CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _call(fn: RowFunction, batch: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    result = fn(*batch)
    outputs = [result] if isinstance(result, torch.Tensor) else [t for t in result if t is not None]
    for number, output in enumerate(outputs):
        if not output.dim() or len(output) != size:
            raise ValueError(f"output {number}: expected {size} rows, got shape {tuple(output.shape)}")
    return outputs


def _compare(
    outputs: list[torch.Tensor],
    alone: list[list[torch.Tensor]],
    placed: dict[int, int],
    size: int,
    neighbours: str,
) -> None:
    """Compare output row ``position`` with what row ``row`` gave alone, for each ``position: row`` in ``placed``."""
    for number, output in enumerate(outputs):
        for position, row in placed.items():
            difference = first_difference(output[position], alone[row][number][0])
            if difference is not None:
                raise BatchVarianceError(
                    f"row {row} at position {position} of a batch of {size} ({neighbours} neighbours), "
                    f"output {number}: {difference}",
                    batch_size=size,
                    position=position,
                    neighbours=neighbours,
                    output=number,
                    row=row,
                )


def _batch(
    tensors: tuple[torch.Tensor, ...], size: int, kind: str, placed: dict[int, int], *, seed: int
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # One choice for all tensors: an integer row (say, a length) must keep belonging to its own partner.
    choice = torch.randint(len(tensors[0]), (size,), generator=generator)
    batch = []
    for t in tensors:
        if t.is_floating_point():
            filled = _fill((size, *t.shape[1:]), t.dtype, kind, generator).to(t.device)
        else:
            filled = t[choice.to(t.device)].clone()
        for position, row in placed.items():
            filled[position] = t[row]
        batch.append(filled)
    return batch


def _fill(shape: tuple[int, ...], dtype: torch.dtype, kind: str, generator: torch.Generator) -> torch.Tensor:
    if kind == "zero":
        return torch.zeros(shape, dtype=dtype)
    if kind == "nan":
        return torch.full(shape, torch.nan).to(dtype)
    signs = torch.randint(2, shape, generator=generator, dtype=torch.int8) * 2 - 1
    if kind == "huge":
        return (signs.double() * torch.finfo(dtype).max).to(dtype)
    power = torch.randint(-6, 7, (shape[0], *[1] * (len(shape) - 1)), generator=generator)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * torch.exp2(power.double())).to(dtype)

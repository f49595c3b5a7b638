"""Launch geometry of the CUDA kernels. The same arithmetic as ``csrc/include/bi/launch.cuh``, and nothing more.

No function here has a parameter for the number of tokens, rows or experts: that a kernel's partition cannot depend on
the batch is a property of these signatures. The grid has as many blocks as there are rows to do; how one row is cut,
and what each thread does with its piece, is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GROUP_SIZE", "SiluMulQuantPlan", "silu_mul_quant_plan"]

GROUP_SIZE = 128
LANES_PER_GROUP = 8  # sixteen elements each
GROUPS_PER_WARP = 4  # hence one packed UE8M0 word per warp
MAX_GROUPS_PER_BLOCK = 32  # 256 threads


@dataclass(frozen=True, slots=True)
class SiluMulQuantPlan:
    """How one row of ``fused_silu_mul_per_token_group_quant`` is cut.

    Attributes:
        groups_per_block: Groups of 128 outputs that one thread block takes, in whole warps.
        blocks_per_row: Thread blocks per row, equally wide.
        threads: Threads per block.
    """

    groups_per_block: int
    blocks_per_row: int
    threads: int


def silu_mul_quant_plan(intermediate: int) -> SiluMulQuantPlan:
    """Geometry for rows of ``intermediate`` outputs, the same for every architecture and scale format.

    Args:
        intermediate: Outputs per row (half the input's width), a positive multiple of 128.

    Raises:
        ValueError: ``intermediate`` is not a positive multiple of 128.

    Invariance:
        A function of the row's width alone.
    """
    groups, rest = divmod(intermediate, GROUP_SIZE)
    if groups <= 0 or rest:
        raise ValueError(f"intermediate: expected a positive multiple of {GROUP_SIZE}, got {intermediate}. Pad it.")
    blocks = -(-groups // MAX_GROUPS_PER_BLOCK)
    width = -(-groups // blocks)
    width += -width % GROUPS_PER_WARP
    return SiluMulQuantPlan(groups_per_block=width, blocks_per_row=blocks, threads=width * LANES_PER_GROUP)

"""Widths, capacities and workspace sizes, from the model's limits and the deployment's alone."""

from __future__ import annotations

from dataclasses import dataclass

from bi_kernels.runtime.checks import check_value

__all__ = ["COMPRESS_RATIOS", "SparseCapacity", "check_compress_ratio", "combined_width"]

COMPRESS_RATIOS = (0, 1, 4, 128)
"""What a DeepSeek-V4 layer may have. 0 and 1 both mean: no compressed entries, sliding window only."""

# FlashMLA walks index lists in pairs of 64-entry blocks.
_INDEX_ALIGNMENT = 128
# What is gathered at once: at most 512 MiB of rows (1 KiB each). 128 tokens fill a Hopper GPU with one CTA per token.
_ROWS_AT_ONCE = 2**19
_SLICE_TOKENS = 128
_GROUP_REQUESTS = 64


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class SparseCapacity:
    """Every size that one layer's sparse attention allocates. Build it with :meth:`from_model`.

    Attributes:
        max_model_len: Longest sequence the deployment serves, in tokens.
        compress_ratio: Tokens per compressed entry: 4 or 128; 0 or 1 for a layer with the sliding window only.
        window_size: Sliding window, in tokens, the token itself included.
        index_topk: Compressed entries that the C4 indexer selects.
        max_num_batched_tokens: Most tokens the scheduler puts into one step.

    Invariance:
        No method or property takes a batch size, a sequence length or any other property of live requests.
    """

    max_model_len: int
    compress_ratio: int
    window_size: int
    index_topk: int
    max_num_batched_tokens: int

    @classmethod
    def from_model(
        cls,
        *,
        max_model_len: int,
        compress_ratio: int,
        window_size: int,
        index_topk: int,
        max_num_batched_tokens: int,
    ) -> SparseCapacity:
        """Capacity of a layer with ``compress_ratio`` in a deployment.

        Raises:
            ArgumentError: A ratio that DeepSeek-V4 does not have, or a limit that is not positive.
        """
        check_compress_ratio(compress_ratio)
        limits = {
            "max_model_len": max_model_len,
            "window_size": window_size,
            "index_topk": index_topk,
            "max_num_batched_tokens": max_num_batched_tokens,
        }
        for name, limit in limits.items():
            check_value(name, limit > 0, "a positive int", limit, "Pass the model's or the deployment's limit.")
        return cls(max_model_len, compress_ratio, window_size, index_topk, max_num_batched_tokens)

    @property
    def c128_width(self) -> int:
        """Width of a C128 layer's list of compressed entries: all of them, to a multiple of 128."""
        return _round_up(-(-self.max_model_len // 128), 128)

    @property
    def topk_width(self) -> int:
        """Width of the compressed part of an index list."""
        return {4: self.index_topk, 128: self.c128_width}.get(self.compress_ratio, 0)

    @property
    def combined_width(self) -> int:
        """Width of a combined index list: compressed part and window, to a multiple of 128."""
        return combined_width(self.topk_width, self.window_size)

    @property
    def compressed_rows(self) -> int:
        """Compressed entries of the longest request: where the window part of a workspace starts."""
        return -(-self.max_model_len // self.compress_ratio) if self.compress_ratio > 1 else 0

    @property
    def gather_rows(self) -> int:
        """Uncompressed rows that one request's chunk can need: the window before it, and the chunk."""
        return self.window_size + self.max_num_batched_tokens

    @property
    def workspace_rows(self) -> int:
        """Rows of the bfloat16 workspace that holds one request's chunk."""
        return self.compressed_rows + self.gather_rows

    @property
    def decode_slice_tokens(self) -> int:
        """Decode tokens whose rows are gathered at once; bounds the workspace, and has no part in any result."""
        return max(16, min(_SLICE_TOKENS, _ROWS_AT_ONCE // self.combined_width // 16 * 16))

    @property
    def prefill_requests(self) -> int:
        """Requests that are prefilled side by side, each in its own ``workspace_rows``; has no part in any result."""
        return max(1, min(_GROUP_REQUESTS, _ROWS_AT_ONCE // self.workspace_rows))


def combined_width(topk_width: int, window_size: int) -> int:
    """Width of an index list with ``topk_width`` compressed entries and ``window_size`` window entries."""
    return _round_up(topk_width + window_size, _INDEX_ALIGNMENT)


def check_compress_ratio(compress_ratio: int) -> None:
    """Raise :class:`ArgumentError` for a ratio that DeepSeek-V4 does not have."""
    check_value(
        "compress_ratio",
        compress_ratio in COMPRESS_RATIOS,
        f"one of {COMPRESS_RATIOS}",
        compress_ratio,
        "Pass the layer's entry of the model's compress_ratios.",
    )

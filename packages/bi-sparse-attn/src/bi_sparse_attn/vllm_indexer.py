"""vLLM's sparse indexer on one selector: what the hook registers in place of ``SparseAttnIndexer``.

Prefill and decode keep their own score kernels, whose scores are equal bit for bit; selection is one op for both.
Imported only after vLLM has imported the module of the class; vLLM's names are looked up inside the functions.
"""

from __future__ import annotations

from typing import Any

import torch

from bi_kernels.runtime.checks import check_value

from .top_k_per_row import top_k_per_row_prefill

__all__ = ["BatchInvariantIndexer", "sparse_attn_indexer_class"]


def sparse_attn_indexer_class(original: type) -> type:
    """The subclass of vLLM's ``SparseAttnIndexer`` that is registered out of tree under its name."""
    return type(f"BatchInvariant{original.__name__}", (BatchInvariantIndexer, original), {})


class BatchInvariantIndexer:
    """What is different from vLLM's ``SparseAttnIndexer``; a mixin that stands before it.

    vLLM's class serves other models too. Those have an uncompressed key cache, and keep vLLM's code.

    Invariance:
        A token's row of ``topk_indices_buffer`` depends on its own query and on its request's keys alone, and is the
        same whether the token was decoded or prefilled.

    Source: preview-pr.txt, *Deterministic sparse top-k*; vLLM ``layers/sparse_attn_indexer.py``.
    """

    # What vLLM's layer has; declared for the type checker.
    head_dim: int
    k_cache: Any
    max_model_len: int
    max_total_seq_len: int
    topk_indices_buffer: torch.Tensor
    topk_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self
        self.is_deepseek_v4 = getattr(self.k_cache, "compress_ratio", 1) > 1
        if not self.is_deepseek_v4:
            return
        check_value(
            "use_fp4_cache", not layer.use_fp4_cache, "FP8 keys", "FP4 keys", "Leave use_fp4_indexer_cache off."
        )
        check_value(
            "skip_k_cache_insert",
            layer.skip_k_cache_insert,
            "keys that the compressor inserts",
            "keys passed to the indexer",
            "Use the vLLM release that the hooks name.",
        )
        check_value(
            "context parallel size",
            layer.dcp_world_size == 1 and not layer.use_pcp,
            "1",
            "more",
            "Run with decode and prefill context parallel size 1.",
        )
        buffer = self.topk_indices_buffer
        # Not a buffer of the module: a reload would move it, and a captured graph holds its address.
        self.row_starts = torch.zeros(buffer.shape[0], dtype=torch.int32, device=buffer.device)

    def forward_cuda(
        self, hidden_states: torch.Tensor, q_quant: torch.Tensor, k: torch.Tensor | None, weights: torch.Tensor
    ) -> torch.Tensor:
        """Select every token's compressed entries into ``topk_indices_buffer``: ascending, -1 at the end.

        Args:
            hidden_states: ``(tokens, hidden)``; only its length is used.
            q_quant: ``(tokens, heads, 128)`` float8_e4m3fn.
            k: Not read; the compressor has inserted the keys.
            weights: ``(tokens, heads)`` float32, the query's scale folded in.

        Returns:
            ``topk_indices_buffer``.
        """
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        if not self.is_deepseek_v4 or not isinstance(metadata, dict):
            # Without metadata vLLM's own code reserves the workspace and models the peak of the scores.
            stock: torch.Tensor = super().forward_cuda(hidden_states, q_quant, k, weights)  # type: ignore[misc]
            return stock
        mine = metadata[self.k_cache.prefix]
        self.topk_indices_buffer[: hidden_states.shape[0]].fill_(-1)  # rows without a key are in no chunk
        if mine.num_prefills:
            self._select_prefill(mine.prefill.chunks, q_quant, weights)
        if mine.num_decodes:
            self._select_decode(mine, q_quant, weights)
        return self.topk_indices_buffer

    def _select_prefill(self, chunks: list[Any], q: torch.Tensor, weights: torch.Tensor) -> None:
        from vllm import _custom_ops
        from vllm.utils.deep_gemm import fp8_fp4_mqa_logits
        from vllm.v1.worker.workspace import current_workspace_manager

        all_keys, all_scales = current_workspace_manager().get_simultaneous(
            ((self.max_total_seq_len, self.head_dim), torch.float8_e4m3fn), ((self.max_total_seq_len, 4), torch.uint8)
        )
        for chunk in chunks:
            keys, scales = all_keys[: chunk.total_seq_lens], all_scales[: chunk.total_seq_lens]
            if not chunk.skip_kv_gather:
                _custom_ops.cp_gather_indexer_k_quant_cache(
                    self.k_cache.kv_cache, keys, scales, chunk.block_table, chunk.cu_seq_lens
                )
            rows = slice(chunk.token_start, chunk.token_end)
            scores = fp8_fp4_mqa_logits(
                (q[rows], None),
                (keys, scales.view(torch.float32).squeeze(-1)),
                weights[rows],
                chunk.cu_seqlen_ks,
                chunk.cu_seqlen_ke,
                clean_logits=False,
            )
            self._select(scores, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke, rows)

    def _select_decode(self, mine: Any, q: torch.Tensor, weights: torch.Tensor) -> None:
        from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits

        decode, tokens = mine.decode, mine.num_decode_tokens
        # Without speculation, which is refused, a request has one row; those that only pad a batch come last.
        fits = decode.seq_lens.shape == (tokens, 1) and decode.block_table.shape[0] >= tokens
        check_value(
            "decode rows", fits, f"{tokens} of one token", tuple(decode.seq_lens.shape), "Leave speculation off."
        )
        rows = slice(0, tokens)
        scores = fp8_fp4_paged_mqa_logits(
            (q[rows].unsqueeze(1), None),
            self.k_cache.kv_cache.unsqueeze(-2),
            weights[rows],
            decode.seq_lens,
            decode.block_table[rows],
            decode.schedule_metadata,
            max_model_len=self.max_model_len,
            clean_logits=False,
        )
        self._select(scores, self.row_starts[rows], decode.seq_lens.view(-1), rows)

    def _select(self, scores: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, rows: slice) -> None:
        top_k_per_row_prefill(scores, starts, ends, self.topk_tokens, out=self.topk_indices_buffer[rows])

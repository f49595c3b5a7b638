"""vLLM's DeepSeek-V4 attention layer on one path: what the hook installs in place of ``_select_dsv4_attn_cls``.

Imported only after vLLM has imported its model module; vLLM's names are looked up inside the functions, so that the
logic runs in CPU tests without it. The layer keeps vLLM's projections, norms, RoPE, cache inserts and output
projection; what it replaces is listed at :class:`BatchInvariantAttention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bi_kernels import fixed_order_mm
from bi_kernels.arch import Arch, detect_arch
from bi_kernels.runtime.checks import check_value
from bi_kernels.runtime.errors import Blocker, HookError

from .capacity import SparseCapacity
from .combine_indices import combine_topk_swa
from .decode_slots import fill_decode_slots_
from .gather_kv import gather_decode_kv

__all__ = ["BatchInvariantAttention", "batch_invariant_class", "select_attention_class"]

_HEAD_DIM = 512
_O_PROJ = {Arch.SM90: ((1, 128, 128), False), Arch.SM100: ((1, 1, 128), True)}
"""Recipe of DeepGEMM's einsum and whether its scales are packed UE8M0, by architecture."""

BufferSpec = tuple[tuple[int, ...], torch.dtype]


def select_attention_class(original: Callable[..., type]) -> Callable[..., type]:
    """``_select_dsv4_attn_cls``: the class that vLLM would take, made batch-invariant.

    Raises (the new function):
        HookError: vLLM picks another class than FlashMLA's.
    """

    def _select_dsv4_attn_cls(vllm_config: Any) -> type:
        from vllm.compilation.breakable_cudagraph import eager_break_during_capture
        from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

        chosen = original(vllm_config)
        if chosen is not DeepseekV4FlashMLAAttention:
            blocker = Blocker(
                "attention backend",
                "FlashMLA's DeepSeek-V4 layer, whose kernel decode, prefill and trainer share",
                chosen.__name__,
                "Leave attention_config.backend unset, on Hopper or a datacenter Blackwell.",
            )
            raise HookError("DeepSeek-V4 cannot be built in aligned mode", [blocker])
        cls = batch_invariant_class(chosen)
        if not hasattr(cls.attention_impl, "__wrapped__"):
            # vLLM's decorator looks at VLLM_USE_BREAKABLE_CUDAGRAPH when the module is imported. Where the engine runs
            # in the process that read the configuration, the quantisation registry has imported it before the variable
            # is set: piecewise graphs would then hold attention as the capture's dummy run saw it, without metadata.
            cls.attention_impl = eager_break_during_capture(cls.attention_impl)
        return cls

    return _select_dsv4_attn_cls


@functools.cache
def batch_invariant_class(base: type) -> type[Any]:
    """The subclass of vLLM's attention layer ``base`` that runs :class:`BatchInvariantAttention`."""
    return type(f"BatchInvariant{base.__name__}", (BatchInvariantAttention, base), {})


class BatchInvariantAttention:
    """What is different from vLLM's ``DeepseekV4FlashMLAAttention``; a mixin that stands before it.

    * Decode gathers the token's own rows and runs prefill's kernel, ``flash_mla_sparse_fwd``, over the same ordered
      list. Tokens come in slices of constant size; a padding token has length 0.
    * Prefill gives every request an area of its own, of a size from the model's limits, and a constant number of
      requests go side by side: where a request lies follows from its place in the batch, and addresses are no part of
      the arithmetic.
    * ``kv_score`` of both compressors and the indexer's ``weights_proj`` come from the fixed-order product.
    * The workspace for all of it is reserved in the dummy run, before vLLM locks its size.
    * The output projection stays vLLM's, with the scale format of the architecture checked.

    Invariance:
        A token's attention output depends on its own hidden state and on the cache entries that it lists, in list
        order: not on which path it took, on neighbours, chunks, padding or replay from a CUDA graph.

    Source: preview-pr.txt, *Sparse MLA and FlashMLA* and *Hopper and Blackwell*; vLLM
    ``models/deepseek_v4/attention.py`` and ``nvidia/flashmla.py``.
    """

    # What vLLM's layer has; declared for the type checker.
    aux_stream_list: list[Any] | None
    compress_ratio: int
    compressor: Any
    fused_wqa_wkv: Any
    indexer: Any
    kv_cache: torch.Tensor
    ln_events: list[Any]
    swa_cache_layer: Any
    topk_indices_buffer: torch.Tensor | None

    def __init__(
        self,
        vllm_config: Any,
        prefix: str,
        topk_indices_buffer: torch.Tensor | None = None,
        aux_stream_list: list[Any] | None = None,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            vllm_config, prefix, topk_indices_buffer=topk_indices_buffer, aux_stream_list=aux_stream_list
        )
        self.capacity = SparseCapacity.from_model(
            max_model_len=vllm_config.model_config.max_model_len,
            compress_ratio=self.compress_ratio,
            window_size=vllm_config.model_config.hf_config.sliding_window,
            index_topk=vllm_config.model_config.hf_config.index_topk,
            max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        )
        self._check_layer()

    def _check_layer(self) -> None:
        """Refuse what the paths below are not written for.

        Raises:
            ArgumentError: Another cache format, or an output projection in another architecture's format.
        """
        layer: Any = self
        check_value(
            "kv_cache_dtype",
            layer.kv_cache_dtype == "fp8_ds_mla",
            "'fp8_ds_mla'",
            layer.kv_cache_dtype,
            "Start vLLM with kv_cache_dtype='fp8'.",
        )
        # One projection per architecture: fp32 block scales on Hopper, packed UE8M0 on Blackwell. Never a mixture.
        want = _O_PROJ[detect_arch()]
        have = (tuple(layer._einsum_recipe), bool(layer._tma_aligned_scales))
        check_value("output projection", have == want, str(want), have, "Use the vLLM release that the hooks name.")

    def attn_gemm_parallel_execute(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The layer's input projections, as vLLM runs them, but for ``kv_score`` and ``weights_proj``.

        cuBLAS picks the algorithm of ``torch.mm(..., out_dtype=float32)`` from M, and every compressed key depends
        on these scores. ``weights_proj`` would be vLLM's batch-invariant linear, one block that walks all of K for up
        to 128 rows; the head weights are rounded to bfloat16 in the same place, once, after a float32 sum.
        """
        from vllm import envs
        from vllm.utils.multi_stream_utils import execute_in_parallel

        compressor, indexer = self.compressor, self.indexer
        lighter: list[Callable[[], torch.Tensor] | None] = [None, None, None]
        if compressor is not None:
            lighter[0] = lambda: _kv_score(hidden_states, compressor)
        if indexer is not None:
            lighter[1] = lambda: fixed_order_mm(hidden_states, indexer.weights_proj.weight, out_dtype=torch.bfloat16)
            lighter[2] = lambda: _kv_score(hidden_states, indexer.compressor)
        projected, (kv_score, weights, index_kv_score) = execute_in_parallel(
            lambda: self.fused_wqa_wkv(hidden_states)[0],
            lighter,
            self.ln_events[0],
            self.ln_events[1:4],
            None if self.aux_stream_list is None else self.aux_stream_list[:3],
            enable=hidden_states.shape[0] <= envs.VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD,
        )
        return projected, kv_score, index_kv_score, weights

    def forward_mqa(self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        """Attention of a step: decode tokens first, then prefill, on the same kernel.

        Args:
            q: ``(tokens, padded heads, 512)`` bfloat16.
            kv: Not read; the rows are in the window cache already.
            positions: ``(tokens,)`` int64.
            output: Like ``q``, written.

        Raises:
            ArgumentError: Metadata of a kind that is refused (micro-batches).
        """
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        if metadata is None:
            for specs in (_prefill_buffers(self.capacity), _decode_buffers(self.capacity)):
                _workspace(specs)
            output.zero_()
            return
        check_value(
            "attn_metadata",
            isinstance(metadata, dict),
            "one dict",
            type(metadata).__name__,
            "Leave micro-batching off.",
        )
        window = metadata[self.swa_cache_layer.prefix]
        compressed = metadata[self.prefix] if self.compress_ratio > 1 else None  # type: ignore[attr-defined]
        first = window.num_decode_tokens
        if window.num_decodes:
            self._decode(q[:first], positions[:first], output[:first], compressed, window)
        if window.num_prefills:
            self._prefill(q[first:], positions[first:], output[first:], compressed, window)

    def _decode(
        self, q: torch.Tensor, positions: torch.Tensor, output: torch.Tensor, compressed: Any, window: Any
    ) -> None:
        rows, indices, lengths, compressed_slots, window_slots = _workspace(_decode_buffers(self.capacity))
        size = self.capacity.decode_slice_tokens
        for start in range(0, q.shape[0], size):
            tokens = slice(start, min(start + size, q.shape[0]))
            count = tokens.stop - tokens.start
            topk = self.topk_indices_buffer[tokens] if self.compress_ratio == 4 else None  # type: ignore[index]
            fill_decode_slots_(
                compressed_slots[:count],
                window_slots[:count],
                topk,
                positions[tokens],
                window.token_to_req_indices[tokens],
                window.is_valid_token[tokens],
                None if compressed is None else compressed.block_table,
                window.block_table,
                compress_ratio=self.compress_ratio,
                compressed_block_size=self._compressed_block_size(compressed),
                window_block_size=window.block_size,
            )
            gathered = gather_decode_kv(
                None if compressed is None else _pages(self.kv_cache),
                _pages(self.swa_cache_layer.kv_cache),
                compressed_slots[:count],
                window_slots[:count],
                compressed_block_size=self._compressed_block_size(compressed),
                window_block_size=window.block_size,
                out=rows[:count],
                out_indices=indices[:count],
                out_lengths=lengths[:count],
            )
            self._attend(q[tokens], gathered.workspace, gathered.indices, gathered.lengths, output[tokens])

    def _prefill(
        self, q: torch.Tensor, positions: torch.Tensor, output: torch.Tensor, compressed: Any, window: Any
    ) -> None:
        from vllm.models.deepseek_v4.common.ops import dequantize_and_gather_k_cache

        rows, indices, lengths = _workspace(_prefill_buffers(self.capacity))
        decodes = window.num_decodes
        step = _PrefillStep.of(window)
        row_offsets = step.row_offsets(self.capacity)
        side_by_side = self.capacity.prefill_requests
        for first in range(0, window.num_prefills, side_by_side):
            group = slice(first, min(first + side_by_side, window.num_prefills))
            tokens = slice(step.bounds[group.start], step.bounds[group.stop])
            areas = rows[: group.stop - group.start]
            seq_lens = window.prefill_seq_lens[group]
            if compressed is not None:
                dequantize_and_gather_k_cache(
                    areas,
                    self.kv_cache,
                    seq_lens=seq_lens // self.compress_ratio,
                    gather_lens=None,
                    block_table=compressed.block_table[decodes:][group],
                    block_size=self._compressed_block_size(compressed),
                    offset=0,
                )
            dequantize_and_gather_k_cache(
                areas,
                self.swa_cache_layer.kv_cache,
                seq_lens=seq_lens,
                gather_lens=window.prefill_gather_lens[group],
                block_table=window.block_table[decodes:][group],
                block_size=window.block_size,
                offset=self.capacity.compressed_rows,
            )
            lists = combine_topk_swa(
                self._prefill_entries(tokens, positions, compressed, window),
                positions[tokens],
                step.gather_starts[tokens],
                compress_ratio=self.compress_ratio,
                window_size=self.capacity.window_size,
                compressed_rows=self.capacity.compressed_rows,
                row_offset=row_offsets[tokens],
                out_indices=indices[: tokens.stop - tokens.start],
                out_lengths=lengths[: tokens.stop - tokens.start],
            )
            self._attend(q[tokens], areas, *lists, output[tokens])

    def _prefill_entries(self, tokens: slice, positions: torch.Tensor, compressed: Any, window: Any) -> torch.Tensor:
        """The compressed entries of prefill tokens, by their place among the step's prefill tokens."""
        if compressed is None:
            return torch.empty((tokens.stop - tokens.start, 0), dtype=torch.int32, device=positions.device)
        if self.compress_ratio == 128:
            entries: torch.Tensor = compressed.c128a_prefill_topk_indices[tokens]
            return entries
        first = window.num_decode_tokens
        assert self.topk_indices_buffer is not None  # vLLM gives every C4 layer its buffer
        return self.topk_indices_buffer[first + tokens.start : first + tokens.stop]

    def _compressed_block_size(self, compressed: Any) -> int:
        return 1 if compressed is None else int(compressed.block_size) // self.compress_ratio

    def _attend(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        indices: torch.Tensor,
        lengths: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

        layer: Any = self
        flash_mla_sparse_fwd(
            q=q,
            kv=rows.view(-1, 1, _HEAD_DIM),
            indices=indices.unsqueeze(1),
            sm_scale=layer.scale,
            attn_sink=layer.attn_sink,
            topk_length=lengths,
            out=output,
        )


class _PrefillStep:
    """What the layers of one step ask alike about its prefill tokens; kept with vLLM's metadata, which live as long.

    Attributes:
        bounds: First token of every request and one past the last one's, among the step's prefill tokens.
        gather_starts: Position of the first gathered window row of each token's request.
    """

    def __init__(self, window: Any) -> None:
        first, last = window.num_decodes, window.num_decodes + window.num_prefills
        starts: list[int] = window.query_start_loc_cpu[first : last + 1].tolist()
        self.bounds = [start - starts[0] for start in starts]
        self._request = window.token_to_req_indices[window.num_decode_tokens :][: self.bounds[-1]].long() - first
        self.gather_starts: torch.Tensor = (window.prefill_seq_lens - window.prefill_gather_lens)[self._request]
        self._row_offsets: dict[SparseCapacity, torch.Tensor] = {}

    @classmethod
    def of(cls, window: Any) -> _PrefillStep:
        """That of ``window``, vLLM's metadata of the step."""
        name = "_bi_prefill_step"
        found: _PrefillStep | None = getattr(window, name, None)
        if found is None:
            found = cls(window)
            setattr(window, name, found)
        return found

    def row_offsets(self, capacity: SparseCapacity) -> torch.Tensor:
        """First workspace row of each token's request: by its place among the step's, in areas of constant size."""
        if capacity not in self._row_offsets:
            self._row_offsets[capacity] = self._request % capacity.prefill_requests * capacity.workspace_rows
        return self._row_offsets[capacity]


def _kv_score(hidden_states: torch.Tensor, compressor: Any) -> torch.Tensor:
    return fixed_order_mm(hidden_states, compressor.fused_wkv_wgate.weight)


def _pages(cache: torch.Tensor) -> torch.Tensor:
    """View vLLM's ``(pages, entries, 584)`` of a cache as ``(pages, bytes)``; pages may be padded at the end."""
    return cache.view(cache.shape[0], -1)


def _prefill_buffers(capacity: SparseCapacity) -> Sequence[BufferSpec]:
    """Gathered rows of the requests that stand side by side, and the lists of their new tokens."""
    tokens = capacity.max_num_batched_tokens
    return (
        ((capacity.prefill_requests, capacity.workspace_rows, _HEAD_DIM), torch.bfloat16),
        ((tokens, capacity.combined_width), torch.int32),
        ((tokens,), torch.int32),
    )


def _decode_buffers(capacity: SparseCapacity) -> Sequence[BufferSpec]:
    """Gathered rows, lists and slots of one slice of decode tokens."""
    tokens = capacity.decode_slice_tokens
    return (
        ((tokens, capacity.combined_width, _HEAD_DIM), torch.bfloat16),
        ((tokens, capacity.combined_width), torch.int32),
        ((tokens,), torch.int32),
        ((tokens, capacity.topk_width), torch.int64),
        ((tokens, capacity.window_size), torch.int64),
    )


def _workspace(specs: Sequence[BufferSpec]) -> list[torch.Tensor]:
    """Views of vLLM's one workspace; they are overwritten by whoever asks next."""
    from vllm.v1.worker.workspace import current_workspace_manager

    buffers: list[torch.Tensor] = current_workspace_manager().get_simultaneous(*specs)
    return buffers

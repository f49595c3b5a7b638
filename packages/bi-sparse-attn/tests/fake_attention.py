"""vLLM's attention layer in small, on the CPU: its caches, metadata and kernels' references, under vLLM's names.

Enough of vLLM 0.26 to run :mod:`bi_sparse_attn.vllm_attention` and :mod:`bi_sparse_attn.vllm_indexer` where it is not
installed. That the names and layouts are vLLM's own is what the anchors and the tests on a GPU say.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from bi_kernels.arch import Arch
from bi_sparse_attn import (
    c128_indices,
    gather_kv,
    index_k_block_bytes,
    kv_block_bytes,
    mqa_logits,
    quantize_and_insert_index_k_,
    quantize_and_insert_kv_,
    sparse_mla_fwd,
)
from bi_sparse_attn import gather_index_k as gather_keys

WINDOW = 128
WINDOW_BLOCK = 64
HEADS = 2
PREFIX = "model.layers.0.attn"


class Workspace:
    """vLLM's workspace: one allocation, views from its start, not to grow once locked. Dirty between uses."""

    def __init__(self) -> None:
        self.bytes = 0
        self.locked = False

    def get_simultaneous(self, *specs: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in specs]
        total = sum(-(-size // 256) * 256 for size in sizes)
        assert total <= self.bytes or not self.locked, "growth after locking"
        self.bytes = max(self.bytes, total)
        starts = itertools.accumulate([0, *(-(-size // 256) * 256 for size in sizes)])
        memory = torch.full((total,), 0xFF, dtype=torch.uint8)  # NaN, and the index -1
        views = zip(specs, starts, sizes, strict=False)
        return [memory[at : at + size].view(dtype).reshape(shape) for (shape, dtype), at, size in views]


class Request(NamedTuple):
    """A sequence with its rows, entries, queries and selections, all of which belong to it alone."""

    kv: torch.Tensor
    entries: torch.Tensor
    q: torch.Tensor
    topk: torch.Tensor


def make_request(tokens: int, ratio: int, index_topk: int, seed: int) -> Request:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    topk = torch.full((tokens, index_topk), -1, dtype=torch.int32)
    for position in range(tokens if ratio == 4 else 0):
        complete = (position + 1) // ratio
        chosen = torch.randperm(complete, generator=generator)[:index_topk].sort().values
        topk[position, : len(chosen)] = chosen.int()
    entries = randn(tokens // ratio if ratio > 1 else 0, 512)
    return Request(randn(tokens, 512), entries, randn(tokens, HEADS, 512), topk)


class FakeLayer:
    """The attributes of vLLM's ``DeepseekV4FlashMLAAttention`` that the hook reads."""

    def __init__(self, vllm_config: Any, prefix: str, topk_indices_buffer: Any = None, aux_stream_list: Any = None):
        hf = vllm_config.model_config.hf_config
        self.prefix = prefix
        self.compress_ratio = max(1, hf.compress_ratio)
        self.kv_cache_dtype = vllm_config.kv_cache_dtype
        self.scale = 512**-0.5
        self.attn_sink = torch.linspace(-1, 1, HEADS)
        self.topk_indices_buffer = topk_indices_buffer
        self.aux_stream_list = aux_stream_list
        self.swa_cache_layer = SimpleNamespace(prefix=f"{prefix}.swa_cache", kv_cache=None)
        self._einsum_recipe, self._tma_aligned_scales = vllm_config.o_proj
        self.ln_events = [object()] * 4
        self.compressor = self.indexer = None

    def attention_impl(self, *tensors: Any) -> None:
        """What runs outside the captured pieces of a graph."""


def eager_break_during_capture(function: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's decorator where breakable graphs are on."""
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


def config(ratio: int, *, max_model_len: int = 1024, index_topk: int = 64, max_tokens: int = 512) -> SimpleNamespace:
    hf = SimpleNamespace(sliding_window=WINDOW, index_topk=index_topk, compress_ratio=ratio)
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len, hf_config=hf),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens),
        kv_cache_dtype="fp8_ds_mla",
        o_proj=((1, 128, 128), False),
    )


class Engine:
    """One layer with its paged caches. ``run`` takes a batch as vLLM's runner would have laid it out."""

    def __init__(self, layer: Any, requests: dict[str, Request], *, seed: int = 0) -> None:
        self.layer, self.requests = layer, requests
        ratio = layer.compress_ratio
        self.entry_block = 256 // ratio if ratio > 1 else 1
        longest = max(len(request.kv) for request in requests.values())
        pages = -(-longest // WINDOW_BLOCK) + 1
        order = torch.randperm(len(requests) * pages, generator=torch.Generator().manual_seed(seed)).int()
        self.tables = dict(zip(requests, order.view(len(requests), pages), strict=True))
        # Bytes that no slot owns are junk, as after another request's use.
        self.window_cache = self._cache(len(requests) * pages, WINDOW_BLOCK)
        self.entry_cache = self._cache(len(requests) * pages, self.entry_block)
        for name, request in requests.items():
            self._insert(self.window_cache, name, request.kv, WINDOW_BLOCK)
            if ratio > 1:
                self._insert(self.entry_cache, name, request.entries, self.entry_block)
        layer.swa_cache_layer.kv_cache = self.window_cache
        layer.kv_cache = self.entry_cache

    def _cache(self, pages: int, block: int) -> torch.Tensor:
        memory = torch.full((pages, kv_block_bytes(block)), 0xFF, dtype=torch.uint8)
        return memory[:, : block * 584].view(pages, block, 584)

    def _insert(self, cache: torch.Tensor, name: str, rows: torch.Tensor, block: int) -> None:
        place = torch.arange(len(rows))
        slots = self.tables[name].long()[place // block] * block + place % block
        quantize_and_insert_kv_(cache.view(len(cache), -1), rows, slots, block_size=block)

    def run(self, *batch: tuple[str, int, int], padding: int = 0) -> dict[tuple[str, int], torch.Tensor]:
        """Outputs by (request, position). Parts of one token come first, as vLLM sorts them; ``padding`` follows."""
        decodes = [part for part in batch if part[2] - part[1] == 1]
        prefills = [part for part in batch if part[2] - part[1] > 1]
        assert not (padding and prefills)
        parts = decodes + prefills
        lens = [stop - start for _, start, stop in parts] + [1] * padding
        token = [(name, position) for name, start, stop in parts for position in range(start, stop)]
        q = torch.cat([self.requests[name].q[position][None] for name, position in token])
        q = torch.cat([q, torch.full((padding, HEADS, 512), float("nan")).bfloat16()])
        # A padding token has whatever position and request an earlier step left there.
        positions = torch.tensor([position for _, position in token] + [777_777] * padding)
        ratio = self.layer.compress_ratio
        if ratio == 4:
            self.layer.topk_indices_buffer.fill_(3)
            rows = torch.stack([self.requests[name].topk[position] for name, position in token])
            self.layer.topk_indices_buffer[: len(rows)] = rows
        metadata = self._metadata(parts, decodes, lens, positions, padding)
        output = torch.full_like(q, 7.0)
        with forward_context(metadata):
            self.layer.forward_mqa(q, q[:, 0], positions, output)
        assert not output[len(token) :].any()
        return dict(zip(token, output, strict=False))

    def _metadata(self, parts: Any, decodes: Any, lens: Any, positions: torch.Tensor, padding: int) -> dict[str, Any]:
        starts = torch.tensor([0, *itertools.accumulate(lens)])
        table = torch.stack([self.tables[name] for name, _, _ in parts] + [self.tables[parts[0][0]] * 0] * padding)
        prefills = parts[len(decodes) :]
        first = len(decodes) + padding
        seq_lens = torch.tensor([stop for _, _, stop in prefills], dtype=torch.int32)
        gather_lens = [stop - start + min(start, WINDOW - 1) for _, start, stop in prefills]
        window = SimpleNamespace(
            block_table=table,
            block_size=WINDOW_BLOCK,
            query_start_loc_cpu=starts,
            is_valid_token=torch.tensor([True] * (sum(lens) - padding) + [False] * padding),
            token_to_req_indices=torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).int(),
            num_decodes=first,
            num_prefills=len(prefills),
            num_decode_tokens=first,
            prefill_seq_lens=seq_lens,
            prefill_gather_lens=torch.tensor(gather_lens, dtype=torch.int32),
        )
        metadata: dict[str, Any] = {self.layer.swa_cache_layer.prefix: window}
        if self.layer.compress_ratio > 1:
            width = self.layer.capacity.c128_width
            metadata[self.layer.prefix] = SimpleNamespace(
                block_table=table,
                block_size=256,
                c128a_prefill_topk_indices=c128_indices(positions[first:], width=width) if padding == 0 else None,
            )
        return metadata


class forward_context:
    """``with forward_context(metadata):`` what vLLM's ``get_forward_context().attn_metadata`` is inside."""

    current: Any = None

    def __init__(self, metadata: Any) -> None:
        self.metadata = metadata

    def __enter__(self) -> None:
        type(self).current = self.metadata

    def __exit__(self, *exc: object) -> None:
        type(self).current = None


def dequantize_and_gather_k_cache(out, k_cache, seq_lens, gather_lens, block_table, block_size, offset):
    """What vLLM's gather does, one request at a time: the last ``gather_lens`` of ``seq_lens`` entries."""
    for request, length in enumerate(seq_lens.tolist()):
        count = length if gather_lens is None else int(gather_lens[request])
        place = torch.arange(length - count, length)
        slots = block_table[request].long()[place // block_size] * block_size + place % block_size
        pages = k_cache.view(len(k_cache), -1)
        out[request, offset : offset + count] = gather_kv(pages, slots, block_size=block_size)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None):
    assert kv.shape[1:] == (1, 512)
    assert indices.shape[1] == 1
    return sparse_mla_fwd(
        q, kv[:, 0], indices[:, 0], sm_scale=sm_scale, attn_sink=attn_sink, topk_length=topk_length, out=out
    )


def execute_in_parallel(default_fn, aux_fns, start_event, done_events, aux_streams=None, enable=False):
    return default_fn(), [fn and fn() for fn in aux_fns]


def fp8_fp4_mqa_logits(q, kv, weights, starts, ends, clean_logits):
    return mqa_logits(q[0], kv[0], kv[1], weights, starts, ends)


def fp8_fp4_paged_mqa_logits(q, cache, weights, context_lens, table, schedule, max_model_len, clean_logits):
    block = cache.shape[1]
    scores = torch.full((len(table), max_model_len), float("nan"))
    for row, length in enumerate(context_lens[:, 0].tolist()):
        place = torch.arange(length)
        slots = table[row].long()[place // block] * block + place % block
        keys, scale = gather_keys(cache.view(len(cache), -1), slots, block_size=block)
        start, end = torch.tensor([0], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        scores[row, :length] = mqa_logits(q[0][row], keys, scale, weights[row : row + 1], start, end)[0]
    return scores


def cp_gather_indexer_k_quant_cache(cache, keys, scales, table, cu_seq_lens):
    block = cache.shape[1]
    for request, (start, stop) in enumerate(itertools.pairwise(cu_seq_lens.tolist())):
        place = torch.arange(stop - start)
        slots = table[request].long()[place // block] * block + place % block
        values, scale = gather_keys(cache.view(len(cache), -1), slots, block_size=block)
        keys[start:stop], scales[start:stop] = values, scale.view(torch.uint8).view(-1, 4)


def key_cache(pages: int, keys: dict[int, torch.Tensor], block: int = 64) -> torch.Tensor:
    """An indexer cache with the keys at ``slot: key``."""
    cache = torch.full((pages, index_k_block_bytes(block)), 0xFF, dtype=torch.uint8)
    slots = torch.tensor(list(keys))
    quantize_and_insert_index_k_(cache, torch.stack(list(keys.values())), slots, block_size=block)
    return cache.view(pages, block, 132)


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Installs the names that the hook imports; returns the workspace behind them."""
    workspace = Workspace()
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": eager_break_during_capture},
        "vllm._custom_ops": {"cp_gather_indexer_k_quant_cache": cp_gather_indexer_k_quant_cache},
        "vllm.envs": {"VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD": 1024},
        "vllm.forward_context": {"get_forward_context": lambda: SimpleNamespace(attn_metadata=forward_context.current)},
        "vllm.models.deepseek_v4.common.ops": {"dequantize_and_gather_k_cache": dequantize_and_gather_k_cache},
        "vllm.models.deepseek_v4.nvidia.flashmla": {"DeepseekV4FlashMLAAttention": FakeLayer},
        "vllm.utils.deep_gemm": {
            "fp8_fp4_mqa_logits": fp8_fp4_mqa_logits,
            "fp8_fp4_paged_mqa_logits": fp8_fp4_paged_mqa_logits,
        },
        "vllm.utils.multi_stream_utils": {"execute_in_parallel": execute_in_parallel},
        "vllm.v1.attention.ops.flashmla": {"flash_mla_sparse_fwd": flash_mla_sparse_fwd},
        "vllm.v1.worker.workspace": {"current_workspace_manager": lambda: workspace},
    }
    for name in list(modules):
        parts = name.split(".")
        for depth in range(1, len(parts)):
            modules.setdefault(".".join(parts[:depth]), {})
    for name in sorted(modules):
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(modules[name])
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    monkeypatch.setattr("bi_sparse_attn.vllm_attention.detect_arch", lambda: Arch.SM90)
    return workspace

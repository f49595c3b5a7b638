"""What the attention path needs from FlashMLA, DeepGEMM and vLLM's fused kernels, and how this GPU proves it.

The contracts are probed, and the self-tests run on the model's own shapes, before a model's first forward and by
``bi-doctor``. Every proof has a twin that depends on the batch on purpose and must be noticed. Import-light: torch and
vLLM are imported by the proofs alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bi_kernels.runtime.packages import distribution_version, module_file, package_directories
from bi_kernels.runtime.probe import Contract, Finding, SelfTest

if TYPE_CHECKING:
    import torch

__all__ = ["FLASH_MLA", "INDEXER_SCORES", "self_tests"]

_REMEDY = "Use the vLLM release and the GPU that the README names; report this with bi-doctor's output."
_KEYS = 4096
_WINDOW = 128
_PAGE = 64
_THRESHOLDS = {"index_q": (1, 2, 17, 511, 512, 513), "insert": (1, 2, 17, 1023, 1024, 1025)}
"""Batch sizes on both sides of where vLLM's fused kernels change their launch."""


def _flash_mla_static() -> Finding:
    interface = module_file("vllm.third_party.flashmla.flash_mla_interface")
    if interface is None or "def flash_mla_sparse_fwd(" not in interface.read_text(encoding="utf-8"):
        return Finding(False, "no flash_mla_sparse_fwd in vllm.third_party.flashmla")
    libraries = [path.name for root in package_directories("vllm") for path in root.glob("_flashmla_C*.so")]
    return Finding(bool(libraries), ", ".join(libraries) or "no vllm/_flashmla_C*.so")


FLASH_MLA = Contract(
    name="flash_mla",
    expected="flash_mla_sparse_fwd, the one kernel of prefill and decode, as vLLM ships it",
    remedy="Install vLLM's own wheel for CUDA; builds without FlashMLA have another attention.",
    static=_flash_mla_static,
)


def _scores_dynamic() -> Finding:
    """Whether the paged kernel of decode gives the scores of the kernel of prefill, and whether a twin shows."""
    import torch

    index = _Index(heads=64)
    q, weights, ends = index.rows(33, torch.device("cuda", torch.cuda.current_device()))
    prefill, decode = index.prefill(q, weights, ends), index.decode(q, weights, ends)
    twin = index.decode(q, weights, ends, flip=True)
    if torch.equal(_bits(prefill), _bits(twin)):
        return Finding(False, "a twin that adds the heads in reverse was not noticed, so nothing is proven")
    different = int((_bits(prefill) != _bits(decode)).sum())
    return Finding(different == 0, f"{different} of {int(ends.sum())} scores differ between prefill and decode")


INDEXER_SCORES = Contract(
    name="indexer_scores",
    expected="the same score bits from fp8_fp4_mqa_logits (prefill) and fp8_fp4_paged_mqa_logits (decode)",
    remedy=_REMEDY,
    dynamic=_scores_dynamic,
)


def self_tests(config: Any) -> tuple[SelfTest, ...]:
    """The third-party ops of the attention path on the shapes of a model with ``config`` (its ``hf_config``).

    Raises (when a test is run):
        UnsupportedArchError: The output projection's test on a GPU other than Hopper, where its scale format was
            not validated.
    """
    index = _Index(heads=config.index_n_heads)
    return (
        _sparse_mla(64 if config.num_attention_heads <= 64 else 128, config.index_topk + _WINDOW),
        _sparse_mla(64 if config.num_attention_heads <= 64 else 128, _WINDOW),
        index.self_test("fp8_fp4_mqa_logits", index.prefill),
        index.self_test("fp8_fp4_paged_mqa_logits", index.decode),
        _o_proj(config.o_groups, config.num_attention_heads * 512 // config.o_groups, config.o_lora_rank),
        _index_q(config.index_n_heads),
        _insert(config.num_attention_heads, 64 if config.num_attention_heads <= 64 else 128),
    )


def _build() -> str:
    return f"vllm {distribution_version('vllm')}, torch {distribution_version('torch')}"


def _test(name: str, op: Callable[..., Any], control: Callable[..., Any], **rest: Any) -> SelfTest:
    return SelfTest(name=name, op=op, control=control, build=_build, remedy=_REMEDY, **rest)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _normal(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)


def _codes(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    import torch

    return (_normal(shape, seed, device) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)


def _sparse_mla(heads: int, width: int) -> SelfTest:
    import torch

    @functools.cache
    def rows_of_kv(device: torch.device) -> torch.Tensor:
        return _normal((_KEYS, 1, 512), 0, device).bfloat16()

    def rows(count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        q = _normal((count, heads, 512), 1, device).bfloat16()
        generator = torch.Generator(device).manual_seed(2)
        order = torch.rand((count, _KEYS), generator=generator, device=device, dtype=torch.float32).argsort(1)
        return q, order[:, :width].sort(1).values.int()

    def op(q: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

        sink = torch.linspace(-1, 1, heads, dtype=torch.float32, device=q.device)
        lengths = torch.full((len(q),), width, dtype=torch.int32, device=q.device)
        found: tuple[torch.Tensor, ...] = flash_mla_sparse_fwd(
            q=q,
            kv=rows_of_kv(q.device),
            indices=indices.unsqueeze(1),
            sm_scale=512**-0.5,
            attn_sink=sink,
            topk_length=lengths,
        )
        return tuple(found)

    def control(q: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # The same rows in another order as soon as there are neighbours, as a decode kernel of its own would.
        return op(q, indices.flip(1) if len(q) > 1 else indices)

    return _test("flash_mla.sparse_fwd", op, control, rows=rows, shape_key=f"heads={heads},width={width}")


class _Index:
    """Queries and keys of an indexer, and both kernels that score them. Rows are ``(q, weights, row_ends)``."""

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def rows(self, count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        import torch

        generator = torch.Generator(device).manual_seed(3)
        ends = torch.randint(1, _KEYS + 1, (count,), generator=generator, device=device, dtype=torch.int32)
        weights = _normal((count, self.heads), 4, device)
        return _codes((count, self.heads, 128), 5, device), weights, ends

    def prefill(self, q: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, flip: bool = False) -> torch.Tensor:
        """Scores of ``fp8_fp4_mqa_logits``, 0 outside the row's range; ``flip`` adds the heads in reverse."""
        import torch
        from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

        q, weights = self._flipped(q, weights, flip)
        starts = torch.zeros_like(ends)
        scores = fp8_fp4_mqa_logits((q, None), self._keys(q.device), weights, starts, ends, clean_logits=False)
        return self._inside(scores, ends)

    def decode(self, q: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, flip: bool = False) -> torch.Tensor:
        """Scores of ``fp8_fp4_paged_mqa_logits`` over the same keys in pages."""
        import torch
        from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits, get_paged_mqa_logits_metadata

        q, weights = self._flipped(q, weights, flip)
        codes, scales = self._keys(q.device)
        pages = _KEYS // _PAGE
        parts = (codes.view(torch.uint8).view(pages, -1), scales.view(pages, _PAGE).view(torch.uint8))
        cache = torch.cat(parts, 1).view(pages, _PAGE, 1, 132)
        table = torch.arange(pages, dtype=torch.int32, device=q.device).expand(len(q), pages).contiguous()
        lengths = ends.unsqueeze(1)
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        plan = get_paged_mqa_logits_metadata(lengths, _PAGE, sms)
        scores = fp8_fp4_paged_mqa_logits(
            (q.unsqueeze(1), None), cache, weights, lengths, table, plan, max_model_len=_KEYS, clean_logits=False
        )
        return self._inside(scores, ends)

    def self_test(self, name: str, op: Callable[..., torch.Tensor]) -> SelfTest:
        def control(q: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return op(q, weights, ends, flip=len(q) > 1)

        return _test(f"deep_gemm.{name}", op, control, rows=self.rows, shape_key=f"heads={self.heads}")

    def _keys(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return _codes((_KEYS, 128), 6, device), _normal((_KEYS,), 7, device).abs()

    def _flipped(self, q: torch.Tensor, weights: torch.Tensor, flip: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if flip:
            # float8 has no flip of its own
            q = q.view(_bits(q).dtype).flip(1).view(q.dtype)
            weights = weights.flip(1)
        return q.contiguous(), weights.contiguous()

    def _inside(self, scores: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        import torch

        column = torch.arange(_KEYS, device=scores.device)
        return torch.where(column < ends.unsqueeze(1), scores[:, :_KEYS], 0.0)


def _o_proj(groups: int, width: int, rank: int) -> SelfTest:
    """``fp8_einsum`` in the layout of vLLM's ``fused_inv_rope_fp8_quant`` on Hopper: float32 scales by block."""
    import torch

    from bi_kernels.arch import Arch, detect_arch
    from bi_kernels.runtime.errors import UnsupportedArchError

    blocks = width // 128

    @functools.cache
    def weight(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        scale = torch.exp2(torch.round(_normal((groups, rank // 128, blocks), 8, device)))
        return _codes((groups, rank, width), 9, device), scale

    def rows(count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        scale = torch.exp2(torch.round(_normal((count, groups, blocks), 10, device)))
        return _codes((count, groups, width), 11, device), scale

    def op(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        from vllm.utils.deep_gemm import fp8_einsum, get_tma_aligned_size

        if detect_arch(x.device) is not Arch.SM90:
            raise UnsupportedArchError("fp8_einsum: expected Hopper; packed scales were not validated. Run on Hopper.")
        w, w_scale = weight(x.device)
        aligned = get_tma_aligned_size(len(x), 4)
        scales = torch.empty_strided(
            (groups, len(x), blocks), (blocks * aligned, 1, aligned), dtype=torch.float32, device=x.device
        ).copy_(scale.transpose(0, 1))
        out = torch.empty((len(x), groups, rank), dtype=torch.bfloat16, device=x.device)
        codes = x.transpose(0, 1).contiguous().transpose(0, 1)
        fp8_einsum(
            "bhr,hdr->bhd", (codes, scales.transpose(0, 1)), (w, w_scale.contiguous()), out, recipe=(1, 128, 128)
        )
        return out

    def control(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        # Two halves of K, rounded and added, for more than one row: how GEMM libraries split K by M.
        if len(x) == 1:
            return op(x, scale)
        w, w_scale = weight(x.device)
        wide = w.float() * w_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        rows = x.float() * scale.repeat_interleave(128, 2)
        half = width // 2
        parts = (slice(None, half), slice(half, None))
        left, right = (torch.einsum("ngk,grk->ngr", rows[..., p], wide[..., p]).bfloat16() for p in parts)
        return left + right

    return _test("deep_gemm.fp8_einsum", op, control, rows=rows, shape_key=f"groups={groups},K={width},N={rank}")


def _rope(device: torch.device) -> torch.Tensor:
    """Angles as a rotary embedding's cache: 32 cosines, then 32 sines."""
    import torch

    angle = torch.arange(8192, device=device, dtype=torch.float32).unsqueeze(1) * (
        10_000.0 ** -torch.linspace(0, 1, 32, device=device, dtype=torch.float32)
    )
    return torch.cat([angle.cos(), angle.sin()], 1)


def _positions(count: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.arange(count, device=device, dtype=torch.int64) * 7 % 8192


def _index_q(heads: int) -> SelfTest:
    """RoPE and quantisation of the indexer's query, which coarsens its launch from 512 tokens on."""

    def rows(count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        q = _normal((count, heads, 128), 14, device).bfloat16()
        return _positions(count, device), q, _normal((count, heads), 15, device).bfloat16()

    def op(positions: torch.Tensor, q: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from vllm.models.deepseek_v4.common.ops import fused_indexer_q_rope_quant

        rope = _rope(q.device)
        return tuple(fused_indexer_q_rope_quant(positions, q.clone(), rope, weights, 128**-0.5, heads**-0.5))

    def control(positions: torch.Tensor, q: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return op(positions, q if len(q) == 1 else (q / q.abs().amax()).to(q.dtype), weights)

    return _test(
        "vllm.fused_indexer_q_rope_quant",
        op,
        control,
        rows=rows,
        shape_key=f"heads={heads}",
        batch_sizes=_THRESHOLDS["index_q"],
    )


def _insert(heads: int, padded: int) -> SelfTest:
    """Norm, RoPE, quantisation and insert of query and row, which change their grid from 1024 tokens on."""
    import torch

    def rows(count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        q = _normal((count, heads, 512), 16, device).bfloat16()
        return _positions(count, device), q, _normal((count, 512), 17, device).bfloat16()

    def op(positions: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        import vllm._custom_ops  # noqa: F401  loads the ops

        count = len(q)
        pages = -(-count // _PAGE)
        cache = torch.zeros((pages, _PAGE * 584), dtype=torch.uint8, device=q.device)
        slots = torch.arange(count, device=q.device, dtype=torch.int64)
        out = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            q.clone(), kv.clone(), cache, slots, positions, _rope(q.device), padded, 1e-6, _PAGE
        )
        data = cache[:, : _PAGE * 576].reshape(pages * _PAGE, 576)[:count]
        scales = cache[:, _PAGE * 576 :].reshape(pages * _PAGE, 8)[:count]
        return out, torch.cat([data, scales], 1)

    def control(positions: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return op(positions, q, kv if len(q) == 1 else (kv / kv.abs().amax()).to(kv.dtype))

    return _test(
        "vllm.fused_qnorm_rope_kv_insert",
        op,
        control,
        rows=rows,
        shape_key=f"heads={heads},padded={padded}",
        batch_sizes=_THRESHOLDS["insert"],
    )

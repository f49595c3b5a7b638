"""A small DeepSeek-V4, written once from the packages' public ops, and run by rollout and actor alike.

Layers of all kinds (window only, C4 with indexer, C128), attention sinks, partial and inverse RoPE, grouped low-rank
output, mHC with four streams, a hash layer and routed layers with a shared expert, block-FP8 weights and activations,
and a paged FP8 KV cache. The caller brings a :class:`~aligned_e2e.paged.Batch` and the caches; how it schedules its
rows, and whether it shares pages, is its own business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

import bi_kernels as bk
import bi_moe_deepep as moe
import bi_reload as reload
import bi_sparse_attn as sparse
from bi_kernels.testing.trace import note_plan, probe

from .config import Deployment, ModelConfig
from .layers import pool_entries, rms_norm, rope, rope_table, rounded
from .paged import Batch, Caches, LayerCache, Segment

__all__ = ["DeepseekV4"]

_GROUP = 128


class Part(nn.Module):
    """A module whose parameters and parts are named by the checkpoint."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class DeepseekV4(Part):
    """The model. Parameters carry checkpoint names; derived weights are refreshed in place by bi-reload.

    Args:
        config: Sizes.
        deployment: Capacities.
        checkpoint: Tensors by name; copied.
    """

    def __init__(self, config: ModelConfig, deployment: Deployment, checkpoint: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.config, self.deployment = config, deployment
        self.scale_format = bk.scale_format_for(config.arch)
        for name, tensor in checkpoint.items():
            _plant(self, name, tensor.clone())
        for n in range(config.num_layers):
            self._pad_sink(self.layer(n).attn, checkpoint[f"layers.{n}.attn.attn_sink"])
        first = self.layer(0)
        first.register_buffer(
            "hc_attn_fn_broadcast", torch.empty(first.hc_attn_fn.shape[0], config.hidden_size), persistent=False
        )
        reload.refresh_mhc_broadcast_(first.hc_attn_fn_broadcast, first.hc_attn_fn)
        self.ropes = {r: rope_table(config, r, deployment.max_model_len) for r in set(config.compress_ratios)}
        self.capacities = {
            ratio: sparse.SparseCapacity.from_model(
                max_model_len=deployment.max_model_len,
                compress_ratio=ratio,
                window_size=config.window,
                index_topk=config.index_topk,
                max_num_batched_tokens=deployment.max_num_batched_tokens,
            )
            for ratio in set(config.compress_ratios)
        }
        self.set_expert_ranks(1)

    def layer(self, n: int) -> Part:
        """Decoder layer ``n``."""
        return cast(Part, self.layers.get_submodule(str(n)))

    def _pad_sink(self, attn: Part, sink: torch.Tensor) -> None:
        padded = nn.Parameter(torch.empty(self.config.padded_heads), requires_grad=False)
        heads = self.config.num_heads

        def weight_loader(param: torch.Tensor, loaded: torch.Tensor) -> None:
            reload.load_attn_sink_(param, loaded, num_heads=heads)

        padded.weight_loader = weight_loader  # type: ignore[attr-defined]
        del attn.attn_sink
        attn.register_parameter("attn_sink", padded)
        weight_loader(padded, sink)

    # -- forward ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, batch: Batch, caches: Caches) -> torch.Tensor:
        """Hidden states before the head.

        Args:
            token_ids: ``(T,)`` int64.
            batch: Requests, positions and pages of the rows.
            caches: This side's pages; the rows' KV is written into them.

        Returns:
            ``(T, hidden)`` bfloat16. Row ``i`` depends on the weights and on the tokens up to it alone.
        """
        c, first = self.config, self.layer(0)
        pre = reload.mhc_pre_broadcast(
            self.embed.weight[token_ids],
            first.hc_attn_fn_broadcast,
            first.hc_attn_scale,
            first.hc_attn_base,
            norm_weight=first.attn_norm.weight,
            **self._mhc,
        )
        layer_input, post, comb, residual = pre
        for n, cache in enumerate(caches.layers):
            probe("mhc_pre, attention", layer_input, layer=n, rows=batch.rows)
            probe("mhc_pre post_mix, attention", post, layer=n, rows=batch.rows)
            probe("mhc_pre comb_mix, attention", comb, layer=n, rows=batch.rows)
            attended = self._attention(n, layer_input, batch, cache)
            residual = reload.mhc_post(attended, residual, post, comb)
            probe("mhc_post, attention", residual, layer=n, rows=batch.rows)
            layer_input, post, comb = self._pre(residual, n, "ffn")
            probe("mhc_pre, ffn", layer_input, layer=n, rows=batch.rows)
            probe("mhc_pre post_mix, ffn", post, layer=n, rows=batch.rows)
            probe("mhc_pre comb_mix, ffn", comb, layer=n, rows=batch.rows)
            residual = reload.mhc_post(self._ffn(n, layer_input, token_ids, batch), residual, post, comb)
            probe("mhc_post, ffn", residual, layer=n, rows=batch.rows)
            if n + 1 < c.num_layers:
                layer_input, post, comb = self._pre(residual, n + 1, "attn")
        collapsed = reload.mhc_head(
            residual, self.hc_head_fn, self.hc_head_scale, self.hc_head_base, rms_eps=c.rms_norm_eps, hc_eps=c.hc_eps
        )
        probe("mhc_head", collapsed, layer=c.num_layers, rows=batch.rows)
        return rms_norm(collapsed, self.norm.weight, c.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, which: torch.Tensor, batch: Batch) -> torch.Tensor:
        """``(n, vocab)`` float32 logits of the ``n`` rows ``which`` of a batch's hidden states."""
        logits = bk.fixed_order_mm(hidden[which], self.head.weight)
        probe("logits", logits, layer=self.config.num_layers, rows=lambda: batch.rows().take(which))
        return logits

    # -- mHC -------------------------------------------------------------------------------------------------------

    @property
    def _mhc(self) -> dict[str, Any]:
        c = self.config
        return {
            "rms_eps": c.rms_norm_eps,
            "hc_eps": c.hc_eps,
            "norm_eps": c.rms_norm_eps,
            "sinkhorn_iters": c.hc_sinkhorn_iters,
        }

    def _pre(self, residual: torch.Tensor, n: int, site: str) -> reload.MhcPre:
        layer = self.layer(n)
        return reload.mhc_pre(
            residual,
            getattr(layer, f"hc_{site}_fn"),
            getattr(layer, f"hc_{site}_scale"),
            getattr(layer, f"hc_{site}_base"),
            norm_weight=getattr(layer, f"{site}_norm").weight,
            **self._mhc,
        )

    # -- attention -------------------------------------------------------------------------------------------------

    def _linear(self, x: torch.Tensor, linear: Part) -> torch.Tensor:
        """Block-FP8 linear: quantise the activation per 128 channels, multiply, round to bfloat16."""
        q, s = bk.per_token_group_quant_fp8(x, scale_format=self.scale_format)
        return moe.fp8_gemm_nt(q, s, linear.weight, linear.scale)

    def _attention(self, n: int, x: torch.Tensor, batch: Batch, cache: LayerCache) -> torch.Tensor:
        c, attn, ratio = self.config, self.layer(n).attn, self.config.compress_ratios[n]
        table = self.ropes[ratio]
        low = rms_norm(self._linear(x, attn.wq_a), attn.q_norm.weight, c.rms_norm_eps)
        q = self._linear(low, attn.wq_b).unflatten(-1, (c.num_heads, c.head_dim))
        q = rope(rms_norm(q, None, c.rms_norm_eps), table, batch.positions)
        kv = rms_norm(self._linear(x, attn.wkv), attn.kv_norm.weight, c.rms_norm_eps)
        kv = rope(kv, table, batch.positions)
        probe("q", q, layer=n, rows=batch.rows)
        probe("kv", kv, layer=n, rows=batch.rows)
        sparse.quantize_and_insert_kv_(cache.window, kv, batch.row_window_slots, block_size=self.deployment.window_page)
        entries = self._compressed_entries(n, x, low, batch, cache)
        out = torch.empty_like(q)
        if batch.num_decode:
            self._attend_decode(n, q, entries, batch, cache, out)
        for segment in batch.prefill_segments:
            self._attend_prefill(n, q, entries, batch, segment, cache, out)
        probe("sparse_mla", out, layer=n, rows=batch.rows)
        projected = self._output_projection(rope(out, table, batch.positions, inverse=True), attn)
        probe("output projection", projected, layer=n, rows=batch.rows)
        return projected

    def _output_projection(self, out: torch.Tensor, attn: Part) -> torch.Tensor:
        """Grouped low-rank output: each group of heads through its own block of ``wo_a``, then all through ``wo_b``."""
        c = self.config
        grouped = out.reshape(out.shape[0], c.o_groups, -1)
        rank, blocks = c.o_lora_rank, c.o_lora_rank // _GROUP
        parts = []
        for g in range(c.o_groups):
            q, s = bk.per_token_group_quant_fp8(grouped[:, g].contiguous(), scale_format=self.scale_format)
            weight = attn.wo_a.weight[g * rank : (g + 1) * rank]
            scale = attn.wo_a.scale[g * blocks : (g + 1) * blocks]
            parts.append(moe.fp8_gemm_nt(q, s, weight, scale))
        return self._linear(torch.cat(parts, -1), attn.wo_b)

    def _compressed_entries(
        self, n: int, x: torch.Tensor, low: torch.Tensor, batch: Batch, cache: LayerCache
    ) -> torch.Tensor | None:
        """Write the entries that these rows complete; return the entries each row attends, ``(T, width)`` int32."""
        c, attn, ratio = self.config, self.layer(n).attn, self.config.compress_ratios[n]
        if not ratio:
            return None
        done, pooled = self._compress(x, attn.compressor, ratio, c.head_dim, batch, cache.state)
        probe("compressed entry", pooled, layer=n, rows=lambda: batch.rows().take(done))
        slots = batch.entry_slots(batch.request[done], batch.positions[done] // ratio, ratio)
        page = self.deployment.block // ratio
        sparse.quantize_and_insert_kv_(cache.compressed, pooled, slots, block_size=page)
        if ratio == 128:
            return sparse.c128_indices(batch.positions, width=self.capacities[ratio].topk_width)
        done, pooled = self._compress(x, attn.indexer.compressor, ratio, c.index_head_dim, batch, cache.index_state)
        probe("index key", pooled, layer=n, rows=lambda: batch.rows().take(done))
        sparse.quantize_and_insert_index_k_(cache.index_k, pooled, slots, block_size=page)
        return self._select(n, x, low, batch, cache)

    def _compress(
        self, x: torch.Tensor, part: Part, ratio: int, dim: int, batch: Batch, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep every row's compressor input; pool the windows that end in this batch.

        Returns:
            The rows that end a window, and their entries, ``(len(rows), dim)`` bfloat16.
        """
        width = state.shape[1] // 2
        value, score = bk.fixed_order_mm(x, part.wkv_gate.weight).split(width, -1)
        state.index_copy_(0, batch.row_state_slots, torch.cat([value, score + part.ape[batch.positions % ratio]], 1))
        done = ((batch.positions + 1) % ratio == 0).nonzero().squeeze(1)
        series = width // dim
        # The window of an entry: its own tokens with the last series, before them (C4) the previous ones with series 0.
        back = torch.arange(series * ratio - 1, -1, -1)
        where = batch.positions[done, None] - back
        rows = batch.state_slots(batch.request[done, None].expand_as(where), where)
        chunks = []
        for some in rows.split(256):
            gathered = state.index_select(0, some.clamp(min=0).flatten()).view(*some.shape, 2, series, dim)
            if series == 2:
                gathered = torch.cat([gathered[:, :ratio, :, 0], gathered[:, ratio:, :, 1]], 1)
            else:
                gathered = gathered[:, :, :, 0]
            values, scores = gathered.unbind(2)
            outside = (some < 0).unsqueeze(-1)
            chunks.append(pool_entries(values.masked_fill(outside, 0.0), scores.masked_fill(outside, -torch.inf)))
        pooled = torch.cat(chunks) if chunks else x.new_zeros(0, dim, dtype=torch.float32)
        pooled = rms_norm(pooled, part.norm.weight, self.config.rms_norm_eps)
        return done, rope(pooled, self.ropes[ratio], batch.positions[done] // ratio * ratio)

    def _select(self, n: int, x: torch.Tensor, low: torch.Tensor, batch: Batch, cache: LayerCache) -> torch.Tensor:
        """The indexer: the ``index_topk`` best compressed entries of each row, ascending, -1 padded."""
        c, indexer = self.config, self.layer(n).attn.indexer
        q = self._linear(low, indexer.wq_b).unflatten(-1, (c.index_heads, c.index_head_dim))
        q = rope(q, self.ropes[4], batch.positions)
        q8, q_scale = bk.per_token_group_quant_fp8(q, scale_format=bk.ScaleFormat.FLOAT32_CEIL_UE8M0)
        weights = bk.fixed_order_mm(x, indexer.weights_proj.weight) * q_scale.squeeze(-1)
        weights = weights * (c.index_head_dim**-0.5 * c.index_heads**-0.5)
        chosen = torch.empty(batch.num_rows, c.index_topk, dtype=torch.int32)
        reach = (batch.positions + 1) // 4  # entries that end at or before each row's position
        # Decode: all requests' keys side by side in one call. Prefill: each request by itself.
        groups = [batch.segments[: batch.num_decode]] if batch.num_decode else []
        groups += [[segment] for segment in batch.prefill_segments]
        for group in groups:
            rows = slice(group[0].first_row, group[-1].first_row + group[-1].rows)
            keys = [batch.entry_slots(s.request, torch.arange(s.stop // 4), 4) for s in group]
            k8, k_scale = sparse.gather_index_k(cache.index_k, torch.cat(keys), block_size=self.deployment.block // 4)
            first = torch.tensor([0] + [len(k) for k in keys[:-1]]).cumsum(0)
            starts = torch.cat([f.expand(s.rows) for f, s in zip(first, group, strict=True)])
            ends = starts + reach[rows]
            starts, ends = starts.to(torch.int32), ends.to(torch.int32)
            scores = sparse.mqa_logits(q8[rows], k8, k_scale, weights[rows], starts, ends)
            sparse.top_k_per_row_prefill(scores, starts, ends, c.index_topk, out=chosen[rows])
        probe("top_k", chosen, layer=n, rows=batch.rows)
        return chosen

    def _attend_prefill(
        self, n: int, q: torch.Tensor, entries: torch.Tensor | None, batch: Batch, segment: Segment, cache: LayerCache,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Rows of one request: gather its entries and its window once, then attend chunk by chunk."""
        c, d, ratio = self.config, self.deployment, self.config.compress_ratios[n]
        chunks = sparse.plan_prefill_chunks([segment.rows], chunk_tokens=d.prefill_chunk)
        note_plan(f"prefill chunks of {segment.rows} rows", [chunk[1:] for chunk in chunks])
        for chunk in chunks:
            start = segment.start + chunk.start
            stop = segment.start + chunk.stop
            rows = slice(segment.first_row + chunk.start, segment.first_row + chunk.stop)
            gather_start = max(0, start - c.window + 1)
            parts = []
            if ratio:
                slots = batch.entry_slots(segment.request, torch.arange(stop // ratio), ratio)
                parts.append(sparse.gather_kv(cache.compressed, slots, block_size=d.block // ratio))
            compressed_rows = len(parts[0]) if parts else 0
            slots = batch.window_slots(segment.request, torch.arange(gather_start, stop))
            parts.append(sparse.gather_kv(cache.window, slots, block_size=d.window_page))
            indices, lengths = sparse.combine_topk_swa(
                entries[rows] if entries is not None else torch.empty(rows.stop - rows.start, 0, dtype=torch.int32),
                batch.positions[rows],
                torch.full((rows.stop - rows.start,), gather_start),
                compress_ratio=ratio,
                window_size=c.window,
                compressed_rows=compressed_rows,
            )
            self._mla(n, q[rows], torch.cat(parts), indices, lengths, out[rows])

    def _attend_decode(
        self, n: int, q: torch.Tensor, entries: torch.Tensor | None, batch: Batch, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Generated tokens: each gathers its own rows into its own piece of the workspace, in prefill's order."""
        c, d, ratio = self.config, self.deployment, self.config.compress_ratios[n]
        rows = slice(0, batch.num_decode)
        request, positions = batch.request[rows], batch.positions[rows]
        window = (positions[:, None] - (c.window - 1)).clamp(min=0) + torch.arange(c.window)  # oldest to newest
        window = torch.where(window <= positions[:, None], window, -1)
        window_slots = batch.window_slots(request[:, None].expand_as(window), window)
        if entries is None:
            entry_slots = torch.empty(batch.num_decode, 0, dtype=torch.int64)
        else:
            wanted = entries[rows].long()
            entry_slots = batch.entry_slots(request[:, None].expand_as(wanted), wanted, ratio)
        workspace, indices, lengths = sparse.gather_decode_kv(
            cache.compressed if ratio else None,
            cache.window,
            entry_slots,
            window_slots,
            compressed_block_size=d.block // ratio if ratio else 1,
            window_block_size=d.window_page,
        )
        self._mla(n, q[rows], workspace.flatten(0, 1), indices, lengths, out[rows])

    def _mla(
        self, n: int, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor
    ) -> None:
        c = self.config
        sparse.sparse_mla_fwd(
            q,
            kv,
            indices,
            sm_scale=c.head_dim**-0.5,
            attn_sink=self.layer(n).attn.attn_sink[: c.num_heads],
            topk_length=lengths,
            out=out,
        )

    # -- feed-forward ----------------------------------------------------------------------------------------------

    def _ffn(self, n: int, x: torch.Tensor, token_ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        c, ffn = self.config, self.layer(n).ffn
        hashed = n < c.num_hash_layers
        logits = moe.router_gate_logits(x, ffn.gate.weight)
        probe("router logits", logits, layer=n, rows=batch.rows)
        weights, ids = moe.select_experts(
            logits,
            top_k=c.experts_per_token,
            bias=None if hashed else ffn.gate.bias,
            token_ids=token_ids if hashed else None,
            tid2eid=ffn.gate.tid2eid if hashed else None,
            routed_scaling_factor=c.routed_scaling_factor,
        )
        probe("selected experts", ids, layer=n, rows=batch.rows)
        probe("expert weights", weights, layer=n, rows=batch.rows)
        routed = self._routed(x, weights, ids, ffn.experts, batch.bucket)
        probe("routed experts", routed, layer=n, rows=batch.rows)
        shared = ffn.shared_experts
        hidden = bk.silu_and_mul(self._linear(x, shared.w13), clamp_limit=c.swiglu_limit, arch=c.arch)
        shared_out = self._linear(hidden, shared.w2)
        probe("shared expert", shared_out, layer=n, rows=batch.rows)
        return rounded(routed.float() + shared_out.float())

    def set_expert_ranks(self, ranks: int) -> None:
        """Share the experts among so many simulated ranks from now on; must not show in the bits."""
        self.ranks = moe.InProcessTransport(ranks)
        self.group: moe.Transport | None = None

    def join_group(self, transport: moe.Transport) -> None:
        """Be one rank of a group of processes from now on, with batches of its own and its part of the experts.

        The other experts are poisoned: using one would show as NaN.
        """
        self.group = transport
        local = self.config.num_experts // transport.world_size
        for n in range(self.config.num_layers):
            for name, weight in self.layer(n).ffn.experts.named_parameters():
                others = torch.ones(len(weight), dtype=torch.bool)
                others[transport.rank * local : (transport.rank + 1) * local] = False
                if name.endswith("weight"):
                    weight.view(torch.uint8)[others] = 0x7F

    def largest_batch(self, rows: int) -> int:
        """Rows of the largest batch of any rank of the group; a collective."""
        return rows if self.group is None else max(rank[0] for rank in self.group.all_gather_ints([rows]))

    @torch.inference_mode()
    def lend_experts(self, bucket: int) -> None:
        """Take part in one forward call of the other ranks, without rows. ``bucket`` is the largest batch."""
        c = self.config
        nothing = torch.empty(0, c.hidden_size, dtype=torch.bfloat16)
        weights, ids = torch.empty(0, c.experts_per_token), torch.empty(0, c.experts_per_token, dtype=torch.int32)
        for n in range(c.num_layers):
            self._routed(nothing, weights, ids, self.layer(n).ffn.experts, bucket)

    def _routed(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Part, bucket: int
    ) -> torch.Tensor:
        """Routed experts of all rows: every rank brings its rows and holds its part of the experts."""
        c, d = self.config, self.deployment

        def program(transport: moe.Transport, rows: slice, bucket: int) -> torch.Tensor:
            local = c.num_experts // transport.world_size
            own = slice(transport.rank * local, (transport.rank + 1) * local)
            weight = [t[own] for t in (experts.w13.weight, experts.w13.scale, experts.w2.weight, experts.w2.scale)]
            # Every rank pads its rows to the same bucket, so that all run the same number of slices.
            plan = moe.plan_slices(-(-bucket // d.expert_capacity) * d.expert_capacity, capacity=d.expert_capacity)
            note_plan("expert capacity", plan.capacity)
            dispatcher = moe.StagedDispatcher(
                transport, num_experts=c.num_experts, capacity=plan.capacity, num_slices=plan.num_slices
            )
            routed, _ = dispatcher.run(
                x[rows],
                ids[rows],
                weights[rows],
                experts=lambda staged, counts: moe.expert_mlp(
                    staged, counts, *weight, arch=c.arch, clamp_limit=c.swiglu_limit
                ),
            )
            return routed

        if self.group is not None:
            return program(self.group, slice(None), bucket)
        share = -(-x.shape[0] // self.ranks.world_size)
        parts = self.ranks.run(lambda t: program(t, slice(t.rank * share, (t.rank + 1) * share), share))
        return torch.cat(parts)


def _plant(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Register ``tensor`` as a parameter of ``root`` under its dotted checkpoint name."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, Part())
        root = root.get_submodule(part)
    root.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))

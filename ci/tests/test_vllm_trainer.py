"""Tracer and trainer without vLLM: a stand-in with the names and the call order of its DeepSeek-V4."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from aligned_e2e.vllm_engine import make_prompts
from aligned_e2e.vllm_probe import ModelProbe, first_partings, switch_plans, watch_engine
from aligned_e2e.vllm_trainer import PackedModel, Sample, pack, read_drawn, read_samples, recompute
from bi_kernels.testing.trace import Trace, first_divergence, row_digests

HIDDEN, HEADS, VOCABULARY, LAYERS = 8, 2, 32, 2
MODULE = "vllm.models.deepseek_v4.nvidia.model"


def mixed(streams):
    """What mHC's pre returns: mixes, and the input of a layer."""
    return streams[:, :, :1] * 0.5, streams[:, :, :4] * 0.25, streams.sum(1)


def post(x, residual, post_mix, comb_mix):
    return residual + x[:, None] * post_mix


class FakeModule(types.ModuleType):
    """The functions that the model's module looks up by name."""

    def __init__(self):
        super().__init__(MODULE)
        self.mhc_pre_tilelang = lambda residual: mixed(residual)
        self.mhc_post_tilelang = lambda *args: post(*args)
        self.hc_head_fused_kernel_tilelang = lambda streams: streams.mean(1)
        self.mhc_pre_broadcast_tilelang = lambda x: (lambda r: (r, *mixed(r)))(x[:, None].repeat(1, 4, 1))
        self.mhc_fused_post_pre_tilelang = lambda *args: (lambda r: (r, *mixed(r)))(post(*args))


class FakeIndexer(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.buffer = buffer

    def forward(self, hidden, q, k, weights):
        self.buffer[: len(hidden)] = (hidden[:, :3] * 100).int()
        return self.buffer


class FakeAttention(nn.Module):
    def __init__(self, compress):
        super().__init__()
        self.n_local_heads = HEADS
        self.indexer = nn.Module() if compress else None
        if compress:
            self.indexer.indexer_op = FakeIndexer(torch.zeros(64, 3, dtype=torch.int32))

    def attn_gemm_parallel_execute(self, hidden):
        extra = hidden * 3 if self.indexer is not None else None
        return hidden * 2, extra, extra, extra

    def _fused_qnorm_rope_kv_insert(self, q, kv, positions, metadata):
        padded = torch.full((len(q), 2 * HEADS, HIDDEN), float(len(q)))  # what stands in padding is nobody's affair
        padded[:, :HEADS] = q[:, None] + positions[:, None, None]
        return padded

    def forward_mqa(self, q, kv, positions, output):
        output.copy_(q * 0.5)

    def forward(self, positions, hidden, scaling=None):
        projected, *_ = self.attn_gemm_parallel_execute(hidden)
        q = self._fused_qnorm_rope_kv_insert(projected, hidden, positions, {})
        if self.indexer is not None:
            self.indexer.indexer_op(hidden, projected.to(torch.float8_e4m3fn), None, hidden)
        out = torch.empty_like(q)
        self.forward_mqa(q, hidden, positions, out)
        return out[:, :HEADS].sum(1)


class FakeExperts(nn.Module):
    def __init__(self, gate, shared):
        super().__init__()
        self.gate, self.shared = gate, shared
        self.router = SimpleNamespace(select_experts=lambda logits: (logits[:, :2], logits[:, :2].int()))
        self.routed_experts = nn.Module()
        self.routed_experts.forward_modular = lambda x, weights: x * weights[:, :1]

    def forward(self, x):
        logits, _ = self.gate(x)
        weights, _ = self.router.select_experts(logits)
        return self.shared(x) + self.routed_experts.forward_modular(x=x, weights=weights)


class FakeGate(nn.Module):
    by_batch = False

    def forward(self, x):
        logits = x * 1.5
        return (logits + 1e-3 if self.by_batch and len(x) < 4 else logits), None


class FakeLayer(nn.Module):
    def __init__(self, module, compress):
        super().__init__()
        self.module = module
        self.attn = FakeAttention(compress)
        self.ffn = nn.Module()
        self.ffn.gate = FakeGate()
        self.ffn.shared_experts = nn.Tanh()
        self.ffn.experts = FakeExperts(self.ffn.gate, self.ffn.shared_experts)

    def forward(self, x, positions, state):
        if state is None:
            residual, post_mix, comb_mix, x = self.module.mhc_pre_broadcast_tilelang(x)
        else:
            residual, post_mix, comb_mix, x = self.module.mhc_fused_post_pre_tilelang(x, *state)
        x = self.attn(positions, x, None)
        residual, post_mix, comb_mix, x = self.module.mhc_fused_post_pre_tilelang(x, residual, post_mix, comb_mix)
        return self.ffn.experts(x), (residual, post_mix, comb_mix)


class FakeModel(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(FakeLayer(module, compress=n == 1) for n in range(LAYERS))
        self.norm = nn.Tanh()

    def forward(self, input_ids, positions):
        x, state = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, state = layer(x, positions, state)
        return self.norm(self.module.hc_head_fused_kernel_tilelang(self.module.mhc_post_tilelang(x, *state)))


class FakeCausalModel(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.model = FakeModel(module)
        self.weight = torch.linspace(-1, 1, HIDDEN * VOCABULARY).reshape(HIDDEN, VOCABULARY)

    def forward(self, input_ids, positions):
        return self.model(input_ids, positions)

    def compute_logits(self, hidden):
        # The elements' sum in one order whatever the number of rows.
        return (hidden[:, :, None] * self.weight).cumsum(1)[:, -1].bfloat16()


@pytest.fixture
def model(monkeypatch):
    module = FakeModule()
    monkeypatch.setitem(sys.modules, MODULE, module)
    torch.manual_seed(0)
    return FakeCausalModel(module)


class FakeRunner:
    """What ``watch_engine`` asks of vLLM's runner, and a schedule: each step has so many tokens of each request."""

    def __init__(self, model, *, eager=True):
        self.model = model
        self.model_config = SimpleNamespace(enforce_eager=eager)
        self.input_batch = SimpleNamespace(num_reqs=0, req_ids=[])
        self.query_start_loc = SimpleNamespace(np=np.zeros(9, dtype=np.int32))

    def get_model(self):
        return self.model

    def _model_forward(self, **kwargs):
        return self.model(kwargs["input_ids"], kwargs["positions"])

    @torch.inference_mode()
    def step(self, parts, *, whole=False):
        """``parts``: request, its tokens, where this step starts and stops in them."""
        bounds = [0]
        for _, _, start, stop in parts:
            bounds.append(bounds[-1] + stop - start)
        self.input_batch.num_reqs, self.input_batch.req_ids = len(parts), [name for name, *_ in parts]
        self.query_start_loc.np[: len(bounds)] = bounds
        tokens = torch.tensor([t for _, tokens, start, stop in parts for t in tokens[start:stop]])
        positions = torch.cat([torch.arange(start, stop) for _, _, start, stop in parts])
        hidden = self._model_forward(input_ids=tokens, positions=positions)
        self.model.compute_logits(hidden[torch.tensor(bounds[1:]) - 1])
        if whole:
            for start, stop in itertools.pairwise(bounds):
                self.model.compute_logits(hidden[start:stop])


PROMPT_A, PROMPT_B = [3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2]


def in_chunks(runner, probe):
    runner.step([("0-aa", PROMPT_A, 0, 4), ("1-bb", PROMPT_B, 0, 4)])
    runner.step([("1-bb", PROMPT_B, 4, 5), ("0-aa", PROMPT_A, 4, 6)])
    runner.step([("0-aa", PROMPT_A, 6, 7)])
    return probe.finish({"0-aa": "a", "1-bb": "b"})


def at_once(runner, probe):
    runner.step([("7-cc", PROMPT_B, 0, 5), ("8-dd", PROMPT_A, 0, 7)], whole=True)
    return probe.finish({"7-cc": "b", "8-dd": "a"})


def test_every_op_is_traced_and_batches_do_not_show(model):
    runner = FakeRunner(model)
    with watch_engine(runner) as probe:
        chunks, whole = in_chunks(runner, probe), at_once(runner, probe)
    assert first_divergence(chunks, whole) is None
    assert not chunks.contradictions
    assert not whole.contradictions
    ops = [op for layer, op in whole.ops if layer == 1]
    # In a layer: as they run. The last op belongs to the layer, but runs with the next.
    assert ops[:3] == ["mhc_pre, attention", "mhc_pre post_mix, attention", "mhc_pre comb_mix, attention"]
    assert ops[3:9] == ["qr_kv", "kv_score", "index kv_score", "index weights", "kv", "q"]
    assert ops[9:15] == ["index q", "top_k", "sparse_mla", "output projection", "mhc_post, attention", "mhc_pre, ffn"]
    assert set(ops[15:]) == {"mhc_pre post_mix, ffn", "mhc_pre comb_mix, ffn", "router logits", "expert weights",
                             "selected experts", "shared expert", "routed experts", "mhc_post, ffn"}  # fmt: skip
    assert ("top_k" in [op for layer, op in whole.ops if layer == 0]) is False
    assert [op for layer, op in whole.ops if layer == -1] == ["embedding"]
    assert [op for layer, op in whole.ops if layer == LAYERS] == ["mhc_head", "hidden", "logits"]
    for layer, op in whole.ops:
        assert len(whole.digests(layer, op)) == 12, op
        assert len(chunks.digests(layer, op)) == (5 if op == "logits" else 12), op
    assert set(chunks.digests(LAYERS, "logits")) == {("a", 3), ("a", 5), ("a", 6), ("b", 3), ("b", 4)}


def test_a_gate_that_follows_the_batch_is_found(model):
    runner = FakeRunner(model)
    model.model.layers[1].ffn.gate.by_batch = True
    with watch_engine(runner) as probe:
        divergence = first_divergence(in_chunks(runner, probe), at_once(runner, probe))
    assert (divergence.layer, divergence.op) == (1, "router logits")
    assert divergence.position == 4
    with watch_engine(runner) as probe:
        partings = first_partings(in_chunks(runner, probe), at_once(runner, probe))
    assert partings == [(1, "router logits", 1.0)]


def test_nothing_is_left_behind(model):
    runner = FakeRunner(model)
    before = {id(m): (dict(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()}
    functions = dict(vars(sys.modules[MODULE]))
    with watch_engine(runner):
        assert "forward_mqa" in vars(model.model.layers[0].attn)
        assert "_model_forward" in vars(runner)
    assert {id(m): (dict(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()} == before
    assert dict(vars(sys.modules[MODULE])) == functions
    assert "_model_forward" not in vars(runner)


def test_forward_passes_that_are_no_step_leave_no_rows(model):
    runner = FakeRunner(model)
    with watch_engine(runner) as probe:
        model(torch.tensor([1, 2]), torch.tensor([0, 1]))  # a dummy run
        assert probe.finish().ops == []
        runner.step([("0-aa", PROMPT_A, 0, 7)])
        assert probe.seen == ["0-aa"]
        assert probe.finish({}).ops == []
        assert probe.seen == []


def test_the_plan_has_the_buffers_that_steps_ask_for(model, monkeypatch):
    from bi_sparse_attn import SparseCapacity, vllm_attention

    limits = {"max_model_len": 64, "window_size": 128, "index_topk": 512, "max_num_batched_tokens": 64}
    capacity = SparseCapacity.from_model(compress_ratio=4, **limits)
    forward = type(model.model.layers[0].attn).forward_mqa

    def forward_mqa(self, *args):
        vllm_attention._decode_buffers(capacity)
        return forward(self, *args)

    monkeypatch.setattr(type(model.model.layers[0].attn), "forward_mqa", forward_mqa)
    runner = FakeRunner(model)
    with watch_engine(runner) as probe:
        model(torch.tensor([1, 2]), torch.tensor([0, 1]))  # a dummy run
        assert probe.finish().plan == {}
        (name,), (values,) = zip(*in_chunks(runner, probe).plan.items(), strict=True)
        assert probe.finish().plan == {}
    assert name == "decode_buffers of compress ratio 4"
    assert [shapes.split()[0] for shapes in values] == ["128x640x512"]


def test_engines_that_replay_graphs_are_refused(model):
    with pytest.raises(ValueError, match="enforce_eager"), watch_engine(FakeRunner(model, eager=False)):
        pass


def test_plans_lose_what_is_switched_off(monkeypatch):
    from bi_moe_deepep import vllm_hook as moe

    for package in ("bi_kernels", "bi_moe_deepep", "bi_reload", "bi_sparse_attn"):
        hook = __import__(f"{package}.vllm_hook", fromlist=["PLAN"])
        monkeypatch.setattr(hook, "PLAN", hook.PLAN)
    gate = "vllm.model_executor.layers.fused_moe.router.gate_linear:GateLinear"
    before = {patch.target for patch in moe.PLAN.patches_for("0.26.0")}
    switch_plans(frozenset({gate}))
    assert {patch.target for patch in moe.PLAN.patches_for("0.26.0")} == before - {gate}
    with pytest.raises(ValueError, match="nowhere:Nothing"):
        switch_plans(frozenset({"nowhere:Nothing"}))


# -- the trainer -------------------------------------------------------------------------------------------------------


class FakeTable:
    """One group's block table, and what was in it when a forward call began."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.slot_mapping = SimpleNamespace(gpu=torch.full((64,), -1))


class FakeTables:
    def __init__(self, block_sizes):
        self.tables = [FakeTable(size) for size in block_sizes]
        self.rows = {}
        self.calls = []

    def __getitem__(self, index):
        return self.tables[index]

    def add_row(self, blocks, row):
        self.rows[row] = blocks

    def commit_block_table(self, count):
        self.calls.append([self.rows[row] for row in range(count)])

    def compute_slot_mapping(self, count, starts, positions):
        requests = torch.repeat_interleave(torch.arange(count), starts.diff())
        for index, table in enumerate(self.tables):
            for token, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
                block = self.rows[request][index][position // table.block_size]
                table.slot_mapping.gpu[token] = block * table.block_size + position % table.block_size


@pytest.fixture
def packed(model, monkeypatch):
    """A :class:`PackedModel` around the stand-in; ``built`` has the metadata of each call."""
    built = []

    @dataclasses.dataclass
    class CommonAttentionMetadata:
        query_start_loc: object
        query_start_loc_cpu: object
        seq_lens: object
        num_reqs: int
        num_actual_tokens: int
        max_query_len: int
        max_seq_len: int
        block_table_tensor: object
        slot_mapping: object
        causal: bool
        positions: object
        is_prefilling: object
        seq_lens_cpu_upper_bound: object
        _seq_lens_cpu: object
        _num_computed_tokens_cpu: object

    @contextlib.contextmanager
    def set_forward_context(metadata, config, *, num_tokens, slot_mapping):
        built.append((metadata, slot_mapping, num_tokens))
        yield

    class Sampler:
        compute_logprobs = staticmethod(lambda logits: logits.float().log_softmax(-1))

    for name, content in {
        "vllm.forward_context": {"set_forward_context": set_forward_context},
        "vllm.v1.attention.backend": {"CommonAttentionMetadata": CommonAttentionMetadata},
        "vllm.v1.sample.sampler": {"Sampler": Sampler},
    }.items():
        fake = types.ModuleType(name)
        vars(fake).update(content)
        monkeypatch.setitem(sys.modules, name, fake)

    groups = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size), layer_names=names)
        for size, names in ((4, ["c4", "index"]), (2, ["window"]))
    ]
    tables = FakeTables([4, 2])
    for table in tables.tables:
        table.get_device_tensor = lambda count: torch.zeros(count, 8)
    builder = SimpleNamespace(build=lambda common_prefix_len, common_attn_metadata: common_attn_metadata)
    attention = [
        [SimpleNamespace(layer_names=[name], get_metadata_builder=lambda: builder) for name in group.layer_names]
        for group in groups
    ]
    made = object.__new__(PackedModel)
    made.model, made.probe = model, ModelProbe(model)
    made.config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=16, max_num_seqs=3))
    made.runner = SimpleNamespace(
        device=torch.device("cpu"), input_batch=SimpleNamespace(block_table=tables), attn_groups=attention
    )
    made._groups, made._blocks, made._calls = groups, 40, 0
    made.built, made.tables = built, tables
    return made


SAMPLES = [Sample(f"s{i}", tuple(range(1, 1 + n)), (5, 6, i)) for i, n in enumerate((4, 1, 7, 2, 9))]


def test_packed_sequences_give_what_each_gives_alone(packed, model):
    schedule, trace = recompute(packed, SAMPLES, traced=["s0", "s2"])
    for sample in SAMPLES:
        tokens = torch.tensor(sample.tokens)
        logits = model.compute_logits(model(tokens, torch.arange(len(tokens))))[len(sample.prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1).gather(1, torch.tensor(sample.drawn)[:, None])[:, 0]
        assert schedule["requests"][sample.name] == {
            "tokens": list(sample.drawn),
            "logprobs": logprobs.view(torch.int32).tolist(),
            "digests": row_digests(logits).tolist(),
        }
    assert list(schedule["requests"]) == [sample.name for sample in SAMPLES]
    assert schedule["did"]["rows"] == sum(len(sample.tokens) for sample in SAMPLES)
    assert schedule["did"]["most_sequences"] > 1
    assert schedule["did"]["largest_call"] <= 16
    # The trace has all positions of the two, and logits where tokens were drawn.
    assert set(trace.digests(0, "q")) == {(s.name, p) for s in (SAMPLES[0], SAMPLES[2]) for p in range(len(s.tokens))}
    assert set(trace.digests(LAYERS, "logits")) == {
        (s.name, len(s.prompt) - 1 + i) for s in (SAMPLES[0], SAMPLES[2]) for i in range(3)
    }


def test_the_trainer_agrees_with_an_engines_trace(packed, model):
    _, trace = recompute(packed, SAMPLES, traced=["s2"])
    runner = FakeRunner(model)
    tokens = list(SAMPLES[2].tokens)
    with watch_engine(runner) as probe:
        runner.step([("0-x", tokens, 0, 6)])
        for at in range(6, len(tokens)):
            runner.step([("0-x", tokens, at, at + 1)])
        assert first_divergence(probe.finish({"0-x": "s2"}), trace) is None


def test_metadata_covers_every_layer_and_no_block_is_shared(packed):
    recompute(packed, SAMPLES)
    assert len(packed.built) == len(packed.tables.calls) > 1
    for (metadata, slots, num_tokens), rows in zip(packed.built, packed.tables.calls, strict=True):
        assert set(metadata) == set(slots) == {"c4", "index", "window"}
        common = metadata["window"]
        lengths = common.query_start_loc_cpu.diff()
        assert common.num_actual_tokens == num_tokens == sum(lengths.tolist())
        assert common.max_seq_len == common.max_query_len == max(lengths.tolist())
        assert torch.equal(common.seq_lens, lengths)
        assert slots["c4"].shape == (num_tokens,)
        assert not torch.equal(slots["c4"], slots["window"])
        used = [block for blocks in rows for group in blocks for block in group]
        assert len(used) == len(set(used))
        assert 0 not in used
        for blocks, length in zip(rows, lengths.tolist(), strict=True):
            assert [len(group) for group in blocks] == [-(-length // 4), -(-length // 2)]


def test_packing_keeps_every_limit():
    samples = [Sample(str(n), (1,) * (n - 1), (1,)) for n in (5, 9, 3, 3, 3, 12)]
    limits = {"max_tokens": 14, "max_sequences": 2, "block_sizes": [4, 2], "blocks": 11}
    batches = [[len(s.tokens) for s in batch] for batch in pack(samples, **limits)]
    assert batches == [[5], [9, 3], [3, 3], [12]]  # 5 and 9 need 5 + 8 blocks
    with pytest.raises(ValueError, match="15"):
        list(pack([Sample("long", (1,) * 14, (1,))], **limits))
    with pytest.raises(ValueError, match="blocks"):
        list(pack(samples, **limits | {"blocks": 8}))


def test_prompts_are_those_of_the_rollout(tmp_path):
    prompts = make_prompts(VOCABULARY, count=9, max_tokens=4)
    rows = {prompt.name: {"tokens": [1, 2, 3, n]} for n, prompt in enumerate(prompts)}
    record, tokens = tmp_path / "record.json", tmp_path / "tokens.json"
    record.write_text(json.dumps({"schedules": [{"requests": rows}, {"requests": {}}]}))
    tokens.write_text(json.dumps({name: row["tokens"] for name, row in rows.items()}))
    assert read_drawn(record) == read_drawn(tokens)
    samples = read_samples(VOCABULARY, read_drawn(tokens))
    assert [(s.name, s.prompt) for s in samples] == [(p.name, p.tokens) for p in prompts]
    assert samples[8].drawn == (1, 2, 3, 8)
    with pytest.raises(TimeoutError, match="Run the engine first"):
        read_drawn(tmp_path / "none.json", seconds=0)


def test_a_trace_is_readable_from_its_file(packed, tmp_path):
    _, trace = recompute(packed, SAMPLES, traced=["s0"])
    trace.save(tmp_path / "trace.json")
    again = Trace.load(tmp_path / "trace.json")
    assert again.ops == trace.ops
    assert first_divergence(trace, again) is None

"""The indexer class on vLLM's chunks and decode batches in small: one selection for prefill and decode."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from fake_attention import forward_context, key_cache

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_bitwise_equal
from bi_sparse_attn.vllm_indexer import sparse_attn_indexer_class

RATIO, TOP_K, HEADS = 4, 8, 2
LENGTHS = {"a": 130, "b": 61, "c": 3}
PAGES = 4


class FakeIndexer:
    """The attributes of vLLM's ``SparseAttnIndexer`` that the hook reads."""

    def __init__(self, k_cache, buffer, **changes):
        self.k_cache, self.topk_indices_buffer = k_cache, buffer
        self.topk_tokens, self.head_dim = TOP_K, 128
        self.max_model_len, self.max_total_seq_len = 64, 256
        self.skip_k_cache_insert, self.use_fp4_cache, self.use_pcp, self.dcp_world_size = True, False, False, 1
        vars(self).update(changes)

    def forward_cuda(self, hidden_states, q_quant, k, weights):
        return "stock"


class Model:
    """Keys and queries per request, its caches, and the metadata of a step."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.q = {
            n: torch.randn((t, HEADS, 128), generator=generator).to(torch.float8_e4m3fn) for n, t in LENGTHS.items()
        }
        self.weights = {n: torch.rand((t, HEADS), generator=generator) for n, t in LENGTHS.items()}
        pages = torch.randperm(PAGES * len(LENGTHS), generator=generator).int().split(PAGES)
        self.tables = dict(zip(LENGTHS, pages, strict=True))
        keys = {}
        for name, tokens in LENGTHS.items():
            # Few distinct keys: most selections are decided by ties.
            few = torch.randn((5, 128), generator=generator).bfloat16()
            for entry in range(tokens // RATIO):
                page = int(self.tables[name][entry // 64])
                keys[page * 64 + entry % 64] = few[torch.randint(5, (1,), generator=generator)][0]
        cache = SimpleNamespace(prefix="k_cache", compress_ratio=RATIO, kv_cache=key_cache(PAGES * len(LENGTHS), keys))
        self.buffer = torch.zeros((256, TOP_K), dtype=torch.int32)
        self.layer = sparse_attn_indexer_class(FakeIndexer)(cache, self.buffer)

    def run(self, *batch, per_chunk=2, padding=0):
        """Selections by (request, position). Parts of one token are decoded, the others prefilled in chunks."""
        decodes = [part for part in batch if part[2] - part[1] == 1]
        prefills = [part for part in batch if part[2] - part[1] > 1]
        token = [(n, p) for n, start, stop in decodes + prefills for p in range(start, stop)]
        q = torch.stack([self.q[n][p] for n, p in token])
        weights = torch.stack([self.weights[n][p] for n, p in token])
        decode = SimpleNamespace(
            seq_lens=torch.tensor([[(stop) // RATIO] for _, _, stop in decodes], dtype=torch.int32),
            block_table=torch.stack([self.tables[n] for n, _, _ in decodes] + [self.tables["a"]] * padding)
            if decodes
            else None,
            schedule_metadata=None,
        )
        chunks, first = [], len(decodes)
        for at in range(0, len(prefills), per_chunk):
            parts = prefills[at : at + per_chunk]
            chunks.append(self._chunk(parts, first))
            first += sum(stop - start for _, start, stop in parts)
        mine = SimpleNamespace(
            num_prefills=len(prefills),
            num_decodes=len(decodes) + padding,
            num_decode_tokens=len(decodes),
            decode=decode,
            prefill=SimpleNamespace(chunks=[chunk for chunk in chunks if chunk.total_seq_lens]),
        )
        self.buffer.fill_(3)
        with forward_context({"k_cache": mine}):
            out = self.layer.forward_cuda(torch.zeros(len(q), 1), q, None, weights)
        assert out is self.buffer
        return {key: row.clone() for key, row in zip(token, out, strict=False)}

    def _chunk(self, parts, first):
        lens = [stop // RATIO for _, _, stop in parts]
        cu = [0, *itertools.accumulate(lens)]
        starts = [cu[i] for i, (_, start, stop) in enumerate(parts) for _ in range(start, stop)]
        ends = [cu[i] + (p + 1) // RATIO for i, (_, start, stop) in enumerate(parts) for p in range(start, stop)]
        return SimpleNamespace(
            total_seq_lens=cu[-1],
            skip_kv_gather=False,
            block_table=torch.stack([self.tables[n] for n, _, _ in parts]),
            cu_seq_lens=torch.tensor(cu, dtype=torch.int32),
            cu_seqlen_ks=torch.tensor(starts, dtype=torch.int32),
            cu_seqlen_ke=torch.tensor(ends, dtype=torch.int32),
            token_start=first,
            token_end=first + len(starts),
        )


@pytest.fixture
def model(fake_vllm):
    return Model()


def test_decode_prefill_neighbours_and_chunks_select_the_same(model):
    want = {}
    for name, tokens in LENGTHS.items():
        want |= model.run((name, 0, tokens))
    assert max(row[-1] for row in want.values()) > TOP_K  # selected from more than it takes
    for batch in (
        [("a", 0, 130), ("b", 0, 61), ("c", 0, 3)],
        [("b", 60, 61), ("a", 129, 130), ("c", 2, 3)],
        [("c", 1, 2), ("b", 40, 61), ("a", 100, 130)],
        [("a", 64, 65)],
    ):
        for per_chunk in (1, 3):
            for key, row in model.run(*batch, per_chunk=per_chunk).items():
                assert_bitwise_equal(row, want[key], str(key))


def test_lists_ascend_and_end_with_minus_one(model):
    for (_, position), row in model.run(("a", 0, 130)).items():
        count = min((position + 1) // RATIO, TOP_K)
        chosen = row[:count].tolist()
        assert chosen == sorted(set(chosen))
        assert set(row[count:].tolist()) <= {-1}


def test_ties_go_to_the_lower_index(model):
    """Equal keys, equal scores: the first entries, not those that came first to a counter."""
    cache = model.layer.k_cache
    one = torch.randn(128).bfloat16()
    cache.kv_cache = key_cache(PAGES * 3, {int(model.tables["a"][0]) * 64 + entry: one for entry in range(33)})
    rows = model.run(("a", 100, 130)) | model.run(("a", 64, 65))
    for row in rows.values():
        assert row.tolist() == list(range(TOP_K))


def test_requests_that_only_pad_a_batch_are_left_out(model):
    want = model.run(("a", 129, 130), ("b", 60, 61))
    for key, row in model.run(("a", 129, 130), ("b", 60, 61), padding=3).items():
        assert_bitwise_equal(row, want[key])


def test_speculative_rows_are_refused(model):
    mine = SimpleNamespace(
        num_prefills=0,
        num_decodes=1,
        num_decode_tokens=2,
        decode=SimpleNamespace(seq_lens=torch.ones((1, 2), dtype=torch.int32), block_table=torch.zeros((1, 1))),
    )
    with forward_context({"k_cache": mine}), pytest.raises(ArgumentError, match="decode rows: expected 2 of one token"):
        model.layer.forward_cuda(torch.zeros(2, 1), torch.zeros(2), None, torch.zeros(2))


def test_without_metadata_vllms_own_code_reserves(model):
    with forward_context(None):
        assert model.layer.forward_cuda(torch.zeros(2, 1), None, None, None) == "stock"


def test_other_models_keep_vllms_indexer(fake_vllm):
    buffer = torch.zeros((4, TOP_K), dtype=torch.int32)
    layer = sparse_attn_indexer_class(FakeIndexer)(SimpleNamespace(prefix="k"), buffer, skip_k_cache_insert=False)
    with forward_context({"k": SimpleNamespace()}):
        assert layer.forward_cuda(torch.zeros(2, 1), None, None, None) == "stock"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"use_fp4_cache": True}, "use_fp4_cache"),
        ({"skip_k_cache_insert": False}, "skip_k_cache_insert"),
        ({"use_pcp": True}, "context parallel size"),
        ({"dcp_world_size": 2}, "context parallel size"),
    ],
    ids=str,
)
def test_what_is_not_written_for_is_refused(fake_vllm, change, match):
    cache = SimpleNamespace(prefix="k_cache", compress_ratio=RATIO)
    with pytest.raises(ArgumentError, match=match):
        sparse_attn_indexer_class(FakeIndexer)(cache, torch.zeros((4, TOP_K), dtype=torch.int32), **change)


def test_the_comparison_sees_vllms_own_selection(model, monkeypatch):
    """Selection in order of score, as vLLM's kernels deliver it at best: not what a reduction order can be built on."""
    want = model.run(("a", 100, 130))

    def by_score(scores, starts, ends, top_k, *, out):
        columns = torch.arange(scores.shape[1])
        inside = (columns >= starts.unsqueeze(1)) & (columns < ends.unsqueeze(1))
        out.copy_(torch.where(inside, scores, -torch.inf).topk(top_k).indices - starts.unsqueeze(1))

    monkeypatch.setattr("bi_sparse_attn.vllm_indexer.top_k_per_row_prefill", by_score)
    (got,) = model.run(("a", 129, 130)).values()
    with pytest.raises(AssertionError):
        assert_bitwise_equal(got, want["a", 129])

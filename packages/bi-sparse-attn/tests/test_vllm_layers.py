"""Attention of a real vLLM 0.26 engine: the same request, the same bits, however it is served.

Needs a Hopper GPU, vLLM 0.26.0, the compiled libraries of bi-kernels and of this package, and ``ci/`` on the import
path, which generates the checkpoint.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import vllm_engine
from vllm_engine import Engine, Run, differences, make_prompt

from bi_kernels.testing import assert_bitwise_equal

# vLLM and what it imports warn at import; which warnings depends on the versions.
pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

TINY = SimpleNamespace(
    hidden_size=2048, num_attention_heads=64, o_groups=8, o_lora_rank=256, index_n_heads=64, index_topk=512
)
LENGTHS = {2: 5, 3: 60, 4: 128, 5: 131, 6: 700, 7: 2049, 8: 2600, 9: 3100}
MIXED = [make_prompt(tag, length, repeat=200 if tag == 8 else 0) for tag, length in LENGTHS.items()]
NEIGHBOURS = [make_prompt(100 + i, 1 + 37 * i % 900) for i in range(63)]


@pytest.fixture(scope="module")
def clean_environment():
    os.environ.update(vllm_engine.ENVIRONMENT)


def _self_tests():
    from bi_sparse_attn.vllm_contracts import self_tests

    return self_tests(TINY)


@pytest.mark.parametrize("number", range(8))
def test_self_tests_hold_and_notice_their_twins(clean_environment, number):
    from bi_kernels.runtime.probe import run_self_test

    test = _self_tests()[number]
    report = run_self_test(test, device=torch.device("cuda", 0))
    print(f"\n{test.name} [{test.shape_key}]: {report.found}")
    assert report.ok, report.found


def test_contracts_hold(clean_environment):
    from bi_sparse_attn.vllm_contracts import FLASH_MLA, INDEXER_SCORES

    for contract in (FLASH_MLA, INDEXER_SCORES):
        report = contract.probe()
        print(f"\n{contract.name}: {report.found}")
        assert report.ok, report.found


def test_gather_equals_vllms_own(clean_environment):
    """Every code with every scale that an insert can write: prefill gathers with vLLM's kernel, decode with ours."""
    from vllm.models.deepseek_v4.common.ops import dequantize_and_gather_k_cache

    from bi_sparse_attn import gather_kv, kv_block_bytes

    pages, block = 16, 64
    generator = torch.Generator("cuda").manual_seed(0)
    memory = torch.zeros((pages, kv_block_bytes(block)), dtype=torch.uint8, device="cuda")
    memory.random_(generator=generator)
    codes = memory[:, : block * 576].view(pages, block, 576)[:, :, :448]
    codes[(codes & 0x7F) == 0x7F] = 0  # no insert of a finite row writes NaN
    scales = memory[:, block * 576 : block * 584].view(pages, block, 8)
    scales.copy_(torch.randint(127 - 23, 127 + 110, scales.shape, generator=generator, device="cuda"))
    cache = memory[:, : block * 584].view(pages, block, 584)
    table = torch.randperm(pages, generator=generator, device="cuda").int().unsqueeze(0)
    lengths = torch.tensor([pages * block - 3], dtype=torch.int32, device="cuda")
    theirs = torch.zeros((1, pages * block + 5, 512), dtype=torch.bfloat16, device="cuda")
    dequantize_and_gather_k_cache(theirs, cache, lengths, None, table, block, 5)
    place = torch.arange(pages * block - 3, device="cuda")
    slots = table[0].long()[place // block] * block + place % block
    mine = gather_kv(cache.view(pages, -1), slots, block_size=block)
    assert_bitwise_equal(mine[:, :448], theirs[0, 5 : 5 + len(mine), :448].contiguous(), "codes")
    finite = mine[:, 448:].isfinite()
    assert_bitwise_equal(mine[:, 448:][finite], theirs[0, 5 : 5 + len(mine), 448:][finite], "RoPE part")


@pytest.fixture(scope="module")
def engine(clean_environment, tmp_path_factory):
    from aligned_e2e.vllm_checkpoint import SIZES, write_checkpoint

    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, SIZES["tiny"], seed=1, device="cuda")
    return Engine(str(path))


@pytest.fixture(scope="module")
def together(engine) -> Run:
    return engine.run(MIXED, max_tokens=12)


def same(one: Run, other: Run, *, logprobs: bool = True) -> None:
    found, compared = differences(one, other)
    print(f"\n{compared} digests compared; graph modes {one.modes} and {other.modes}")
    if logprobs:
        for tag in sorted(one.tokens.keys() & other.tokens.keys()):
            if (one.tokens[tag], one.logprobs[tag]) != (other.tokens[tag], other.logprobs[tag]):
                found.append(
                    f"request {tag}: logprobs {one.logprobs[tag][:4]}... {one.tokens[tag][:4]}... against "
                    f"{other.logprobs[tag][:4]}... {other.tokens[tag][:4]}..."
                )
    assert compared
    assert not found, "\n".join(found)


def test_the_hooks_are_in_place(engine):
    assert type(engine.layers[0]).__name__ == "BatchInvariantDeepseekV4FlashMLAAttention"
    assert [layer.compress_ratio for layer in engine.layers] == [1, 4, 128, 4]
    indexer = engine.layers[1].indexer.indexer_op
    assert type(indexer).__name__ == "BatchInvariantSparseAttnIndexer"
    assert indexer.is_deepseek_v4


def test_the_same_batch_twice(engine, together):
    same(together, engine.run(MIXED, max_tokens=12))


@pytest.mark.parametrize("tag", LENGTHS)
def test_alone_equals_together(engine, together, tag):
    same(together, engine.run([MIXED[tag - 2]], max_tokens=12))


@pytest.mark.parametrize("tag", LENGTHS)
def test_decode_equals_recomputation(engine, together, tag):
    prompt = MIXED[tag - 2]
    recomputed = engine.run([[*prompt, *together.tokens[tag]]], prompt_logprobs=True)
    same(together, recomputed, logprobs=False)
    assert recomputed.logprobs[tag][len(prompt) :] == together.logprobs[tag]


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 127, 128, 129, 512])
def test_chunks(engine, together, chunk):
    prompts = MIXED[:4] if chunk < 6 else MIXED[3:7]
    same(together, engine.run(prompts, max_tokens=12, chunk=chunk))


@pytest.mark.parametrize("count", [1, 7, 31, 63])
def test_neighbours(engine, together, count):
    """The request alone against the request among neighbours, through prefill and decode."""
    same(together, engine.run([*NEIGHBOURS[: count // 2], MIXED[6], *NEIGHBOURS[count // 2 : count]], max_tokens=12))


@pytest.mark.parametrize("length", [1, 127, 513, 2048, 2052, 4096, 8191, 16_380])
def test_contexts(engine, length):
    """Decode and its recomputation, behind every length of context, alone and with a neighbour."""
    prompt = make_prompt(50, length)
    alone = engine.run([prompt], max_tokens=4)
    same(alone, engine.run([MIXED[5], prompt], max_tokens=4))
    recomputed = engine.run([[*prompt, *alone.tokens[50]]], prompt_logprobs=True, chunk=500)
    same(alone, recomputed, logprobs=False)
    assert recomputed.logprobs[50][length:] == alone.logprobs[50]


@pytest.mark.parametrize("count", [1, 3])
def test_requests_side_by_side_do_not_matter(engine, together, monkeypatch, count):
    from bi_sparse_attn import SparseCapacity

    monkeypatch.setattr(SparseCapacity, "prefill_requests", count)
    same(together, engine.run(MIXED, max_tokens=2, chunk=300), logprobs=False)


def test_prefill_has_the_bits_of_vllms_own(engine, together, monkeypatch):
    """Same kernel, same lists: areas and widths from the model's limits change addresses only."""
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

    from bi_sparse_attn.vllm_attention import BatchInvariantAttention

    def stock(layer, q, positions, output, compressed, window):
        caches = layer.kv_cache, layer.swa_cache_layer.kv_cache
        DeepseekV4FlashMLAAttention._forward_prefill(layer, q, positions, *caches, output, compressed, window)

    monkeypatch.setattr(BatchInvariantAttention, "_prefill", stock)
    same(together, engine.run(MIXED, max_tokens=1), logprobs=False)


def test_the_digests_see_vllms_own_order(engine, together, monkeypatch):
    """Decode lists the window before the compressed entries, as vLLM's own decode kernel does: other bits."""
    from bi_sparse_attn import vllm_attention

    gather = vllm_attention.gather_decode_kv

    def window_first(*args, **kwargs):
        result = gather(*args, **kwargs)
        for row, length in zip(result.indices, result.lengths.tolist(), strict=True):
            row[:length] = row[:length].roll(128)
        return result

    monkeypatch.setattr(vllm_attention, "gather_decode_kv", window_first)
    found, _ = differences(together, engine.run([MIXED[6]], max_tokens=12))
    assert any("attention" in line for line in found), found


@pytest.fixture(scope="module")
def graphs(engine) -> Engine:
    """The same engine with its graphs captured; tests before this one ran without."""
    engine.capture()
    return engine


def test_graphs_equal_eager(graphs, together):
    """Full graphs for decode, broken ones for prefill, every size replayed after other shapes."""
    first = graphs.run(MIXED, max_tokens=12)
    assert first.modes.get("FULL"), first.modes
    same(together, first)
    graphs.run(NEIGHBOURS, max_tokens=9)
    same(together, graphs.run(MIXED, max_tokens=12))


@pytest.mark.parametrize("tag", LENGTHS)
def test_a_request_alone_in_a_graph_of_one(graphs, together, tag):
    same(together, graphs.run([MIXED[tag - 2]], max_tokens=12))


@pytest.mark.parametrize("count", [1, 7, 31, 63])
def test_neighbours_in_graphs(graphs, together, count):
    same(together, graphs.run([*NEIGHBOURS[:count], MIXED[6]], max_tokens=12))


@pytest.mark.parametrize("chunk", [4, 31, 64])
def test_chunks_in_graphs(graphs, together, chunk):
    same(together, graphs.run(MIXED[:5], max_tokens=12, chunk=chunk))

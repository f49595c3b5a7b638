"""Contracts and self-tests of the third-party kernels, seen from a machine without them. On a GPU: test_vllm_layers."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bi_kernels import UnsupportedArchError
from bi_kernels.runtime.packages import resolve
from bi_kernels.runtime.probe import Contract, SelfTest
from bi_sparse_attn import vllm_contracts
from bi_sparse_attn.vllm_hook import PLAN

FLASH = SimpleNamespace(
    hidden_size=4096, num_attention_heads=64, o_groups=8, o_lora_rank=1024, index_n_heads=64, index_topk=512
)


def test_register_can_look_at_them_without_torch() -> None:
    code = """
import sys
from bi_sparse_attn import vllm_contracts
print([contract.name for contract in (vllm_contracts.FLASH_MLA, vllm_contracts.INDEXER_SCORES)])
vllm_contracts.FLASH_MLA.static_blockers()
assert not {"torch", "vllm"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "['flash_mla', 'indexer_scores']\n"


def test_the_plan_names_what_exists() -> None:
    assert all(isinstance(resolve(name), Contract) for name in PLAN.contracts)
    assert [resolve(name) for name in PLAN.self_tests] == [vllm_contracts.self_tests]


def test_every_third_party_op_has_one_self_test_per_shape() -> None:
    tests = vllm_contracts.self_tests(FLASH)
    assert all(isinstance(test, SelfTest) for test in tests)
    assert len({(test.name, test.shape_key) for test in tests}) == len(tests) == 7
    shapes = {test.name: test.shape_key for test in tests}
    assert shapes["deep_gemm.fp8_einsum"] == "groups=8,K=4096,N=1024"
    # Both sides of the sizes at which vLLM's fused kernels change their launch.
    sizes = {test.name: set(test.batch_sizes) for test in tests}
    assert {511, 512} <= sizes["vllm.fused_indexer_q_rope_quant"]
    assert {1023, 1024} <= sizes["vllm.fused_qnorm_rope_kv_insert"]


@pytest.mark.parametrize("heads", [32, 64, 128])
def test_query_heads_are_padded_as_in_the_layer(heads: int) -> None:
    config = SimpleNamespace(**(vars(FLASH) | {"num_attention_heads": heads}))
    mla = [test for test in vllm_contracts.self_tests(config) if test.name == "flash_mla.sparse_fwd"]
    padded = 128 if heads == 128 else 64
    assert [test.shape_key for test in mla] == [f"heads={padded},width=640", f"heads={padded},width=128"]


def test_rows_are_the_same_each_time_and_of_one_length() -> None:
    for test in vllm_contracts.self_tests(FLASH):
        first, again = (test.rows(3, torch.device("cpu")) for _ in range(2))
        assert {len(tensor) for tensor in first} == {3}
        for mine, theirs in zip(first, again, strict=True):
            assert torch.equal(vllm_contracts._bits(mine) if mine.dtype != torch.int64 else mine,
                               vllm_contracts._bits(theirs) if theirs.dtype != torch.int64 else theirs)  # fmt: skip


def test_an_output_projection_that_was_not_validated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from bi_kernels.arch import Arch

    (test,) = (test for test in vllm_contracts.self_tests(FLASH) if test.name == "deep_gemm.fp8_einsum")
    monkeypatch.setattr("bi_kernels.arch.detect_arch", lambda device: Arch.SM100)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.utils", SimpleNamespace())
    fake = SimpleNamespace(fp8_einsum=None, get_tma_aligned_size=None)
    monkeypatch.setitem(sys.modules, "vllm.utils.deep_gemm", fake)
    (test,) = (test for test in vllm_contracts.self_tests(FLASH) if test.name == "deep_gemm.fp8_einsum")
    with pytest.raises(UnsupportedArchError, match="packed scales were not validated"):
        test.op(*test.rows(1, torch.device("cpu")))


def test_without_flash_mla_the_contract_says_so() -> None:
    report = vllm_contracts.FLASH_MLA.probe()
    assert report.ok == (not report.blockers)
    assert report.ok or "flash_mla_sparse_fwd" in report.found

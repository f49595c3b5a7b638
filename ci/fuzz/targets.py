"""What each target does with bytes. It returns for all of them, or something is wrong with what it calls.

Files of JSON must be read back as they were written, or refused with an error of ours that names the file. Pages of
the KV caches have no wrong bytes; but what one entry holds must not show in another.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from unittest import mock

import torch

import bi_reload as reload
import bi_sparse_attn as sparse
from aligned_e2e.report import check_report
from aligned_e2e.shards import load_checkpoint, save_checkpoint
from bi_kernels.runtime import anchors
from bi_kernels.runtime.attest import Attestation, attest
from bi_kernels.runtime.errors import BatchInvarianceError
from bi_kernels.runtime.native import NativeLibrary
from bi_kernels.testing import assert_bitwise_equal
from bi_kernels.testing.trace import Trace, first_divergence, plan_differences

__all__ = ["SEEDS", "TARGETS"]

_ENTRIES = 3  # of a page
R = TypeVar("R")


def _accepted(call: Callable[[], R], *words: str) -> R | None:
    """What ``call`` returns; None where it refuses with an error of ours that has one of ``words``."""
    try:
        return call()
    except BatchInvarianceError as error:
        if not any(word in str(error) for word in words):
            raise AssertionError(f"the error names none of {words}") from error
        return None


def _page(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray((data + bytes(size))[:size]), dtype=torch.uint8).view(1, -1)


def kv_page(data: bytes) -> None:
    """A page of the main cache: every entry by itself, NaN in one pattern, and a stable second generation."""
    size = sparse.kv_block_bytes(_ENTRIES)
    page = _page(data, size)
    slots = torch.arange(_ENTRIES)
    rows = sparse.gather_kv(page, slots, block_size=_ENTRIES)
    for slot in range(_ENTRIES):
        alone = torch.zeros_like(page)
        alone[0, slot * 576 : (slot + 1) * 576] = page[0, slot * 576 : (slot + 1) * 576]
        first = _ENTRIES * 576 + slot * 8
        alone[0, first : first + 8] = page[0, first : first + 8]
        assert_bitwise_equal(sparse.gather_kv(alone, slots[slot : slot + 1], block_size=_ENTRIES)[0], rows[slot])
    again = torch.zeros_like(page)
    sparse.quantize_and_insert_kv_(again, rows, slots, block_size=_ENTRIES)
    second = sparse.gather_kv(again, slots, block_size=_ENTRIES)
    sparse.quantize_and_insert_kv_(again, second, slots, block_size=_ENTRIES)
    assert_bitwise_equal(sparse.gather_kv(again, slots, block_size=_ENTRIES), second)


def index_page(data: bytes) -> None:
    """A page of the indexer's keys: codes and scales come back as they lie there."""
    page = _page(data, sparse.index_k_block_bytes(_ENTRIES))
    codes, scales = sparse.gather_index_k(page, torch.arange(_ENTRIES), block_size=_ENTRIES)
    for slot in range(_ENTRIES):
        assert_bitwise_equal(codes[slot].view(torch.uint8), page[0, slot * 128 : (slot + 1) * 128])
        first = _ENTRIES * 128 + slot * 4
        assert_bitwise_equal(scales[slot : slot + 1].view(torch.uint8), page[0, first : first + 4])


@contextmanager
def _file(data: bytes, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


def trace_file(data: bytes) -> None:
    """A trace, read, compared with itself and written."""
    with _file(data, "trace.json") as path:
        trace = _accepted(lambda: Trace.load(path), str(path))
        if trace is not None:
            _accepted(lambda: first_divergence(trace, trace), "in common")
            plan_differences(trace, trace)
            trace.save(path)
            assert Trace.load(path).ops == trace.ops


def address_ledger(data: bytes) -> None:
    """The addresses of a model, read and written."""
    with _file(data, "ledger.json") as path:
        ledger = _accepted(lambda: reload.AddressLedger.load(path), str(path))
        if ledger is not None:
            ledger.save(path)
            assert reload.AddressLedger.load(path).entries == ledger.entries


def anchors_file(data: bytes) -> None:
    """The anchors of a package for one release of vLLM."""
    with _file(data, "vllm-0.26.0.json") as path, mock.patch.object(anchors, "anchors_file", return_value=path):
        targets = _accepted(lambda: anchors.load_anchors("bi_kernels", "0.26.0"), str(path))
        assert all(isinstance(text, str) for item in (targets or {}).items() for text in item)


def build_info(data: bytes) -> None:
    """The record that lies beside a compiled library: a library is loaded only beside a whole and matching one."""
    with _file(data, "build_info.json") as path:
        library = path.with_name("_C.so")
        library.write_bytes(b"no library")
        native = NativeLibrary(package="bi-kernels", import_name="bi_kernels", namespace="fuzzed", ops=())
        with mock.patch.dict("os.environ", {"BI_KERNELS_LIBRARY": str(library)}):
            assert not native.available()
            assert all(str(blocker) for blocker in native.blockers())


def attestation(data: bytes) -> None:
    """The record that trainer and rollout exchange: whatever is believed has its own digest."""
    record = _accepted(lambda: Attestation.from_json(data.decode("utf-8", "replace")), "attestation")
    assert record is None or json.loads(record.to_json())["digest"] == record.digest


def report(data: bytes) -> None:
    """A report of the end-to-end run."""
    with _file(data, "report.json") as path:
        failures = _accepted(lambda: check_report(path), str(path))
        assert all(isinstance(failure, str) for failure in failures or [])


@functools.cache
def _tiny_checkpoint() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5, dtype=torch.int32)}


def checkpoint_shard(data: bytes) -> None:
    """A shard: only the bytes that were saved are believed."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), _tiny_checkpoint(), shards=1)
        (Path(folder) / "weights-00.safetensors").write_bytes(data)
        loaded = _accepted(lambda: load_checkpoint(Path(folder)), "weights-00.safetensors")
        for name, tensor in _tiny_checkpoint().items() if loaded is not None else ():
            assert_bitwise_equal(loaded[name], tensor)


def checkpoint_index(data: bytes) -> None:
    """An index of shards: a checkpoint is whole and as described, or refused."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), _tiny_checkpoint(), shards=1)
        (Path(folder) / "index.json").write_bytes(data)
        loaded = _accepted(lambda: load_checkpoint(Path(folder)), folder)
        assert loaded is None or loaded.keys() <= _tiny_checkpoint().keys()


def bucket(data: bytes) -> None:
    """A tensor on its way: other bytes than the manifest's fingerprint says are refused, and nothing is written."""
    model = torch.nn.Linear(3, 2, bias=False).requires_grad_(False)
    sent = torch.arange(6.0).view(2, 3)
    spec = reload.TensorSpec.of(sent, fingerprint=reload.weight_fingerprint({"weight": sent})["weight"])
    update = reload.LayerwiseReload(model, {"weight": spec})
    update.begin()
    came = torch.frombuffer(bytearray((data + bytes(24))[:24]), dtype=torch.float32).view(2, 3)
    before = model.weight.detach().clone()
    _accepted(lambda: update.load_bucket({"weight": came}), "its bytes changed on their way")
    same = torch.equal(came.view(torch.int32), sent.view(torch.int32))
    assert_bitwise_equal(model.weight.detach(), sent if same else before)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        kv_page, index_page, trace_file, address_ledger, anchors_file, build_info, attestation, report,
        checkpoint_shard, checkpoint_index, bucket,
    )
}  # fmt: skip


def _written(write: Callable[[Path], object]) -> bytes:
    with _file(b"", "seed") as path:
        write(path)
        return path.read_bytes()


def _saved(file: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), _tiny_checkpoint(), shards=1)
        return (Path(folder) / file).read_bytes()


SEEDS: dict[str, Callable[[], bytes]] = {
    "trace_file": lambda: _written(Trace().save),
    "address_ledger": lambda: _written(reload.AddressLedger().record(torch.nn.Linear(2, 2)).save),
    "anchors_file": lambda: b'{"targets": {"vllm.ops:top_k": "0123456789abcdef"}}',
    "build_info": lambda: b'{"version": "0.1.0", "archs": ["90a"], "torch_target": "2.10"}',
    "attestation": lambda: attest().to_json().encode(),
    "report": lambda: b'{"failures": [], "schedules": [{"tokens_compared": 3}], "digest": ""}',
    "checkpoint_shard": lambda: _saved("weights-00.safetensors"),
    "checkpoint_index": lambda: _saved("index.json"),
    "bucket": lambda: torch.arange(6.0).numpy().tobytes(),
}
"""Bytes near which the interesting ones lie."""

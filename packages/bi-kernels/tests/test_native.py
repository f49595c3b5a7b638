from __future__ import annotations

import hashlib
import json
import sys

import pytest
import torch

from bi_kernels.runtime import library, native
from bi_kernels.runtime.errors import NativeLibraryError
from bi_kernels.runtime.native import NativeLibrary, op_blockers, require_native

INFO = {
    "package": "bi-fake",
    "version": "0.1.0",
    "torch_target": "2.10",
    "archs": ["90a", "100f"],
    "nvcc": "13.0.88",
    "compiler": "g++ 12.2",
    "flags": "-O3 -gencode=arch=compute_90a,code=sm_90a",
    "sources_sha256": "0" * 64,
}


@pytest.fixture
def fake_library(tmp_path, monkeypatch, clean_environment):
    """An installed package with a library that 'loads' into a torch that pretends to be a CUDA build."""
    package = tmp_path / "bi_fake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_version.py").write_text("__version__ = '0.1.0'\n")
    (package / "_C.so").write_bytes(b"not really a library")
    (package / "build_info.json").write_text(json.dumps(INFO))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    kernels = {"bi_fake::first", "bi_fake::second"}
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(library, "has_cuda_kernel", lambda op: bool(loaded) and op in kernels)
    fake = NativeLibrary(package="bi-fake", import_name="bi_fake", namespace="bi_fake", ops=("first", "second"))
    fake.loads = loaded
    fake.directory = package
    yield fake
    for name in [name for name in sys.modules if name.partition(".")[0] == "bi_fake"]:
        del sys.modules[name]


def rewrite(fake, **changes):
    (fake.directory / "build_info.json").write_text(json.dumps({**INFO, **changes}))


def test_a_good_library_loads_once(fake_library):
    assert fake_library.blockers() == []
    fake_library.load()
    assert fake_library.available()
    assert fake_library.loads == [str(fake_library.directory / "_C.so")]
    require_native("bi_fake::first", "bi_fake::second")


def test_describe_says_what_it_is(fake_library):
    described = fake_library.describe()
    assert described["sha256"] == hashlib.sha256(b"not really a library").hexdigest()
    assert described["archs"] == ["90a", "100f"]
    assert described["nvcc"] == "13.0.88"
    assert (described["loaded"], described["override"]) == (False, False)
    fake_library.load()
    assert fake_library.describe()["loaded"] is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "0.0.9"}, "expected a build of 0.1.0; found a build of 0.0.9"),
        ({"package": "bi-other"}, "expected a library of bi-fake; found one of bi-other"),
        ({"flags": "-O3 --use_fast_math"}, "IEEE arithmetic"),
        ({"flags": ["-O3", "-Xcompiler=-ffast-math"]}, "IEEE arithmetic"),
        ({"torch_target": "99.0"}, "expected torch 99.0 or newer"),
        ({"archs": []}, "without archs"),
        ({"sources_sha256": None}, "without sources_sha256"),
    ],
)
def test_a_library_of_another_build_is_refused_and_never_loaded(fake_library, changes, words):
    rewrite(fake_library, **changes)
    with pytest.raises(NativeLibraryError) as raised:
        fake_library.load()
    assert words in str(raised.value)
    assert not fake_library.available()
    assert fake_library.loads == []


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_build_record_that_cannot_be_read_is_refused(fake_library, text):
    (fake_library.directory / "build_info.json").write_text(text)
    assert "no readable" in str(fake_library.blockers()[0])


def test_several_faults_are_reported_together(fake_library):
    rewrite(fake_library, version="9", flags="--use_fast_math", torch_target="99.0")
    assert len(fake_library.blockers()) == 3


def test_a_cpu_build_of_torch_loads_nothing(fake_library, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not fake_library.available()
    assert "CPU build of torch" in str(fake_library.blockers()[0])
    assert fake_library.loads == []


def test_a_reference_only_install_says_so(fake_library):
    (fake_library.directory / "_C.so").unlink()
    assert "reference-only" in fake_library.blockers()[0].found
    assert fake_library.describe()["path"] is None


def test_the_loaders_own_words_are_in_the_message(fake_library, monkeypatch):
    def refuse(path):
        try:
            raise OSError("undefined symbol: aoti_torch_dtype_float32")
        except OSError as reason:
            raise OSError("Could not load this library") from reason

    monkeypatch.setattr(torch.ops, "load_library", refuse)
    (blocker,) = fake_library.blockers()
    assert "Could not load this library" in blocker.found
    assert "undefined symbol: aoti_torch_dtype_float32" in blocker.found


def test_what_is_no_library_does_not_load(fake_library, monkeypatch):
    monkeypatch.undo()  # the real loader, on a file that is no library
    monkeypatch.syspath_prepend(str(fake_library.directory.parent))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (blocker,) = fake_library.blockers()
    assert "invalid ELF header" in blocker.found or "file too short" in blocker.found


def test_a_library_without_a_declared_kernel_is_incomplete(fake_library):
    fake_library.ops = (*fake_library.ops, "bi_fake::third")
    (blocker,) = fake_library.blockers()
    assert blocker.subject == "bi_fake::third"
    assert not fake_library.available()


def test_the_override_names_another_file(fake_library, monkeypatch, tmp_path):
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "mine.so").write_bytes(b"mine")
    (other / "build_info.json").write_text(json.dumps(INFO))
    monkeypatch.setenv("BI_FAKE_LIBRARY", str(other / "mine.so"))
    fake_library.load()
    assert fake_library.loads == [str(other / "mine.so")]
    assert fake_library.describe()["override"] is True
    assert fake_library.describe()["sha256"] == hashlib.sha256(b"mine").hexdigest()


def test_an_override_that_does_not_exist_is_not_replaced_by_the_installed_one(fake_library, monkeypatch):
    monkeypatch.setenv("BI_FAKE_LIBRARY", "/nowhere/_C.so")
    assert "no file /nowhere/_C.so" in str(fake_library.blockers()[0])
    assert fake_library.loads == []


def test_require_native_lists_every_op(fake_library):
    with pytest.raises(NativeLibraryError) as raised:
        require_native("bi_fake::first", "bi_fake::third", "bi_fake::fourth", "nobody::op")
    subjects = [blocker.subject for blocker in raised.value.blockers]
    assert subjects == ["bi_fake::third", "bi_fake::fourth", "nobody::op"]


def test_a_librarys_reasons_come_once(fake_library):
    rewrite(fake_library, version="9")
    blockers = op_blockers(["bi_fake::first", "bi_fake::second"])
    assert [blocker.subject for blocker in blockers] == [
        "native library of bi-fake",
        "bi_fake::first",
        "bi_fake::second",
    ]


@pytest.mark.parametrize(("capability", "fits"), [((9, 0), True), ((10, 3), True), ((8, 0), False), ((12, 0), False)])
def test_the_gpu_must_be_one_the_library_was_built_for(fake_library, monkeypatch, capability, fits):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert (fake_library.arch_blockers() == []) is fits
    if fits:
        require_native("bi_fake::first")
    else:
        with pytest.raises(NativeLibraryError, match="compute capability"):
            require_native("bi_fake::first")


def test_without_a_library_this_package_still_imports_and_refuses_only_use(clean_environment):
    from bi_kernels._native import NATIVE

    assert native.libraries()["bi_kernels"] is NATIVE
    with pytest.raises(NativeLibraryError):
        require_native("bi_kernels::no_such_op")

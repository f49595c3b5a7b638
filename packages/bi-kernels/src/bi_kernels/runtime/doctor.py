"""``bi-doctor``: one table of everything that aligned mode needs, with OK or blocked and the remedy.

Works with no GPU, no vLLM and any subset of the packages installed, and never crashes: a check that breaks is a
blocked row. Exits with 0 only if aligned mode could start here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from . import anchors, hooks, mode, native, probe
from .errors import Blocker, UnsupportedArchError
from .packages import (
    PACKAGES,
    distribution_version,
    installed_version,
    module_file,
    public_version,
    release_prefix,
    resolve,
)
from .settings import SETTINGS, refusals, setting_blocker

__all__ = ["FLASH", "Row", "diagnose", "main"]

Status = Literal["ok", "blocked", "refused"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        section: ``version``, ``setting``, ``hook``, ``native``, ``contract``, ``self-test`` or ``refused``.
        name: What was checked.
        status: ``ok``; ``blocked``: aligned mode cannot start because of it; ``refused``: a feature that aligned mode
            refuses when it is asked for, listed for information.
        found: What is there.
        remedy: What to do about it; empty if ``ok``.
    """

    section: str
    name: str
    status: Status
    found: str
    remedy: str = ""


FLASH = SimpleNamespace(
    hidden_size=4096,
    vocab_size=129_280,
    num_attention_heads=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    n_routed_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    index_n_heads=64,
    index_topk=512,
    hc_mult=4,
)
"""What self-tests read of a model's configuration, for DeepSeek-V4-Flash."""


def diagnose(config: SimpleNamespace = FLASH) -> list[Row]:
    """Every check, in the order of the table. Never raises.

    Args:
        config: The model's configuration, as in its ``config.json``: self-tests run on its shapes.
    """
    rows: list[Row] = []
    for section, check in (
        ("version", _version_rows),
        ("setting", _setting_rows),
        ("hook", _hook_rows),
        ("native", _native_rows),
        ("contract", _contract_rows),
        ("self-test", lambda: _self_test_rows(config)),
        ("refused", _refused_rows),
    ):
        try:
            rows += check()
        except Exception as error:  # whatever breaks here would break start-up too
            rows.append(_broken(section, f"{section} checks", error))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Returns 0 if aligned mode could start in this environment, else 1."""
    parser = argparse.ArgumentParser(prog="bi-doctor", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    parser.add_argument(
        "--model", type=Path, metavar="CONFIG", help="config.json whose shapes self-tests use (default: V4-Flash's)"
    )
    arguments = parser.parse_args(argv)
    try:
        config = FLASH if arguments.model is None else SimpleNamespace(**json.loads(arguments.model.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        parser.error(f"--model: expected a readable config.json, got {arguments.model}: {error}")
    rows = diagnose(config)
    blocked = sum(row.status == "blocked" for row in rows)
    if arguments.json:
        print(json.dumps({"ready": not blocked, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        _print_table(rows, blocked)
    return int(blocked > 0)


def _print_table(rows: Sequence[Row], blocked: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="bi-doctor: batch-invariant DeepSeek-V4")
    for header in ("section", "check", "status", "found", "what to do"):
        table.add_column(header, overflow="fold")
    styles = {"ok": "green", "blocked": "bold red", "refused": "yellow"}
    section = ""
    for row in rows:
        if section and row.section != section:
            table.add_section()
        section = row.section
        status = Text("OK" if row.status == "ok" else row.status, style=styles[row.status])
        table.add_row(row.section, Text(row.name), status, Text(row.found), Text(row.remedy))
    # A fixed width keeps names whole where the output is no terminal, as in a log.
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    verdict = f"{blocked} blocked: aligned mode cannot start here. The repository's docs/failures explains each."
    console.print(verdict if blocked else "Aligned mode can start here.")


def _row(section: str, name: str, blocker: Blocker | None, found: str) -> Row:
    if blocker is None:
        return Row(section, name, "ok", found)
    return Row(section, name, "blocked", blocker.found, f"Expected {blocker.expected}. {blocker.remedy}")


def _broken(section: str, name: str, error: Exception) -> Row:
    found = f"the check failed: {type(error).__name__}: {error}"
    return Row(section, name, "blocked", found, "Repair the installation; start-up would meet the same error.")


def _guarded(section: str, name: str, check: Callable[[], Row]) -> Row:
    try:
        return check()
    except Exception as error:  # one broken check must not hide the others
        return _broken(section, name, error)


def _version_rows() -> Iterator[Row]:
    yield Row("version", "python", "ok", platform.python_version())
    for name, check in (
        ("torch", _torch_row),
        ("triton", _triton_row),
        ("vllm", _vllm_row),
        *((package, _package_check(package)) for package in PACKAGES),
        ("GPU", _gpu_row),
    ):
        yield _guarded("version", name, check)


def _torch_row() -> Row:
    if distribution_version("torch") is None:
        blocker = Blocker("torch", "a CUDA build of torch", "not installed", "Install the torch that vLLM pins.")
        return _row("version", "torch", blocker, "")
    import torch

    if torch.version.cuda is None:
        found = f"CPU build {torch.__version__}"
        blocker = Blocker("torch", "a CUDA build of torch", found, "Run on a GPU machine with a CUDA build of torch.")
        return _row("version", "torch", blocker, "")
    return Row("version", "torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda}")


def _triton_row() -> Row:
    version = distribution_version("triton")
    blocker = Blocker("triton", "triton", "not installed", "Install the triton that torch pins.")
    return _row("version", "triton", blocker if version is None else None, version or "")


def _vllm_row() -> Row:
    version = public_version(distribution_version("vllm") or "")
    expected = " or ".join(f"{prefix}.x" for prefix in hooks.SUPPORTED_VLLM)
    supported = release_prefix(version) in hooks.SUPPORTED_VLLM
    blocker = Blocker("vllm", expected, version or "not installed", "Install vllm 0.26.0.")
    return _row("version", "vllm", None if supported else blocker, version)


def _package_check(package: str) -> Callable[[], Row]:
    def check() -> Row:
        version = installed_version(package)
        if version is None:
            return Row("version", package, "blocked", "not installed", f"pip install {package}. V4 needs all four.")
        return Row("version", package, "ok", version)

    return check


def _gpu_row() -> Row:
    if not _has_gpu():
        found = "no GPU is visible to this process"
        return Row("version", "GPU", "blocked", found, "Run on a Hopper (SM90) or Blackwell (SM100) GPU.")
    import torch

    from ..arch import detect_arch

    try:
        arch = detect_arch()
    except UnsupportedArchError as error:
        return Row("version", "GPU", "blocked", str(error), "Run on a Hopper (SM90) or Blackwell (SM100) GPU.")
    return Row("version", "GPU", "ok", f"{torch.cuda.get_device_name()}, {arch.name}")


def _setting_rows() -> Iterator[Row]:
    for name in SETTINGS:
        yield _guarded("setting", name, lambda name=name: _setting_row(name))  # type: ignore[misc]


def _setting_row(name: str) -> Row:
    blocker = setting_blocker(name)
    value = os.environ.get(name)
    if blocker is None and name == mode.SWITCH and not mode.is_enabled():
        # vLLM would start, but as stock vLLM: a check that passes here would be read as "this run is aligned".
        blocker = Blocker(name, "1", "unset" if value is None else repr(value), "Set it to 1 to start aligned mode.")
    if blocker is None and name == mode.PARTIAL and mode.is_partial():
        blocker = Blocker(name, "0 or unset", repr(value), "Unset it: a partial run never counts as aligned.")
    return _row("setting", name, blocker, "unset" if value is None else repr(value))


def _hook_rows() -> Iterator[Row]:
    for package in PACKAGES:
        if installed_version(package) is None:
            continue  # named among the versions
        try:
            plan = anchors.load_plan(package)
            assert plan is not None  # it is installed
            yield from _plan_rows(plan)
        except Exception as error:  # one broken package must not hide the others
            yield _broken("hook", package, error)


def _plan_rows(plan: hooks.HookPlan) -> Iterator[Row]:
    version = public_version(distribution_version("vllm") or "")
    known = release_prefix(version) in plan.vllm
    blockers = [blocker for blocker in hooks.patch_blockers(plan) if blocker.subject != "vllm"]  # among the versions
    for patch in plan.patches_for(version if known else plan.vllm[0]):
        subject = f"{plan.package}: {patch.target}"
        mine = [blocker for blocker in blockers if blocker.subject == subject]
        blockers = [blocker for blocker in blockers if blocker.subject != subject]
        if mine:
            expected = "; ".join(f"{blocker.expected}" for blocker in mine)
            found = "; ".join(blocker.found for blocker in mine)
            yield Row("hook", subject, "blocked", found, f"Expected {expected}. {mine[0].remedy}")
        elif not known:
            yield Row("hook", subject, "blocked", "not checked without a supported vLLM", "Install vllm 0.26.0.")
        else:
            yield Row("hook", subject, "ok", f"{patch.kind}, matches vLLM {version}")
    for blocker in blockers:  # what the patches rely on without editing it
        yield _row("hook", blocker.subject, blocker, "")


def _native_rows() -> Iterator[Row]:
    needed: dict[str, None] = {}
    for package, import_name in PACKAGES.items():
        if module_file(f"{import_name}._native") is not None:
            importlib.import_module(f"{import_name}._native")
        if module_file(f"{import_name}.vllm_hook") is not None:
            plan = anchors.load_plan(package)
            needed |= dict.fromkeys(plan.requires_native if plan is not None else ())
    for library in native.libraries().values():
        needed |= dict.fromkeys(library.ops)
        yield _guarded("native", f"library of {library.package}", lambda library=library: _library_row(library))  # type: ignore[misc]
    for op in needed:
        yield _guarded("native", op, lambda op=op: _op_row(op))  # type: ignore[misc]


def _library_row(library: native.NativeLibrary) -> Row:
    name = f"library of {library.package}"
    blockers = [blocker for blocker in library.blockers() if blocker.subject not in library.ops]
    blockers = blockers or library.arch_blockers()
    if not blockers:
        description = library.describe()
        archs = ", ".join(description["archs"])
        return Row("native", name, "ok", f"{description['version']} for {archs}, {description['sha256'][:12]}")
    found = "; ".join(blocker.found for blocker in blockers)
    return Row("native", name, "blocked", found, " ".join(dict.fromkeys(blocker.remedy for blocker in blockers)))


def _op_row(op: str) -> Row:
    blockers = native.op_blockers([op])
    mine = next((blocker for blocker in blockers if blocker.subject == op), None)
    if mine is None and blockers:
        return Row("native", op, "blocked", "its library is not loaded", blockers[0].remedy)
    return _row("native", op, mine, "CUDA kernel loaded")


def _contract_rows() -> Iterator[Row]:
    for package in PACKAGES:
        if module_file(f"{PACKAGES[package]}.vllm_hook") is None:
            continue
        plan = anchors.load_plan(package)
        for reference in plan.contracts if plan is not None else ():
            yield _guarded("contract", reference, lambda reference=reference: _contract_row(reference))  # type: ignore[misc]


def _contract_row(reference: str) -> Row:
    contract: probe.Contract = resolve(reference)
    if contract.dynamic is not None and not _has_gpu():
        blockers = contract.static_blockers()
        no_gpu = Blocker(contract.name, contract.expected, "no GPU to prove it on", "Run this on the GPU machine.")
        return _row("contract", contract.name, blockers[0] if blockers else no_gpu, "")
    report = contract.probe()
    return _row("contract", contract.name, report.blockers[0] if report.blockers else None, report.found)


def _self_test_rows(config: SimpleNamespace) -> Iterator[Row]:
    for package in PACKAGES:
        if module_file(f"{PACKAGES[package]}.vllm_hook") is None:
            continue
        plan = anchors.load_plan(package)
        for reference in plan.self_tests if plan is not None else ():
            if not _has_gpu():
                yield Row("self-test", reference, "blocked", "no GPU to run it on", "Run this on the GPU machine.")
                continue
            try:
                tests = resolve(reference)(config)
            except Exception as error:  # one broken package must not hide the others
                yield _broken("self-test", reference, error)
                continue
            for test in tests:
                name = f"{test.name} [{test.shape_key}]"
                yield _guarded("self-test", name, lambda name=name, test=test: _self_test_row(name, test))  # type: ignore[misc]


def _self_test_row(name: str, test: probe.SelfTest) -> Row:
    import torch

    report = probe.run_self_test(test, device=torch.device("cuda", torch.cuda.current_device()))
    return _row("self-test", name, report.blockers[0] if report.blockers else None, report.found)


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _refused_rows() -> Iterator[Row]:
    for refusal in refusals():
        yield Row("refused", refusal.feature, "refused", refusal.reason, f"Leave it off ({refusal.owner}).")


if __name__ == "__main__":
    sys.exit(main())

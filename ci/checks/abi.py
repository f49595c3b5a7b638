"""Audit compiled libraries: what they need from the machine, and what GPU code they hold.

    python ci/checks/abi.py <wheel, folder of wheels, or _C.so> ... [--archs 90a,100f] [--max-glibc 2.39]

For every library: it uses libtorch through the stable C shim alone, and nothing newer than its declared torch
target; it has no Python symbols; it holds cubins for exactly the architectures that its build_info.json names (or
``--archs``), and no PTX; its flags have no fast math and no contraction; no text in it names
a source file of the machine that built it. A pure wheel must hold no library. Exit code 1
lists every fault.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHIM_PREFIX = re.compile(r"^(aoti_torch_|torch_)")
# C++ symbols of libtorch: mangled names inside namespaces at, c10, torch or caffe2, however qualified.
UNSTABLE = re.compile(r"^_ZT?[A-Z]*N?K?(2at|3c10|5torch|6caffe2)")
PYTHON = re.compile(r"^_?Py")
# Shim functions without a version guard in the headers are older than the guards themselves.
UNGUARDED = (2, 9)
# What __FILE__ leaves behind where the build's folders were not mapped away.
SOURCE_PATH = re.compile(rb"(?<=\0)/[\w.+/-]+\.(?:cuh?|h|hpp|cpp)(?=\0)")
FATBIN_MAGIC = 0xBA55ED50
FATBIN_KINDS = {1: "PTX", 2: "cubin"}

Version = tuple[int, ...]


@dataclass(frozen=True)
class Library:
    """What the ELF file says about itself."""

    undefined: tuple[str, ...]
    exported: tuple[str, ...]
    needed: tuple[str, ...]
    glibc: Version
    images: tuple[str, ...]  # "sm_90a cubin", "sm_90 PTX", ...
    source_paths: tuple[str, ...]  # absolute


class Elf:
    """The few parts of a little-endian ELF64 file that the audit reads."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a little-endian ELF64 file")
        self.data = data
        table, entry_size, count, names = struct.unpack_from("<Q10xHHH", data, 40)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)]
        self.sections = {self.string(headers[names][4], h[0]): h for h in headers}

    def string(self, table: int, offset: int) -> str:
        """The NUL-terminated string at ``offset`` of the string table that starts at file offset ``table``."""
        start = table + offset
        return self.data[start : self.data.index(b"\0", start)].decode()

    def section(self, name: str) -> bytes:
        """Contents of a section; empty if there is none."""
        header = self.sections.get(name)
        return self.data[header[4] : header[4] + header[5]] if header else b""

    def dynstr(self, offset: int) -> str:
        """A string of .dynstr."""
        return self.string(self.sections[".dynstr"][4], offset)

    def symbols(self) -> Iterator[tuple[str, bool]]:
        """Dynamic symbols: name, and whether it is defined here."""
        for name, _, _, section, _, _ in struct.iter_unpack("<IBBHQQ", self.section(".dynsym")):
            if name:
                yield self.dynstr(name), section != 0

    def needed(self) -> Iterator[str]:
        """Sonames of the libraries that the loader must find."""
        for tag, value in struct.iter_unpack("<qQ", self.section(".dynamic")):
            if tag == 1:
                yield self.dynstr(value)

    def version_references(self) -> Iterator[str]:
        """Symbol versions required of other libraries, such as GLIBC_2.34."""
        data, at = self.section(".gnu.version_r"), 0
        while data:
            _, count, _, first, following = struct.unpack_from("<HHIII", data, at)
            aux = at + first
            for _ in range(count):
                _, _, _, name, step = struct.unpack_from("<IHHII", data, aux)
                yield self.dynstr(name)
                aux += step
            if not following:
                return
            at += following


def gpu_images(fatbin: bytes) -> Iterator[str]:
    """Architecture and kind of every image in an .nv_fatbin section, as nvcc 13 writes them."""
    at = 0
    while (at := fatbin.find(struct.pack("<I", FATBIN_MAGIC), at)) >= 0:
        header_size, size = struct.unpack_from("<HQ", fatbin, at + 6)
        entry, end = at + header_size, at + header_size + size
        while entry < end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", fatbin, entry)
            (arch,) = struct.unpack_from("<I", fatbin, entry + 28)
            (flags,) = struct.unpack_from("<Q", fatbin, entry + 40)
            suffix = "a" if flags & 1 << 20 else "f" if flags & 1 << 21 else ""
            yield f"sm_{arch}{suffix} {FATBIN_KINDS.get(kind, f'kind {kind}')}"
            entry += entry_header + payload
        at = end


def read_library(data: bytes) -> Library:
    """Read everything that the audit judges."""
    elf = Elf(data)
    symbols = list(elf.symbols())
    glibc = [parse_version(v[6:]) for v in elf.version_references() if re.match(r"GLIBC_\d", v)]
    return Library(
        undefined=tuple(sorted(n for n, defined in symbols if not defined)),
        exported=tuple(sorted(n for n, defined in symbols if defined)),
        needed=tuple(elf.needed()),
        glibc=max(glibc, default=(0,)),
        images=tuple(sorted(set(gpu_images(elf.section(".nv_fatbin"))))),
        source_paths=tuple(sorted({found.decode() for found in SOURCE_PATH.findall(data)})),
    )


def parse_version(text: str) -> Version:
    """``"2.10"`` -> ``(2, 10)``."""
    return tuple(int(part) for part in text.split("."))


def show(version: Version) -> str:
    """The inverse of :func:`parse_version`."""
    return ".".join(map(str, version))


def shim_versions() -> dict[str, Version] | None:
    """First torch version of every function that the installed torch's C shim headers declare; None without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    include = Path(spec.submodule_search_locations[0]) / "include" / "torch" / "csrc"
    versions: dict[str, Version] = {}
    for header in [include / "stable" / "c" / "shim.h", *sorted((include / "inductor" / "aoti_torch").rglob("*.h"))]:
        guards: list[Version] = []
        for line in header.read_text().splitlines():
            if re.match(r"\s*#\s*if", line):
                found = re.search(r"TORCH_FEATURE_VERSION >= TORCH_VERSION_(\d+)_(\d+)_", line)
                guards.append((int(found[1]), int(found[2])) if found else UNGUARDED)
            elif re.match(r"\s*#\s*endif", line):
                guards.pop()
            else:
                for name in re.findall(r"\b((?:aoti_)?torch_\w+)\(", line):
                    versions.setdefault(name, max([UNGUARDED, *guards]))
    return versions


def audit(
    library: Library,
    info: dict[str, object],
    shims: dict[str, Version] | None,
    archs: list[str],
    max_glibc: Version | None,
) -> tuple[list[str], Version]:
    """Faults of one library, and the first torch version that has all of its symbols.

    Without the shim headers that version is taken to be the declared target, whose guards held when it was compiled.
    """
    faults = []
    target = parse_version(str(info["torch_target"]))
    first: Version = UNGUARDED if shims else target
    for name in library.undefined:
        if PYTHON.match(name):
            faults.append(f"Python symbol {name}: the library must not know Python")
        elif UNSTABLE.match(name):
            faults.append(f"unstable libtorch symbol {name}: use the stable headers only")
        elif shims and SHIM_PREFIX.match(name):
            if name not in shims:
                faults.append(f"{name} is not declared by the stable shim headers of the installed torch")
            else:
                first = max(first, shims[name])
                if shims[name] > target:
                    faults.append(f"{name} needs torch {show(shims[name])}, the target is {show(target)}")
    for soname in ("libtorch.so", "libtorch_cpu.so"):
        if soname not in library.needed:
            faults.append(f"{soname} is not in DT_NEEDED: link with -Wl,--no-as-needed -ltorch -ltorch_cpu")
    faults += [
        f"needs {n}" for n in library.needed if n.startswith(("libpython", "libc10", "libtorch_cuda", "libcuda"))
    ]
    faults += [f"exports {n}" for n in library.exported if n.startswith("PyInit")]
    faults += [f"names the build's file {n}: compile with -ffile-prefix-map" for n in library.source_paths]
    want = sorted(f"sm_{arch} cubin" for arch in archs)
    if list(library.images) != want:
        faults.append(f"GPU code: expected {', '.join(want)}; found {', '.join(library.images) or 'none'}")
    if max_glibc and library.glibc > max_glibc:
        faults.append(f"needs GLIBC {show(library.glibc)}, at most {show(max_glibc)} is allowed")
    flags = [str(flag) for flag in info["flags"]]  # type: ignore[attr-defined]
    faults += [f"compiled with {f}" for f in flags if re.search(r"fast.?math|ftz=true|prec-(div|sqrt)=false", f)]
    if "-fmad=false" not in flags:
        faults.append("compiled without -fmad=false: multiplications and additions may have been contracted")
    return faults, first


def libraries(path: Path) -> Iterator[tuple[str, bytes, dict[str, object]]]:
    """Every library in a wheel, or the one given, with its build_info.json."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = [n for n in wheel.namelist() if n.endswith(".so")]
            infos = [n for n in wheel.namelist() if n.endswith("/build_info.json")]
            if names and path.name.endswith("-any.whl"):
                raise ValueError(f"a pure wheel holds {', '.join(names)}")
            if len(names) != len(infos):
                raise ValueError(f"libraries {names} and build infos {infos} do not pair")
            for name in names:
                info = json.loads(wheel.read(f"{name.rpartition('/')[0]}/build_info.json"))
                yield f"{path.name}:{name}", wheel.read(name), info
    else:
        yield str(path), path.read_bytes(), json.loads((path.parent / "build_info.json").read_text())


def main() -> int:
    """Audit the files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="wheels, folders of wheels, or libraries")
    parser.add_argument("--archs", help="required architectures, comma-separated; default: those of build_info.json")
    parser.add_argument("--max-glibc", type=parse_version, help="highest GLIBC version that may be required")
    parser.add_argument("--require-library", action="store_true", help="a wheel without a library is a fault")
    args = parser.parse_args()
    shims = shim_versions()
    note = "" if shims else " (as declared: no torch headers here to confirm it)"
    failed = False
    for path in [f for p in args.paths for f in (sorted(p.glob("*.whl")) if p.is_dir() else [p])]:
        count, faults = 0, []
        try:
            for label, data, info in libraries(path):
                count += 1
                library = read_library(data)
                archs = args.archs.split(",") if args.archs else [str(a) for a in info["archs"]]  # type: ignore[attr-defined]
                found, first = audit(library, info, shims, archs, args.max_glibc)
                faults += [f"{label}: {fault}" for fault in found]
                print(
                    f"{label}: stable ABI, torch >= {show(first)}{note}, GLIBC >= {show(library.glibc)}, "
                    f"{', '.join(library.images)}"
                    if not found
                    else f"{label}: {len(found)} faults"
                )
        except ValueError as error:
            faults.append(f"{path.name}: {error}")
        if not count and not faults:
            print(f"{path.name}: no library (references only)")
            if args.require_library:
                faults.append(f"{path.name}: expected a library, found none")
        for fault in faults:
            print(f"  FAULT {fault}", file=sys.stderr)
        failed |= bool(faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

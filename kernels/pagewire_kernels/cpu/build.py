"""Compiles the kernels, one library per instruction set.

    python kernels/pagewire_kernels/cpu/build.py

The environment variable `CXX` names another compiler, with options, and `PAGEWIRE_MACHINE` the
machine for which it compiles. The package's build runs this script if there is a compiler; run it
again after a change to a source. It imports nothing from the package, since it runs before the
package is installed.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "src"
LIBRARIES = FOLDER / "lib"

_AVX512_BF16 = ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"]

INSTRUCTION_SETS_BY_MACHINE: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "avx2": ["-march=x86-64-v3"],
        "avx512": ["-march=x86-64-v4"],
        "avx512_bf16": _AVX512_BF16,
        "amx": [*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    },
    "aarch64": {"neon": ["-mno-outline-atomics"]},
}
"""Compiler options by machine and instruction set, from the narrowest to the widest."""

MACHINE = os.environ.get("PAGEWIRE_MACHINE") or platform.machine()

INSTRUCTION_SETS = INSTRUCTION_SETS_BY_MACHINE.get(MACHINE, {})
"""Instruction sets of this machine."""

# Without -ffast-math, sums keep their order in the sources. -nodefaultlibs: the libraries do not
# need a C++ runtime. GCC 12 warns that its own vector intrinsics use uninitialized values.
_OPTIONS = [
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-nodefaultlibs"),
]


def compiler() -> str | None:
    """The C++ compiler: `CXX`, or the system's; None if there is none, or no kernels for this
    processor."""
    if not INSTRUCTION_SETS or platform.system() != "Linux":
        return None
    cxx = os.environ.get("CXX", "c++")
    return cxx if shutil.which(shlex.split(cxx)[0]) else None


def digest() -> str:
    """The digest of the sources and options from which the libraries are compiled."""
    sha = hashlib.sha256(repr((INSTRUCTION_SETS_BY_MACHINE, _OPTIONS)).encode())
    for source in sorted(SOURCES.iterdir()):
        sha.update(source.name.encode() + source.read_bytes())
    return sha.hexdigest()[:16]


def build(cxx: str) -> tuple[list[Path], list[str]]:
    """Compile one library per instruction set, unless it was compiled from these sources before.

    Returns the paths of the libraries, and the instruction sets that this compiler does not
    support: GCC before 11 does not know x86-64-v4, for instance. Older libraries for these are
    deleted. Raises CalledProcessError if nothing could be built.
    """
    LIBRARIES.mkdir(exist_ok=True)
    compilations = []
    built, failed = [], []
    for name, options in INSTRUCTION_SETS.items():
        target = library_path(name)
        if target.exists() and digest().encode() in target.read_bytes():
            built.append(target)
            continue
        unfinished = target.with_suffix(f".{os.getpid()}")
        process = subprocess.Popen(command(cxx, options, unfinished))
        compilations.append((name, process, unfinished, target))
    for name, process, unfinished, target in compilations:
        if process.wait() == 0:
            unfinished.replace(target)
            built.append(target)
        else:
            unfinished.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            failed.append(name)
    if not built:
        _, process, _, _ = compilations[-1]
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return built, failed


def command(cxx: str, options: list[str], library: Path) -> list[str]:
    """The command that compiles a library with the options of an instruction set."""
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    version = f'-DPAGEWIRE_SOURCES="{digest()}"'
    return [*shlex.split(cxx), *_OPTIONS, *options, version, *sources, "-o", str(library), "-lc"]


def library_path(instruction_set: str) -> Path:
    """The path of the library for an instruction set."""
    return LIBRARIES / f"libpagewire_{instruction_set}.so"


if __name__ == "__main__":
    found = compiler()
    if found is None:
        raise SystemExit("no C++ compiler found, or no kernels for this processor")
    built, failed = build(found)
    for library in built:
        print(library)
    if failed:
        raise SystemExit(f"{found} cannot build for {', '.join(failed)}")

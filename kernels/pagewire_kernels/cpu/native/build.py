"""Compiles the kernels, one library per instruction set.

    python kernels/pagewire_kernels/cpu/native/build.py

The package's build does it where it finds a compiler; who changes a source calls it again. This
file imports nothing of ours, since it runs before anything is installed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "src"
LIBRARIES = FOLDER / "lib"

INSTRUCTION_SETS = {
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4"],
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16"],
}
"""Compiler options by name; which one a processor has is found out when the library is loaded."""

# Sums keep the order they are written in, and nothing of C++ is needed when running. GCC 12 finds
# its own vector intrinsics to use what is not initialized.
_OPTIONS = [
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-nodefaultlibs"),
]


def compiler() -> str | None:
    """The C++ compiler: `CXX`, or the system's; None without one or on another processor."""
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return None
    return shutil.which(os.environ.get("CXX", "c++"))


def digest() -> str:
    """A digest of all that the libraries are compiled from."""
    sha = hashlib.sha256(repr((INSTRUCTION_SETS, _OPTIONS)).encode())
    for source in sorted(SOURCES.iterdir()):
        sha.update(source.name.encode() + source.read_bytes())
    return sha.hexdigest()[:16]


def build(cxx: str) -> list[Path]:
    """Compile all libraries; returns their paths. Raises CalledProcessError."""
    LIBRARIES.mkdir(exist_ok=True)
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    version = f'-DPAGEWIRE_SOURCES="{digest()}"'
    compilations = []
    for name, options in INSTRUCTION_SETS.items():
        target = LIBRARIES / f"libpagewire_{name}.so"
        unfinished = target.with_suffix(f".{os.getpid()}")
        command = [cxx, *_OPTIONS, *options, version, *sources, "-o", str(unfinished), "-lc"]
        compilations.append((subprocess.Popen(command), command, unfinished, target))
    for process, command, unfinished, target in compilations:
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, command)
        unfinished.replace(target)
    return [target for _, _, _, target in compilations]


if __name__ == "__main__":
    found = compiler()
    if found is None:
        raise SystemExit("no C++ compiler found, or no kernels for this processor")
    for library in build(found):
        print(library)

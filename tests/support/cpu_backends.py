"""The CPU's attention backends that this machine can run."""

from pathlib import Path

from pagewire_kernels.cpu.native import Library, NativeBackend
from pagewire_kernels.cpu.native.build import INSTRUCTION_SETS, LIBRARIES
from pagewire_kernels.cpu.native.compiled import instruction_set
from pagewire_kernels.cpu.numba import NumbaBackend
from pagewire_kernels.interface import AttentionBackend

NUMBA = "numba"


def names() -> list[str]:
    """numba, and every instruction set that the processor has and a library was built for."""
    best, known = instruction_set(), list(INSTRUCTION_SETS)
    usable = known[: known.index(best) + 1] if best is not None else []
    return [NUMBA, *(name for name in usable if _path(name).exists())]


def make(name: str) -> AttentionBackend:
    """The backend of that name."""
    return NumbaBackend() if name == NUMBA else NativeBackend(Library(_path(name), name))


def _path(name: str) -> Path:
    return LIBRARIES / f"libpagewire_{name}.so"

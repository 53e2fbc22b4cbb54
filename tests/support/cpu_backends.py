"""The CPU's attention backends that this machine can run."""

from pagewire_kernels.cpu.attention import NativeBackend
from pagewire_kernels.cpu.build import library_path
from pagewire_kernels.cpu.native_library import Library, instruction_sets
from pagewire_kernels.cpu.numba import NumbaBackend
from pagewire_kernels.interface import AttentionBackend

NUMBA = "numba"


def names() -> list[str]:
    """numba, and every instruction set that the processor has and a library was built for."""
    return [NUMBA, *(name for name in instruction_sets()[::-1] if library_path(name).exists())]


def make(name: str) -> AttentionBackend:
    """The backend of that name."""
    return NumbaBackend() if name == NUMBA else NativeBackend(Library(library_path(name), name))

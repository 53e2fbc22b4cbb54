"""Kernels for the CPU.

native/     in C++, built with the package: attention, products, what is between them, block moves
numba/      attention by numba, where none were built for the processor
checks.py   what attention of both takes
threads.py  running a kernel on torch's own threads
"""

from pagewire_kernels.cpu.native import Library, NativeBackend, library
from pagewire_kernels.interface import AttentionBackend


def cpu_backend(native: Library | None) -> AttentionBackend:
    """The faster of the `cpu` backends, given the native kernels for this processor, if any."""
    if native is not None:
        return NativeBackend(native)
    from pagewire_kernels.cpu.numba import NumbaBackend  # numba is loaded only where it is used

    return NumbaBackend()


__all__ = ["cpu_backend", "library"]

"""Kernels for the CPU.

native/     in C++, built with the package: attention, linear layers, row-wise kernels, block copies
numba/      attention by numba, if no C++ kernels were built for the processor
checks.py   argument checks that both share
threads.py  runs a kernel on torch's own threads
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

"""Paged attention compiled for the CPU by numba: the floor that needs no compiler on the machine.

simd/         vectors of sixteen floats, so that every sum has one order
attention.py  the attention kernel
cache_write.py  the kernel that stores keys and values
compile.py    their machine code, kept on disk
backend.py    `NumbaBackend`: from tensors to a kernel's arguments
"""

from pagewire_kernels.cpu.numba.backend import NumbaBackend

__all__ = ["NumbaBackend"]

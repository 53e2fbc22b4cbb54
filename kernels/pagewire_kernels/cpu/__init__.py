"""Paged attention compiled for the CPU by numba.

simd.py       vectors of sixteen floats, so that every sum has one order
attention.py  the attention kernel
copy.py       the kernel that stores keys and values
compile.py    their machine code, kept on disk
threads.py    running them on torch's own threads
backend.py    `CpuBackend`: from tensors to a kernel's arguments
"""

from pagewire_kernels.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]

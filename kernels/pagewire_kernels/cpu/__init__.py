"""CPU kernels in C++, built with the package if there is a compiler.

They need control over the instructions, which numba does not give: the processor's dot product of
bfloat16 pairs, with a fixed order of summation. They have a plain C interface and no dependency,
not even on a C++ runtime or OpenMP, so that one build runs with any torch. If they were not built,
or the processor lacks the instructions, `library()` is None and oneDNN and numba replace them.

    src/team.h      what a kernel is, and how threads share its work
    src/batch.h     the layout of one step's batch, as kernels see it
    src/attention*  paged attention; attention.h explains the algorithm
    src/cache_write.cpp  writes new keys and values to their slots
    src/block_copy.cpp   copies whole blocks
    src/linear.h    linear layers with packed weights, and the packing
    src/share.h     how threads take over the items of one that lost its core
    src/layers.h    embedding, norms, activations, RoPE with the cache write, argmax
    src/program.cpp a list of kernels run by one team, without returning in between
    build.py        compiles one library per instruction set
    native_library.py  finds and loads the one for this processor
    tasks.py        the C structures, for ctypes
    attention.py    `NativeBackend`: paged attention and cache writes
    block_copy.py    `move_blocks`: within a cache, or from one to another
    linear.py       `NativeWeight`, `NativeGatedWeight`: pack a weight and multiply by it
    layers.py       `NativeLayerKernels`: norms, activations, RoPE; rows by index, argmax
    program.py      records kernels instead of running them, and runs what was recorded
    recorded_model.py  `RecordedModel`: a model as such a program
    checks.py       argument checks of the attention backends
    threads.py      runs a kernel on torch's own threads
    numba/          attention by numba, if no C++ kernels were built for the processor
"""

from pagewire_kernels.cpu.attention import NativeBackend
from pagewire_kernels.cpu.native_library import Library, library
from pagewire_kernels.interface import AttentionBackend


def cpu_backend(native: Library | None) -> AttentionBackend:
    """The faster of the `cpu` backends, given the native kernels for this processor, if any."""
    if native is not None:
        return NativeBackend(native)
    from pagewire_kernels.cpu.numba import NumbaBackend  # numba is loaded only where it is used

    return NumbaBackend()


__all__ = ["cpu_backend", "library"]

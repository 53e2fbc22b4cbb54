"""CPU kernels in C++, built with the package if there is a compiler.

They have a plain C interface and no dependency, not even on a C++ runtime or OpenMP, so that one
build runs with any torch. If they were not built, or the processor lacks the instructions,
`library()` is None; oneDNN and the torch reference replace them.

    src/vectors.h   vector arithmetic; avx2.h, avx512.h and neon.h hold one instruction set each
    src/team.h      what a kernel is, and how threads share its work
    src/batch.h     the layout of one step's batch, as kernels see it
    src/attention*  paged attention; attention.h explains the algorithm
    src/cache_write.cpp  writes new keys and values to their slots
    src/int8_head.h  a key or value in int8: codes and their scale
    src/block_copy.cpp   copies whole blocks
    src/linear.h    linear layers with packed weights, and the packing
    src/quantized.h  weights in fewer bits: their packing, and products with them
    src/w8a8.cpp     products of rows of 8 bits with weights of 8 bits
    src/share.h     how threads take over the items of one that lost its core
    src/layers.h    embedding, norms, activations, RoPE with the cache write, argmax
    src/program.cpp a list of kernels run by one team, without returning in between
    build.py        compiles one library per instruction set
    native_library.py  finds and loads the one for this processor
    tasks.py        the C structures, for ctypes
    attention.py    `NativeBackend`: paged attention and cache writes
    block_copy.py    `move_blocks`: within a cache, or from one to another
    linear.py       `NativeWeight`, `NativeGatedWeight`: pack a weight and multiply by it
    w8a8.py         rounds rows to 8 bits
    layers.py       `NativeLayerKernels`: norms, activations, RoPE; rows by index, argmax
    program.py      records kernels instead of running them, and runs what was recorded
    recorded_model.py  `RecordedModel`: a model as such a program
    checks.py       argument checks of the attention backends
    threads.py      runs a kernel on torch's own threads
"""

from pagewire_kernels.cpu.attention import NativeBackend
from pagewire_kernels.cpu.native_library import library

__all__ = ["NativeBackend", "library"]

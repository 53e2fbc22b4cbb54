"""CPU kernels in C++, built with the package where a compiler is there.

What numba makes of a loop cannot be told apart by instruction: these kernels need the processor's
dot product of bfloat16 pairs and a fixed order of sums at once. They have a plain C interface and
no dependency, not even on a C++ runtime or OpenMP, so that one build runs with any torch. Where
they were not built, or the processor lacks the instructions, `library()` is None, and oneDNN and
the numba kernels do the work.

    src/team.h      how threads share a kernel's work; what a kernel is
    src/batch.h     the layout of one step's batch, as kernels see it
    src/attention*  paged attention; attention.h tells how
    src/cache_write.cpp  new keys and values put into their slots
    src/block_copy.cpp   whole blocks copied
    src/linear.h    linear layers with packed weights, and the packing
    src/share.h     how threads take over what one that lost its core has begun
    src/layers.h    embedding, norms, activations, rotation with the cache write, largest logits
    src/program.cpp a list of kernels run by one team, without leaving it in between
    build.py        compiles one library per instruction set
    compiled.py     finds and loads the one for this processor
    structs.py layer_structs.py
                    the C structures, for ctypes
    attention.py    tasks of attention, described by tensors
    backend.py      `NativeBackend`
    blocks.py       `move_blocks`: within a cache, or from one to another
    linear.py       `NativeWeight`, `NativeGatedWeight`: pack a weight and multiply by it
    huge_memory.py  where packed weights are
    layers.py       `NativeLayerKernels`: norms, activations, rotation
    taking.py       rows by index, and the largest of a row
    program.py      recording kernels instead of running them, and running what was recorded
    recorded.py     `RecordedModel`: a model as such a program
"""

from pagewire_kernels.cpu.native.backend import NativeBackend
from pagewire_kernels.cpu.native.blocks import move_blocks
from pagewire_kernels.cpu.native.compiled import Library, library
from pagewire_kernels.cpu.native.linear import HugeMemory, NativeGatedWeight, NativeWeight

__all__ = [
    "HugeMemory",
    "Library",
    "NativeBackend",
    "NativeGatedWeight",
    "NativeWeight",
    "library",
    "move_blocks",
]

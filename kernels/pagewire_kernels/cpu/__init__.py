"""CPU kernels in C++, built with the package if there is a compiler.

They have a plain C interface and no dependencies, not even a C++ runtime or OpenMP, so that one
build works with any version of torch. If they were not built, or the processor lacks the
instructions, `library()` is None, and torch and the reference are used instead.

    src/vectors.h   vector arithmetic; avx2.h, avx512.h and neon.h hold one instruction set each
    src/team.h      the signature of a kernel, and how threads share its work
    src/batch.h     the layout of a step's batch
    src/attention*  attention, over a paged cache or none; attention.h explains the algorithm
    src/cache_write.cpp  writes new keys and values to their slots
    src/int8_head.h  a key or value in int8: codes and their scale
    src/block_copy.cpp   copies whole blocks
    src/linear.h    linear layers with packed weights, and the packing
    src/quantized.h  quantized weights: packing, and products
    src/w8a8.cpp     products of 8-bit activations with 8-bit weights
    src/linear_multiply.h  the loops over a product's items, of all kinds of weights
    src/adapters.h  what LoRA adapters add to products
    src/experts.h   mixture of experts: their choice, and products of rows sorted by expert
    src/share.h     how threads take over the items of a thread that lost its core
    src/layers.h    embedding, norms, activations, RoPE, sums of rows, argmax
    src/states.h    layers with a state: causal convolutions, Mamba, the gated delta rule
    src/program.cpp a list of kernels run by one team, without returning in between
    build.py        compiles one library per instruction set
    native_library.py  finds and loads the library for this processor
    tasks.py        the C structures, for ctypes
    attention.py    `NativeBackend`: attention and cache writes
    block_copy.py    `move_blocks`: copies within a cache, or between two
    linear.py       `NativeWeight`, `NativeGatedWeight`: weights packed for products
    adapters.py     `NativeDeltas`: what the adapters in slots add to a layer's products
    experts.py      `NativeExperts`: the gated experts of a layer
    heads.py        `NativeHeads`: products of heads, each with a weight of its own
    w8a8.py         quantizes activations to 8 bits
    layers.py       `NativeLayerKernels`: norms, activations, RoPE; gathers of rows, argmax
    states.py       `NativeStateKernels`: causal convolutions, Mamba, delta rule, gated norms
    program.py      records kernels instead of running them, and runs the recorded program
    recorded_model.py  `RecordedModel`: a model as a recorded program
    checks.py       argument checks of the kernels' launchers
    threads.py      runs a kernel on torch's own threads
"""

from pagewire_kernels.cpu.attention import NativeBackend
from pagewire_kernels.cpu.native_library import library

__all__ = ["NativeBackend", "library"]

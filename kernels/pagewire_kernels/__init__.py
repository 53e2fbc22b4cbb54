"""Attention over a paged KV cache, and the copying of its blocks.

The cache is block-major, one tensor `[num_blocks, num_layers, 2, block_size, num_kv_heads,
head_dim]`, so that a block is one contiguous piece of memory for all layers, keys and values. A
layer sees it as two strided views `[num_blocks, block_size, num_kv_heads, head_dim]`. Where a
sequence's tokens lie is told by its block table; what a step computes by `AttentionMetadata`.

    metadata.py    the layout of one step's batch
    block_pairs.py moves of blocks that depend on each other
    reference/     the meaning of everything here, in plain torch: the oracle of the tests, and what
                   runs on a device that has nothing faster
    layer_kernels.py  what a model computes between products and attention, as one interface
    cpu/           attention, products and what is between them, compiled for the CPU; and a model's
                   layers recorded as one program
    gpu/           all of it as Triton kernels, for CUDA devices
    flash/         FlashAttention over the paged cache, where one of its packages is installed
    backends/      one interface over them, and the choice between them

A backend's promise: a query row's result depends on that row and on its sequence's KV alone up to
rounding, whether a prefill, a chunk of it or a decode computes it, whatever else is in the batch
and on whichever thread. With the `cpu` backend that is bitwise; with `triton` if asked for.
"""

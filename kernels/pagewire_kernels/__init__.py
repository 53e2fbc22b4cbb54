"""Attention over a paged KV cache, and the copying of its blocks.

The cache is block-major, one tensor `[num_blocks, num_layers, 2, block_size, num_kv_heads,
head_dim]`, so that a block is one contiguous piece of memory for all layers, keys and values. A
layer sees it as two strided views `[num_blocks, block_size, num_kv_heads, head_dim]`. A sequence's
block table says where its tokens lie, `AttentionMetadata` what a step computes.

    interface.py   what every attention backend and set of layer kernels offers
    select.py      the choice between them, by device and by what a model requires
    self_check.py  a small case, run on the device before a GPU backend is trusted
    batch.py       the metadata of one step's batch; pairs of blocks to copy
    quantized_weight.py  weights in fewer bits: codes, scales and offsets
    philox.py      counter-based random numbers: the reference and the host's sampler draw with them
    reference/     the definition of every operation in plain torch: the oracle of the tests, and
                   the fallback on a device that has nothing faster
    cpu/           attention, linear layers and row-wise kernels for the CPU; a model's layers
                   recorded as one program
    triton/        Triton kernels for CUDA devices
    flash_attention.py  FlashAttention over the paged cache, if one of its packages is installed

Every backend guarantees that a query row's result depends, up to rounding, on that row and on its
sequence's KV alone: not on whether a prefill, a chunk of one or a decode computes it, on the rest
of the batch or on the thread. The `cpu` backend guarantees the same bits; `triton` does so on
request.
"""

"""Kernels of a model's forward pass and of sampling: attention over a paged KV cache, linear
layers, norms, activations, logit processing, and copies of KV blocks.

The KV cache is block-major, one tensor `[num_blocks, num_layers, 2, block_size, num_kv_heads,
head_dim]`, so that one block, all layers, keys and values, is one contiguous piece of memory. A
layer uses two strided views `[num_blocks, block_size, num_kv_heads, head_dim]`. A sequence's block
table maps its positions to blocks; `AttentionMetadata` describes the batch of a step.

    interface.py   the interface of attention backends, and keywords of kernels
    select.py      the choice between them, by device and by the model's requirements
    self_check.py  small cases that a GPU backend must pass on the device before it is used
    batch.py       the metadata of a step's batch, tables of sampling parameters, copies of blocks
    quantized_weight.py  quantized weights: codes, scales and offsets
    slot_deltas.py  the adapters in a device's slots, and what they add to the products of a layer
    philox.py      counter-based random numbers of the reference and of the host's sampler
    reference/     the definition of every operation in plain torch: the oracle of the tests, and
                   the fallback on devices without faster kernels
    cpu/           attention, linear layers and row-wise kernels for the CPU; a model's layers
                   recorded as one program
    triton/        Triton kernels for CUDA devices
    flash_attention.py  FlashAttention over the paged cache, if one of its packages is installed

Every backend guarantees that the result of a query row depends, up to rounding, only on that row
and on the KV of its sequence: not on whether it is computed by a prefill, a chunk of one or a
decode, nor on the rest of the batch, nor on the thread. The `cpu` backend guarantees equal bits;
`triton` does so on request.
"""

"""Triton kernels, which are defined by the functions of the same names in
`pagewire_kernels.reference`.

attention.py   paged attention of prefills, chunks and decodes; kernels in `attention_kernels.py`
packed_attention.py  attention over whole texts without a cache
kv_cache.py    cache writes; copies of whole blocks, also from and to pinned host memory
layers.py      norms, fused with the residual addition; activations; sums of rows
rotary.py      norms of queries and keys, RoPE and the cache write, if any, in one kernel
streams.py     rows of several streams; statistics of rows
states.py      layers with a state: causal convolutions, Mamba, the delta rule, gated norms
latents.py     the cache writes of latent attention
linear.py      batch-invariant linear layers, with a fixed order of summation
few_rows.py    products of up to four rows, and gated ones
adapters.py    what LoRA adapters add to products, by the slot of each row's adapter
experts.py     mixture of experts: products of rows sorted by expert, in dense weights
quantized_linear.py  products with quantized weights, and gathers of their rows
sampling.py    a step's inputs, edits of logits, sampling, log probabilities; kernels in
               `sampling_kernels.py`
backend.py     `TritonBackend`; `TritonLayerKernels`, the row-wise operations
launch.py      launches that call compiled kernels directly
checks.py      argument checks of the launchers

The docstring of each file names the bottleneck of its kernels. No function synchronizes with the
device, so all can be captured in a CUDA graph, except `move_blocks` with `pairs` on the device.
"""

from pagewire_kernels.triton.adapters import add_deltas, add_embedding_deltas
from pagewire_kernels.triton.attention import Launch, choose_launch, paged_attention
from pagewire_kernels.triton.backend import TritonBackend, TritonLayerKernels
from pagewire_kernels.triton.experts import TritonExperts
from pagewire_kernels.triton.kv_cache import move_blocks, write_kv
from pagewire_kernels.triton.layers import (
    act_and_mul,
    activate,
    apply_gate,
    layer_norm,
    rms_norm,
    sum_rows,
)
from pagewire_kernels.triton.linear import InvariantWeight, linear
from pagewire_kernels.triton.packed_attention import packed_attention
from pagewire_kernels.triton.quantized_linear import TritonQuantizedWeight, can_pack_codes
from pagewire_kernels.triton.rotary import rotate, rotate_and_write_kv
from pagewire_kernels.triton.sampling import accept, edit, gather_logprobs, prepare, sample

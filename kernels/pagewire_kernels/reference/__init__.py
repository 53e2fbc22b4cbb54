"""The definition of every kernel in plain torch: the oracle of the tests.

attention.py  attention over a paged cache, and over whole texts without one
kv_cache.py   writes to a paged cache, int8 heads, copies of blocks
layers.py     embedding, norms, rotary embedding, activations
adapters.py   what LoRA adapters add to products
experts.py    the choice of experts, and gated experts
states.py     layers with a state: causal convolutions, Mamba, the delta rule, RG-LRU
sampling.py   a step's inputs; edits of logits, sampling, log probabilities
backend.py    the reference as an attention backend and as layer kernels
"""

from pagewire_kernels.reference.adapters import add_deltas, add_embedding_deltas
from pagewire_kernels.reference.attention import packed_attention, paged_attention
from pagewire_kernels.reference.experts import (
    Gate,
    Product,
    Routing,
    add_shared,
    gated_experts,
    route,
)
from pagewire_kernels.reference.kv_cache import swap_blocks, write_kv
from pagewire_kernels.reference.layers import (
    ACTIVATIONS,
    act_and_mul,
    activate,
    add,
    correct_streams,
    embed,
    gate_counts,
    layer_norm,
    match_rms,
    mix_streams,
    multiply,
    multiply_sigmoid,
    multiply_softplus,
    read_streams,
    rms_norm,
    rotate,
    rotate_and_write_kv,
    scale,
    soft_cap,
    sparsify,
    sum_rows,
    write_latents,
    write_streams,
    xielu,
)
from pagewire_kernels.reference.sampling import (
    accept,
    apply_bitmask,
    decode_drafts,
    edit,
    gather_logprobs,
    prepare,
    sample,
)
from pagewire_kernels.reference.states import (
    causal_convolution,
    gated_delta_rule,
    gated_rms_norm,
    mamba1_scan,
    mamba2_scan,
    rglru_scan,
)

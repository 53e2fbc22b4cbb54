"""The `triton` attention backend and layer kernels."""

from typing import Unpack

from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import Abilities, AttentionOptions
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.triton.attention import paged_attention
from pagewire_kernels.triton.kv_cache import write_kv
from pagewire_kernels.triton.latents import write_latents
from pagewire_kernels.triton.layers import (
    act_and_mul,
    activate,
    apply_gate,
    layer_norm,
    multiply_sigmoid,
    multiply_softplus,
    rms_norm,
    sum_rows,
)
from pagewire_kernels.triton.packed_attention import packed_attention
from pagewire_kernels.triton.rotary import rotate, rotate_and_write_kv
from pagewire_kernels.triton.states import (
    causal_convolution,
    gated_delta_rule,
    gated_rms_norm,
    mamba1_scan,
    mamba2_scan,
    rglru_scan,
)
from pagewire_kernels.triton.streams import (
    correct_streams,
    match_rms,
    mix_streams,
    read_streams,
    sparsify,
    write_streams,
)


class TritonBackend:
    """Attention and cache writes by Triton kernels.

    With `batch_invariant`, the result of a query row depends, bitwise, only on that row and on the
    KV of its sequence: not on the rest of the batch, nor on whether it is computed by a prefill, a
    chunk or a decode.
    """

    name = "triton"

    abilities = Abilities(fp8_cache=True, batch_invariant=True)

    write_kv = staticmethod(write_kv)
    packed_attention = staticmethod(packed_attention)

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:
        """Causal attention of flattened query rows; as `reference.paged_attention`."""
        is_invariant = self._batch_invariant
        return paged_attention(
            query, key_cache, value_cache, metadata, batch_invariant=is_invariant, **options
        )


class TritonLayerKernels(LayerKernels):
    """One launch per operation. Results are bitwise independent of the batch, since a row is
    computed by a single program, in an order that depends only on its size."""

    name = "triton"
    rms_norm = staticmethod(rms_norm)
    layer_norm = staticmethod(layer_norm)
    activate = staticmethod(activate)
    act_and_mul = staticmethod(act_and_mul)
    apply_gate = staticmethod(apply_gate)
    # It takes tensors by position only.
    rotate_and_write_kv = staticmethod(rotate_and_write_kv)  # type: ignore[assignment]
    rotate = staticmethod(rotate)
    multiply_sigmoid = staticmethod(multiply_sigmoid)
    multiply_softplus = staticmethod(multiply_softplus)
    sparsify = staticmethod(sparsify)
    match_rms = staticmethod(match_rms)
    mix_streams = staticmethod(mix_streams)
    correct_streams = staticmethod(correct_streams)
    read_streams = staticmethod(read_streams)
    write_streams = staticmethod(write_streams)
    sum_rows = staticmethod(sum_rows)
    write_latents = staticmethod(write_latents)
    causal_convolution = staticmethod(causal_convolution)
    mamba1_scan = staticmethod(mamba1_scan)
    mamba2_scan = staticmethod(mamba2_scan)
    rglru_scan = staticmethod(rglru_scan)
    gated_delta_rule = staticmethod(gated_delta_rule)
    gated_rms_norm = staticmethod(gated_rms_norm)

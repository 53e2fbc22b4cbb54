"""The reference as an attention backend and as layer kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.interface import Abilities
from pagewire_kernels.reference.experts import Gate


class ReferenceBackend:
    """Attention in plain torch, on any device; several times slower than device kernels."""

    name = "reference"
    abilities = Abilities(fp8_cache=True, int8_cache=True, cuda_graphs=False)
    write_kv = staticmethod(reference.write_kv)
    paged_attention = staticmethod(reference.paged_attention)
    packed_attention = staticmethod(reference.packed_attention)


class LayerKernels:
    """Row-wise operations of layers in plain torch, on any device; those of a device replace them.

    Weights, biases and tables have the dtype and device of the rows; weights of RMS norms may be
    float32 instead. Rows have a dense last axis and otherwise arbitrary strides. Results are new
    tensors unless a function says otherwise. The result of a row of layers with a state, and the
    state after it, have the same bits in any batch and in any division of a sequence into steps.
    """

    name = "torch"
    embed = staticmethod(reference.embed)
    rms_norm = staticmethod(reference.rms_norm)
    layer_norm = staticmethod(reference.layer_norm)
    activate = staticmethod(reference.activate)
    act_and_mul = staticmethod(reference.act_and_mul)
    rotate_and_write_kv = staticmethod(reference.rotate_and_write_kv)
    rotate = staticmethod(reference.rotate)
    scale = staticmethod(reference.scale)
    soft_cap = staticmethod(reference.soft_cap)
    sparsify = staticmethod(reference.sparsify)
    match_rms = staticmethod(reference.match_rms)
    mix_streams = staticmethod(reference.mix_streams)
    correct_streams = staticmethod(reference.correct_streams)
    read_streams = staticmethod(reference.read_streams)
    write_streams = staticmethod(reference.write_streams)
    xielu = staticmethod(reference.xielu)
    add = staticmethod(reference.add)
    multiply = staticmethod(reference.multiply)
    multiply_sigmoid = staticmethod(reference.multiply_sigmoid)
    multiply_softplus = staticmethod(reference.multiply_softplus)
    sum_rows = staticmethod(reference.sum_rows)
    write_latents = staticmethod(reference.write_latents)
    causal_convolution = staticmethod(reference.causal_convolution)
    mamba1_scan = staticmethod(reference.mamba1_scan)
    mamba2_scan = staticmethod(reference.mamba2_scan)
    rglru_scan = staticmethod(reference.rglru_scan)
    gated_delta_rule = staticmethod(reference.gated_delta_rule)
    gated_rms_norm = staticmethod(reference.gated_rms_norm)

    def apply_gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """The activation of rows that hold gate, then up, or up alone; see `Gate.apply`. Rows
        without a gate are overwritten."""
        return gate.apply(gate_up)

    def copy(self, x: Tensor) -> Tensor:
        """Copy the rows of x, [num_tokens, size], which are overwritten later."""
        return x.clone()

    def take_columns(self, x: Tensor, order: Tensor) -> Tensor:
        """Rows of some columns of x, [num_tokens, size]. order: int32, that of each column of the
        result, where one may occur several times."""
        return x.index_select(1, order)

    def concatenate(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows that consist of those of the parts, [num_tokens, size] each."""
        return torch.cat([*parts], dim=1)

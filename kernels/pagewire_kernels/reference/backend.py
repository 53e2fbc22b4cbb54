"""The reference as an attention backend and as layer kernels."""

import torch

from pagewire_kernels import reference
from pagewire_kernels.interface import Abilities


class ReferenceBackend:
    """Attention in plain torch, on any device; several times slower than device kernels."""

    name = "reference"
    abilities = Abilities(fp8_cache=True, int8_cache=True, cuda_graphs=False)
    write_kv = staticmethod(reference.write_kv)
    paged_attention = staticmethod(reference.paged_attention)
    packed_attention = staticmethod(reference.packed_attention)


class TorchLayerKernels:
    """Layer kernels in plain torch, on any device: the fallback."""

    name = "torch"
    embed = staticmethod(reference.embed)
    copy = staticmethod(torch.clone)
    rms_norm = staticmethod(reference.rms_norm)
    layer_norm = staticmethod(reference.layer_norm)
    activate = staticmethod(reference.activate)
    act_and_mul = staticmethod(reference.act_and_mul)
    rotate_and_write_kv = staticmethod(reference.rotate_and_write_kv)
    rotate = staticmethod(reference.rotate)
    scale = staticmethod(reference.scale)
    soft_cap = staticmethod(reference.soft_cap)
    xielu = staticmethod(reference.xielu)
    add = staticmethod(reference.add)
    multiply = staticmethod(reference.multiply)
    multiply_sigmoid = staticmethod(reference.multiply_sigmoid)
    sum_rows = staticmethod(reference.sum_rows)
    write_latents = staticmethod(reference.write_latents)
    causal_convolution = staticmethod(reference.causal_convolution)
    mamba1_scan = staticmethod(reference.mamba1_scan)
    mamba2_scan = staticmethod(reference.mamba2_scan)
    gated_delta_rule = staticmethod(reference.gated_delta_rule)
    gated_rms_norm = staticmethod(reference.gated_rms_norm)

"""Products of 8-bit activations with 8-bit weights (W8A8)."""

import torch
from torch import Tensor

from pagewire_kernels.quantized_weight import Int8Activations, QuantizedWeight


def quantize_rows(rows: Tensor, activations: Int8Activations) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize activations; a number is about (code - zero point) * scale.

    rows: [num_rows, size], of finite numbers. Returns codes [num_rows, size], scales [num_rows, 1]
    and zero points [num_rows, 1], all float32.
    """
    x = rows.float()
    least, most = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    zeros = torch.zeros_like(most)
    if activations.scale is not None:
        scales = torch.full_like(most, activations.scale)
        zeros += activations.zero_point
    elif activations.symmetric:
        scales = torch.maximum(most, -least) / 127.5
    else:
        scales = (most - least) / 255
        zeros = (-128 - least / scales).nan_to_num(-128).clamp(-128, 127).round()
    scales = scales.masked_fill(scales == 0, torch.finfo(torch.float32).eps)
    return (x / scales + zeros).clamp(-128, 127).round(), scales, zeros


def multiply_quantized_rows(
    rows: Tensor, weight: QuantizedWeight, bias: Tensor | None = None
) -> Tensor:
    """Quantize rows as the weight requires, and multiply them by it.

    rows: [num_rows, in_features]; weight: with `activations`, and one scale per output; bias:
    [out_features]. Returns float32 [num_rows, out_features]. Sums are exact, so that the bits are
    those of the compiled kernels.
    """
    assert weight.activations is not None
    codes, scales, zeros = quantize_rows(rows, weight.activations)
    sums = ((codes - zeros).double() @ weight.values().double().T).float()
    products = sums * (scales * weight.scales.T)
    return products if bias is None else products + bias.float()

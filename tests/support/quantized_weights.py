"""Weights in fewer bits with random codes."""

import torch

from pagewire_kernels.quantized_weight import SIGNED_TABLE, QuantizedWeight


def random_weight(
    out_features: int,
    in_features: int,
    bits: int,
    group_size: int,
    *,
    offsets: bool,
    wide: bool,
    table: tuple[int, ...] = SIGNED_TABLE,
) -> QuantizedWeight:
    """wide: whether its scales need float32."""
    generator = torch.Generator().manual_seed(out_features + in_features + bits)

    def numbers(spread: float) -> torch.Tensor:
        found = torch.randn(out_features, in_features // group_size, generator=generator) * spread
        return found if wide else found.half().float()

    codes = torch.randint(0, 2**bits, (out_features, in_features), generator=generator)
    return QuantizedWeight(
        codes=codes.to(torch.uint8),
        scales=numbers(0.02),
        offsets=numbers(0.1) if offsets else None,
        table=table if bits == 4 else None,
    )

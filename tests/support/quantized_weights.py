"""Weights in fewer bits with random codes."""

from dataclasses import replace

import torch

from pagewire_kernels.quantized_weight import SIGNED_TABLE, Int8Activations, QuantizedWeight


def random_weight(
    out_features: int,
    in_features: int,
    bits: int,
    group_size: int,
    *,
    offsets: bool,
    scales: str = "float16",
    table: tuple[float, ...] = SIGNED_TABLE,
    is_float: bool = False,
    ordered: bool = True,
) -> QuantizedWeight:
    """scales: float16, float32, or units, of which an output has two; is_float: whether a table is
    one of floats, and codes of 8 bits are those of finite numbers of float8_e4m3fn; ordered:
    whether columns are in the order of the inputs."""
    generator = torch.Generator().manual_seed(out_features + in_features + bits)

    def random(spread: float, columns: int) -> torch.Tensor:
        found = torch.randn(out_features, columns, generator=generator) * spread
        return found if scales == "float32" else found.half().float()

    def numbers(spread: float) -> torch.Tensor:
        columns = in_features // group_size
        if scales != "units":
            return random(spread, columns)
        return torch.randint(-128, 128, (out_features, columns), generator=generator).float()

    def units(spread: float) -> torch.Tensor | None:
        return random(spread, 2) if scales == "units" else None

    codes = torch.randint(0, 2**bits, (out_features, in_features), generator=generator)
    if is_float and bits == 8:
        codes -= ((codes & 127) == 127).long()
    return QuantizedWeight(
        codes=codes.to(torch.uint8),
        scales=numbers(0.02),
        offsets=numbers(0.1) if offsets else None,
        units=units(0.001),
        offset_units=units(0.005) if offsets else None,
        table=table if bits == 4 else None,
        is_float=is_float,
        order=None if ordered else torch.randperm(in_features, generator=generator),
    )


def as_multiplied(weight: QuantizedWeight, dtype: torch.dtype) -> QuantizedWeight:
    """The weight that kernels multiply rows of `dtype` by: a table of floats is rounded to it."""
    if not weight.is_float or weight.table is None:
        return weight
    return replace(weight, table=tuple(torch.tensor(weight.table).to(dtype).tolist()))


def random_int8_weight(
    out_features: int, in_features: int, activations: Int8Activations
) -> QuantizedWeight:
    """One scale for each output, and rows that are rounded, too."""
    generator = torch.Generator().manual_seed(out_features + in_features)
    codes = torch.randint(0, 256, (out_features, in_features), generator=generator)
    return QuantizedWeight(
        codes=codes.to(torch.uint8),
        scales=torch.rand(out_features, 1, generator=generator) * 0.01,
        activations=activations,
    )

"""Weights of a layer, quantized by rounding to nearest, in the formats of quantized checkpoints.

Written from the specifications of the formats, independently of the code that reads them.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CONFIGS: Mapping[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text()
)
"""The `quantization_config` of each format."""

GROUP_SIZE: int = CONFIGS["awq"]["group_size"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bits:
    """Bits per weight of a format, with the scales and offsets of its groups."""

    layers: float
    head: float | None = None
    """Those of the LM head; None: those of the dtype."""


BITS_PER_WEIGHT: Mapping[str, Bits] = {
    "awq": Bits(layers=4 + 20 / GROUP_SIZE),
    "gptq": Bits(layers=4 + 20 / GROUP_SIZE),
    "w8a8": Bits(layers=8),
    # Dense checkpoints that Pagewire rounds while it loads them; --quantization.
    "int4": Bits(layers=4 + 32 / GROUP_SIZE, head=8 + 16 / GROUP_SIZE),
    "int8": Bits(layers=8 + 16 / GROUP_SIZE, head=8 + 16 / GROUP_SIZE),
    # The GGUF file of `make test-real`, whose embedding is in Q8_0.
    "q4_1": Bits(layers=5, head=8.5),
}


def quantized(weight: Tensor, kind: str) -> dict[str, Tensor]:
    """Quantize a weight [out_features, in_features] to tensors, by the suffixes of their names."""
    weight = weight.float()
    if kind == "w8a8":
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    if kind == "gptq":
        scales = (groups.abs().amax(dim=2) / 7).half()
        zeros = torch.full_like(scales, 8, dtype=torch.int32)
    else:
        least, most = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scales = ((most - least) / 15).half()
        zeros = (-least / scales).round().clamp(0, 15).int()
    steps = (groups / scales.float().unsqueeze(2)).round().int() + zeros.unsqueeze(2)
    codes = steps.clamp(0, 15).flatten(1)
    shared = {"scales": scales.t().contiguous()}
    if kind == "gptq":
        group_of = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP_SIZE
        stored_zeros = _words(zeros.t() - 1)  # the format's first version stores one less
        return {"qweight": _words(codes).t(), "qzeros": stored_zeros, "g_idx": group_of, **shared}
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": _words(codes.t(), order), "qzeros": _words(zeros.t(), order), **shared}


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight consecutive 4-bit codes of a row into each 32-bit word; order: of these codes,
    from the lowest bits."""
    parts = codes.long().unflatten(1, (-1, 8))[:, :, list(order)]
    words = (parts << torch.arange(0, 32, 4)).sum(dim=2)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()

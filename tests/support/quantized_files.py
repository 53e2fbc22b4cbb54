"""Quantized checkpoints made from tiny ones, beside checkpoints with the same dequantised weights.

Tensors are packed word by word, as the specifications of the formats describe it; nothing is shared
with the code that reads them.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import make_checkpoint

GROUP_SIZE = 32
SHAPE: dict[str, Any] = {"intermediate_size": 128}
"""Whole groups in all layers."""


@dataclass(frozen=True)
class Integers:
    """A quantized weight: (codes - zeros) * scales."""

    codes: np.ndarray
    """0 to 2^bits - 1: [out, in]"""

    scales: np.ndarray
    """float16 [out, groups]"""

    zeros: np.ndarray
    """Likewise."""

    groups: np.ndarray
    """Of each input."""

    @property
    def values(self) -> Tensor:
        """float32"""
        scales, zeros = self.scales.astype(np.float32), self.zeros[:, self.groups]
        return torch.from_numpy((self.codes - zeros).astype(np.float32) * scales[:, self.groups])


def integers(
    weight: Tensor, bits: int, *, size: int = GROUP_SIZE, symmetric: bool, shuffled: bool = False
) -> Integers:
    """A weight rounded to `bits`. size: of a group of inputs; shuffled: groups are not consecutive
    inputs."""
    values, top = weight.float().numpy(), (1 << bits) - 1
    groups = np.arange(values.shape[1]) // size
    if shuffled:
        groups = np.random.default_rng(0).permutation(groups)
    order = np.argsort(groups, kind="stable")
    parts = values[:, order].reshape(len(values), -1, size)
    if symmetric:
        scales = (2 * np.abs(parts).max(2) / top).astype(np.float16)
        zeros = np.full(scales.shape, (top + 1) // 2)
    else:
        low, high = parts.min(2).clip(max=0), parts.max(2).clip(min=0)
        scales = ((high - low) / top).astype(np.float16)
        zeros = np.rint(-low / scales).astype(np.int64).clip(0, top)
        # Groups of positive numbers only: their zero point is 0.
        zeros[::7] = 0
    codes = np.rint(values / scales[:, groups]).astype(np.int64) + zeros[:, groups]
    return Integers(codes.clip(0, top), scales, zeros, groups)


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of codes [rows, columns], consecutive columns in each, the first lowest.

    order: the columns of each word, lowest first.
    """
    per_word = 32 // bits
    words = np.zeros((len(codes), codes.shape[1] // per_word), np.uint32)
    for place, column in enumerate(order or range(per_word)):
        words |= codes[:, column::per_word].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def awq(weight: Integers, bits: int) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": pack(weight.codes.T, bits, order),
        "qzeros": pack(weight.zeros.T, bits, order),
        "scales": torch.from_numpy(weight.scales.T.copy()),
    }


def gptq(weight: Integers, bits: int, *, version: int = 1) -> dict[str, Tensor]:
    zeros = pack(weight.zeros.T, bits)
    if version == 1:
        zeros -= 0x11111111 if bits == 4 else 0x01010101
    return {
        "qweight": pack(weight.codes, bits).T.contiguous(),
        "qzeros": zeros,
        "scales": torch.from_numpy(weight.scales.T.copy()),
        "g_idx": torch.from_numpy(weight.groups.astype(np.int32)),
    }


Quantize = Callable[[str, Tensor], tuple[Mapping[str, Tensor], Tensor]]


def make_quantized(
    folder: Path, settings: Mapping[str, Any], quantize: Quantize, *, family: str = "llama"
) -> tuple[Path, Path]:
    """(a quantized checkpoint, one with the same weights in float32)

    settings: its `quantization_config`. quantize: from the name of a module and its weight, the
    stored tensors by suffix, and the dequantised weight. It gets the weights of linear layers but
    the head and the routers of experts.
    """
    source = make_checkpoint(family, folder / "source", **SHAPE)
    path = Path(shutil.copytree(source, folder / "quantized"))
    stored, dense = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or "layers" not in name or name.endswith(".gate.weight"):
            stored[name] = dense[name] = tensor
            continue
        parts, dense[name] = quantize(module, tensor)
        stored.update({f"{module}.{suffix}": part for suffix, part in parts.items()})
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    save_file(dense, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return path, source

"""Quantized checkpoints made from tiny ones, beside checkpoints with the same dequantized weights.

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

_DENSE = (".gate.weight", ".embed_tokens.weight", ".shared_head.head.weight")
"""Ends of names in layers of weights that stay dense."""


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
        "scales": torch.from_numpy(weight.scales.T),
    }


def gptq(weight: Integers, bits: int, *, version: int = 1) -> dict[str, Tensor]:
    zeros = pack(weight.zeros.T, bits)
    if version == 1:
        zeros -= 0x11111111 if bits == 4 else 0x01010101
    return {
        "qweight": pack(weight.codes, bits).T,
        "qzeros": zeros,
        "scales": torch.from_numpy(weight.scales.T),
        "g_idx": torch.from_numpy(weight.groups.astype(np.int32)),
    }


def compressed(
    weight: Tensor, kind: str, *, scale_dtype: torch.dtype = torch.float32, **arguments: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """What the package compressed-tensors makes of a weight, and how it dequantizes that.

    kind: the format; arguments: of `QuantizationArgs`.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    settings = QuantizationArgs(**arguments)
    rows, columns = {
        "tensor": weight.shape,
        "channel": (1, weight.shape[1]),
        "group": (1, settings.group_size),
        "block": settings.block_structure,
    }[settings.strategy]
    height, width = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    padded = torch.zeros(height * rows, width * columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    tiles = padded.unflatten(1, (width, columns)).unflatten(0, (height, rows))
    scales, zeros = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), settings)
    if settings.strategy == "tensor":
        scales, zeros = scales.flatten(), zeros.flatten()
    compressor = BaseCompressor.get_value_from_registry(kind)
    scheme = QuantizationScheme(targets=["Linear"], weights=settings)
    parts = {"weight": weight, "weight_scale": scales.to(scale_dtype), "weight_zero_point": zeros}
    stored = compressor.compress(parts, scheme)
    exact = {name: part.float() if "scale" in name else part for name, part in stored.items()}
    return stored, compressor.decompress(exact, scheme)["weight"]


def fp8(
    weight: Tensor, block: tuple[int, int], suffix: str, shape: list[int]
) -> tuple[dict[str, Tensor], Tensor]:
    """Floats of 8 bits. block: outputs and inputs that share a scale; shape: of the scales."""
    rows = torch.arange(weight.shape[0]) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            scales[row, column] = weight[rows == row][:, columns == column].abs().max() / 448
    scale = scales[rows][:, columns]
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, suffix: scales.reshape(shape)}, codes.float() * scale


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


FP4 = tuple(sign * n / 12 for sign in (1, -1) for n in (0.0, 0.0625, 8, 12, 4, 6, 2, 3))


def bitsandbytes(
    weight: Tensor, *, nested: bool, kind: str = "nf4"
) -> tuple[dict[str, Tensor], Tensor]:
    """Codes of bitsandbytes in blocks of 64; nested: scales are codes, too, in blocks of 5; kind:
    nf4 or fp4."""
    table = torch.tensor(NF4 if kind == "nf4" else FP4)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": 64,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    numbers = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scales = numbers.abs().amax(1)
    parts = {"weight.quant_map": table, "weight.absmax": scales}
    if nested:
        offset, levels = float(scales.mean()), torch.linspace(-1, 1, 256)
        blocks = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 5)).view(-1, 5)
        tops = blocks.abs().amax(1)
        codes = (blocks[:, :, None] / tops[:, None, None] - levels).abs().argmin(2)
        scales = (levels[codes] * tops[:, None]).flatten()[: len(scales)] + offset
        parts["weight.absmax"] = codes.flatten()[: len(scales)].to(torch.uint8)
        parts |= {"weight.nested_absmax": tops, "weight.nested_quant_map": levels}
        state |= {"nested_blocksize": 5, "nested_dtype": "float32", "nested_offset": offset}
    codes = (numbers[:, :, None] / scales[:, None, None] - table).abs().argmin(2)
    pairs = codes.flatten()[: weight.numel()].view(-1, 2).to(torch.uint8)
    parts["weight"] = (pairs[:, :1] << 4) | pairs[:, 1:]
    encoded = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = encoded
    dense = (table[codes] * scales[:, None]).flatten()[: weight.numel()]
    return parts, dense.view(weight.shape)


Quantize = Callable[[str, Tensor], tuple[Mapping[str, Tensor], Tensor]]


def make_quantized(
    folder: Path,
    settings: Mapping[str, Any],
    quantize: Quantize,
    *,
    family: str = "llama",
    **shape: Any,
) -> tuple[Path, Path]:
    """(a quantized checkpoint, one with the same weights in float32)

    settings: its `quantization_config`. quantize: from the name of a module and its weight, the
    stored tensors by suffix, and the dequantized weight. It gets the weights of linear layers but
    the head and the routers of experts.
    """
    source = make_checkpoint(family, folder / "source", **{**SHAPE, **shape})
    return quantize_checkpoint(source, folder / "quantized", settings, quantize), source


def quantize_checkpoint(
    source: Path, path: Path, settings: Mapping[str, Any], quantize: Quantize
) -> Path:
    """Write a quantized copy of a checkpoint to `path`, and to `source` the dequantized weights;
    see `make_quantized`. Returns `path`."""
    shutil.copytree(source, path)
    stored, dense = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or "layers" not in name or name.endswith(_DENSE):
            stored[name] = dense[name] = tensor
            continue
        parts, values = quantize(module, tensor)
        dense[name] = values.contiguous()
        stored.update({f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()})
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    save_file(dense, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return path


def make_w8a8(
    folder: Path,
    inputs: Mapping[str, Any],
    more: Mapping[str, Tensor] | None = None,
    *,
    family: str = "llama",
    **shape: Any,
) -> tuple[Path, Path]:
    """As `make_quantized`, with 8-bit weights of outputs and 8-bit activations.

    inputs: of `QuantizationArgs`, how activations are rounded; more: further tensors of each
    module, by suffix.
    """
    weights = {"num_bits": 8, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": dict(inputs)}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }

    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        stored, dense = compressed(weight, "int-quantized", **weights)
        copies = {suffix: part.clone() for suffix, part in (more or {}).items()}
        return {**stored, **copies}, dense

    return make_quantized(folder, settings, quantize, family=family, **shape)

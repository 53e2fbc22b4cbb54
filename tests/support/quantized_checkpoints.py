"""Formats of quantized checkpoints with their settings, and what tests of all of them share."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.support.quantized_files import (
    GROUP_SIZE,
    Integers,
    Quantize,
    awq,
    bitsandbytes,
    compressed,
    fp8,
    gptq,
    integers,
)

AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt"}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
NF4 = {**BITSANDBYTES, "bnb_4bit_quant_type": "nf4"}
LAYER = "model.layers.0.mlp.down_proj"
"""A quantized module of all formats."""


def replace_part(suffix: str, value: Tensor | None) -> Callable[[dict[str, Tensor]], object]:
    """An edit of one of `LAYER`'s tensors; value: None removes it."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors.pop(f"{LAYER}.{suffix}", None)
        if value is not None:
            tensors[f"{LAYER}.{suffix}"] = value

    return edit


def _integers(
    write: Callable[[Integers, int], Mapping[str, Tensor]], bits: int, **options: Any
) -> Quantize:
    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        rounded = integers(weight, bits, **{"size": GROUP_SIZE, **options})
        return write(rounded, bits), rounded.values

    return quantize


def _whole(write: Callable[[Integers, int], Mapping[str, Tensor]], bits: int) -> Quantize:
    """One group of all inputs."""

    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        rounded = integers(weight, bits, size=weight.shape[1], symmetric=False)
        return write(rounded, bits), rounded.values

    return quantize


def compression(kind: str, **arguments: Any) -> tuple[dict[str, Any], Quantize]:
    """A format of compressed-tensors; arguments: of `compressed`."""
    weights = {name: value for name, value in arguments.items() if name != "scale_dtype"}
    weights.setdefault("num_bits", 8)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    settings = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return settings, lambda _, weight: compressed(weight, kind, **arguments)


def _fp8_blocks(rows: int, columns: int) -> tuple[dict[str, Any], Quantize]:
    """Dequantized by compressed-tensors."""

    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer

        grid = [-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)]
        stored, dense = fp8(weight, (rows, columns), "weight_scale_inv", grid)
        reference = FP8BlockDequantizer(weight_block_size=(rows, columns), dtype=torch.float32)
        named = {f"{module}.{suffix}": part for suffix, part in stored.items()}
        torch.testing.assert_close(reference.process(named)[f"{module}.weight"], dense)
        return stored, dense

    return {**FP8, "weight_block_size": [rows, columns]}, quantize


FORMATS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "awq": (AWQ, _integers(awq, 4, symmetric=False)),
    "awq symmetric": ({**AWQ, "zero_point": False}, _integers(awq, 4, symmetric=True)),
    "awq, one group": ({**AWQ, "group_size": -1}, _whole(awq, 4)),
    "gptq 4": (GPTQ, _integers(gptq, 4, symmetric=False)),
    "gptq 4 symmetric": (GPTQ, _integers(gptq, 4, symmetric=True)),
    "gptq 8": ({**GPTQ, "bits": 8}, _integers(gptq, 8, symmetric=False)),
    "gptq 8 symmetric": ({**GPTQ, "bits": 8}, _integers(gptq, 8, symmetric=True)),
    "gptq, one group": ({**GPTQ, "group_size": -1}, _whole(gptq, 4)),
    "gptq_v2 4": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        _integers(partial(gptq, version=2), 4, symmetric=False),
    ),
    "gptq_v2 8": (
        {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
        _integers(partial(gptq, version=2), 8, symmetric=False),
    ),
    "gptq with ordered groups": (
        {**GPTQ, "desc_act": True},
        _integers(gptq, 4, symmetric=False, shuffled=True),
    ),
    "gptq with ordered symmetric groups of 8 bits": (
        {**GPTQ, "bits": 8, "desc_act": True},
        _integers(gptq, 8, symmetric=True, shuffled=True),
    ),
    "pack-quantized 4": compression("pack-quantized", num_bits=4, group_size=32),
    "pack-quantized 4 with zero points": compression(
        "pack-quantized", num_bits=4, group_size=32, symmetric=False
    ),
    "pack-quantized 4 with scales in bfloat16": compression(
        "pack-quantized", num_bits=4, group_size=32, scale_dtype=torch.bfloat16
    ),
    "pack-quantized 4 of outputs": compression(
        "pack-quantized", num_bits=4, group_size=-1, symmetric=False
    ),
    "pack-quantized 4 of tensors with zero points": compression(
        "pack-quantized", num_bits=4, strategy="tensor", symmetric=False
    ),
    "pack-quantized 8": compression("pack-quantized", num_bits=8, group_size=32),
    "pack-quantized 8 with zero points": compression(
        "pack-quantized", num_bits=8, group_size=16, symmetric=False
    ),
    "pack-quantized 8 of tensors": compression("pack-quantized", num_bits=8),
    "int-quantized of outputs": compression("int-quantized", strategy="channel"),
    "int-quantized of outputs with zero points": compression(
        "int-quantized", strategy="channel", symmetric=False
    ),
    "int-quantized of groups": compression("int-quantized", group_size=16),
    "int-quantized of tensors": compression("int-quantized", strategy="tensor"),
    "naive-quantized": compression("naive-quantized", strategy="channel"),
    "float-quantized of tensors": compression("float-quantized", type="float", strategy="tensor"),
    "float-quantized of outputs": compression("float-quantized", type="float", strategy="channel"),
    "float-quantized of groups": compression("float-quantized", type="float", group_size=16),
    "float-quantized of blocks": compression(
        "float-quantized", type="float", strategy="block", block_structure=[32, 48]
    ),
    "naive-quantized floats": compression("naive-quantized", type="float", strategy="channel"),
    "fp8 of tensors": (
        FP8,
        lambda _, weight: fp8(weight, tuple(weight.shape), "weight_scale", []),
    ),
    "fp8 of outputs": (
        FP8,
        lambda _, weight: fp8(weight, (1, weight.shape[1]), "weight_scale", [-1, 1]),
    ),
    "fp8 of blocks of 128": _fp8_blocks(128, 128),
    "fp8 of smaller blocks": _fp8_blocks(32, 40),
    "modelopt fp8 of tensors": (
        {**MODELOPT, "quant_algo": "FP8"},
        lambda _, weight: fp8(weight, tuple(weight.shape), "weight_scale", []),
    ),
    "modelopt fp8 of outputs": (
        {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        lambda _, weight: fp8(weight, (1, weight.shape[1]), "weight_scale", [-1]),
    ),
    "modelopt fp8 of blocks": (
        {**MODELOPT, "quant_algo": "fp8_pb_wo"},
        lambda _, weight: fp8(
            weight, (128, 128), "weight_scale", [-(-weight.shape[0] // 128), 1, -1, 1]
        ),
    ),
    **{
        f"{kind}{' with scales that are codes' if nested else ''}": (
            {**BITSANDBYTES, "bnb_4bit_quant_type": kind},
            lambda _, weight, nested=nested, kind=kind: bitsandbytes(
                weight, nested=nested, kind=kind
            ),
        )
        for kind in ("nf4", "fp4")
        for nested in (False, True)
    },
}
"""By name: `quantization_config`, and how weights are stored."""

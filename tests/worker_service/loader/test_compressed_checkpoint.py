"""What only compressed-tensors stores: shapes, words that are not full, targets, zero points."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.loading import assert_same, edit_tensors, load
from tests.support.quantized_checkpoints import FORMATS, LAYER, compression, replace_part
from tests.support.quantized_files import (
    GROUP_SIZE,
    awq,
    compressed,
    integers,
    make_quantized,
    pack,
)
from worker_service.errors import BadCheckpoint


def test_words_that_are_not_full_and_groups_of_targets(tmp_path: Path) -> None:
    """100 codes of 4 bits do not fill whole words. The first group of settings holds for no module
    that another one names."""
    all_of = {"num_bits": 8, "group_size": None}
    outputs = {"num_bits": 4, "group_size": -1, "symmetric": False}
    floats = {"num_bits": 8, "type": "float", "strategy": "channel"}

    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        if "mlp" in module:
            return compressed(weight, "pack-quantized", **outputs)
        if module == "model.layers.0.self_attn.q_proj":
            stored, dense = compressed(weight, "float-quantized", **floats)
            return {**stored, "input_scale": torch.tensor([0.5])}, dense
        return compressed(weight, "pack-quantized", **all_of)

    activations = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "all": {"targets": ["Linear"], "weights": all_of, "format": "pack-quantized"},
            "mlp": {"targets": [r"re:.*\.mlp\."], "weights": outputs, "format": "pack-quantized"},
            "one": {
                "targets": ["model.layers.0.self_attn.q_proj"],
                "weights": floats,
                "input_activations": activations,
                "format": "float-quantized",
            },
        },
    }
    assert_same(*make_quantized(tmp_path, settings, quantize, intermediate_size=100))


def test_targets_may_be_names_inside_a_multimodal_model(tmp_path: Path) -> None:
    """As the checkpoint stores them, not as the text model alone is named."""
    four, eight = {"num_bits": 4, "group_size": 32}, {"num_bits": 8, "group_size": 32}

    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        return compressed(weight, "pack-quantized", **(eight if "mlp" in module else four))

    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "attention": {"targets": ["Linear"], "weights": four},
            "mlp": {"targets": [r"re:model\.language_model\..*\.mlp\."], "weights": eight},
        },
    }
    path, reference = make_quantized(tmp_path, settings, quantize, intermediate_size=128)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)

    edit_tensors(path, rename)
    assert_same(path, reference)


def test_older_forms_of_compressed_tensors_are_read(tmp_path: Path) -> None:
    """Zero points of a byte each, and groups in the order of activations."""

    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        rounded = integers(weight, 4, symmetric=False, shuffled="mlp" in module)
        parts = {
            "weight_packed": pack(rounded.codes, 4),
            "weight_scale": torch.from_numpy(rounded.scales),
            "weight_zero_point": torch.from_numpy(rounded.zeros - 8).char(),
            "weight_shape": torch.tensor(weight.shape),
            "weight_g_idx": torch.from_numpy(rounded.groups),
        }
        return parts, rounded.values

    settings, _ = compression("pack-quantized", num_bits=4, group_size=32, symmetric=False)
    assert_same(*make_quantized(tmp_path, settings, quantize))


@pytest.mark.parametrize("shape", [7, [7], [64, 0], [64, -128], [64, 1 << 62], [64, 64], [1, 1, 1]])
def test_the_stored_shape_of_packed_weights_is_checked(shape: Any, tmp_path: Path) -> None:
    settings, quantize = FORMATS["pack-quantized 4"]
    path, _ = make_quantized(tmp_path, settings, quantize)
    edit_tensors(path, replace_part("weight_shape", torch.tensor(shape)))
    with pytest.raises(BadCheckpoint, match=rf"model\.safetensors: {LAYER}\.weight_"):
        load(path)


def test_awq_is_dequantized_as_compressed_tensors_does() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    rounded = integers(torch.randn(48, 96), 4, symmetric=False)
    parts = {
        f"m.{suffix}": part.float() if suffix == "scales" else part
        for suffix, part in awq(rounded, 4).items()
    }
    converted = AutoAWQConverter(group_size=GROUP_SIZE).process(parts)
    weights = QuantizationArgs(num_bits=4, group_size=GROUP_SIZE, symmetric=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    local = {name.removeprefix("m."): part.contiguous() for name, part in converted.items()}
    assert compressor.decompress(local, scheme)["weight"].equal(rounded.values)

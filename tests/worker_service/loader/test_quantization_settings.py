"""`quantization_config` is read wherever tools wrote it; what is unknown is refused by name."""

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.loading import assert_same, edit_config, load
from tests.support.quantized_checkpoints import AWQ, FORMATS, FP8, GPTQ, MODELOPT, NF4, compression
from tests.support.quantized_files import make_quantized
from worker_service.errors import UnsupportedModel
from worker_service.loader.quantized.schemes import read_schemes


@pytest.fixture
def path(gptq_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint of GPTQ to change."""
    return Path(shutil.copytree(gptq_checkpoint, tmp_path / "changed"))


KNOWN = "expected awq or gptq or compressed-tensors or fp8 or modelopt or mxfp4 or bitsandbytes"

PACKED = FORMATS["pack-quantized 4"][0]

GROUP = PACKED["config_groups"]["group_0"]

INT8 = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}


def _group(**changes: Any) -> dict[str, Any]:
    return {**PACKED, "config_groups": {"g": {**GROUP, **changes}}}


def _weights(**changes: Any) -> dict[str, Any]:
    return _group(weights={**GROUP["weights"], **changes})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], r"expected an object, got \[\]"),
        ({}, f"quant_method: {KNOWN}.*, got None"),
        ({"quant_method": "hqq"}, f"quant_method: {KNOWN}.*, got 'hqq'"),
        ({"quant_method": ["awq"]}, f"quant_method: {KNOWN}.*"),
        ({**AWQ, "version": "gemv"}, "version: expected gemm, got 'gemv'"),
        ({**AWQ, "bits": 8}, "bits: expected 4, got 8"),
        ({**AWQ, "group_size": 0}, "group_size: expected a positive number, or -1 .*, got 0"),
        ({**GPTQ, "bits": 3}, "bits: expected 4 or 8, got 3"),
        ({**GPTQ, "bits": True}, "bits: expected 4 or 8, got True"),
        ({**GPTQ, "bits": None}, "bits: expected 4 or 8, got None"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format: expected gptq or gptq_v2"),
        ({**GPTQ, "group_size": "128"}, "group_size: expected a positive number"),
        ({**GPTQ, "dynamic": ["a"]}, r"dynamic: expected an object, got \['a'\]"),
        ({**GPTQ, "dynamic": {"a": {"bits": 5}}}, r"dynamic\.a\.bits: expected 4 or 8, got 5"),
        ({**GPTQ, "dynamic": {"(": {}}}, r"expected a regular expression, got '\('"),
        ({**PACKED, "format": "marlin-24"}, "format: expected pack-quantized or int-quantized or"),
        ({**PACKED, "format": None}, "format: expected pack-quantized .*, got None"),
        (_group(format="nvfp4-pack-quantized"), r"config_groups\.g\.format: expected pack"),
        (_group(format="float-quantized"), r"g\.weights\.type: expected float, got 'int'"),
        (_group(input_activations=INT8), r"g\.input_activations: expected none: activations are"),
        (_group(output_activations=INT8), r"g\.output_activations: expected none"),
        (_group(targets=["re:("]), r"expected a regular expression, got '\('"),
        (_group(weights=[4]), r"g\.weights: expected an object, got \[4\]"),
        (_weights(num_bits=3), r"weights\.num_bits: expected 4 or 8, got 3"),
        (_weights(type="float"), r"weights\.type: expected int, got 'float'"),
        (_weights(strategy="block"), r"strategy: expected tensor or channel or group, got 'block'"),
        (_weights(strategy="group", group_size=None), r"group_size: expected a positive number"),
        (_weights(symmetric="no"), r"symmetric: expected True or False, got 'no'"),
        ({**PACKED, "config_groups": {"W4A16": ["Linear"]}}, "W4A16: expected an object"),
        ({**PACKED, "transform_config": {"config_groups": {"r": 1}}}, "transforms are not applied"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "format: expected dense"),
        ({**FP8, "fmt": "e5m2"}, "fmt: expected e4m3, got 'e5m2'"),
        ({**FP8, "weight_block_size": [128, 0]}, "weight_block_size: expected two positive"),
        ({**FP8, "weight_block_size": 128}, "weight_block_size: expected two positive"),
        ({**NF4, "load_in_4bit": False}, "load_in_4bit: expected True, got False"),
        ({**NF4, "bnb_4bit_quant_type": "af4"}, "quant_type: expected nf4 or fp4, got 'af4'"),
        ({**NF4, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage: expected uint8"),
    ],
)
def test_unknown_settings_are_refused_with_what_is_known(
    settings: Any, message: str, path: Path
) -> None:
    edit_config(path, quantization_config=settings)
    with pytest.raises(UnsupportedModel, match=rf"config\.json: quantization_config.*{message}"):
        load(path)


def test_settings_are_found_where_older_tools_wrote_them(tmp_path: Path) -> None:
    """compressed-tensors under another key of config.json, ModelOpt in a file of its own."""
    settings, quantize = FORMATS["pack-quantized 4"]
    path, reference = make_quantized(tmp_path / "compressed", settings, quantize)
    _move_settings(path, "config.json", lambda rest: {**rest, "compression_config": settings})
    assert_same(path, reference)

    settings, quantize = FORMATS["modelopt fp8 of tensors"]
    path, reference = make_quantized(tmp_path / "modelopt", settings, quantize)
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["a*"]}
    _move_settings(path, "hf_quant_config.json", lambda _: {"quantization": quantization})
    assert_same(path, reference)
    quantization["quant_algo"] = "NVFP4"
    _move_settings(path, "hf_quant_config.json", lambda _: {"quantization": quantization})
    with pytest.raises(
        UnsupportedModel,
        match=r"hf_quant_config\.json\.quantization\.quant_algo: expected fp8 or .*, got 'nvfp4'",
    ):
        load(path)


def _move_settings(
    path: Path, file: str, content: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """content: of the file, given config.json without settings."""
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    (path / "config.json").write_text(json.dumps(config))
    (path / file).write_text(json.dumps(content(config)))


def test_a_checkpoint_of_modelopt_may_quantize_the_kv_cache_alone(tmp_path: Path) -> None:
    settings = {**MODELOPT, "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    paths = make_quantized(tmp_path, settings, lambda _, weight: ({"weight": weight}, weight))
    assert_same(*paths)


JUNK: tuple[Any, ...] = (
    *(None, 0, -1, 3, 1 << 70, 1.5, math.nan, True, "", "x", "re:(", "("),
    *([], [1], ["x", 2], [[]], [-1, -1], [1 << 70, 1 << 70], {}, {"a": 1}, {"a": {}}),
)

RARE = ("dynamic", "transform_config", "sparsity_config", "kv_cache_scheme", "version")


def _fields(values: Any, *outer: str) -> Iterator[tuple[str, ...]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield (*outer, key)
            yield from _fields(value, *outer, key)


W8A8 = compression("int-quantized", strategy="channel")[0]

W8A8["config_groups"]["group_0"]["input_activations"] = INT8


@pytest.mark.parametrize(
    "known",
    [*(settings for settings, _ in FORMATS.values()), W8A8],
    ids=[*FORMATS, "int-quantized with activations"],
)
def test_no_setting_causes_another_error(known: dict[str, Any]) -> None:
    settings = {**dict.fromkeys(RARE), **known}
    for *outer, key in _fields(settings):
        for junk in JUNK:
            changed = copy.deepcopy(settings)
            inner = changed
            for part in outer:
                inner = inner[part]
            inner[key] = junk
            with suppress(UnsupportedModel):  # nothing else may be raised
                read_schemes(Path("config.json"), {"quantization_config": changed})

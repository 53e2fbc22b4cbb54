"""Quantized checkpoints compute as transformers do with the dequantized weights."""

import copy
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire_kernels.cpu.linear import NativeWeight
from tests.support.paged_driver import PagedDriver
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
    make_quantized,
    pack,
)
from tests.support.transformers_oracle import Oracle
from tests.worker_service.loader.test_sharded_loading import empty_model, layouts
from worker_service.config import ModelConfig
from worker_service.distributed.layout import Layout
from worker_service.errors import BadCheckpoint, UnsupportedModel, WorkerError
from worker_service.loader import LoadedModel, load_model
from worker_service.loader.model_files import read_config
from worker_service.loader.quantized_checkpoint import (
    QuantizedTensors,
    describe,
    find_weights,
    read_schemes,
)
from worker_service.loader.weights import load_weights, open_checkpoint
from worker_service.models.linear import Linear

DATA = Path(__file__).parent / "data"
TOKENS = list(range(3, 30))
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE}

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt"}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
NF4 = {**BITSANDBYTES, "bnb_4bit_quant_type": "nf4"}


def _load(path: Path) -> LoadedModel:
    return load_model(ModelConfig(model=str(path), device="cpu", dtype="float32"))


def _assert_same(path: Path, reference: Path) -> None:
    """Logits within rounding, and the same greedy tokens."""
    loaded, oracle = _load(path), Oracle(reference)
    driver = PagedDriver(loaded.model)
    tokens = TOKENS + oracle.generate(TOKENS, 12)
    found, expected = driver.run([(0, 0, tokens)])[0], oracle.logits(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()) + 1e-4)
    assert found.argmax(1)[len(TOKENS) - 1 : -1].tolist() == tokens[len(TOKENS) :]


def _assert_expressed(path: Path, reference: Path) -> None:
    """Every quantized weight is dequantized as in the reference, and given without rounding."""
    checkpoint = open_checkpoint(path, read_schemes(path / "config.json", read_config(path)))
    dense = load_file(reference / "model.safetensors")
    assert checkpoint.file_of.keys() == dense.keys()
    for file in checkpoint.files:
        with checkpoint.open(file) as tensors:
            assert set(tensors.keys()) == dense.keys()
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                torch.testing.assert_close(tensors.get_tensor(name), dense[name])
                weight = tensors.get_quantized(name)
                assert (weight is not None) == (name in checkpoint.quantized), name
                if weight is not None:
                    torch.testing.assert_close(weight.dequantize(), dense[name])


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


def _compressed(kind: str, **arguments: Any) -> tuple[dict[str, Any], Quantize]:
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
    "pack-quantized 4": _compressed("pack-quantized", num_bits=4, group_size=32),
    "pack-quantized 4 with zero points": _compressed(
        "pack-quantized", num_bits=4, group_size=32, symmetric=False
    ),
    "pack-quantized 4 with scales in bfloat16": _compressed(
        "pack-quantized", num_bits=4, group_size=32, scale_dtype=torch.bfloat16
    ),
    "pack-quantized 4 of outputs": _compressed(
        "pack-quantized", num_bits=4, group_size=-1, symmetric=False
    ),
    "pack-quantized 8": _compressed("pack-quantized", num_bits=8, group_size=32),
    "pack-quantized 8 with zero points": _compressed(
        "pack-quantized", num_bits=8, group_size=16, symmetric=False
    ),
    "pack-quantized 8 of tensors": _compressed("pack-quantized", num_bits=8),
    "int-quantized of outputs": _compressed("int-quantized", strategy="channel"),
    "int-quantized of outputs with zero points": _compressed(
        "int-quantized", strategy="channel", symmetric=False
    ),
    "int-quantized of groups": _compressed("int-quantized", group_size=16),
    "int-quantized of tensors": _compressed("int-quantized", strategy="tensor"),
    "naive-quantized": _compressed("naive-quantized", strategy="channel"),
    "float-quantized of tensors": _compressed("float-quantized", type="float", strategy="tensor"),
    "float-quantized of outputs": _compressed("float-quantized", type="float", strategy="channel"),
    "float-quantized of groups": _compressed("float-quantized", type="float", group_size=16),
    "float-quantized of blocks": _compressed(
        "float-quantized", type="float", strategy="block", block_structure=[32, 48]
    ),
    "naive-quantized floats": _compressed("naive-quantized", type="float", strategy="channel"),
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


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_computes_as_its_dequantized_weights(name: str, tmp_path: Path) -> None:
    settings, quantize = FORMATS[name]
    paths = make_quantized(tmp_path, settings, quantize)
    _assert_expressed(*paths)
    _assert_same(*paths)


@pytest.mark.parametrize("name", ["awq, one group", "int-quantized of outputs", "fp8 of outputs"])
def test_scales_may_lack_dimensions_of_size_one(name: str, tmp_path: Path) -> None:
    settings, quantize = FORMATS[name]
    paths = make_quantized(tmp_path, settings, quantize)

    def flatten(tensors: dict[str, Tensor]) -> None:
        for part, tensor in tensors.items():
            tensors[part] = tensor.squeeze() if "scale" in part else tensor

    _edit_tensors(paths[0], flatten)
    _assert_expressed(*paths)


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
    _assert_same(*make_quantized(tmp_path, settings, quantize, intermediate_size=100))


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

    settings, _ = _compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False)
    _assert_same(*make_quantized(tmp_path, settings, quantize))


def test_scales_that_are_powers_of_two_may_be_exponents(tmp_path: Path) -> None:
    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        scales = torch.full((-(-weight.shape[0] // 32), weight.shape[1] // 32), 2.0**-6)
        codes = (weight * 64).to(torch.float8_e4m3fn)
        parts = {"weight": codes, "weight_scale_inv": scales.to(torch.float8_e8m0fnu)}
        return parts, codes.float() / 64

    settings = {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    _assert_same(*make_quantized(tmp_path, settings, quantize))


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


@pytest.mark.parametrize("name", ["plain", "nested"])
def test_nf4_is_dequantized_as_bitsandbytes_does(name: str) -> None:
    """The file has weights that bitsandbytes 0.50.2 quantized on a CPU, and dequantized."""
    file = DATA / "bitsandbytes.safetensors"
    schemes = read_schemes(file, {"quantization_config": NF4})
    with safe_open(file, framework="pt") as opened:
        weights = find_weights(schemes, {tensor.name: tensor for tensor in describe(file, opened)})
        tensors = QuantizedTensors(file, opened, weights, safe_open)
        assert tensors.get_tensor(f"{name}.weight").equal(tensors.get_tensor(f"expected.{name}"))


def test_scales_of_the_kv_cache_stay_as_they_are(tmp_path: Path) -> None:
    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        stored, dense = fp8(weight, (1, weight.shape[1]), "weight_scale", [-1, 1])
        name = module.rpartition(".")[2]
        more = {"k_proj": "k_scale", "v_proj": "v_scale"}.get(name)
        return {**stored, **({more: torch.tensor(0.5)} if more else {})}, dense

    for scheme in (None, "static"):
        (tmp_path / str(scheme)).mkdir()
        settings = {**FP8, "kv_cache_scheme": scheme}
        _assert_same(*make_quantized(tmp_path / str(scheme), settings, quantize))


def test_settings_are_found_where_older_tools_wrote_them(tmp_path: Path) -> None:
    """compressed-tensors under another key of config.json, ModelOpt in a file of its own."""
    settings, quantize = FORMATS["pack-quantized 4"]
    path, reference = make_quantized(tmp_path / "compressed", settings, quantize)
    _move_settings(path, "config.json", lambda rest: {**rest, "compression_config": settings})
    _assert_same(path, reference)

    settings, quantize = FORMATS["modelopt fp8 of tensors"]
    path, reference = make_quantized(tmp_path / "modelopt", settings, quantize)
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["a*"]}
    _move_settings(path, "hf_quant_config.json", lambda _: {"quantization": quantization})
    _assert_same(path, reference)
    quantization["quant_algo"] = "NVFP4"
    _move_settings(path, "hf_quant_config.json", lambda _: {"quantization": quantization})
    with pytest.raises(
        UnsupportedModel,
        match=r"hf_quant_config\.json\.quantization\.quant_algo: expected fp8 or .*, got 'nvfp4'",
    ):
        _load(path)


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
    _assert_same(*paths)


FAMILIES = ["qwen2", "qwen3", "opt", "mixtral", "phi3", "gemma2"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["gptq 4", "fp8 of blocks of 128", "nf4"])
def test_other_families_and_models_of_transformers_read_them(
    name: str, family: str, tmp_path: Path
) -> None:
    settings, quantize = FORMATS[name]
    shape = {"ffn_dim": 128} if family == "opt" else {}
    _assert_same(*make_quantized(tmp_path, settings, quantize, family=family, **shape))


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_biases_of_zeros_may_be_there(family: str, tmp_path: Path) -> None:
    settings, quantize = FORMATS["gptq 4"]

    def with_bias(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        stored, dense = quantize(module, weight)
        return {**stored, "bias": torch.zeros(weight.shape[0])}, dense

    path, reference = make_quantized(tmp_path, settings, with_bias, family=family)
    _assert_same(path, reference)
    name = f"{LAYER}.bias"
    _edit_tensors(path, lambda tensors: tensors[name].add_(1.0))
    with pytest.raises(BadCheckpoint, match=f"unexpected tensors: {name}"):
        _load(path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings, quantize = FORMATS["gptq 4"]
    return make_quantized(tmp_path_factory.mktemp("gptq"), settings, quantize)[0]


@pytest.fixture
def path(shared: Path, tmp_path: Path) -> Path:
    """A checkpoint of GPTQ to change."""
    return Path(shutil.copytree(shared, tmp_path / "changed"))


LAYER = "model.layers.0.mlp.down_proj"


def _edit_settings(path: Path, settings: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def _edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_the_tensors_of_a_weight_may_be_in_several_files(path: Path) -> None:
    expected = PagedDriver(_load(path).model).run([(0, 0, TOKENS)])[0]
    tensors = load_file(path / "model.safetensors")
    parts = [{name: tensors[name] for name in sorted(tensors)[part::2]} for part in range(2)]
    (path / "model.safetensors").unlink()
    for part, content in enumerate(parts):
        save_file(content, path / f"model-{part}.safetensors", metadata={"format": "pt"})
    assert PagedDriver(_load(path).model).run([(0, 0, TOKENS)])[0].equal(expected)


def test_settings_of_some_modules_take_precedence(tmp_path: Path) -> None:
    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        if "layers.1.self_attn" in module:
            return {"weight": weight}, weight
        bits = 8 if "down_proj" in module else 4
        size = 64 if "up_proj" in module else GROUP_SIZE
        rounded = integers(weight, bits, size=size, symmetric=False)
        return gptq(rounded, bits), rounded.values

    dynamic = {
        r"-:model\.layers\.1\.self_attn": {},
        r"+:.*\.down_proj": {"bits": 8},
        r".*up_proj": {"group_size": 64},
    }
    _assert_same(*make_quantized(tmp_path, {**GPTQ, "dynamic": dynamic}, quantize))


ACT_ORDER = FORMATS["gptq with ordered groups"]


def _linears(
    path: Path, layout: Layout | None = None, expected: Mapping[str, int] | None = None
) -> dict[str, Linear]:
    """expected: what is dequantized, in bytes, by reason."""
    model = empty_model(path, layout or Layout())
    schemes = read_schemes(path / "config.json", read_config(path))
    load_weights(model, open_checkpoint(path, schemes), show_progress=False)
    model.finish_loading()
    assert model.dequantized == (expected or {})
    return {name: each for name, each in model.named_modules() if isinstance(each, Linear)}


def _columns(linear: Linear) -> tuple[Tensor, bool]:
    """(what a packed layer multiplies by, whether its inputs are gathered)"""
    packed = linear.packed
    assert isinstance(packed, NativeWeight)
    return packed.apply(torch.eye(packed.in_features)), packed._order is not None


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_scattered_groups_stay_packed(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, quantize = ACT_ORDER
    shape = {"moe_intermediate_size": 64}
    path, reference = make_quantized(tmp_path, settings, quantize, family=family, **shape)
    with caplog.at_level(logging.INFO):
        _assert_same(path, reference)
    assert "weights dequantized" not in caplog.text
    if family == "llama":
        assert all(_columns(linear)[1] for name, linear in _linears(path).items() if ".qkv" in name)


def test_rows_of_scattered_groups_do_not_depend_on_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers that gather their inputs are a part of recorded programs."""
    path, _ = make_quantized(tmp_path, *ACT_ORDER)
    config = ModelConfig(model=str(path), device="cpu", dtype="bfloat16")
    loaded = load_model(config)
    assert loaded.batch_invariant
    driver = PagedDriver(loaded.model)
    with caplog.at_level(logging.INFO):
        whole = driver.run([(0, 0, TOKENS)])[0]
        parts = [driver.run([(1, i, [token])])[0] for i, token in enumerate(TOKENS)]
    assert "layers run eagerly" not in caplog.text
    assert torch.cat(parts).equal(whole)


def test_ranks_keep_scattered_groups_where_they_share_no_inputs(tmp_path: Path) -> None:
    path, _ = make_quantized(tmp_path, *ACT_ORDER)
    whole = _linears(path)
    num_bytes = 4 * 2 * (64 * 48 + 64 * 64)  # of a rank's half of `output` and `down`
    dense = {"scattered groups that ranks share, or that differ in one product": num_bytes}
    ranks = [_linears(path, layout, dense) for layout in layouts(tensor=2, pipeline=1)]
    for name in ("layers.1.output", "layers.0.down"):
        halves = [_columns(rank[name]) for rank in ranks]
        expected, is_gathered = _columns(whole[name])
        assert is_gathered
        assert not any(gathered for _, gathered in halves)
        assert torch.cat([columns for columns, _ in halves]).equal(expected)
    for rank in ranks:
        assert _columns(rank["layers.1.qkv"])[1]


def test_layers_of_one_product_with_other_groups_are_dequantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        is_shuffled = not module.endswith(("k_proj", "up_proj"))
        rounded = integers(weight, 4, symmetric=False, shuffled=is_shuffled)
        return gptq(rounded, 4), rounded.values

    path, reference = make_quantized(tmp_path, ACT_ORDER[0], quantize)
    with caplog.at_level(logging.INFO):
        _assert_same(path, reference)
    num_bytes = 4 * 2 * (64 * (96 + 48 + 48) + 64 * 256)  # of `qkv` and `gate_up`
    reason = "scattered groups that ranks share, or that differ in one product"
    assert f"weights dequantized num_bytes={num_bytes} reason={reason}" in caplog.text


@pytest.mark.parametrize(
    "name", ["gptq 4", "fp8 of blocks of 128", "nf4 with scales that are codes"]
)
def test_ranks_read_their_parts_of_the_weights(name: str, tmp_path: Path) -> None:
    path, _ = make_quantized(tmp_path, *FORMATS[name])

    def weights(layout: Layout) -> dict[str, Tensor]:
        """What the packed layers multiply by, from their products with unit vectors."""
        model = empty_model(path, layout)
        schemes = read_schemes(path / "config.json", read_config(path))
        load_weights(model, open_checkpoint(path, schemes), show_progress=False)
        model.finish_loading()
        linears = {name: each for name, each in model.named_modules() if isinstance(each, Linear)}
        found = {}
        for name in ("layers.1.output", "layers.0.down"):
            packed = linears[name].packed
            assert isinstance(packed, NativeWeight)
            found[name] = packed.apply(torch.eye(packed.in_features))
        return found

    whole = weights(Layout())
    ranks = [weights(layout) for layout in layouts(tensor=2, pipeline=1)]
    for name, weight in whole.items():
        assert torch.cat([rank[name] for rank in ranks]).equal(weight)


KNOWN = "expected awq or gptq or compressed-tensors or fp8 or modelopt or bitsandbytes"
PACKED = FORMATS["pack-quantized 4"][0]
GROUP = PACKED["config_groups"]["group_0"]


def _group(**changes: Any) -> dict[str, Any]:
    return {**PACKED, "config_groups": {"g": {**GROUP, **changes}}}


def _weights(**changes: Any) -> dict[str, Any]:
    return _group(weights={**GROUP["weights"], **changes})


INT8 = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}


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
    _edit_settings(path, settings)
    with pytest.raises(UnsupportedModel, match=rf"config\.json: quantization_config.*{message}"):
        _load(path)


def _replace(suffix: str, value: Tensor | None) -> Callable[[dict[str, Tensor]], object]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors.pop(f"{LAYER}.{suffix}", None)
        if value is not None:
            tensors[f"{LAYER}.{suffix}"] = value

    return edit


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("scales", None, f"missing tensors: {LAYER}.scales"),
        ("qzeros", None, f"missing tensors: {LAYER}.qzeros"),
        ("qweight", None, "missing tensors: {LAYER}.weight; unexpected"),
        ("scales", torch.ones(3, 64).half(), r"scales is \[3, 64\], expected \[4, 64\]"),
        ("scales", torch.ones(4, 64).int(), r"scales is stored as I32, expected F16 or BF16"),
        (
            "scales",
            torch.full((4, 64), torch.nan).half(),
            "scales: expected finite numbers, got nan",
        ),
        (
            "scales",
            torch.full((4, 64), torch.inf).half(),
            "scales: expected finite numbers, got inf",
        ),
        ("qzeros", torch.ones(4, 9).int(), r"qzeros is \[4, 9\], expected \[4, 8\]"),
        ("qweight", torch.ones(16, 64), r"qweight is stored as F32, expected I32"),
        ("qweight", torch.ones(16).int(), r"qweight is \[16\], expected a matrix"),
        ("qweight", torch.ones(0, 64).int(), r"qweight is \[0, 64\], expected a matrix"),
        (
            "qweight",
            torch.ones(13, 64).int(),
            "expected a multiple of the group size 32 .*, got 104",
        ),
        ("qweight", torch.ones(16, 60).int(), "expected a multiple of 8 .*, got 60"),
        ("qweight", torch.ones(8, 64).int(), r"scales is \[4, 64\], expected \[2, 64\]"),
        ("g_idx", torch.full((128,), 4).int(), r"g_idx: expected groups 0 to 3, got 4 to 4"),
        ("g_idx", torch.full((128,), -1).int(), r"g_idx: expected groups 0 to 3, got -1 to -1"),
        ("g_idx", torch.zeros(127).int(), r"g_idx is \[127\], expected \[128\]"),
        ("weight", torch.ones(64, 128), "weight is stored both dense and quantized"),
        ("weight", torch.ones(64, 128).char(), "weight is stored as I8, which"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    suffix: str, value: Tensor | None, message: str, path: Path
) -> None:
    _edit_tensors(path, _replace(suffix, value))
    with pytest.raises(WorkerError, match=message.replace("{LAYER}", LAYER)):
        _load(path)


def test_weights_that_fit_each_other_must_fit_the_model(path: Path) -> None:
    words = {"qweight": (8, 64), "scales": (2, 64), "qzeros": (2, 8), "g_idx": (64,)}

    def edit(tensors: dict[str, Tensor]) -> None:
        for suffix, shape in words.items():
            kind = torch.float16 if suffix == "scales" else torch.int32
            tensors[f"{LAYER}.{suffix}"] = torch.zeros(shape, dtype=kind)

    _edit_tensors(path, edit)
    with pytest.raises(BadCheckpoint, match=rf"{LAYER}\.weight is \[64, 64\], expected \[64, 128"):
        _load(path)


def test_settings_without_quantized_tensors_are_refused(path: Path, shared: Path) -> None:
    dense = shared.with_name("source") / "model.safetensors"
    (path / "model.safetensors").write_bytes(dense.read_bytes())
    with pytest.raises(BadCheckpoint, match=r"no tensor is quantized: expected \*\.qweight"):
        _load(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


DAMAGED = (
    "awq",
    "gptq 8",
    "pack-quantized 4 with zero points",
    "int-quantized of outputs with zero points",
    "float-quantized of outputs",
    "fp8 of blocks of 128",
    "nf4",
    "nf4 with scales that are codes",
    "fp4",
)


@pytest.mark.parametrize(
    "damage",
    [
        lambda part: None,
        lambda part: torch.cat([part.flatten(), part.flatten()[:1]]),
        lambda part: torch.zeros(part.shape, dtype=torch.int16),
        lambda part: torch.zeros(part.shape, dtype=torch.float64),
        lambda part: (
            torch.full(part.shape, torch.nan).to(part.dtype)
            if part.is_floating_point()
            else torch.zeros(0, dtype=part.dtype)
        ),
    ],
    ids=["missing", "longer", "integers", "doubles", "not numbers, or empty"],
)
@pytest.mark.parametrize("name", DAMAGED)
def test_no_part_of_a_weight_can_be_damaged(
    name: str, damage: Callable[[Tensor], Tensor | None], folder: Path, tmp_path: Path
) -> None:
    settings, quantize = FORMATS[name]
    if not (folder / name).is_dir():
        (folder / name).mkdir()
        make_quantized(folder / name, settings, quantize)
    source = folder / name / "quantized"
    parts = [part for part in load_file(source / "model.safetensors") if LAYER in part]
    assert len(parts) > 1
    for part in parts:
        if part.endswith("g_idx") and damage(torch.zeros(1)) is None:
            continue  # groups are consecutive without it
        path = shutil.copytree(source, tmp_path / part)
        tensors = load_file(path / "model.safetensors")
        damaged = damage(tensors.pop(part))
        if damaged is not None:
            tensors[part] = damaged
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(WorkerError, match=LAYER):
            _load(path)


@pytest.mark.parametrize("shape", [7, [7], [64, 0], [64, -128], [64, 1 << 62], [64, 64], [1, 1, 1]])
def test_the_stored_shape_of_packed_weights_is_checked(shape: Any, tmp_path: Path) -> None:
    settings, quantize = FORMATS["pack-quantized 4"]
    path, _ = make_quantized(tmp_path, settings, quantize)
    _edit_tensors(path, _replace("weight_shape", torch.tensor(shape)))
    with pytest.raises(BadCheckpoint, match=rf"model\.safetensors: {LAYER}\.weight_"):
        _load(path)


STATE = {"shape": [64, 128], "blocksize": 64, "nested_blocksize": 5, "nested_offset": 0.0}


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        *(
            json.dumps({**STATE, **changes}).encode()
            for changes in (
                {"shape": [64]},
                {"shape": [64, -128]},
                {"shape": [64, math.inf]},
                {"shape": None},
                {"shape": [64, 64]},
                {"blocksize": 0},
                {"blocksize": 32},
                {"blocksize": 1 << 60},
                {"blocksize": "a"},
                {"nested_blocksize": 0},
                {"nested_blocksize": 1 << 60},
                {"nested_offset": None},
                {"nested_offset": math.nan},
            )
        ),
    ],
)
def test_the_state_of_nf4_is_checked(state: bytes, tmp_path: Path) -> None:
    settings, quantize = FORMATS["nf4 with scales that are codes"]
    path, _ = make_quantized(tmp_path, settings, quantize)
    value = torch.tensor(list(state), dtype=torch.uint8)
    _edit_tensors(path, _replace("weight.quant_state.bitsandbytes__nf4", value))
    with pytest.raises(BadCheckpoint, match=rf"model\.safetensors: {LAYER}\.weight"):
        _load(path)


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


W8A8 = _compressed("int-quantized", strategy="channel")[0]
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

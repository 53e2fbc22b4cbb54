"""Quantized checkpoints compute as transformers do with the dequantised weights."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.paged_driver import PagedDriver
from tests.support.quantized_files import (
    GROUP_SIZE,
    Integers,
    Quantize,
    awq,
    gptq,
    integers,
    make_quantized,
)
from tests.support.transformers_oracle import Oracle
from tests.worker_service.loader.test_sharded_loading import empty_model, layouts
from worker_service.config import ModelConfig
from worker_service.distributed.layout import Layout
from worker_service.errors import BadCheckpoint, UnsupportedModel, WorkerError
from worker_service.loader import LoadedModel, load_model
from worker_service.loader.model_files import read_config
from worker_service.loader.quantized_checkpoint import read_schemes
from worker_service.loader.weights import load_weights, open_checkpoint

TOKENS = list(range(3, 30))
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE}


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


def _assert_expressed(path: Path, reference: Path, *, expressed: bool) -> None:
    """Every quantized weight is dequantised as in the reference, and given without rounding."""
    checkpoint = open_checkpoint(path, read_schemes(path / "config.json", read_config(path)))
    dense = load_file(reference / "model.safetensors")
    assert checkpoint.file_of.keys() == dense.keys()
    for file in checkpoint.files:
        with checkpoint.open(file) as tensors:
            assert set(tensors.keys()) == dense.keys()
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                torch.testing.assert_close(tensors.get_tensor(name), dense[name])
                weight = tensors.get_quantized(name)
                assert (weight is not None) == (expressed and name in checkpoint.quantized), name
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


FORMATS: dict[str, tuple[dict[str, Any], Quantize, bool]] = {
    "awq": (AWQ, _integers(awq, 4, symmetric=False), True),
    "awq symmetric": ({**AWQ, "zero_point": False}, _integers(awq, 4, symmetric=True), True),
    "awq, one group": ({**AWQ, "group_size": -1}, _whole(awq, 4), True),
    "gptq 4": (GPTQ, _integers(gptq, 4, symmetric=False), True),
    "gptq 4 symmetric": (GPTQ, _integers(gptq, 4, symmetric=True), True),
    "gptq 8": ({**GPTQ, "bits": 8}, _integers(gptq, 8, symmetric=False), True),
    "gptq 8 symmetric": ({**GPTQ, "bits": 8}, _integers(gptq, 8, symmetric=True), True),
    "gptq, one group": ({**GPTQ, "group_size": -1}, _whole(gptq, 4), True),
    "gptq_v2 4": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        _integers(partial(gptq, version=2), 4, symmetric=False),
        True,
    ),
    "gptq_v2 8": (
        {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
        _integers(partial(gptq, version=2), 8, symmetric=False),
        True,
    ),
    "gptq with ordered groups": (
        {**GPTQ, "desc_act": True},
        _integers(gptq, 4, symmetric=False, shuffled=True),
        False,
    ),
    "gptq with ordered symmetric groups of 8 bits": (
        {**GPTQ, "bits": 8, "desc_act": True},
        _integers(gptq, 8, symmetric=True, shuffled=True),
        False,
    ),
}
"""By name: `quantization_config`, how weights are stored, and whether they have an exact form."""


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_computes_as_its_dequantised_weights(name: str, tmp_path: Path) -> None:
    settings, quantize, expressed = FORMATS[name]
    paths = make_quantized(tmp_path, settings, quantize)
    _assert_expressed(*paths, expressed=expressed)
    _assert_same(*paths)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mixtral", "phi3", "gemma2"])
def test_other_families_and_models_of_transformers_read_them(family: str, tmp_path: Path) -> None:
    settings, quantize, _ = FORMATS["gptq 4"]
    _assert_same(*make_quantized(tmp_path, settings, quantize, family=family))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings, quantize, _ = FORMATS["gptq 4"]
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


def test_ranks_read_their_parts_of_the_dequantised_weights(path: Path) -> None:
    def filled(layout: Layout) -> dict[str, Tensor]:
        model = empty_model(path, layout)
        schemes = read_schemes(path / "config.json", read_config(path))
        load_weights(model, open_checkpoint(path, schemes), show_progress=False)
        return {weight.name: weight.target for weight in model.weight_targets()}

    whole = filled(Layout())
    ranks = [filled(layout) for layout in layouts(tensor=2, pipeline=1)]
    for name, axis in ((f"{LAYER}.weight", 1), ("model.layers.1.self_attn.q_proj.weight", 0)):
        assert torch.cat([rank[name] for rank in ranks], axis).equal(whole[name])


KNOWN = "expected awq or gptq"


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
        ({**GPTQ, "dynamic": {"(": {}}}, r"'\(' is no regular expression"),
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
        ("scales", torch.full((4, 64), torch.nan).half(), "scales: expected finite numbers only"),
        ("scales", torch.full((4, 64), torch.inf).half(), "scales: expected finite numbers only"),
        ("qzeros", torch.ones(4, 9).int(), r"qzeros is \[4, 9\], expected \[4, 8\]"),
        ("qweight", torch.ones(16, 64), r"qweight is stored as F32, expected I32"),
        ("qweight", torch.ones(16).int(), r"qweight is \[16\], expected a matrix"),
        ("qweight", torch.ones(0, 64).int(), r"qweight is \[0, 64\], expected a matrix"),
        ("qweight", torch.ones(13, 64).int(), "has 104 inputs, which are not whole groups of 32"),
        ("qweight", torch.ones(16, 60).int(), "has 60 outputs, whose zero points do not fill"),
        ("qweight", torch.ones(8, 64).int(), r"scales is \[4, 64\], expected \[2, 64\]"),
        ("g_idx", torch.full((128,), 4).int(), r"g_idx: expected groups 0 to 3"),
        ("g_idx", torch.full((128,), -1).int(), r"g_idx: expected groups 0 to 3"),
        ("g_idx", torch.zeros(127).int(), r"g_idx is \[127\], expected \[128\]"),
        ("weight", torch.ones(64, 128), "weight is there twice: dense, and quantized"),
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

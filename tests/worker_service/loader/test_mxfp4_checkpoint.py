"""gpt-oss with experts in MXFP4, as it is published."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pagewire_kernels.cpu import library
from pagewire_kernels.cpu.experts import NativeExperts
from tests.support.checkpoints import make_checkpoint
from tests.support.loading import assert_same, edit_tensors, load
from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.loader.files.config import read_config
from worker_service.loader.quantized.schemes import read_schemes
from worker_service.loader.weights.checkpoint import open_checkpoint
from worker_service.models.feed_forward.experts import ExpertWeights

EXPERTS = "model.layers.1.mlp.experts"
BLOCKS, SCALES = f"{EXPERTS}.gate_up_proj_blocks", f"{EXPERTS}.gate_up_proj_scales"


def _dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """By the library: [num_experts, in_features, out_features], in float32."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and one with the same weights in float32."""
    dense = make_checkpoint("gpt_oss", tmp_path / "dense", intermediate_size=96)
    stored = load_file(dense / "model.safetensors")
    path = Path(shutil.copytree(dense, tmp_path / "mxfp4"))
    generator = torch.Generator().manual_seed(0)
    quantized, rounded = dict(stored), dict(stored)
    for name, tensor in stored.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        num_experts, num_inputs, num_outputs = tensor.shape
        shape = (num_experts, num_outputs, num_inputs // 32)
        scales = torch.randint(120, 125, shape, generator=generator).to(torch.uint8)
        blocks = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
        del quantized[name]
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        rounded[name] = _dequantized(blocks, scales)
    edit_tensors(dense, lambda tensors: tensors.update(rounded))
    edit_tensors(path, lambda tensors: (tensors.clear(), tensors.update(quantized)))
    config = json.loads((path / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return path, dense


def test_experts_stay_packed(paths: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    path, dense = paths
    with caplog.at_level(logging.INFO):
        loaded = load(path)
    if library() is not None:
        assert "weights dequantized" not in caplog.text
        packed = [m._packed for m in loaded.model.modules() if isinstance(m, ExpertWeights)]
        assert len(packed) == 2
        for experts in packed:
            assert isinstance(experts, NativeExperts)
            assert {experts._gate_up[0].suffix, experts._down[0].suffix} == {"_float4"}
    assert_same(loaded, dense)


def test_weights_are_those_of_transformers(paths: tuple[Path, Path]) -> None:
    path, dense = paths
    checkpoint = open_checkpoint(path, read_schemes(path / "config.json", read_config(path)))
    stored = load_file(dense / "model.safetensors")
    for part in ("gate_up_proj", "down_proj"):
        for i, weight in enumerate(stored[f"{EXPERTS}.{part}"].mT):
            assert torch.equal(checkpoint.tensors[f"{EXPERTS}.{i}.{part}.weight"][...], weight)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(SCALES), rf"missing tensors: {re.escape(EXPERTS)}\.0\.gate_up_proj"),
        (lambda t: t.update({BLOCKS: t[BLOCKS].flatten(2)}), "expected 4 dimensions"),
        (lambda t: t.update({SCALES: t[SCALES][:, :, :1].clone()}), r"scales is \[192, 1\], expe"),
        (lambda t: t.update({SCALES: t[SCALES].float()}), "stored as F32, expected U8"),
        (lambda t: t[SCALES].fill_(255), "scales: expected numbers, got NaN"),
    ],
    ids=["missing", "dimensions", "shape", "dtype", "NaN"],
)
def test_faults_are_named(
    paths: tuple[Path, Path], edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    path, _ = paths
    edit_tensors(path, edit)
    with pytest.raises(BadCheckpoint, match=message):
        load(path)


def test_settings_that_the_weights_contradict_are_refused(paths: tuple[Path, Path]) -> None:
    path, dense = paths
    config = json.loads((path / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match="no tensor is quantized"):
        load(dense)
    config["quantization_config"]["quant_method"] = "mxfp8"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"quant_method: expected .*mxfp4"):
        load(path)

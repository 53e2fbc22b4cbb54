"""Checkpoints of all formats compute as transformers do with the dequantized weights."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire_kernels.cpu.linear import NativeWeight
from tests.support.loading import assert_same, edit_tensors, layouts, linears, load, open_weights
from tests.support.quantized_checkpoints import FORMATS, LAYER
from tests.support.quantized_files import make_quantized
from worker_service.distributed.layout import Layout
from worker_service.errors import BadCheckpoint, WorkerError


def _assert_expressed(path: Path, reference: Path) -> None:
    """Every quantized weight is dequantized as in the reference, and given without rounding."""
    checkpoint = open_weights(path)
    dense = load_file(reference / "model.safetensors")
    assert checkpoint.tensors.keys() == dense.keys()
    for name, tensor in checkpoint.tensors.items():
        torch.testing.assert_close(tensor[...], dense[name])
        weight = tensor.quantized()
        assert (weight is not None) == tensor.is_quantized, name
        if weight is not None:
            torch.testing.assert_close(weight.dequantize(), dense[name])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_computes_as_its_dequantized_weights(name: str, tmp_path: Path) -> None:
    settings, quantize = FORMATS[name]
    paths = make_quantized(tmp_path, settings, quantize)
    _assert_expressed(*paths)
    assert_same(*paths)


@pytest.mark.parametrize("name", ["awq, one group", "int-quantized of outputs", "fp8 of outputs"])
def test_scales_may_lack_dimensions_of_size_one(name: str, tmp_path: Path) -> None:
    settings, quantize = FORMATS[name]
    paths = make_quantized(tmp_path, settings, quantize)

    def flatten(tensors: dict[str, Tensor]) -> None:
        for part, tensor in tensors.items():
            tensors[part] = tensor.squeeze() if "scale" in part else tensor

    edit_tensors(paths[0], flatten)
    _assert_expressed(*paths)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *(("gptq 4", family) for family in ("qwen2", "opt", "mixtral", "phi3")),
        *(("fp8 of blocks of 128", family) for family in ("qwen3", "mixtral", "gemma2")),
        *(("nf4", family) for family in ("qwen2", "mixtral", "gemma2")),
        *(("fp8 of blocks of 128", family) for family in ("deepseek_v3", "longcat_flash")),
        *(("nf4", family) for family in ("deepseek_v3", "longcat_flash")),
        ("gptq 4", "youtu"),
    ],
)
def test_other_families_and_models_of_transformers_read_them(
    name: str, family: str, tmp_path: Path
) -> None:
    settings, quantize = FORMATS[name]
    shape = {"ffn_dim": 128} if family == "opt" else {}
    assert_same(*make_quantized(tmp_path, settings, quantize, family=family, **shape))


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_biases_of_zeros_may_be_there(family: str, tmp_path: Path) -> None:
    settings, quantize = FORMATS["gptq 4"]

    def with_bias(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        stored, dense = quantize(module, weight)
        return {**stored, "bias": torch.zeros(weight.shape[0])}, dense

    path, reference = make_quantized(tmp_path, settings, with_bias, family=family)
    assert_same(path, reference)
    name = f"{LAYER}.bias"
    edit_tensors(path, lambda tensors: tensors[name].add_(1.0))
    with pytest.raises(BadCheckpoint, match=f"unexpected tensors: {name}"):
        load(path)


@pytest.mark.parametrize(
    "name", ["gptq 4", "fp8 of blocks of 128", "nf4 with scales that are codes"]
)
def test_ranks_read_their_parts_of_the_weights(name: str, tmp_path: Path) -> None:
    path, _ = make_quantized(tmp_path, *FORMATS[name])

    def weights(layout: Layout) -> dict[str, Tensor]:
        """What the packed layers multiply by, from their products with unit vectors."""
        named, _ = linears(path, layout)
        found = {}
        for name in ("layers.1.attention.output", "layers.0.feed_forward.down"):
            packed = named[name].packed
            assert isinstance(packed, NativeWeight)
            found[name] = packed.apply(torch.eye(packed.in_features))
        return found

    whole = weights(Layout())
    ranks = [weights(layout) for layout in layouts(tensor=2, pipeline=1)]
    for name, weight in whole.items():
        assert torch.cat([rank[name] for rank in ranks]).equal(weight)


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
            load(path)

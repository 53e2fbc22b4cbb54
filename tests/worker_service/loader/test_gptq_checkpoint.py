"""GPTQ: groups in the order of activations, settings of modules, and tensors that do not fit."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire_kernels.cpu.linear import NativeWeight
from tests.support.loading import TOKENS, assert_same, edit_tensors, layouts, linears, load, logits
from tests.support.paged_driver import PagedDriver
from tests.support.quantized_checkpoints import FORMATS, GPTQ, LAYER
from tests.support.quantized_files import GROUP_SIZE, gptq, integers, make_quantized
from worker_service.distributed.layout import Layout
from worker_service.errors import BadCheckpoint
from worker_service.models.linear.linear import Linear


@pytest.fixture
def path(gptq_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint of GPTQ to change."""
    return Path(shutil.copytree(gptq_checkpoint, tmp_path / "changed"))


def test_the_tensors_of_a_weight_may_be_in_several_files(path: Path) -> None:
    expected = logits(load(path))
    tensors = load_file(path / "model.safetensors")
    parts = [{name: tensors[name] for name in sorted(tensors)[part::2]} for part in range(2)]
    (path / "model.safetensors").unlink()
    for part, content in enumerate(parts):
        save_file(content, path / f"model-{part}.safetensors", metadata={"format": "pt"})
    assert logits(load(path)).equal(expected)


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
    assert_same(*make_quantized(tmp_path, {**GPTQ, "dynamic": dynamic}, quantize))


def test_layers_with_the_inputs_of_a_single_word_are_read(tmp_path: Path) -> None:
    """Gemma 4's embeddings of layers, in a tiny model."""

    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        rounded = integers(weight, 4, size=8, symmetric=False)
        return gptq(rounded, 4), rounded.values

    settings = {**GPTQ, "group_size": 8}
    path, reference = make_quantized(tmp_path, settings, quantize, family="gemma4_shared")
    words = load_file(path / "model.safetensors")
    assert 1 in {len(part) for name, part in words.items() if name.endswith("qweight")}
    assert_same(path, reference)


ACT_ORDER = FORMATS["gptq with ordered groups"]


def _linears(
    path: Path, layout: Layout | None = None, expected: Mapping[str, int] | None = None
) -> dict[str, Linear]:
    """expected: what is dequantized, in bytes, by reason."""
    named, model = linears(path, layout)
    assert model.dequantized == (expected or {})
    return named


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
        assert_same(path, reference)
    assert "weights dequantized" not in caplog.text
    if family == "llama":
        assert all(_columns(linear)[1] for name, linear in _linears(path).items() if ".qkv" in name)


def test_rows_of_scattered_groups_do_not_depend_on_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers that gather their inputs are a part of recorded programs."""
    path, _ = make_quantized(tmp_path, *ACT_ORDER)
    loaded = load(path, dtype="bfloat16")
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
    for name in ("layers.1.attention.output", "layers.0.feed_forward.down"):
        halves = [_columns(rank[name]) for rank in ranks]
        expected, is_gathered = _columns(whole[name])
        assert is_gathered
        assert not any(gathered for _, gathered in halves)
        assert torch.cat([columns for columns, _ in halves]).equal(expected)
    for rank in ranks:
        assert _columns(rank["layers.1.attention.qkv"])[1]


def test_layers_of_one_product_with_other_groups_are_dequantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def quantize(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        is_shuffled = not module.endswith(("k_proj", "up_proj"))
        rounded = integers(weight, 4, symmetric=False, shuffled=is_shuffled)
        return gptq(rounded, 4), rounded.values

    path, reference = make_quantized(tmp_path, ACT_ORDER[0], quantize)
    with caplog.at_level(logging.INFO):
        assert_same(path, reference)
    num_bytes = 4 * 2 * (64 * (96 + 48 + 48) + 64 * 256)  # of `attention.qkv` and `feed_forward.up`
    reason = "scattered groups that ranks share, or that differ in one product"
    assert f"weights dequantized num_bytes={num_bytes} reason={reason}" in caplog.text


def test_weights_that_fit_each_other_must_fit_the_model(path: Path) -> None:
    words = {"qweight": (8, 64), "scales": (2, 64), "qzeros": (2, 8), "g_idx": (64,)}

    def edit(tensors: dict[str, Tensor]) -> None:
        for suffix, shape in words.items():
            kind = torch.float16 if suffix == "scales" else torch.int32
            tensors[f"{LAYER}.{suffix}"] = torch.zeros(shape, dtype=kind)

    edit_tensors(path, edit)
    with pytest.raises(BadCheckpoint, match=rf"{LAYER}\.weight is \[64, 64\], expected \[64, 128"):
        load(path)


def test_settings_without_quantized_tensors_are_refused(path: Path, gptq_checkpoint: Path) -> None:
    dense = gptq_checkpoint.with_name("source") / "model.safetensors"
    (path / "model.safetensors").write_bytes(dense.read_bytes())
    with pytest.raises(BadCheckpoint, match=r"no tensor is quantized: expected \*\.qweight"):
        load(path)

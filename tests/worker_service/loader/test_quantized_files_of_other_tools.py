"""Quantized checkpoints that say one thing and hold another, and what earlier tools wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import make_checkpoint
from tests.support.loading import assert_same, edit_config, edit_tensors, load
from tests.support.quantized_checkpoints import FORMATS, GPTQ, LAYER, compression, replace_part
from tests.support.quantized_files import make_quantized
from worker_service.errors import BadCheckpoint


def _ordered(actorder: Any) -> dict[str, Any]:
    settings, _ = compression("pack-quantized", num_bits=4, group_size=32, actorder=actorder)
    return settings


def _packed(folder: Path, actorder: Any) -> tuple[Path, Path]:
    _, quantize = FORMATS["pack-quantized 4"]
    return make_quantized(folder, _ordered(actorder), quantize)


@pytest.mark.parametrize(
    "settings", [{"desc_act": True}, {"dynamic": {".*down_proj": {"desc_act": True}}}]
)
def test_a_module_without_the_order_that_desc_act_asks_for_is_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    _, quantize = FORMATS["gptq with ordered groups"]
    path, _ = make_quantized(tmp_path, {**GPTQ, **settings}, quantize)
    edit_tensors(path, replace_part("g_idx", None))
    message = rf"{LAYER}\.weight is quantized with desc_act; missing tensors: {LAYER}\.g_idx"
    with pytest.raises(BadCheckpoint, match=message):
        load(path)


def test_one_group_of_all_inputs_needs_no_order(tmp_path: Path) -> None:
    _, quantize = FORMATS["gptq, one group"]
    path, reference = make_quantized(
        tmp_path, {**GPTQ, "group_size": -1, "desc_act": True}, quantize
    )

    def drop_orders(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    edit_tensors(path, drop_orders)
    assert_same(path, reference)


@pytest.mark.parametrize("actorder", ["group", "dynamic", True, "GROUP"])
def test_a_module_without_the_order_that_actorder_asks_for_is_refused(
    actorder: Any, tmp_path: Path
) -> None:
    path, _ = _packed(tmp_path, actorder)
    message = r"\.weight is quantized with actorder .*; missing tensors: .*\.weight_g_idx"
    with pytest.raises(BadCheckpoint, match=message):
        load(path)


@pytest.mark.parametrize("actorder", [None, False, "weight", "static"])
def test_an_order_of_weights_alone_needs_no_tensor(actorder: Any, tmp_path: Path) -> None:
    assert_same(*_packed(tmp_path, actorder))


def _set_groups(path: Path, value: int, count: int | None = None) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        _, num_inputs = tensors[f"{LAYER}.weight_shape"].tolist()
        groups = torch.full((num_inputs,), value, dtype=torch.int32)
        if count is not None:
            groups[count:] = 0
        tensors[f"{LAYER}.weight_g_idx"] = groups

    edit_tensors(path, edit)


def test_groups_that_are_all_minus_one_are_in_order(tmp_path: Path) -> None:
    path, reference = _packed(tmp_path, None)
    _set_groups(path, -1)
    assert_same(path, reference)


@pytest.mark.parametrize(("value", "count"), [(-1, 3), (-2, None)])
def test_other_negative_groups_are_refused(value: int, count: int | None, tmp_path: Path) -> None:
    path, _ = _packed(tmp_path, None)
    _set_groups(path, value, count)
    with pytest.raises(BadCheckpoint, match=rf"{LAYER}\.weight: g_idx: expected groups 0 to"):
        load(path)


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("fp8 of smaller blocks", "weight_scale_inv"),
        ("modelopt fp8 of blocks", "weight_scale"),
        ("float-quantized of blocks", "weight_scale"),
        ("float-quantized of outputs", "weight_scale"),
        ("modelopt fp8 of outputs", "weight_scale"),
    ],
)
@pytest.mark.parametrize("shape", [[], [1], [1, 1]])
def test_one_scale_for_many_blocks_is_refused(
    name: str, suffix: str, shape: list[int], tmp_path: Path
) -> None:
    settings, quantize = FORMATS[name]
    path, _ = make_quantized(tmp_path, settings, quantize, hidden_size=256, intermediate_size=264)
    edit_tensors(path, replace_part(suffix, torch.ones(shape)))
    with pytest.raises(BadCheckpoint, match=rf"{LAYER}\.{suffix} is \[.*\], expected \["):
        load(path)


@pytest.mark.parametrize("name", ["fp8 of tensors", "modelopt fp8 of tensors"])
@pytest.mark.parametrize("shape", [[], [1], [1, 1]])
def test_one_scale_of_a_tensor_may_have_any_dimensions(
    name: str, shape: list[int], tmp_path: Path
) -> None:
    settings, quantize = FORMATS[name]
    path, reference = make_quantized(tmp_path, settings, quantize)

    def reshape(tensors: dict[str, Tensor]) -> None:
        scale = tensors[f"{LAYER}.weight_scale"]
        tensors[f"{LAYER}.weight_scale"] = scale.reshape(shape)

    edit_tensors(path, reshape)
    assert_same(path, reference)


@pytest.mark.parametrize(
    ("dtype", "kind", "family"),
    [
        (torch.int8, "I8", "llama"),
        (torch.uint8, "U8", "gemma2"),
        (torch.int32, "I32", "llama"),
        (torch.float8_e4m3fn, "F8_E4M3", "gemma2"),
        (torch.float8_e5m2, "F8_E5M2", "llama"),
    ],
)
def test_codes_without_settings_are_refused_by_tensor(
    dtype: torch.dtype, kind: str, family: str, tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path)
    edit_tensors(path, lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].to(dtype)}))
    message = rf"{LAYER}\.weight is stored as {kind}, which looks quantized, but config\.json has"
    with pytest.raises(BadCheckpoint, match=message):
        load(path)


def test_codes_with_scales_but_without_settings_are_refused(tmp_path: Path) -> None:
    path, _ = make_quantized(tmp_path, *FORMATS["fp8 of smaller blocks"])
    edit_config(path, quantization_config=None)
    with pytest.raises(BadCheckpoint, match=r"F8_E4M3, which looks quantized"):
        load(path)

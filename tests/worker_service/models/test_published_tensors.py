"""Tensors and keys that published checkpoints have, or lack, where `transformers` writes others."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import checkpoint, make_checkpoint
from tests.support.loading import assert_same, copy_checkpoint, edit_config, edit_tensors, load
from worker_service.errors import BadCheckpoint, UnsupportedModel

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_x_k1_may_lack_corrections_and_have_norms_that_no_layer_uses(tmp_path: Path) -> None:
    path = copy_checkpoint("axk1", tmp_path)

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
            del tensors[name]
        tensors["model.layers.0.post_mlp_layernorm.weight"] = torch.ones(64)

    edit_tensors(path, edit)
    edit_config(path, topk_method="none")
    assert_same(path, path)


def test_longcat_flash_has_no_weights_of_zero_experts_but_a_layer_that_predicts_tokens(
    tmp_path: Path,
) -> None:
    path = copy_checkpoint("longcat_flash", tmp_path)

    def edit(tensors: dict[str, Tensor]) -> None:
        of_zero = re.compile(r".*\.experts\.[6-9]\..*")  # which `transformers` writes
        for name in [name for name in tensors if of_zero.fullmatch(name)]:
            del tensors[name]
        tensors["model.mtp.layers.0.eh_proj.weight"] = torch.ones(64, 128)

    edit_tensors(path, edit)
    edit_config(path, mla_scale_q_lora=True, mla_scale_kv_lora=True, zero_expert_type="identity")
    assert_same(path, checkpoint("longcat_flash"))
    edit_config(path, mla_scale_q_lora=False)
    with pytest.raises(UnsupportedModel, match="mla_scale_q_lora: expected True, got False"):
        load(path)


def test_hunyuan_4_has_names_of_its_own_and_layers_that_predict_tokens(tmp_path: Path) -> None:
    path = copy_checkpoint("hy_v4", tmp_path)

    def edit(tensors: dict[str, Tensor]) -> None:
        stored = re.compile(r"(.*)\.hc_pre\.(hc_(?:attn|mlp)_layer)(.*)")
        for name in [*tensors]:
            if match := stored.fullmatch(name):  # as `transformers` writes it
                tensors["{}.{}.hc_pre{}".format(*match.groups())] = tensors.pop(name)
            elif ".mlp.linear_gate." in name:
                tensors[name.replace(".linear_gate.", ".gate_proj.")] = tensors.pop(name)
        tensors["model.mtp_layers.0.eh_proj.weight"] = torch.ones(64, 128)

    edit_tensors(path, edit)
    edit_config(path, head_dim=256, num_key_value_heads=1)  # of which neither has that many
    assert_same(path, checkpoint("hy_v4"))


@pytest.mark.parametrize("theta", [None, 10000.0])
def test_olmo_hybrid_has_convolutions_of_each_part(theta: float | None, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    path = make_checkpoint("olmo_hybrid", tmp_path, linear_value_head_dim=20, rope_parameters=rope)

    def edit(tensors: dict[str, Tensor]) -> None:
        norm = tensors.pop("model.layers.1.feedforward_layer_norm.weight")
        tensors["model.layers.1.post_attention_layernorm.weight"] = norm
        for layer in (0, 2):  # `transformers` writes three parts of one size
            names = [f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
            parts = torch.cat([tensors[name] for name in names]).split([48, 48, 80])
            tensors |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}

    with pytest.raises(
        BadCheckpoint, match=r"q_conv1d\.weight is \[59, 1, 4\], expected \[48, 1, 4\]"
    ):
        load(path)
    edit_tensors(path, edit)
    assert_same(path, path)


def test_mimo_counts_the_tokens_before_one_in_a_window(tmp_path: Path) -> None:
    path = copy_checkpoint("mimo_v2_flash", tmp_path)
    edit_config(path, sliding_window=100, sliding_window_size=5, routed_scaling_factor=None)
    edit_tensors(path, lambda tensors: tensors.update({"model.mtp.norm.weight": torch.ones(64)}))
    assert_same(path, path)


def test_zamba2_may_have_copies_of_its_blocks_and_plain_attention(tmp_path: Path) -> None:
    plain = {"use_shared_attention_adapter": False, "use_mem_rope": False, "add_bias_linear": False}
    path = make_checkpoint("zamba2", tmp_path, num_mem_blocks=1, **plain)

    def edit(tensors: dict[str, Tensor]) -> None:
        first = "model.layers.1.shared_transformer."
        for name in [name for name in tensors if name.startswith(first)]:
            tensors[name.replace(".1.", ".2.", 1)] = tensors[name].clone()

    edit_tensors(path, edit)
    edit_config(path, layers_block_type=["mamba", "hybrid", "hybrid"] * 2)
    assert_same(path, path)

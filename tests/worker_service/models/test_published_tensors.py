"""Tensors that published checkpoints have, or lack, where `transformers` writes others."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.loading import assert_same, copy_checkpoint, edit_config, edit_tensors

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

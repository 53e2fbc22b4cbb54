"""Models that are those of other families under their authors' names."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.loading import assert_same, copy_checkpoint, edit_config

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("family", "architecture", "renamed"),
    [
        (
            "exaone",
            "ExaoneForCausalLM",
            {
                "num_hidden_layers": "num_layers",
                "rms_norm_eps": "layer_norm_epsilon",
                "hidden_act": "activation_function",
            },
        ),
        (
            "llama_bias",
            "InternLM3ForCausalLM",
            {"attention_bias": "qkv_bias", "mlp_bias": "bias"},
        ),
        ("llama", "IQuestCoderForCausalLM", {}),
        (
            "sarvam_moe",
            "BailingMoeV2ForCausalLM",
            {
                "n_routed_experts": "num_experts",
                "n_shared_experts": "num_shared_experts",
                "attention_bias": "use_qkv_bias",
            },
        ),
    ],
)
def test_the_keys_of_the_authors_are_read(
    family: str, architecture: str, renamed: dict[str, str], tmp_path: Path
) -> None:
    path = copy_checkpoint(family, tmp_path)
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    changes = {new: config[old] for old, new in renamed.items()} | dict.fromkeys(renamed)
    edit_config(path, architectures=[architecture], model_type="of_its_authors", **changes)
    assert_same(path, checkpoint(family))

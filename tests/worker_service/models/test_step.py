"""Step 3.5 and 3.7: keys of published checkpoints, the multimodal model, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import checkpoint
from tests.support.loading import edit_tensors, load
from tests.support.paged_driver import PagedDriver
from worker_service.errors import UnsupportedModel
from worker_service.loader.files.config import read_config
from worker_service.models.decoder_families.step import step3p5_settings

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [5, 80, 299, 7, 160, 33, 4, 4, 90, 201, 17, 64, 250, 3, 122]


def _config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint("step3p5") / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias: expected false, got true"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate: expected True, got False"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation: expected sigmoid"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected sliding_attention or full"),
        (
            {"swiglu_limits": [1.0]},
            "swiglu_limits: expected a limit above 0, or none",
        ),
        ({"swiglu_limits_shared": [0, 0, -1, 0]}, "swiglu_limits_shared: expected a limit above 0"),
    ],
)
def test_a_faulty_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}"):
        step3p5_settings(_config() | changes)


def test_the_keys_of_published_checkpoints_are_read(tmp_path: Path) -> None:
    """They list layers that predict further tokens behind the others."""
    ours = _config()
    keys = (*("layer_types", "mlp_layer_types", "rope_parameters", "num_key_value_heads"),)
    renamed = ("n_routed_experts", "num_experts_per_tok", "num_sliding_attention_heads")
    published = {k: v for k, v in ours.items() if k not in (*keys, *renamed, "per_layer_config")}
    published |= {
        "num_attention_groups": 2,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "num_nextn_predict_layers": 1,
        "layer_types": [*ours["layer_types"], "full_attention"],
        "moe_layers_enum": "2,3",
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
        "partial_rotary_factors": [0.5, 1.0] * 2 + [0.5],
        "rope_theta": [500.0, 10000.0] * 2 + [500.0],
        "use_head_wise_attn_gate": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    found = step3p5_settings(read_config(tmp_path))
    expected = step3p5_settings(ours)
    assert found.layers == expected.layers
    assert found == expected


def test_the_text_model_of_step_3_7_is_served(tmp_path: Path) -> None:
    import transformers

    vision = {"width": 16, "layers": 1, "heads": 2, "image_size": 56, "patch_size": 14}
    text = {k: v for k, v in _config().items() if k not in ("architectures", "model_type")}
    config = transformers.Step3p7Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Step3p7ForConditionalGeneration(config).float().eval()
    model.save_pretrained(tmp_path)
    behind = {"model.layers.4.eh_proj.weight": torch.ones(64, 128)}
    edit_tensors(tmp_path, lambda tensors: tensors.update(behind))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    (found,) = PagedDriver(load(tmp_path).model).run([(0, 0, TOKENS)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))

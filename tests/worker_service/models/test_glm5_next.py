"""GLM-5 Next: the multimodal model, defaults, lengths, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import MAX_POSITIONS, checkpoint
from tests.support.loading import edit_tensors, load
from tests.support.paged_driver import PagedDriver
from worker_service.errors import UnsupportedModel
from worker_service.models.decoder_families.glm5_next import glm5_next_settings

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [5, 80, 299, 7, 160, 33, 4, 4, 90, 201, 17, 64, 250, 3, 122]


def _config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint("glm5_next") / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim: expected 0, got 64"),
        (
            {"index_kpool_always_select_tail": False},
            "index_kpool_always_select_tail: expected",
        ),
        ({"swiglu_limit": 0}, "swiglu_limit: expected one above 0, got 0"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types: expected linear_attention or ind"),
    ],
)
def test_a_faulty_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}"):
        glm5_next_settings(_config() | changes)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Glm5NextTextConfig

    base = {"architectures": ["Glm5NextForCausalLM"], "num_hidden_layers": 6}
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 154_880}
    written = Glm5NextTextConfig(num_hidden_layers=6).to_dict() | base
    assert glm5_next_settings(base | sizes) == glm5_next_settings(written)


def test_sequences_are_as_long_as_indexers_choose_all_of_them() -> None:
    assert glm5_next_settings(_config()).max_model_len == MAX_POSITIONS
    assert glm5_next_settings(_config() | {"index_topk": 96}).max_model_len == 96


def test_the_text_model_of_the_multimodal_one_is_served(tmp_path: Path) -> None:
    import transformers

    text = {k: v for k, v in _config().items() if k not in ("architectures", "model_type")}
    vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16}
    config = transformers.Glm5NextConfig(
        text_config=text,
        vision_config={**vision, "out_hidden_size": 64, "projection_intermediate_size": 16},
    )
    torch.manual_seed(0)
    model = transformers.Glm5NextForConditionalGeneration(config).float().eval()
    model.save_pretrained(tmp_path)
    behind = {"model.language_model.layers.4.eh_proj.weight": torch.ones(64, 128)}
    edit_tensors(tmp_path, lambda tensors: tensors.update(behind))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    (found,) = PagedDriver(load(tmp_path).model).run([(0, 0, TOKENS)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4 * float(expected.std()))

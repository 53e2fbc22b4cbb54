"""Muse Glimmer: the multimodal model, defaults, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import checkpoint
from tests.support.loading import load
from tests.support.paged_driver import PagedDriver
from worker_service.errors import UnsupportedModel
from worker_service.models.decoder_families.muse import muse_glimmer_settings

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [5, 80, 299, 7, 160, 33, 4, 4, 90, 201, 17, 64, 250, 3, 122]


def _config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint("muse_glimmer") / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"layer_rope_theta": [0, 7.0, 0, 0, 0]}, "layer_rope_theta: expected 0 or 10000, as rope"),
        (
            {"layer_rope_theta": [0]},
            "layer_rope_theta: expected 0 or 10000, as rope",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types: expected sliding_attention or full"),
    ],
)
def test_a_faulty_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}"):
        muse_glimmer_settings(_config() | changes)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import MuseGlimmerTextConfig

    base = {"architectures": ["MuseGlimmerForCausalLM"], "num_hidden_layers": 6}
    sizes = {"hidden_size": 6656, "intermediate_size": 19968, "num_attention_heads": 32}
    written = MuseGlimmerTextConfig(num_hidden_layers=6).to_dict() | base
    brief = base | sizes | {"vocab_size": 202_048, "rope_parameters": written["rope_parameters"]}
    assert muse_glimmer_settings(brief) == muse_glimmer_settings(written)


def test_the_text_model_of_the_multimodal_one_is_served(tmp_path: Path) -> None:
    import transformers

    text = {k: v for k, v in _config().items() if k not in ("architectures", "model_type")}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.MuseGlimmerConfig(
        text_config=text,
        vision_config={**vision, "num_attention_heads": 2, "patch_size": 4},
        out_hidden_size=64,
        projector_hidden_size=16,
    )
    torch.manual_seed(0)
    model = transformers.MuseGlimmerForConditionalGeneration(config).float().eval()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    (found,) = PagedDriver(load(tmp_path).model).run([(0, 0, TOKENS)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))

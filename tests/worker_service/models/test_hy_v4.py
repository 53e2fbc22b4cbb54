"""Hunyuan 4: settings that are refused, defaults, and what several residual streams lack."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import MAX_POSITIONS, checkpoint
from tests.support.float64 import Float64
from tests.support.loading import load
from tests.support.paged_driver import PagedDriver
from tests.support.transformers_oracle import Oracle
from worker_service.errors import InvalidOption, UnsupportedModel
from worker_service.models.decoder.hyper import HyperConnection
from worker_service.models.decoder_families.hy_v4 import hy_v4_settings
from worker_service.models.linear.linear import FloatLinear
from worker_service.models.native import NativeModel


def _config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint("hy_v4") / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hc_mult": 17}, "hc_mult: expected 1 to 16 streams, got 17"),
        ({"hc_mult": 0}, "hc_mult: expected 1 to 16 streams, got 0"),
        ({"swiglu_limit": 0}, "swiglu_limit: expected one above 0, got 0"),
        ({"swiglu_limit": None}, "swiglu_limit: expected one above 0, got None"),
        (
            {"layer_types": ["indexed_attention", "full_attention"]},
            "layer_types: expected indexed_attention alone, got full_attention, indexed_attention",
        ),
    ],
)
def test_a_faulty_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}"):
        hy_v4_settings(_config() | changes)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import HYV4Config

    base = {"architectures": ["HYV4ForCausalLM"], "num_hidden_layers": 4, "vocab_size": 120832}
    sizes = {"hidden_size": 2816, "intermediate_size": 6912, "num_attention_heads": 32}
    written = HYV4Config(num_hidden_layers=4).to_dict() | base
    brief = base | sizes | {"rope_parameters": written["rope_parameters"]}
    assert hy_v4_settings(brief) == hy_v4_settings(written)


def test_the_text_model_of_the_multimodal_one_is_served(tmp_path: Path) -> None:
    """It rotates other pairs, and its norms of latents have another epsilon."""
    import transformers

    text = {k: v for k, v in _config().items() if k not in ("architectures", "model_type")}
    half = text["qk_rope_head_dim"] // 2
    rotary = text["rope_parameters"] | {"mrope_section": [half - 2, 1, 1]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"out_hidden_size": text["hidden_size"]}
    config = transformers.HYV4VLConfig(
        text_config={**text, "rms_norm_eps": 1e-2, "rope_parameters": rotary},
        vision_config={**vision, "num_attention_heads": 2, "patch_size": 4, "max_image_size": 16},
    )
    torch.manual_seed(0)
    model = transformers.HYV4VLForConditionalGeneration(config).float().eval()
    for name, weight in model.named_parameters():
        if weight.dim() < 2 and "language_model" in name:  # norms, gates and sinks
            weight.data += 0.3 * torch.randn(weight.shape)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(300, (130,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        greedy = model(input_ids=torch.tensor([tokens])).logits[0].argmax(-1)
        model.set_experts_implementation("eager")  # others lack float64
        with Float64():
            exact = model.double()(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    driver = PagedDriver(load(tmp_path).model, max_tokens=MAX_POSITIONS)
    found = driver.run([(0, 0, tokens)])[0]
    assert found.argmax(-1).tolist() == greedy.tolist()
    torch.testing.assert_close(found.double().log_softmax(-1), exact, atol=2e-5, rtol=0)


def test_sequences_are_as_long_as_indexers_choose_all_of_them() -> None:
    assert hy_v4_settings(_config()).max_model_len == MAX_POSITIONS
    assert hy_v4_settings(_config() | {"index_topk": 96}).max_model_len == 96
    path = checkpoint("hy_v4")
    tokens = torch.randint(300, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    driver = PagedDriver(load(path).model, max_tokens=MAX_POSITIONS)
    found = driver.run([(0, 0, tokens)])[0]
    torch.testing.assert_close(found, Oracle(path).logits(tokens), atol=2e-4, rtol=0)


def test_a_head_of_hidden_states_is_refused() -> None:
    model = load(checkpoint("hy_v4")).model
    assert isinstance(model, NativeModel)
    with pytest.raises(InvalidOption, match="expected no head for HYV4ForCausalLM, whose residual"):
        model.capture([1])


def test_gates_keep_their_float32_weights_in_a_bfloat16_model() -> None:
    exact, rounded = (
        load(checkpoint("hy_v4"), dtype=name).model for name in ("float32", "bfloat16")
    )
    streams = torch.randn(5, 3 * 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    pairs = [
        [part for part in model.modules() if isinstance(part, HyperConnection)]  # type: ignore[attr-defined]
        for model in (exact, rounded)
    ]
    assert len(pairs[0]) == len(pairs[1]) == 2 * 3 + 1
    for ours, theirs in zip(*pairs, strict=True):
        assert type(theirs.product) is FloatLinear
        expected, found = ours.read(streams.float()), theirs.read(streams)
        torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[0], expected[0].bfloat16(), atol=1e-6, rtol=1e-2)

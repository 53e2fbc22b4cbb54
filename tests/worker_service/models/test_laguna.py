"""Laguna: defaults, what is refused, and what runs through `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import checkpoint, make_checkpoint
from tests.support.loading import load
from worker_service.errors import UnsupportedModel
from worker_service.models.decoder_families.common import NotNative
from worker_service.models.decoder_families.laguna import laguna_settings
from worker_service.models.mixers.attention import AttentionSpec
from worker_service.models.transformers_backend.model import TransformersModel

pytestmark = pytest.mark.usefixtures("one_thread")


def _config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint("laguna") / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gating": "per-layer"},
            "gating: expected True or per-head or per-element",
        ),
        ({"gating": False}, "gating: expected True or per-head or per-element, got False"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input: expected"),
        (
            {"num_attention_heads_per_layer": [4]},
            "num_attention_heads_per_layer: expected a",
        ),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected dense or sparse for each of 3"),
    ],
)
def test_a_faulty_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}"):
        laguna_settings(_config() | changes)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import LagunaConfig

    base = {"architectures": ["LagunaForCausalLM"], "num_hidden_layers": 4, "vocab_size": 100352}
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 48}
    written = LagunaConfig(num_hidden_layers=4).to_dict() | base
    brief = base | sizes | {"max_position_embeddings": 131_072}
    ours, theirs = laguna_settings(brief), laguna_settings(written)
    assert [layer.feed_forward for layer in ours.layers] == [
        layer.feed_forward for layer in theirs.layers
    ]
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        found, expected = layer.attention, other.attention
        assert isinstance(found, AttentionSpec)
        assert isinstance(expected, AttentionSpec)
        assert found.rotary is not None
        assert expected.rotary is not None
        assert found.rotary.rotary_dim == expected.rotary.rotary_dim == 64
        assert found.rotary.theta == expected.rotary.theta
        assert (found.num_heads, found.window) == (expected.num_heads, expected.window)


@pytest.mark.parametrize("key", ["attention_bias", "moe_router_logit_softcapping"])
def test_other_variants_run_through_transformers(key: str, tmp_path: Path) -> None:
    value = True if key == "attention_bias" else 5.0
    with pytest.raises(NotNative, match=key):
        laguna_settings(_config() | {key: value})
    path = make_checkpoint("laguna", tmp_path, **{key: value})
    assert isinstance(load(path).model, TransformersModel)

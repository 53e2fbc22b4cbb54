"""Settings that `config.json` lacks, or names as older versions did, mean what `transformers` makes
of them."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.loading import assert_same, copy_checkpoint, edit_config, load
from worker_service.errors import UnsupportedModel
from worker_service.models.native import NativeModel
from worker_service.models.transformers_backend.model import TransformersModel

NONE: dict[str, Any] = {}
THETA = {"rope_theta": 3333.0}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("smollm3", NONE),
        ("cohere_plain", NONE),
        ("gpt_oss", NONE),
        ("gpt_oss", THETA),
        ("mistral4", NONE),
        ("mistral4", THETA),
        ("apertus", THETA),
        ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 77.0}),
        ("gpt_neox", {**THETA, "partial_rotary_factor": 0.5}),
    ],
)
def test_without_rope_parameters_a_model_has_its_familys(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    path = copy_checkpoint(family, tmp_path)
    edit_config(path, rope_parameters=None, pad_token_id=0, **settings)
    loaded = load(path)
    assert isinstance(loaded.model, NativeModel)
    assert_same(loaded, path)


@pytest.mark.parametrize("family", ["olmo2", "qwen2_moe", "gemma2"])
def test_a_part_of_heads_is_rotated_only_where_transformers_does(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = copy_checkpoint(family, tmp_path)
    edit_config(path, partial_rotary_factor=0.5)
    loaded = load(path)
    assert isinstance(loaded.model, TransformersModel)
    assert "our own layers do not compute it: partial_rotary_factor" in caplog.text
    assert_same(loaded, path)


def test_a_refused_variant_of_a_family_is_named(tmp_path: Path) -> None:
    path = copy_checkpoint("lfm2", tmp_path)
    edit_config(path, partial_rotary_factor=0.5)
    message = "it has convolution layers; our own layers do not compute partial_rotary_factor"
    with pytest.raises(UnsupportedModel, match=message):
        load(path)


_FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("family", "settings", "rope"),
    [
        (
            "phi3",
            {"original_max_position_embeddings": 4},
            {"rope_type": "longrope", "original_max_position_embeddings": 1024, **_FACTORS},
        ),
        ("nanochat", NONE, {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}),
    ],
)
def test_rope_is_scaled_as_by_transformers(
    family: str, settings: dict[str, Any], rope: dict[str, Any], tmp_path: Path
) -> None:
    """Of the lengths on which Phi-3 was trained, the one outside counts; of nanochat, the norms
    after RoPE undo the factor of queries and keys."""
    path = copy_checkpoint(family, tmp_path)
    edit_config(path, rope_parameters=rope, pad_token_id=0, **settings)
    loaded = load(path)
    assert isinstance(loaded.model, NativeModel)
    assert_same(loaded, path)

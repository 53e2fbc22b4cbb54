"""Settings of Mamba and of hybrids: what `config.json` may say, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import checkpoint
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption, UnsupportedModel
from worker_service.loader.files.config import read_config
from worker_service.models.decoder_families import DECODERS
from worker_service.models.decoder_families.common import NotNative
from worker_service.models.mixers.mamba import Mamba2Spec, ParallelMixerSpec


def _config(family: str) -> dict[str, Any]:
    return read_config(Path(checkpoint(family)))


def _settings(config: dict[str, Any]) -> Any:
    return DECODERS[config["architectures"][0]](config)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bamba", {"time_step_limit": [0.5]}, "time_step_limit: expected two ascending numbers"),
        ("bamba", {"time_step_limit": [2, 1]}, "time_step_limit: expected two ascending numbers"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act: expected silu, got gelu"),
        (
            "bamba",
            {"mamba_d_head": 17},
            "mamba_d_head: expected 128 elements in 8 heads, got heads",
        ),
        ("mamba2", {"n_groups": 3}, "Mamba's groups: expected a divisor of 8 heads, got 3"),
        ("mamba", {"hidden_act": "relu"}, "hidden_act: expected silu, got relu"),
        (
            "granite_hybrid",
            {"layer_types": ["linear_attention", "conv", "mamba"]},
            "layer_types: expected linear_attention or full_attention for each of 3 layers",
        ),
        (
            "granite_hybrid",
            {"layer_types": ["mamba"]},
            "layer_types: expected linear_attention or full_attention for each of 3 layers",
        ),
        (
            "granite_hybrid",
            {"position_embedding_type": "alibi"},
            "position_embedding_type: expected rope or nope, got alibi",
        ),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers: expected 5 numbers, got 1"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers: expected 2 numbers, got 1"),
        (
            "zamba2",
            {"tie_word_embeddings": False},
            "tie_word_embeddings: expected True, got False",
        ),
        ("kimi_linear", {"attention_bias": True}, "attention_bias: expected False, got True"),
        (
            "bailing_hybrid",
            {"kda_lower_bound": 0.5},
            "kda_lower_bound: expected one below 0, got 0.5",
        ),
        ("bailing_hybrid", {"attention_bias": True}, "attention_bias: expected False, got True"),
        (
            "bailing_hybrid",
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types: expected linear_attention or full_attention for each of 3 layers",
        ),
        (
            "lara_mini",
            {"layer_types": ["conv"] * 4},
            "layer_types: expected linear_attention, sliding_attention or full_attention",
        ),
        ("nemotron_h", {"layers_block_type": ["mamba", "ssm"]}, "layer_types: expected .* or mlp"),
    ],
)
def test_a_faulty_field_is_refused_by_name(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}"):
        _settings(_config(family) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_block_type": ["moe", "mamba"], "mlp_bias": True}, "mlp_bias with experts"),
        ({"sliding_window": 64}, "sliding_window"),
    ],
)
def test_parts_of_nemotron_h_that_are_not_computed_are_named(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotNative, match=message):
        _settings(_config("nemotron_h") | {"num_hidden_layers": None} | changes)


def test_types_of_layers_may_have_the_names_of_older_checkpoints() -> None:
    config = _config("granite_hybrid")
    older = {"layer_types": None, "layers_block_type": ["mamba", "attention", "mamba"]}
    assert _settings(config | older) == _settings(config)
    config = _config("nemotron_h")
    older = {"layers_block_type": None, "hybrid_override_pattern": "M-*M"}
    assert _settings(config | older) == _settings(config)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2"])
def test_models_without_positions_need_no_length(family: str) -> None:
    config = _config(family)
    del config["max_position_embeddings"]
    assert _settings(config).max_model_len >= 1 << 20


def test_infinite_limits_of_time_steps_are_read_as_transformers_writes_them(
    tmp_path: Path,
) -> None:
    config = _config("bamba") | {"time_step_limit": [0.25, {"__float__": "Infinity"}]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mixer = _settings(read_config(tmp_path)).layers[0].attention
    assert isinstance(mixer, Mamba2Spec)
    assert mixer.time_step_limits == (0.25, float("inf"))


def test_ranks_that_cannot_share_groups_are_refused() -> None:
    sizes = {"mamba_n_groups": 4, "mamba_n_heads": 12, "mamba_d_ssm": 192}
    mixer = _settings(_config("falcon_h1") | sizes).layers[0].attention
    assert isinstance(mixer, ParallelMixerSpec)
    mixer.mamba.require_shards(Layout(tensor_parallel_size=2))
    with pytest.raises(InvalidOption, match="6 ranks cannot share the model's 4 groups of Mamba's"):
        mixer.mamba.require_shards(Layout(tensor_parallel_size=6))

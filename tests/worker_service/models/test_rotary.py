"""Rotary tables against the angles that `transformers` computes."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from worker_service.models.interface import ModelContext
from worker_service.models.layers.rotary import (
    QUERY_SCALING,
    RotarySettings,
    RotaryTable,
    RotaryTables,
)

HEAD_DIM = 24
LENGTH = 64
CPU = torch.device("cpu")
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, untruncated": {
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
        "beta_fast": 20,
        "beta_slow": 2,
    },
    "yarn, mscale": {
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
    "yarn, factor given": {
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.7,
    },
}


def _config(name: str) -> LlamaConfig:
    kind = name.split(",")[0]
    return LlamaConfig(
        hidden_size=96,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **SCALINGS[name]},
    )


def _settings(name: str) -> RotarySettings:
    return RotarySettings.from_config(_config(name).to_dict(), HEAD_DIM)


def _table(name: str, num_positions: int) -> RotaryTable:
    table = RotaryTable(_settings(name), num_positions, torch.float32, CPU)
    table.fill(num_positions)
    return table


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_within_the_trained_length_are_those_of_transformers(name: str) -> None:
    table = _table(name, LENGTH)
    rotary = LlamaRotaryEmbedding(_config(name))
    expected_cos, expected_sin = rotary(torch.empty(0), torch.arange(LENGTH)[None])
    half = HEAD_DIM // 2
    torch.testing.assert_close(table.cos, expected_cos[0, :, :half], atol=1e-5, rtol=0)
    torch.testing.assert_close(table.sin, expected_sin[0, :, :half], atol=1e-5, rtol=0)


def test_dynamic_angles_beyond_it_are_those_of_a_sequence_that_ends_there() -> None:
    cos = _table("dynamic", 3 * LENGTH).cos
    for position in (LENGTH, LENGTH + 1, 2 * LENGTH, 3 * LENGTH - 1):
        rotary = LlamaRotaryEmbedding(_config("dynamic"))
        expected, _ = rotary(torch.empty(0), torch.tensor([[position]]))
        torch.testing.assert_close(
            cos[position], expected[0, 0, : HEAD_DIM // 2], atol=1e-5, rtol=0
        )


def test_the_table_is_rounded_from_exact_numbers() -> None:
    """Whatever share of it a thread computes, and on every CPU: sequences move between workers."""
    length = (1 << 16) + 8
    table = _table("default", length)
    frequencies = 1.0 / (5000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    rows = [*range(64), length - 9, length - 8, length - 1]
    angles = (torch.arange(length)[:, None] * frequencies)[rows].double().tolist()
    for found, function in ((table.cos, math.cos), (table.sin, math.sin)):
        exact = torch.tensor([[function(angle) for angle in row] for row in angles])
        assert torch.equal(found[rows], exact)


@pytest.mark.parametrize("name", SCALINGS)
def test_a_table_that_grows_has_the_bits_of_one_computed_at_once(name: str) -> None:
    length = 30_001
    full, grown = (
        _table(name, length),
        RotaryTables(length, ModelContext(dtype=torch.float32, device=CPU)),
    )
    table = grown.table(_settings(name))
    assert table is not None
    address = table.cos.data_ptr()
    for position in (5, 9000, length - 1):
        grown.fill(torch.tensor([1, position, 0]))
        assert torch.equal(table.cos[: position + 1], full.cos[: position + 1])
        assert torch.equal(table.sin[: position + 1], full.sin[: position + 1])
    assert table.is_filled
    assert table.cos.data_ptr() == address  # recorded programs hold it


def test_scales_of_queries_grow_with_their_table() -> None:
    parameters = {QUERY_SCALING: 0.1, "original_max_position_embeddings": 1000}
    settings = replace(_settings("default"), parameters=parameters)
    table = RotaryTable(settings, 20_000, torch.float32, CPU)
    scales, _ = table.query_scales(8)
    table.fill(20_000)
    expected = 1 + 0.1 * torch.log1p(torch.arange(20_000) // 1000)
    torch.testing.assert_close(scales, expected[:, None].expand(-1, 4))
    torch.testing.assert_close(table.query_cos, table.cos * expected[:, None])


def test_only_positions_in_use_are_computed() -> None:
    """Those of Llama 4, of which all would take minutes and gigabytes."""
    tables = RotaryTables(10_485_760, ModelContext(dtype=torch.bfloat16, device=CPU))
    table = tables.table(_settings("default"))
    assert table is not None
    assert not table.is_filled
    tables.fill(torch.tensor([100_000]))
    assert not table.is_filled
    assert table.cos[100_000].abs().max() <= 1


def test_dynamic_angles_do_not_depend_on_threads() -> None:
    before, tables = torch.get_num_threads(), []
    settings = replace(_settings("dynamic"), rotary_dim=64)
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            table = RotaryTable(settings, 20_000, torch.float32, CPU)
            table.fill(20_000)
            tables.append(table)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(tables[0].cos, tables[1].cos)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("default", LENGTH),
        ("linear", LENGTH * 2.5),
        ("dynamic", LENGTH * 4),
        ("llama3", LENGTH),
        ("yarn", LENGTH),
        ("yarn, untruncated", 256),
    ],
)
def test_a_scaled_model_serves_the_scaled_length(name: str, length: int) -> None:
    settings = RotarySettings.from_config(_config(name).to_dict(), HEAD_DIM)
    assert settings.max_model_len() == length


def test_the_older_keys_of_config_json_are_understood() -> None:
    config = {
        "rope_theta": 1234.0,
        "rope_scaling": {"type": "linear", "factor": 3.0},
        "max_position_embeddings": 10,
    }
    settings = RotarySettings.from_config(config, 8)
    assert (settings.theta, settings.scaling_type, settings.max_model_len()) == (1234, "linear", 30)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("beside", "scaling"),
    [
        ({}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        ({"original_max_position_embeddings": 8}, {"type": "yarn", "factor": 4.0}),
        ({"original_max_position_embeddings": 8}, {"rope_type": "llama3", **SCALINGS["llama3"]}),
        ({"rope_theta": 77.0}, {"rope_type": "linear", "factor": 3.0, "rope_theta": 99.0}),
        ({"rope_theta": 77.0}, {"type": "linear", "factor": 3.0}),
    ],
)
def test_parameters_inside_and_beside_of_either_key_are_read_as_transformers_does(
    beside: dict[str, Any], scaling: dict[str, Any], spelling: str
) -> None:
    config = {"max_position_embeddings": LENGTH, **beside, spelling: scaling}
    settings = RotarySettings.from_config(copy.deepcopy(config), HEAD_DIM)
    table = RotaryTable(settings, LENGTH, torch.float32, CPU)
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=96, num_attention_heads=4, head_dim=HEAD_DIM, **config)
    )
    expected, _ = rotary(torch.empty(0), torch.arange(LENGTH)[None])
    torch.testing.assert_close(table.cos, expected[0, :, : HEAD_DIM // 2], atol=1e-5, rtol=0)


def test_of_both_keys_rope_scaling_is_read() -> None:
    config = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0},
        "max_position_embeddings": 10,
    }
    assert LlamaConfig(**config).rope_parameters["rope_theta"] == 7.0
    settings = RotarySettings.from_config(config, 8)
    assert (settings.theta, settings.scaling_type) == (7.0, "linear")


@pytest.mark.parametrize(("length", "scale"), [(32, 1.1), (33, 1.3)])
def test_long_rotary_scales_queries_and_keys_by_the_length_served(
    length: int, scale: float
) -> None:
    parameters = {
        "short_factor": [1.0] * 12,
        "long_factor": [1.0] * 12,
        "original_max_position_embeddings": 32,
        "short_mscale": 1.1,
        "long_mscale": 1.3,
    }
    settings = RotarySettings(
        rotary_dim=HEAD_DIM,
        theta=5000.0,
        scaling_type="longrope",
        max_position_embeddings=64,
        parameters=parameters,
    )
    table = RotaryTable(settings, length, torch.float32, CPU)
    assert torch.equal(table.cos[0], torch.full((12,), scale))


def test_bits_do_not_depend_on_how_many_positions_are_computed_at_once() -> None:
    num_positions = 3000
    parameters = {**SCALINGS["yarn, factor given"], "llama_4_scaling_beta": 0.1}
    settings = RotarySettings(
        rotary_dim=HEAD_DIM,
        theta=5000.0,
        scaling_type="yarn",
        max_position_embeddings=num_positions,
        parameters=parameters,
    )
    # More positions than are computed at once, and the first of them in a table of few.
    many, few = (
        RotaryTable(settings, count, torch.float32, CPU) for count in (num_positions, LENGTH)
    )
    for name in ("cos", "sin", "query_cos", "query_sin"):
        table: torch.Tensor = getattr(many, name)
        assert table.shape == (num_positions, HEAD_DIM // 2)
        assert torch.equal(table[:LENGTH], getattr(few, name))
    frequencies = LlamaRotaryEmbedding(_config("yarn, factor given")).inv_freq
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    expected = (angles.double().cos() * parameters["attention_factor"]).float()
    torch.testing.assert_close(many.cos, expected, atol=1e-6, rtol=0)

import json
import logging

import pytest

from scheduler_service.frontend.models.generation_defaults import (
    GenerationDefaults,
    parse_generation_config,
)


def parse(**config: object) -> GenerationDefaults:
    return parse_generation_config(json.dumps(config).encode())


def test_without_a_file_our_own_defaults_hold() -> None:
    assert parse_generation_config(None) == GenerationDefaults()


def test_the_authors_defaults_are_taken() -> None:
    defaults = parse(
        temperature=0.6,
        top_p=0.9,
        top_k=50,
        min_p=0.05,
        repetition_penalty=1.1,
        max_new_tokens=64,
        eos_token_id=[1, 2],
    )
    assert defaults == GenerationDefaults(
        sampling={
            "temperature": 0.6,
            "top_p": 0.9,
            "top_k": 50,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
        },
        named=frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}),
        max_tokens=64,
        eos_token_ids=frozenset({1, 2}),
    )


def test_do_sample_false_does_not_make_requests_greedy() -> None:
    assert parse(do_sample=False).sampling["temperature"] == 1.0


def test_a_single_end_of_sequence_token_is_a_set_of_one() -> None:
    assert parse(eos_token_id=7).eos_token_ids == {7}


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"temperature": 10**400},
        {"top_p": 0},
        {"top_p": True},
        {"top_k": -1},
        {"top_k": 1.5},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
        {"eos_token_id": "x"},
        {"temperature": None},
    ],
)
def test_a_value_out_of_range_is_left_out(config: dict[str, object]) -> None:
    assert parse(**config) == GenerationDefaults()


@pytest.mark.parametrize("data", [b"{", b"[1]", b"\xff", pytest.param(b"[" * 100_000, id="deep")])
def test_a_broken_file_is_logged_and_left_out(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_generation_config(data) == GenerationDefaults()
    assert "generation_config.json ignored" in caplog.text

"""The simulated sampler keeps the rules of the real one, looking at few candidates only."""

from typing import Any

import numpy as np
import pytest

from pagewire_kernels.philox import DRAW_BITS, draw_bits
from tests.worker_service.sampling import reference
from worker_service.plan import SamplerParams
from worker_service.simulated.model import NextToken, SimulatedSampler

VOCAB_SIZE = 211


def ids(*tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def likely(history: int, num_ranks: int = 6) -> list[int]:
    """The most probable tokens after a history."""
    distribution = NextToken(history, VOCAB_SIZE)
    return [distribution.token(rank) for rank in range(num_ranks)]


def expected(
    history: int, params: SamplerParams, choice_index: int, prompt: list[int], output: list[int]
) -> int:
    """The token by the rules written the plain way, over the whole vocabulary."""
    distribution = NextToken(history, VOCAB_SIZE)
    logits = [distribution.logprob(distribution.rank(token)) for token in range(VOCAB_SIZE)]
    edited = reference.edited_logits(logits, params, prompt, output)
    if params.temperature == 0.0:
        return edited.index(max(edited))
    bits = draw_bits(params.seed, choice_index, len(output))
    return reference.drawn(reference.filtered(edited, params), bits * 2.0**-DRAW_BITS)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"temperature": 4.0},
        {"temperature": 100.0},
        {"top_k": 3, "temperature": 2.0},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
    ],
)
def test_it_chooses_what_the_rules_say(fields: dict[str, Any]) -> None:
    for seed in range(40):
        params = SamplerParams(seed=seed, **fields)
        found = SimulatedSampler(params, 2).choose(NextToken(seed, VOCAB_SIZE), [1, 2, 3], 2)
        assert found == expected(seed, params, 2, [1, 2], [3])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["bias", "bad words", "suppressed", "penalties", "all"])
def test_it_edits_what_the_parameters_single_out(kind: str, temperature: float) -> None:
    for seed in range(40):
        first, second, third, *_ = likely(seed)
        prompt, output = [first, 7], [second, second, third, 9]
        edits: dict[str, dict[str, Any]] = {
            "bias": {"bias_token_ids": ids(5, first), "bias_values": np.float32([90.0, -3.0])},
            "bad words": {"bad_words": ((second,), (third, 9, first), (1, 9, third))},
            "suppressed": {"min_tokens": 5, "suppressed_token_ids": ids(first, third)},
            "penalties": {
                "repetition_penalty": 1.5,
                "presence_penalty": 0.3,
                "frequency_penalty": 0.4,
            },
        }
        edits["all"] = {name: value for edit in edits.values() for name, value in edit.items()}
        params = SamplerParams(seed=seed, temperature=temperature, **edits[kind])
        tokens = [*prompt, *output]
        found = SimulatedSampler(params, 0).choose(NextToken(seed, VOCAB_SIZE), tokens, 2)
        assert found == expected(seed, params, 0, prompt, output)


def test_there_is_no_token_where_all_are_excluded() -> None:
    params = SamplerParams(min_tokens=1, suppressed_token_ids=np.arange(VOCAB_SIZE, dtype=np.int32))
    assert SimulatedSampler(params, 0).choose(NextToken(1, VOCAB_SIZE), [1], 1) is None

"""Rows with drafts: what is proposed, what is kept, and what a plan may ask for."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire.v1 import sampling_pb2
from tests.support import vocabularies
from tests.support.counting_model import CountingModel, next_token
from tests.support.in_process import InProcessEngine, KnowingDrafter, Output
from tests.support.runners import RUNNERS, AllDrafts, make_cache, speculating
from tests.support.speculation import SpeculatingEngine
from tests.support.worker_driver import PlanBuilder, Row, sampler_params
from worker_service.array_types import Int32Array
from worker_service.config import RunnerConfig
from worker_service.errors import InvalidOption
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.plan import RowErrorReason, StepResult
from worker_service.runner.drafting.drafter import Draft, SequenceDrafter
from worker_service.runner.drafting.suffix_drafter import SuffixDrafter
from worker_service.service import wire

EMBEDDED = Path(__file__).parents[4] / "worker_service/embedded_model"


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        ([9, 1, 2, 5, 8, 1, 2, 6, 1, 2], [6, 1, 2, 6]),  # the last of equal matches
        ([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], [7, 9, 2, 3]),  # the longest match
        ([5, 6, 5, 6], [5, 6, 5, 6]),  # a loop goes on
        ([4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 3, 4], []),
        ([7, 2, 8, 2], [8, 2, 8, 2]),  # one token is enough
        ([2, 6, 2, 7, 2, 6, 2, 8, 2], [6, 2, 8, 2]),  # the most frequent next token, at its last
        ([2, 6, 2, 7, 2], [7, 2, 7, 2]),  # the last of equals
        ([3], []),
        ([3, 3], [3, 3, 3, 3]),
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 99], [5, 6, 7, 1]),  # 99 replaces 4
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 98, 99], [6, 7, 1, 2]),  # 98 and 99 replace 4 and 5
        ([1, 2, 3, 4, 5, 6, 7, 6, 0, 6, 0, 1, 2, 3, 6], [7, 6, 0, 6]),  # 4 and 5 are left out
        ([1, 2, 3, 4, 1, 2, 99], []),  # too short a match
    ],
)
def test_ngrams_propose_what_followed_the_longest_match(
    tokens: list[int], drafts: list[int]
) -> None:
    for count in (4, 1):
        found = SuffixDrafter(history_tokens=0).follow(
            np.array(tokens, np.int32), count, np.uint64(0)
        )
        assert found.tokens.tolist() == drafts[:count]


class FixedDrafter(SequenceDrafter):
    """Proposes what it is given."""

    def __init__(self) -> None:
        self.drafts: list[int] = []

    def follow(self, tokens: Int32Array, num_drafts: int, salt: np.uint64) -> Draft:
        """The drafts."""
        return Draft(np.array(self.drafts[:num_drafts], np.int32))


class Bench:
    """A runner with given drafts, over a model whose tokens show every mistake."""

    def __init__(self, runner: str, poison: int | None = None) -> None:
        model = CountingModel(256, poison=poison)
        cache = make_cache(model, 4)
        self.drafter, kind = FixedDrafter(), RUNNERS[runner]
        self.runner = speculating(lambda _: self.drafter, AllDrafts(), model, cache, 4, kind=kind)
        self.plans = PlanBuilder(block_size=4)

    def step(self, *rows: Row, drafts: Sequence[int] = (), **fields: Any) -> StepResult:
        self.drafter.drafts = list(drafts)
        plan = self.plans.plan(rows, **fields)
        return self.runner.launch(wire.decode_plan(plan, 0)).collect()

    def draft(self, seq_id: int, drafts: Sequence[int], lookahead: int) -> list[int]:
        """Tokens of a decode row that may have `lookahead` drafts."""
        self.plans.grow(seq_id, lookahead)
        result = self.step(Row(seq_id), drafts=drafts, lookahead=bytes([lookahead]))
        tokens: list[int] = result.token_ids.tolist()
        num_drafts = min(len(drafts), lookahead)
        if num_drafts:
            assert result.num_sampled is not None
            assert result.num_sampled.tolist() == [len(tokens)]
            assert result.num_drafts is not None
            assert result.num_drafts.tolist() == [num_drafts]
        self.plans.lengths[seq_id] += len(tokens) - 1 - lookahead
        return tokens


def output_of(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


PROMPT = [3, 1, 4, 1, 5]


EACH_RUNNER = pytest.mark.parametrize("runner", list(RUNNERS))


@EACH_RUNNER
@pytest.mark.parametrize("num_right", range(6))
def test_drafts_are_kept_up_to_the_first_wrong_one(num_right: int, runner: str) -> None:
    bench, wanted = Bench(runner), output_of(PROMPT, 30)
    bench.plans.add(1, PROMPT)
    tokens = bench.step(Row(1, len(PROMPT))).token_ids.tolist()
    while len(tokens) < 20:
        drafts = wanted[len(tokens) : len(tokens) + 5]
        if num_right < 5:
            drafts[num_right] += 1
        tokens += (found := bench.draft(1, drafts, 5))
        assert len(found) == num_right + 1
    assert tokens == wanted[: len(tokens)]


@EACH_RUNNER
def test_an_error_after_a_draft_is_that_of_the_next_row(runner: str) -> None:
    wanted = output_of(PROMPT, 8)
    bench = Bench(runner, poison=wanted[2])
    bench.plans.add(1, PROMPT)
    tokens = bench.step(Row(1, len(PROMPT))).token_ids.tolist()
    tokens += bench.draft(1, wanted[1:5], 4)
    assert tokens == wanted[:3], "the token that poisons the logits after it was sampled"
    self_grown = bench.step(Row(1))
    assert self_grown.errors == {0: RowErrorReason.NON_FINITE_LOGITS}
    assert self_grown.token_ids.tolist() == [-1]


@EACH_RUNNER
@pytest.mark.parametrize(
    ("drafts", "num_allowed"), [("abab", 4), ("abac", 3), ("xaba", 0), ("ab\0ab", 3)]
)
def test_drafts_end_before_one_that_the_constraint_forbids(
    drafts: str, num_allowed: int, runner: str
) -> None:
    """A zero stands for the token that may end the output, after which nothing is drafted."""
    texts = vocabularies.token_texts(256)
    ids = [texts.index(draft.encode()) if draft != "\0" else vocabularies.END for draft in drafts]
    constraint = sampling_pb2.Constraint(regex="x(?:ab)*", end_token_ids=ENDS)
    bench = Bench(runner)
    bench.plans.add(1, PROMPT, sampling=sampler_params(temperature=0.0, constraint=constraint))
    assert bench.step(Row(1, len(PROMPT))).token_ids.tolist() == [texts.index(b"x")]
    bench.plans.grow(1, 5)
    result = bench.step(Row(1), drafts=ids, lookahead=b"\x05")
    found = [0] if result.num_drafts is None else result.num_drafts.tolist()
    assert found == [num_allowed]


ENDS = np.array([vocabularies.END], "<i4").tobytes()

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "seed": 11},
    "bad words": {
        "bad_words": [
            sampling_pb2.TokenSequence(token_ids=np.array(word, "<i4").tobytes())
            for word in ([7], [20, 21])
        ],
        "temperature": 1.0,
    },
    "min_tokens": {
        "min_tokens": 9,
        "suppressed_token_ids": np.arange(5, 90, dtype="<i4").tobytes(),
    },
    "biases": {
        "logit_bias": [sampling_pb2.LogitBias(token_id=40, bias=4.0)],
        "temperature": 1.0,
        "seed": 3,
    },
    "a frequency penalty": {"frequency_penalty": 0.7},
    "a presence penalty": {"presence_penalty": -0.8, "temperature": 0.9, "seed": 5},
    "a repetition penalty": {"repetition_penalty": 1.4, "temperature": 1.0, "seed": 2**33},
    "all penalties": {
        "frequency_penalty": -0.4,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "temperature": 0.7,
        "top_k": 20,
        "min_tokens": 5,
        "suppressed_token_ids": np.arange(5, 90, dtype="<i4").tobytes(),
    },
    "log probabilities": {"logprobs": 3, "temperature": 0.9, "seed": 8},
    "a grammar": {
        "constraint": sampling_pb2.Constraint(
            grammar=r'start: "(" start ")" | start "+" start | /[0-9]{1,3}/', end_token_ids=ENDS
        ),
        "temperature": 1.2,
        "seed": 4,
    },
    "a JSON schema": {
        "constraint": sampling_pb2.Constraint(
            json_schema='{"type": "array", "items": {"enum": ["a", 1, null]}, "minItems": 40}',
            end_token_ids=ENDS,
        ),
    },
    "a short constraint, and log probabilities": {
        "constraint": sampling_pb2.Constraint(regex="(?:ab|ba|[A-F]){9,12}!", end_token_ids=ENDS),
        "min_tokens": 3,
        "logprobs": 0,
        "temperature": 0.8,
        "frequency_penalty": 0.2,
    },
}


MANY_PROMPTS = [[5 + (7 * index + at) % 200 for at in range(6 + 5 * index)] for index in range(4)]


@cache
def _without_speculation(parameters: str, dtype: str) -> list[Output]:
    engine = InProcessEngine(EMBEDDED, dtype=dtype)
    return engine.generate(MANY_PROMPTS, 40, num_choices=2, **PARAMETERS[parameters])


@pytest.mark.parametrize(
    ("parameters", "dtype", "runner"),
    [
        *((name, "float32", runner) for name in PARAMETERS for runner in ("host", "recorded")),
        ("all penalties", "bfloat16", "host"),
    ],
)
def test_every_position_is_sampled_as_if_the_drafts_were_output(
    parameters: str, dtype: str, runner: str
) -> None:
    fields, prompts = PARAMETERS[parameters], MANY_PROMPTS
    plain = _without_speculation(parameters, dtype)
    outputs = [[*prompts[index // 2], *output.token_ids] for index, output in enumerate(plain)]
    drafter = KnowingDrafter(())

    class Engine(SpeculatingEngine):
        num_drafts = 4

        def make_drafter(self, cache: CacheEngine) -> KnowingDrafter:
            return drafter

    # The device's sampler rounds log probabilities in another way.
    without = plain
    if runner == "recorded" and "logprobs" in fields:
        without = Engine(EMBEDDED, dtype=dtype, runner=runner).generate(prompts, 40, 2, **fields)
    drafter = KnowingDrafter(outputs)
    drafting = Engine(EMBEDDED, dtype=dtype, runner=runner).generate(prompts, 40, 2, **fields)
    assert [answer.token_ids for answer in drafting] == [answer.token_ids for answer in plain]
    assert [answer.logprobs for answer in drafting] == [answer.logprobs for answer in without]
    assert drafter.num_drafts > 100 or (runner, parameters) == ("recorded", "bad words")


@EACH_RUNNER
def test_prompts_with_log_probabilities_have_no_drafts(runner: str) -> None:
    bench = Bench(runner)
    sampling = sampler_params(temperature=0.0, prompt_logprobs=0)
    bench.plans.add(1, PROMPT, sampling=sampling)
    bench.step(Row(1, len(PROMPT)))
    bench.plans.grow(1, 3)
    result = bench.step(Row(1), drafts=[1, 2, 3], lookahead=b"\x03")
    assert result.num_drafts is None
    assert len(result.token_ids) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"speculative": "oracle"},
            "speculative: expected one of ngram, suffix, draft, eagle, mtp, got 'oracle'",
        ),
        (
            {"speculative": "draft"},
            "speculative_model: expected a directory or a hub id, which --speculative draft",
        ),
        (
            {"speculative": "ngram", "speculative_model": "embedded"},
            "speculative_model: expected --speculative draft or eagle with it",
        ),
        (
            {"speculative": "mtp", "speculative_model": "embedded"},
            "speculative_model: expected --speculative draft or eagle with it",
        ),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens: expected --speculative with it"),
        (
            {"speculative": "ngram", "num_speculative_tokens": 0},
            "num_speculative_tokens: expected 1 to 254, got 0",
        ),
        (
            {"speculative": "ngram", "num_speculative_tokens": 255},
            "num_speculative_tokens: expected 1 to 254, got 255",
        ),
    ],
)
def test_wrong_flags_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        RunnerConfig(**fields)

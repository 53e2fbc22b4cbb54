"""A harness that finds nothing must be able to find something."""

from dataclasses import replace

import pytest

from pagewire_client import SamplingParams
from tests.chaos.comparison import Answer, Choice, differences, is_repetition
from tests.chaos.streams import Progress, Streams, watch
from tests.chaos.timeline import Timeline
from tests.chaos.workload import Ask

CHOICE = Choice(
    index=0,
    token_ids=(5, 6, 7, 8),
    text="abcd",
    logprobs=(((5, -0.5, 1, "a"),), ((6, -0.25, 1, "b"),)),
    cumulative_logprob=-0.75,
    finish_reason="stop",
    stop_reason=8,
)
ANSWER = Answer(
    seed=1,
    prompt_token_ids=(1, 2),
    prompt_logprobs=None,
    choices=(CHOICE, replace(CHOICE, index=1)),
    prompt_tokens=2,
    completion_tokens=8,
)


def with_choice(**changes: object) -> Answer:
    return replace(ANSWER, choices=(CHOICE, replace(CHOICE, index=1, **changes)))


def test_equal_answers_do_not_differ() -> None:
    assert differences(ANSWER, replace(ANSWER)) == []


@pytest.mark.parametrize(
    ("got", "where"),
    [
        (replace(ANSWER, seed=2), "seed: 2 instead of 1"),
        (replace(ANSWER, completion_tokens=9), "completion_tokens: 9 instead of 8"),
        (replace(ANSWER, prompt_logprobs=()), "prompt_logprobs: () instead of None"),
        (replace(ANSWER, choices=(CHOICE,)), "1 choices instead of 2"),
        (with_choice(text="abcx"), "choice 1: text: length 4 instead of 4; from 3 on"),
        (with_choice(token_ids=(5, 6, 7)), "choice 1: token_ids: length 3 instead of 4; from 3"),
        (with_choice(token_ids=(5, 6, 6, 7, 8)), "choice 1: token_ids: 1 entries came twice"),
        (with_choice(cumulative_logprob=-0.7500001), "choice 1: cumulative_logprob"),
        (with_choice(logprobs=CHOICE.logprobs[:1]), "choice 1: logprobs: length 1 instead of 2"),
        (with_choice(stop_reason=None), "choice 1: stop_reason: None instead of 8"),
        (with_choice(finish_reason="length"), "choice 1: finish_reason: length 6 instead of 4"),
    ],
)
def test_each_difference_is_told(got: Answer, where: str) -> None:
    [found] = differences(got, ANSWER)
    assert found.startswith(where)


@pytest.mark.parametrize(
    ("got", "expected", "is_one"),
    [
        ([1, 2, 2, 3], [1, 2, 3], True),
        ([1, 2, 1, 2, 3], [1, 2, 3], True),
        ([1, 2, 3, 2, 3], [1, 2, 3], True),
        ([1, 2, 3], [1, 2, 3], False),
        ([1, 2, 3, 4], [1, 2, 3], False),
        ([1, 2], [1, 2, 3], False),
    ],
)
def test_tokens_that_came_twice_are_told_from_others(
    got: list[int], expected: list[int], is_one: bool
) -> None:
    assert is_repetition(got, expected) is is_one


async def test_a_silent_stream_is_found_with_the_tokens_it_had() -> None:
    timeline = Timeline()
    streams = Streams([], [], timeline, max_open=0)
    streams.awake_s = 11
    ask = Ask(number=3, kinds=("greedy",), prompt="x", params=SamplingParams(temperature=0))
    streams.open["silent"] = Progress(ask, num_tokens=17, at_s=1)
    streams.open["lively"] = Progress(ask, num_tokens=5, at_s=9)
    await watch(streams, timeline, patience_s=10.0)
    [hung] = streams.tally.hung
    assert hung.startswith("silent request 3 (greedy)")
    assert hung.endswith("nothing for 11 s after 17 tokens")


async def test_an_answer_that_arrives_whole_is_silent_until_nothing_is_disturbed() -> None:
    timeline = Timeline()
    streams = Streams([], [], timeline, max_open=0)
    streams.awake_s = 1000
    ask = Ask(number=5, kinds=("beam search",), prompt="x", params=SamplingParams(beam_width=2))
    streams.open["whole"] = Progress(ask, num_tokens=0, at_s=0, arrives_whole=True)
    streams.open["other"] = Progress(ask, num_tokens=0, at_s=1000)
    await watch(streams, timeline, patience_s=0.0)
    assert [line.split()[0] for line in streams.tally.hung] == ["other"]
    streams.tally.hung.clear()
    del streams.open["other"]
    streams.is_disturbed = False
    await watch(streams, timeline, patience_s=0.0)
    assert [line.split()[0] for line in streams.tally.hung] == ["whole"]

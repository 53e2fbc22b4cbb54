"""A harness that finds nothing must be able to find something."""

from dataclasses import replace

import pytest

from pagewire_client import SamplingParams
from tests.chaos.comparison import Answer, Choice, differences
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
        (replace(ANSWER, choices=(CHOICE,)), "1 choices instead of 2"),
        (with_choice(token_ids=(5, 6, 7)), "choice 1: token_ids: length 3 instead of 4; from 3"),
        (with_choice(token_ids=(5, 6, 6, 7, 8)), "choice 1: token_ids: 1 entries came twice"),
        (with_choice(logprobs=CHOICE.logprobs[:1]), "choice 1: logprobs: length 1 instead of 2"),
        (with_choice(finish_reason="length"), "choice 1: finish_reason: length 6 instead of 4"),
    ],
)
def test_each_difference_is_told(got: Answer, where: str) -> None:
    [found] = differences(got, ANSWER)
    assert found.startswith(where)


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

"""Biases, penalties, bad words and suppressed tokens, each shown by a choice that it changes.

The log probabilities that come with a token show by how much the best leads. A bias a little below
that lead must change nothing, one a little above it must change the choice. A penalty needs a token
that has occurred and is among the most probable: the kit looks for one, then lifts it by a bias.
"""

from typing import Any, NamedTuple

from conformance.assertions import Skipped, expect
from conformance.case import case
from conformance.sequence import NUM_LOGPROBS, sampler_params
from conformance.worker import Worker
from pagewire import columns

MARGIN = 0.05
"""Between a lead and a bias: more than rounding, less than any two tokens of interest differ."""

MAX_BIAS = 90.0
"""SamplingParams allows 100."""

NUM_REPEATS = 3
MANY_LOGPROBS = 64
MAX_BATCHES = 16


class Lead(NamedTuple):
    """The two most probable tokens after a prompt, and the first one's lead in logits."""

    first: int
    second: int
    gap: float


def lead(worker: Worker, prompt: list[int]) -> Lead:
    """The choice after a prompt."""
    step = worker.alone(prompt, 1).steps[0]
    first, second = step.top_ids[:2]
    return Lead(first, second, step.top_logprobs[0] - step.top_logprobs[1])


def chosen(worker: Worker, tokens: list[int], num_prompt_tokens: int, **fields: Any) -> int:
    """The token chosen at temperature 0 with these parameters."""
    sampling = sampler_params(temperature=0.0, **fields)
    with worker.open() as stream:
        sequence = stream.new(tokens, num_prompt_tokens=num_prompt_tokens, sampling=sampling)
        return stream.step(sequence).token(sequence)


def bias(token: int, value: float) -> list[dict[str, float]]:
    """`logit_bias` of one token."""
    return [{"token_id": token, "bias": value}]


def words(*tokens: int) -> list[dict[str, bytes]]:
    """`bad_words` of one word."""
    return [{"token_ids": columns.pack(tokens)}]


def expect_bias_decides(worker: Worker, sign: int) -> None:
    """Fail unless the lead is overcome by a bias up on the second token, or down on the first."""
    for number in range(3):
        prompt = worker.prompt(number)
        first, second, gap = lead(worker, prompt)
        biased, name = (second, "second") if sign > 0 else (first, "first")
        for value, token in ((gap - MARGIN, first), (gap + MARGIN, second)):
            got = chosen(worker, prompt, len(prompt), logit_bias=bias(biased, sign * value))
            expect(f"the token chosen with bias {sign * value:.3f} on the {name}", got, token)


@case("sampling", "Added to logits; no token twice.")
def a_bias_lifts_a_token(worker: Worker) -> None:
    expect_bias_decides(worker, 1)


@case("sampling", "biases are added")
def a_negative_bias_pushes_a_token_down(worker: Worker) -> None:
    expect_bias_decides(worker, -1)


@case("sampling", "Before this many output tokens, the logits of suppressed_token_ids are -inf.")
def min_tokens_holds_suppressed_tokens_back(worker: Worker) -> None:
    prompt = worker.prompt(1)
    alone = worker.alone(prompt, 3)
    for position, step in enumerate(alone.steps):
        tokens = [*prompt, *alone.tokens[:position]]
        suppressed = {"suppressed_token_ids": columns.pack([step.top_ids[0]])}
        for min_tokens, rank in ((position + 1, 1), (position, 0)):
            got = chosen(worker, tokens, len(prompt), min_tokens=min_tokens, **suppressed)
            what = f"the token at position {position} with min_tokens {min_tokens}"
            expect(what, got, step.top_ids[rank])


@case("sampling", "Tokens that would complete a bad word and suppressed tokens are excluded")
def a_bad_word_of_one_token_never_appears(worker: Worker) -> None:
    for number in range(3):
        prompt = worker.prompt(number)
        first, second, _ = lead(worker, prompt)
        got = chosen(worker, prompt, len(prompt), bad_words=words(first))
        expect("the token chosen", got, second)


@case("sampling", "Token sequences that must not be completed in the output")
def a_bad_word_of_two_tokens_is_not_completed(worker: Worker) -> None:
    prompt = worker.prompt(1)
    alone = worker.alone(prompt, 2)
    (one, two), other = alone.tokens, (alone.tokens[0] + 1) % worker.vocab_size
    for word, token in (([one, two], alone.steps[1].top_ids[1]), ([other, two], two)):
        got = chosen(worker, [*prompt, one], len(prompt), bad_words=words(*word))
        expect(f"the token after {one} with the bad word {word}", got, token)


@case("sampling", "the prompt does not count")
def a_bad_word_that_the_prompt_begins_may_be_completed(worker: Worker) -> None:
    prompt = worker.prompt(2)
    first, _, _ = lead(worker, prompt)
    got = chosen(worker, prompt, len(prompt), bad_words=words(prompt[-1], first))
    expect("the token chosen", got, first)


class Repeat(NamedTuple):
    """A prompt whose end repeats a token that is among the most probable ones to follow."""

    prompt: list[int]
    token: int
    rival: int
    """The most probable other token."""

    gap: float
    """The rival's lead over the token in logits; negative if the token leads."""


def find_repeat(worker: Worker) -> Repeat:
    """Search for it; skip the case if the model never repeats itself."""
    width = min(MANY_LOGPROBS, worker.vocab_size)
    sampling = sampler_params(temperature=0.0, logprobs=width)
    with worker.open() as stream:
        for batch in range(MAX_BATCHES):
            prompts = [
                worker.prompt(500, 1) + worker.prompt(64 * batch + index, 1) * NUM_REPEATS
                for index in range(64)
            ]
            sequences = [stream.new(prompt, sampling=sampling) for prompt in prompts]
            stream.step(*sequences)
            for sequence in sequences:
                step = sequence.sampled[0]
                ranked = dict(zip(step.top_ids, step.top_logprobs, strict=True))
                token = sequence.tokens[1]
                rivals = [other for other in step.top_ids if other not in sequence.tokens[:4]]
                if token in ranked and rivals:
                    gap = ranked[rivals[0]] - ranked[token]
                    if gap < MAX_BIAS:
                        return Repeat(sequence.tokens[:4], token, rivals[0], gap)
            stream.step(stream.new(worker.prompt(1, 2)), forget=sequences)
    raise Skipped("of a thousand tokens that occurred none was among the most probable to follow")


def lifted(worker: Worker, repeat: Repeat, num_prompt_tokens: int, by: float, **fields: Any) -> int:
    """The token chosen when a bias makes the repeated token lead its rival by `lead`."""
    biases = bias(repeat.token, repeat.gap + by)
    return chosen(worker, repeat.prompt, num_prompt_tokens, logit_bias=biases, **fields)


ORDER = "the repetition, then the frequency and the presence penalty are applied"


@case("sampling", ORDER)
def a_presence_penalty_is_subtracted_once(worker: Worker) -> None:
    repeat = find_repeat(worker)
    for penalty, token in ((0.95, repeat.token), (1.05, repeat.rival)):
        got = lifted(worker, repeat, 1, 1.0, presence_penalty=penalty)
        expect(f"the token chosen with a lead of 1 and a presence penalty of {penalty}", got, token)


@case("sampling", ORDER)
def a_frequency_penalty_counts_occurrences(worker: Worker) -> None:
    repeat = find_repeat(worker)
    # The token occurs three times in the output.
    for penalty, token in ((0.32, repeat.token), (0.35, repeat.rival)):
        got = lifted(worker, repeat, 1, 1.0, frequency_penalty=penalty)
        what = f"the token chosen with a lead of 1 and a frequency penalty of {penalty}"
        expect(what, got, token)


@case("sampling", "Subtracted from a token's logit once per occurrence in the output")
def the_prompt_does_not_count_for_frequency_and_presence(worker: Worker) -> None:
    repeat = find_repeat(worker)
    fields = {"frequency_penalty": 2.0, "presence_penalty": 2.0}
    got = lifted(worker, repeat, len(repeat.prompt), 1.0, **fields)
    expect("the token chosen, which occurs only in the prompt", got, repeat.token)


@case("sampling", "Logits of tokens in prompt or output are divided by this where positive")
def a_repetition_penalty_pushes_down_what_occurred(worker: Worker) -> None:
    repeat = find_repeat(worker)
    # Divided by 100 where positive, multiplied where negative: unless the logit is within a hair
    # of 0, both cost more than the lead.
    for num_prompt_tokens in (1, len(repeat.prompt)):
        got = lifted(worker, repeat, num_prompt_tokens, MARGIN)
        expect("the token chosen with a lead and no penalty", got, repeat.token)
        got = lifted(worker, repeat, num_prompt_tokens, MARGIN, repetition_penalty=100.0)
        expect("the token chosen with a lead and a penalty of 100", got, repeat.rival)


@case("sampling", "1 penalises nothing.")
def penalties_leave_tokens_that_did_not_occur_alone(worker: Worker) -> None:
    fields = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 5.0}
    for number in range(8):
        prompt = worker.prompt(number, 16)  # few, so that most tokens do not occur
        step = worker.alone(prompt, 1).steps[0]
        if set(step.top_ids) & set(prompt):
            continue
        expect("the token chosen", chosen(worker, prompt, len(prompt), **fields), step.top_ids[0])
        return
    raise Skipped(f"the {NUM_LOGPROBS} most probable tokens always occur in the kit's prompts")

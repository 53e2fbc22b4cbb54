"""Predicted random tokens: draws by Philox, and the filters of the contract."""

from typing import Any

from conformance.assertions import expect, expect_true, fail
from conformance.case import case
from conformance.sampling_oracle import draw, expected_token
from conformance.sequence import sampler_params
from conformance.worker import Worker

TOP_K = 16
"""Tokens kept; their log probabilities suffice to predict the draw."""

NUM_SEQUENCES = 32
NUM_TOKENS = 3
MIN_PREDICTED = NUM_SEQUENCES
"""Number of draws, of three times as many, that must be predictable."""


def check_draws(worker: Worker, **fields: Any) -> None:
    """Fail unless sequences with these parameters draw what the kit predicts."""
    top_k = min(TOP_K, worker.vocab_size)
    fields = {"top_k": top_k, "logprobs": min(top_k + 1, worker.vocab_size)} | fields
    tokens_predicted, tokens_seen = 0, set()
    with worker.open() as stream:
        sequences = [
            stream.new(
                worker.prompt(number, 5),
                sampling=sampler_params(seed=(2**40 + 1) * (number + 1), **fields),
                choice_index=number % 5,
            )
            for number in range(NUM_SEQUENCES)
        ]
        for position in range(NUM_TOKENS):
            stream.step(*sequences)
            for sequence in sequences:
                step = sequence.sampled[position]
                logprobs = dict(zip(step.top_ids, step.top_logprobs, strict=True))
                seed, choice = sequence.sampling.seed, sequence.choice_index
                uniform = draw(seed, choice, position)
                expected = expected_token(logprobs, sequence.sampling, uniform)
                tokens_seen.add(step.token)
                if expected is None:
                    continue
                tokens_predicted += 1
                where = f"seed {seed}, choice {choice}, position {position}, draw {uniform:.6f}"
                expect(f"the token drawn ({where})", step.token, expected)
    if tokens_predicted < MIN_PREDICTED:
        fail(f"only {tokens_predicted} draws could be predicted: are log probabilities falling?")
    expect_true(len(tokens_seen) > 1, "all draws gave the same token")


@case("sampling", "the draw is the upper 53 bits of w0 * 2^32 + w1, divided by 2^53")
def draws_are_those_of_philox(worker: Worker) -> None:
    check_draws(worker)


@case("sampling", "the first is taken at which their cumulative probability exceeds the draw")
def a_low_temperature_sharpens(worker: Worker) -> None:
    check_draws(worker, temperature=0.4)


@case("sampling", "Any other temperature divides the logits")
def a_high_temperature_flattens(worker: Worker) -> None:
    check_draws(worker, temperature=3.0)


@case("sampling", "top_p keeps the smallest set of most probable tokens whose share reaches it")
def top_p_keeps_the_smallest_set(worker: Worker) -> None:
    check_draws(worker, top_p=0.6)
    check_draws(worker, top_p=0.9, temperature=2.0)


@case("sampling", "tokens whose probability is below min_p times the largest")
def min_p_drops_the_improbable(worker: Worker) -> None:
    check_draws(worker, min_p=0.15)
    check_draws(worker, min_p=0.05, top_p=0.8, temperature=1.5)


@case("sampling", "those beyond the top_k most probable, are dropped")
def top_k_keeps_the_most_probable(worker: Worker) -> None:
    check_draws(worker, top_k=3, temperature=2.0)
    check_draws(worker, top_k=5, top_p=0.7)

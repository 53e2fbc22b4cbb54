"""Log probabilities of sampled tokens."""

import math

from conformance.assertions import expect, expect_true
from conformance.case import case
from conformance.sequence import Sequence, sampler_params
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import plan_pb2

WIDTH = 8
ROUNDING = 1e-3


def entry_of(stream: StepStream, sequence: Sequence) -> plan_pb2.RowLogprobs:
    """The one entry of a step in which only this sequence has a row."""
    entries = stream.step(sequence).message.logprobs
    expect("entries in `logprobs`, of one row that asked", len(entries), 1)
    return entries[0]


@case("plan", "The sampled token, then the most probable ones, most probable first")
def the_sampled_token_comes_first_then_the_most_probable(worker: Worker) -> None:
    width = min(WIDTH, worker.vocab_size)
    for number in range(4):
        sampling = sampler_params(logprobs=width, temperature=2.0, seed=number)
        with worker.open() as stream:
            sequence = stream.new(worker.prompt(number), sampling=sampling)
            entry = entry_of(stream, sequence)
        ids, logprobs = columns.unpack(entry.token_ids), columns.unpack_floats(entry.logprobs)
        expect("entries, the sampled token's among them", len(ids), 1 + width)
        expect("log probabilities", len(logprobs), len(ids))
        expect("the first token", ids[0], sequence.tokens[-1])
        expect("distinct most probable tokens", len(set(ids[1:])), width)
        expect("their log probabilities, falling", logprobs[1:], sorted(logprobs[1:], reverse=True))


@case("plan", "Their log probabilities, natural logarithm.")
def log_probabilities_are_those_of_a_distribution(worker: Worker) -> None:
    width = min(64, worker.vocab_size)
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1), sampling=sampler_params(logprobs=width))
        logprobs = columns.unpack_floats(entry_of(stream, sequence).logprobs)
    expect_true(all(map(math.isfinite, logprobs)), "a log probability is not finite")
    total = sum(map(math.exp, logprobs[1:]))
    expect_true(total <= 1 + ROUNDING, f"the probabilities of {width} tokens add up to {total:.4f}")
    expect_true(
        total >= 1 - ROUNDING or width < worker.vocab_size,
        f"the probabilities of all tokens add up to {total:.4f}",
    )


@case("plan", "Rank of the sampled token: one more than the number of tokens more probable.")
def the_rank_counts_more_probable_tokens(worker: Worker) -> None:
    width = min(64, worker.vocab_size)
    for seed in range(8):
        sampling = sampler_params(logprobs=width, temperature=1.5, seed=seed)
        with worker.open() as stream:
            entry = entry_of(stream, stream.new(worker.prompt(1), sampling=sampling))
        own, *others = columns.unpack_floats(entry.logprobs)
        better = sum(other > own for other in others)
        if columns.unpack(entry.token_ids)[0] in columns.unpack(entry.token_ids)[1:]:
            expect("sampled_rank", entry.sampled_rank, 1 + better)
        else:
            expect_true(entry.sampled_rank > better, f"sampled_rank is {entry.sampled_rank}")


@case("sampling", "Number of most probable tokens reported in addition to the sampled one.")
def logprobs_of_0_reports_the_sampled_token_alone(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1), sampling=sampler_params(logprobs=0))
        entry = entry_of(stream, sequence)
    expect("token_ids", columns.unpack(entry.token_ids), [sequence.tokens[-1]])
    expect("number of log probabilities", len(columns.unpack_floats(entry.logprobs)), 1)


@case("plan", "For sampling rows that request them, in row order:")
def only_rows_that_asked_get_log_probabilities(worker: Worker) -> None:
    silent = sampler_params()
    silent.ClearField("logprobs")
    with worker.open() as stream:
        wishes = [silent, sampler_params(logprobs=2), silent, sampler_params(logprobs=1)]
        asking = [
            stream.new(worker.prompt(number), sampling=wish) for number, wish in enumerate(wishes)
        ]
        unsampled = stream.new(worker.prompt(7), sampling=sampler_params(logprobs=2))
        entries = stream.step(unsampled.row(2, brings=False), *asking).message.logprobs
        expect("rows with log probabilities", [entry.row for entry in entries], [2, 4])
        widths = [len(columns.unpack(entry.token_ids)) for entry in entries]
        expect("entries of each", widths, [3, 2])

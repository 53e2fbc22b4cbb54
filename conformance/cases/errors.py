"""Rows that fail alone: their constraints leave no token."""

from conformance import columns
from conformance.assertions import expect, expect_true
from conformance.case import case
from conformance.generation import Generation
from conformance.sequence import sampler_params
from conformance.worker import Worker
from pagewire.v1 import plan_pb2, sampling_pb2

NO_CANDIDATES = plan_pb2.ROW_ERROR_REASON_NO_CANDIDATES


def impossible(worker: Worker) -> sampling_pb2.SamplerParams:
    """Parameters that exclude every token at the first position."""
    everything = columns.pack(range(worker.vocab_size))
    return sampler_params(temperature=0.0, min_tokens=1, suppressed_token_ids=everything)


@case("plan", "Every token was excluded by the request's own constraints.")
def a_row_without_candidates_fails(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1), sampling=impossible(worker))
        result = stream.step(sequence.row())
    expect("the row's error", result.errors, {sequence.seq_id: NO_CANDIDATES})
    expect("its token", result.token(sequence), -1)
    expect("its log probabilities", len(result.message.logprobs), 0)
    expect_true(bool(result.message.errors[0].message), "the error has no message")


@case("plan", "Rows that failed; the rest of the batch is unaffected.")
def the_rest_of_the_batch_continues(worker: Worker) -> None:
    prompts = [worker.prompt(number) for number in range(3)]
    with worker.open() as stream:
        good = [stream.new(prompts[0]), stream.new(prompts[2])]
        bad = stream.new(prompts[1], sampling=impossible(worker))
        result = stream.step(good[0].row(), bad.row(), good[1].row())
        expect("the failed rows", [error.row for error in result.message.errors], [1])
        first = [result.sampled[each.seq_id] for each in good]
        rest = [stream.generate(each, 2).steps for each in good]
    for prompt, one, more in zip((prompts[0], prompts[2]), first, rest, strict=True):
        worker.expect_as_alone("a row beside a failed one", Generation([one, *more]), prompt)


@case("plan", "its rows in later plans, which may be in flight already, fail")
def a_failed_sequence_fails_again_until_forgotten(worker: Worker) -> None:
    prompt = worker.prompt(2)
    with worker.open() as stream:
        bad = stream.new(worker.prompt(1), sampling=impossible(worker))
        good = stream.new(prompt)
        stream.send(bad.row(), good.row())
        stream.send(bad.row(), good.row())
        stream.receive()
        second = stream.receive()
        expect("the error of the plan in flight", second.errors, {bad.seq_id: NO_CANDIDATES})
        expect("its token", second.token(bad), -1)
        found = stream.generate(good, 2, forget=[bad])
    worker.expect_as_alone("a row beside a failed one", found, prompt, start=2)

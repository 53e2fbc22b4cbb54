"""Rows that fail alone: their constraints leave no token."""

from conformance.assertions import expect, expect_true
from conformance.case import Alone, stream_case
from conformance.sequence import sampler_params
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire import columns
from pagewire.v1 import plan_pb2, sampling_pb2

NO_CANDIDATES = plan_pb2.ROW_ERROR_REASON_NO_CANDIDATES


def impossible(worker: Worker) -> sampling_pb2.SamplerParams:
    """Parameters that exclude every token at the first position."""
    everything = columns.pack(range(worker.vocab_size))
    return sampler_params(temperature=0.0, min_tokens=1, suppressed_token_ids=everything)


@stream_case("plan", "Every token was excluded by the request's own constraints.")
def a_row_without_candidates_fails(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1), sampling=impossible(worker))
    result = stream.step(sequence)
    expect("the row's error", result.errors, {sequence.seq_id: NO_CANDIDATES})
    expect("its token", result.token(sequence), -1)
    expect("its log probabilities", len(result.message.logprobs), 0)
    expect_true(bool(result.message.errors[0].message), "the error has no message")


@stream_case("plan", "Rows that failed; the rest of the batch is unaffected.")
def the_rest_of_the_batch_continues(worker: Worker, stream: StepStream) -> Alone:
    before, after = stream.new(worker.prompt(0)), stream.new(worker.prompt(2))
    bad = stream.new(worker.prompt(1), sampling=impossible(worker))
    result = stream.step(before, bad, after)
    expect("the failed rows", [error.row for error in result.message.errors], [1])
    stream.generate(before, 2)
    stream.generate(after, 2)
    return {"a row before a failed one": before, "a row after a failed one": after}


@stream_case("plan", "its rows in later plans, which may be in flight already, fail")
def a_failed_sequence_fails_again_until_forgotten(worker: Worker, stream: StepStream) -> Alone:
    bad = stream.new(worker.prompt(1), sampling=impossible(worker))
    good = stream.new(worker.prompt(2))
    stream.send(bad, good)
    stream.send(bad, good)
    _, second = stream.receive_all()
    expect("the error of the plan in flight", second.errors, {bad.seq_id: NO_CANDIDATES})
    expect("its token", second.token(bad), -1)
    stream.generate(good, 2, forget=[bad])
    return {"a row in a batch with a failed one": good}

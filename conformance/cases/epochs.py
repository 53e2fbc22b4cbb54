"""Fencing: a stream with a greater epoch takes over."""

import grpc

from conformance.assertions import expect, expect_true
from conformance.case import Alone, case, refusal_case, stream_case
from conformance.step_stream import StepStream
from conformance.worker import Worker


@refusal_case(
    "worker_service", "A step stream that is open ends with ABORTED.", code=grpc.StatusCode.ABORTED
)
def new_caches_end_the_stream_of_the_older_epoch(worker: Worker, stream: StepStream) -> None:
    stream.prefilled(worker.prompt(1))
    worker.initialize(worker.next_epoch())


@stream_case("worker_service", "a stream with a greater epoch ends an older one with ABORTED")
def a_stream_of_a_greater_epoch_ends_the_older_one(worker: Worker, older: StepStream) -> Alone:
    older.prefilled(worker.prompt(2))
    with worker.stream(worker.next_epoch()) as newer:
        sequence = newer.generate(newer.new(worker.prompt(1)), 2)
        older.call.refusal().expect(grpc.StatusCode.ABORTED)
    return {"the stream that took over": sequence}


def other_stream_is_refused(
    worker: Worker, stream: StepStream, epoch: int, code: grpc.StatusCode
) -> Alone:
    """Fail unless a second stream is refused with this code, and the first one continues."""
    stream.prefilled(worker.prompt(1))
    with worker.stream(epoch) as other:
        other.send(other.new(worker.prompt(1)))
        other.call.refusal().expect(code)
    sequence = stream.generate(stream.new(worker.prompt(2)), 2)
    return {"the stream that holds, after the other one's try": sequence}


@stream_case("plan", "A worker that has seen a greater epoch ends the stream with ABORTED.")
def a_stream_of_an_older_epoch_is_refused(worker: Worker, stream: StepStream) -> Alone:
    return other_stream_is_refused(worker, stream, stream.epoch - 1, grpc.StatusCode.ABORTED)


@stream_case("worker_service", "a second one is refused with FAILED_PRECONDITION")
def a_second_stream_of_an_epoch_is_refused(worker: Worker, stream: StepStream) -> Alone:
    code = grpc.StatusCode.FAILED_PRECONDITION
    return other_stream_is_refused(worker, stream, stream.epoch, code)


@stream_case("worker_service", "An epoch has one stream")
def an_epoch_cannot_be_reused_after_its_stream(worker: Worker, first: StepStream) -> None:
    first.prefilled(worker.prompt(1))
    first.call.finish()
    with worker.stream(first.epoch) as second:
        second.send(second.new(worker.prompt(1)))
        second.call.refusal().expect(grpc.StatusCode.FAILED_PRECONDITION)


@stream_case("plan", "the same in all its plans")
def a_plan_of_another_epoch_ends_the_stream(worker: Worker, stream: StepStream) -> None:
    sequence = stream.prefilled(worker.prompt(1))
    stream.send_changed(sequence, epoch=stream.epoch + 1)
    code = stream.call.refusal().code
    worker.next_epoch()
    allowed = (grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION)
    expect_true(code in allowed, f"expected ABORTED or FAILED_PRECONDITION, got {code.name}")


@stream_case("worker_service", "Creates the KV caches and forgets all sequences.")
def sequences_of_an_older_epoch_are_unknown(worker: Worker, older: StepStream) -> None:
    sequence = older.prefilled(worker.prompt(1))
    with worker.open() as newer:
        newer.send(sequence)
        newer.call.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "seq_ids", "block_updates")


@case("worker_service", "However a stream ends, its sequences are forgotten")
def a_cancelled_stream_leaves_no_sequences(worker: Worker) -> None:
    with worker.open() as broken:
        former = broken.prefilled(worker.prompt(1))
        broken.call.cancel()
    with worker.stream(worker.next_epoch()) as stream:
        sequence = stream.generate(stream.new(worker.prompt(2), seq_id=former.seq_id), 2)
        expect("its id", sequence.seq_id, former.seq_id)
    worker.expect_as_alone("a sequence under the same id", sequence)

"""Fencing: a stream with a greater epoch takes over."""

import grpc

from conformance.assertions import expect, expect_true
from conformance.case import case
from conformance.worker import Worker


@case("worker_service", "A step stream that is open ends with ABORTED.")
def new_caches_end_the_stream_of_the_older_epoch(worker: Worker) -> None:
    with worker.open() as older:
        older.step(older.new(worker.prompt(1)).row())
        worker.initialize(worker.next_epoch())
        older.refusal().expect(grpc.StatusCode.ABORTED)


@case("worker_service", "a stream with a greater epoch ends an older one with ABORTED")
def a_stream_of_a_greater_epoch_ends_the_older_one(worker: Worker) -> None:
    prompt = worker.prompt(1)
    with worker.open() as older:
        older.step(older.new(worker.prompt(2)).row())
        with worker.stream(worker.next_epoch()) as newer:
            found = newer.generate(newer.new(prompt), 2)
            older.refusal().expect(grpc.StatusCode.ABORTED)
    worker.expect_as_alone("the stream that took over", found, prompt)


@case("plan", "A worker that has seen a greater epoch ends the stream with ABORTED.")
def a_stream_of_an_older_epoch_is_refused(worker: Worker) -> None:
    with worker.open() as newer:
        newer.step(newer.new(worker.prompt(1)).row())
        with worker.stream(newer.epoch - 1) as older:
            older.send(older.new(worker.prompt(1)).row())
            older.refusal().expect(grpc.StatusCode.ABORTED)
        prompt = worker.prompt(2)
        found = newer.generate(newer.new(prompt), 2)
    worker.expect_as_alone("the newer stream, after the older one's try", found, prompt)


@case("worker_service", "a second one is refused with FAILED_PRECONDITION")
def a_second_stream_of_an_epoch_is_refused(worker: Worker) -> None:
    with worker.open() as first:
        first.step(first.new(worker.prompt(1)).row())
        with worker.stream(first.epoch) as second:
            second.send(second.new(worker.prompt(1)).row())
            second.refusal().expect(grpc.StatusCode.FAILED_PRECONDITION)
        prompt = worker.prompt(2)
        found = first.generate(first.new(prompt), 2)
    worker.expect_as_alone("the first stream, after the second one's try", found, prompt)


@case("worker_service", "An epoch has one stream")
def an_epoch_cannot_be_reused_after_its_stream(worker: Worker) -> None:
    with worker.open() as first:
        first.step(first.new(worker.prompt(1)).row())
        first.finish()
        with worker.stream(first.epoch) as second:
            second.send(second.new(worker.prompt(1)).row())
            second.refusal().expect(grpc.StatusCode.FAILED_PRECONDITION)


@case("plan", "the same in all its plans")
def a_plan_of_another_epoch_ends_the_stream(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1))
        stream.step(sequence.row())
        plan = stream.plan(sequence.row())
        plan.epoch += 1
        stream.send_plan(plan)
        code = stream.refusal().code
    worker.next_epoch()
    allowed = (grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION)
    expect_true(code in allowed, f"expected ABORTED or FAILED_PRECONDITION, got {code.name}")


@case("worker_service", "Creates the KV caches and forgets all sequences.")
def sequences_of_an_older_epoch_are_unknown(worker: Worker) -> None:
    with worker.open() as older:
        sequence = older.new(worker.prompt(1))
        older.step(sequence.row())
        with worker.open() as newer:
            newer.send(sequence.row())
            newer.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "seq_ids")


@case("worker_service", "However a stream ends, its sequences are forgotten")
def a_cancelled_stream_leaves_no_sequences(worker: Worker) -> None:
    with worker.open() as broken:
        sequence = broken.new(worker.prompt(1))
        broken.step(sequence.row())
        broken.cancel()
    with worker.stream(worker.next_epoch()) as stream:
        prompt = worker.prompt(2)
        found = stream.generate(stream.new(prompt, seq_id=sequence.seq_id), 2)
        worker.expect_as_alone("a sequence under the same id", found, prompt)
        expect("its id", stream.step_id, 2)

"""Step numbers, and several plans in flight."""

import grpc

from conformance.assertions import expect_true
from conformance.case import Alone, case, refusal_case, stream_case
from conformance.step_stream import StepStream
from conformance.worker import Worker

DEPTH = 12
IN_ORDER = "Executes plans in order and answers each, whether or not the next has arrived."
OUT_OF_ORDER = "Anything else ends the stream with FAILED_PRECONDITION."


@stream_case("worker_service", IN_ORDER)
def plans_are_taken_before_earlier_results_are_read(worker: Worker, stream: StepStream) -> Alone:
    sequence = stream.new(worker.prompt(1))
    for _ in range(DEPTH):
        stream.send(sequence)
    stream.receive_all()
    return {"pipelined decodes": sequence}


@stream_case("worker_service", IN_ORDER)
def a_result_does_not_wait_for_the_next_plan(worker: Worker, stream: StepStream) -> None:
    stream.generate(stream.new(worker.prompt(1)), 3)


@case("worker_service", "Several in a message mean what they mean in as many")
def plans_in_one_message_are_executed_in_order(worker: Worker) -> None:
    for together in (0, 2, DEPTH):
        with worker.open() as stream:
            sequence = stream.prefilled(worker.prompt(1))
            stream.send_together([sequence] * (DEPTH - 1), max_results=together)
            stream.receive_all()
        worker.expect_as_alone("decodes sent together", sequence)


@stream_case("plan", "only while the worker has two")
def a_result_does_not_wait_while_one_plan_is_left(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1))
    stream.send(sequence, max_results=DEPTH)
    for _ in range(DEPTH):
        stream.send(sequence, max_results=DEPTH)
        stream.receive()


@case("plan", "Counts up by one, from 1 at the start of the stream.")
def a_stream_that_does_not_begin_with_step_1_is_refused(worker: Worker) -> None:
    for step_id in (0, 2):
        with worker.open() as stream:
            stream.send_changed(stream.new(worker.prompt(1)), step_id=step_id)
            stream.call.refusal().expect(grpc.StatusCode.FAILED_PRECONDITION)


@refusal_case("plan", OUT_OF_ORDER, code=grpc.StatusCode.FAILED_PRECONDITION)
def a_step_left_out_ends_the_stream(worker: Worker, stream: StepStream) -> None:
    stream.send_changed(stream.prefilled(worker.prompt(1)), step_id=3)


@refusal_case("plan", OUT_OF_ORDER, code=grpc.StatusCode.FAILED_PRECONDITION)
def a_step_sent_twice_ends_the_stream(worker: Worker, stream: StepStream) -> None:
    sequence = stream.prefilled(worker.prompt(1))
    plan = stream.plan(sequence)
    stream.send_plan(plan, [sequence.row(1)])
    stream.receive()
    stream.send_plan(plan)


@stream_case("worker_service", "Results of the plans before it are sent first.")
def a_wrong_plan_does_not_swallow_the_results_before_it(
    worker: Worker, stream: StepStream
) -> Alone:
    sequence = stream.new(worker.prompt(2))
    for _ in range(4):
        stream.send(sequence)
    stream.send_changed(seq_ids=[sequence.seq_id + 1])
    for _ in range(4):
        stream.receive()
    stream.call.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "seq_ids")
    return {"the results before a wrong plan": sequence}


@case("plan", "Counts up by one, from 1 at the start of the stream.")
def a_new_stream_counts_from_1_again(worker: Worker) -> None:
    for _ in range(2):
        with worker.open() as stream:
            stream.prefilled(worker.prompt(1))
            stream.prefilled(worker.prompt(2))
            expect_true(stream.step_id == 2, "the kit itself must count from 1")

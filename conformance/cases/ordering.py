"""Step numbers, and several plans in flight."""

import grpc

from conformance import columns
from conformance.assertions import Skipped, expect_true
from conformance.case import case
from conformance.generation import Generation
from conformance.worker import Worker

DEPTH = 12


@case(
    "worker_service",
    "Executes plans in order and answers each, whether or not the next has arrived.",
)
def plans_are_taken_before_earlier_results_are_read(worker: Worker) -> None:
    prompt = worker.prompt(1)
    with worker.open() as stream:
        sequence = stream.new(prompt)
        for _ in range(DEPTH):
            stream.send(sequence.row())
        steps = [stream.receive().sampled[sequence.seq_id] for _ in range(DEPTH)]
    worker.expect_as_alone("pipelined decodes", Generation(steps), prompt)


@case(
    "worker_service",
    "Executes plans in order and answers each, whether or not the next has arrived.",
)
def a_result_does_not_wait_for_the_next_plan(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1))
        for _ in range(3):
            stream.step(sequence.row())


@case("worker_service", "The plans of the following steps, in order.")
def plans_in_one_message_are_executed_in_order(worker: Worker) -> None:
    if not worker.info.takes_several_plans:
        raise Skipped("it takes one plan at a time")
    prompt, count = worker.prompt(1), DEPTH - 1
    for together in (0, 2, DEPTH):
        with worker.open() as stream:
            sequence = stream.new(prompt)
            steps = [stream.step(sequence.row()).sampled[sequence.seq_id]]
            stream.send_together([sequence.row()] * count, max_results_together=together)
            steps += [stream.receive().sampled[sequence.seq_id] for _ in range(count)]
        worker.expect_as_alone("decodes sent together", Generation(steps), prompt)


@case("plan", "only while the worker has two")
def a_result_does_not_wait_while_one_plan_is_left(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1))
        stream.send(sequence.row(), max_results_together=DEPTH)
        for _ in range(DEPTH):
            stream.send(sequence.row(), max_results_together=DEPTH)
            stream.receive()


@case("plan", "Counts up by one, from 1 at the start of the stream.")
def a_stream_that_does_not_begin_with_step_1_is_refused(worker: Worker) -> None:
    for step_id in (0, 2):
        with worker.open() as stream:
            plan = stream.plan(stream.new(worker.prompt(1)).row())
            plan.step_id = step_id
            stream.send_plan(plan)
            stream.refusal().expect(grpc.StatusCode.FAILED_PRECONDITION)


@case("plan", "Anything else ends the stream with FAILED_PRECONDITION.")
def a_step_left_out_ends_the_stream(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1))
        stream.step(sequence.row())
        plan = stream.plan(sequence.row())
        plan.step_id += 1
        stream.send_plan(plan)
        stream.refusal().expect(grpc.StatusCode.FAILED_PRECONDITION)


@case("plan", "Anything else ends the stream with FAILED_PRECONDITION.")
def a_step_sent_twice_ends_the_stream(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1))
        stream.step(sequence.row())
        plan = stream.plan(sequence.row())
        stream.send_plan(plan, [sequence.row(1)])
        stream.receive()
        stream.send_plan(plan)
        stream.refusal().expect(grpc.StatusCode.FAILED_PRECONDITION)


@case("worker_service", "Results of the plans before it are sent first.")
def a_wrong_plan_does_not_swallow_the_results_before_it(worker: Worker) -> None:
    prompt = worker.prompt(2)
    with worker.open() as stream:
        sequence = stream.new(prompt)
        for _ in range(4):
            stream.send(sequence.row())
        plan = stream.plan()
        plan.seq_ids = columns.pack([sequence.seq_id + 1])
        stream.send_plan(plan)
        steps = [stream.receive().sampled[sequence.seq_id] for _ in range(4)]
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "seq_ids")
    worker.expect_as_alone("the results before a wrong plan", Generation(steps), prompt)


@case("plan", "Counts up by one, from 1 at the start of the stream.")
def a_new_stream_counts_from_1_again(worker: Worker) -> None:
    for _ in range(2):
        with worker.open() as stream:
            stream.generate(stream.new(worker.prompt(1)), 2)
            expect_true(stream.step_id == 2, "the kit itself must count from 1")

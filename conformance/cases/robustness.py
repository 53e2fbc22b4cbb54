"""After any error of a core, the worker is ready for the next one."""

import grpc

from conformance.assertions import expect
from conformance.case import Alone, case, stream_case
from conformance.sequence import Sequence, sampler_params
from conformance.step_stream import StepStream
from conformance.worker import MAX_NUM_SEQS, Worker
from pagewire.v1 import plan_pb2

UNKNOWN_FIELD = b"\xfa\x3f\x03abc"
"""Field 1023, of three bytes: what a newer core may send."""


@case("worker_service", "the worker is ready for a greater epoch")
def after_a_wrong_plan_a_new_epoch_works(worker: Worker) -> None:
    for _ in range(3):
        with worker.open() as stream:
            stream.send_changed(seq_ids=[77])
            stream.call.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "seq_ids")
    worker.expect_healthy()


@case("worker_service", "However a stream ends, its sequences are forgotten")
def after_a_cancelled_stream_a_new_epoch_works(worker: Worker) -> None:
    for num_plans in (0, 1, 8):
        with worker.open() as stream:
            sequence = stream.new(worker.prompt(1))
            for _ in range(num_plans):
                stream.send(sequence)
            stream.call.cancel()
    worker.expect_healthy()


@case("worker_service", "When the core half-closes the stream, it ends with OK")
def a_stream_without_a_plan_ends_well(worker: Worker) -> None:
    with worker.open() as stream:
        stream.call.finish()
    worker.expect_healthy()


@case("worker_service", "the worker is ready for a greater epoch")
def malformed_bytes_end_only_the_stream(worker: Worker) -> None:
    with worker.open():
        raw = worker.channel.stream_stream(
            "/pagewire.v1.WorkerService/ExecuteSteps", request_serializer=bytes
        )
        worker.refusal(
            lambda requests, timeout: list(raw(requests, timeout=timeout)),
            iter([b"\xff\xff\xff\xff"]),
        )
    worker.expect_healthy()


@stream_case("worker_service", "The plans of one or several consecutive steps.")
def fields_of_a_newer_contract_are_ignored(worker: Worker, stream: StepStream) -> Alone:
    sequence = stream.new(worker.prompt(1))
    rows = [sequence.row()]
    plan = stream.plan(*rows)
    plan.MergeFromString(UNKNOWN_FIELD)
    stream.send_plan(plan, rows)
    stream.receive()
    return {"a plan with an unknown field": sequence}


@stream_case("worker_service", "Maximum number of sequences in a step.")
def as_many_sequences_as_were_profiled_fit_into_a_step(worker: Worker, stream: StepStream) -> Alone:
    sampling = sampler_params(temperature=0.0)
    sequences = [
        stream.new(worker.prompt(number, 3), sampling=sampling) for number in range(MAX_NUM_SEQS)
    ]
    stream.step(*sequences)
    expect("tokens sampled", len(stream.step(*sequences).sampled), MAX_NUM_SEQS)
    return {"the first of many": sequences[0], "the last of many": sequences[-1]}


@stream_case("plan", "Sequences whose state the worker drops.")
def many_sequences_are_added_and_forgotten(worker: Worker, stream: StepStream) -> Alone:
    blocks = stream.blocks.take(-(-8 // worker.block_size))
    former: list[Sequence] = []
    for _ in range(50):
        sequence = stream.new(worker.prompt(1, 4), blocks=list(blocks))
        stream.generate(sequence, 2, forget=former)
        former = [sequence]
    return {"the last of 50 sequences in the same blocks": sequence}


@stream_case("worker_service", "Creates the KV caches and forgets all sequences.")
def other_calls_may_be_made_during_a_step_stream(worker: Worker, stream: StepStream) -> Alone:
    sequence = stream.prefilled(worker.prompt(1))
    worker.get_info()
    list(worker.model_assets())
    stream.generate(sequence, 2)
    return {"a sequence during other calls": sequence}


@case("plan", "The stream's fencing number, the same in all its plans.")
def a_plan_without_any_field_set_is_refused(worker: Worker) -> None:
    with worker.open() as stream:
        stream.send_plan(plan_pb2.StepPlan())
        stream.call.refusal()
    worker.expect_healthy()

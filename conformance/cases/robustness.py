"""After any error of a core, the worker is ready for the next one."""

import grpc

from conformance import columns
from conformance.assertions import expect
from conformance.case import case
from conformance.generation import Generation
from conformance.sequence import Sequence, sampler_params
from conformance.worker import MAX_NUM_SEQS, Worker
from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as pb

UNKNOWN_FIELD = b"\xfa\x3f\x03abc"
"""Field 1023, of three bytes: what a newer core may send."""


@case("worker_service", "the worker is ready for a greater epoch")
def after_a_wrong_plan_a_new_epoch_works(worker: Worker) -> None:
    for _ in range(3):
        with worker.open() as stream:
            plan = stream.plan()
            plan.seq_ids = columns.pack([77])
            stream.send_plan(plan)
            stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "seq_ids")
    worker.expect_healthy()


@case("worker_service", "However a stream ends, its sequences are forgotten")
def after_a_cancelled_stream_a_new_epoch_works(worker: Worker) -> None:
    for num_plans in (0, 1, 8):
        with worker.open() as stream:
            sequence = stream.new(worker.prompt(1))
            for _ in range(num_plans):
                stream.send(sequence.row())
            stream.cancel()
    worker.expect_healthy()


@case("worker_service", "When the core half-closes the stream, it ends with OK")
def a_stream_without_a_plan_ends_well(worker: Worker) -> None:
    with worker.open() as stream:
        stream.finish()
    worker.expect_healthy()


@case("worker_service", "the worker is ready for a greater epoch")
def malformed_bytes_end_only_the_stream(worker: Worker) -> None:
    with worker.open():
        raw = worker.channel.stream_stream(
            "/pagewire.v1.WorkerService/ExecuteSteps", request_serializer=bytes
        )
        call = raw(iter([b"\xff\xff\xff\xff"]), timeout=worker.timeout_s)
        worker.refusal(lambda: list(call))
    worker.expect_healthy()


@case("worker_service", "One plan, or several")
def fields_of_a_newer_contract_are_ignored(worker: Worker) -> None:
    prompt = worker.prompt(1)
    with worker.open() as stream:
        sequence = stream.new(prompt)
        rows = [sequence.row()]
        plan = stream.plan(*rows)
        plan.MergeFromString(UNKNOWN_FIELD)
        stream.send_plan(plan, rows)
        found = Generation([stream.receive().sampled[sequence.seq_id]])
    worker.expect_as_alone("a plan with an unknown field", found, prompt)


@case("worker_service", "Maximum number of sequences in a step.")
def as_many_sequences_as_were_profiled_fit_into_a_step(worker: Worker) -> None:
    sampling = sampler_params(temperature=0.0)
    prompts = [worker.prompt(number, 3) for number in range(MAX_NUM_SEQS)]
    with worker.open() as stream:
        sequences = [stream.new(prompt, sampling=sampling) for prompt in prompts]
        results = [stream.step(*(each.row() for each in sequences)) for _ in range(2)]
    expect("tokens sampled", len(results[-1].sampled), MAX_NUM_SEQS)
    for number in (0, MAX_NUM_SEQS - 1):
        seq_id = sequences[number].seq_id
        found = Generation([result.sampled[seq_id] for result in results])
        worker.expect_as_alone("one of many", found, prompts[number], sampling)


@case("plan", "Sequences whose state the worker drops.")
def many_sequences_are_added_and_forgotten(worker: Worker) -> None:
    prompt = worker.prompt(1, 4)
    with worker.open() as stream:
        blocks = stream.take_blocks(-(-8 // worker.block_size))
        former: list[Sequence] = []
        for _ in range(50):
            sequence = stream.new(prompt, blocks=list(blocks))
            found = stream.generate(sequence, 2, forget=former)
            former = [sequence]
    worker.expect_as_alone("the last of 50 sequences in the same blocks", found, prompt)


@case("worker_service", "Creates the KV caches and forgets all sequences.")
def other_calls_may_be_made_during_a_step_stream(worker: Worker) -> None:
    prompt = worker.prompt(1)
    with worker.open() as stream:
        sequence = stream.new(prompt)
        steps = [stream.step(sequence.row()).sampled[sequence.seq_id]]
        worker.get_info()
        list(
            worker.stub.GetModelAssets(
                pb.WorkerServiceGetModelAssetsRequest(), timeout=worker.timeout_s
            )
        )
        steps += stream.generate(sequence, 2).steps
    worker.expect_as_alone("a sequence during other calls", Generation(steps), prompt)


@case("plan", "The stream's fencing number, the same in all its plans.")
def a_plan_without_any_field_set_is_refused(worker: Worker) -> None:
    with worker.open() as stream:
        stream.send_plan(plan_pb2.StepPlan())
        stream.refusal()
    worker.expect_healthy()

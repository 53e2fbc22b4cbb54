"""Batches: independence of rows, their order, and columns of matching lengths."""

import grpc

from conformance import columns
from conformance.assertions import expect
from conformance.case import case
from conformance.cases.sequences import refuses
from conformance.generation import Generation
from conformance.sequence import Sequence, sampler_params
from conformance.worker import Worker
from pagewire.v1 import plan_pb2

NUM_SEQUENCES = 8
NUM_TOKENS = 4


@case("plan", "The batch: one row per scheduled sequence.")
def tokens_do_not_depend_on_the_rest_of_the_batch(worker: Worker) -> None:
    sampling = sampler_params(seed=11)
    with worker.open() as stream:
        generations = {}
        sequences = []
        # They arrive one after the other, so that prefills and decodes share batches.
        for number in range(NUM_SEQUENCES + NUM_TOKENS - 1):
            if number < NUM_SEQUENCES:
                prompt = worker.prompt(number, 3 + 5 * number)
                sequences.append(stream.new(prompt, sampling=sampling))
                generations[sequences[-1].seq_id] = (prompt, Generation())
            rows = [each for each in sequences if len(each.output) < NUM_TOKENS]
            result = stream.step(*(each.row() for each in rows))
            for seq_id, step in result.sampled.items():
                generations[seq_id][1].steps.append(step)
    for prompt, found in generations.values():
        worker.expect_as_alone("a sequence among others", found, prompt, sampling)


@case("plan", "The sampled token of each sampling row, in row order")
def results_are_in_the_order_of_the_rows(worker: Worker) -> None:
    prompts = [worker.prompt(number) for number in range(4)]
    with worker.open() as stream:
        sequences = [stream.new(prompt) for prompt in prompts]
        stream.step(*(each.row() for each in sequences))
        shuffled = [sequences[index] for index in (2, 0, 3, 1)]
        result = stream.step(*(each.row() for each in shuffled))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        found = Generation([result.sampled[sequence.seq_id]])
        worker.expect_as_alone("a row in another place", found, prompt, start=1)


@case("plan", "The batch: one row per scheduled sequence.")
def a_known_sequence_may_be_left_out_of_a_step(worker: Worker) -> None:
    first, second = worker.prompt(1), worker.prompt(2)
    with worker.open() as stream:
        waiting, running = stream.new(first), stream.new(second)
        steps = [stream.step(waiting.row(), running.row()).sampled[waiting.seq_id]]
        stream.generate(running, 3)
        steps += stream.generate(waiting, 2).steps
    worker.expect_as_alone("a sequence that paused", Generation(steps), first)


@case("plan", "One byte per row")
def only_rows_that_sample_return_tokens(worker: Worker) -> None:
    with worker.open() as stream:
        sequences = [stream.new(worker.prompt(number)) for number in range(3)]
        rows = [
            sequences[0].row(2, sample=False),
            sequences[1].row(),
            sequences[2].row(3, sample=False),
        ]
        result = stream.step(*rows)
        expect("sequences that sampled", list(result.sampled), [sequences[1].seq_id])


@case("plan", "Tokens to compute per row, following those already computed.")
def more_tokens_than_the_sequence_has_are_refused(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1))
        stream.send(sequence.row(len(sequence.tokens) + 1))
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "num_tokens", "seq_ids")


@case("plan", "A sampling row computes up to and including the last token the sequence has.")
def sampling_before_the_last_token_is_refused(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1))
        stream.send(sequence.row(len(sequence.tokens) - 1))
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "sample", "num_tokens")


@case("plan", "Tokens to compute per row, following those already computed.")
def a_num_tokens_column_of_another_length_is_refused(worker: Worker) -> None:
    def change(plan: plan_pb2.StepPlan, sequence: Sequence) -> None:
        plan.seq_ids = columns.pack([sequence.seq_id])
        plan.num_tokens = columns.pack([1, 1])

    refuses(worker, change, "num_tokens")


@case("plan", "Tokens to compute per row, following those already computed.")
def a_negative_number_of_tokens_is_refused(worker: Worker) -> None:
    def change(plan: plan_pb2.StepPlan, sequence: Sequence) -> None:
        plan.seq_ids = columns.pack([sequence.seq_id])
        plan.num_tokens = columns.pack([-1])

    refuses(worker, change, "num_tokens")


@case("plan", "One byte per row")
def a_sample_column_of_another_length_is_refused(worker: Worker) -> None:
    def change(plan: plan_pb2.StepPlan, sequence: Sequence) -> None:
        plan.seq_ids = columns.pack([sequence.seq_id])
        plan.sample = b"\x01\x01"

    refuses(worker, change, "sample")


def _malformed(field: str, size: int) -> None:
    """A case: a column whose size is not a multiple of an entry's."""

    def run(worker: Worker) -> None:
        def change(plan: plan_pb2.StepPlan, sequence: Sequence) -> None:
            plan.seq_ids = columns.pack([sequence.seq_id])
            setattr(plan, field, b"\x00" * size)

        refuses(worker, change, field)

    run.__name__ = f"a_{field}_column_of_{size}_bytes_is_refused"
    run.__module__ = __name__
    case("worker_service", "A plan that is malformed")(run)


for _field, _size in (
    ("seq_ids", 3),
    ("forget_seq_ids", 5),
    ("num_tokens", 2),
    ("swap_out", 4),
    ("swap_in", 12),
    ("copy", 7),
    ("block_updates", 8),
):
    _malformed(_field, _size)

"""The worker's state of sequences: added, forgotten, and invalid updates."""

from collections.abc import Callable

import grpc

from conformance import columns
from conformance.case import case
from conformance.sequence import Sequence
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire.v1 import plan_pb2

Change = Callable[[plan_pb2.StepPlan, Sequence], None]


def refuses(worker: Worker, change: Change, *fields: str) -> None:
    """Fail unless a plan, changed like this, is refused by naming one of these fields.

    Before it, one sequence was computed and has sampled a token.
    """
    with worker.open() as stream:
        sequence = stream.new(worker.prompt(1))
        stream.step(sequence.row())
        plan = stream.plan()
        change(plan, sequence)
        stream.send_plan(plan)
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, *fields)


def refuses_new(
    worker: Worker, change: Callable[[plan_pb2.NewSequence], None], *fields: str
) -> None:
    """Fail unless a plan whose only new sequence was changed like this is refused."""
    with worker.open() as stream:
        plan = stream.plan(stream.new(worker.prompt(1)).row())
        change(plan.new_sequences[0])
        stream.send_plan(plan)
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, *fields)


def _known(stream: StepStream, worker: Worker) -> Sequence:
    sequence = stream.new(worker.prompt(1))
    stream.step(sequence.row())
    return sequence


@case("plan", "Sequences that the worker does not know (or has been instructed to forget)")
def a_row_of_an_unknown_sequence_is_refused(worker: Worker) -> None:
    def change(plan: plan_pb2.StepPlan, sequence: Sequence) -> None:
        plan.seq_ids = columns.pack([sequence.seq_id + 7])

    refuses(worker, change, "seq_ids")


@case("plan", "no id twice")
def two_rows_of_one_sequence_are_refused(worker: Worker) -> None:
    def change(plan: plan_pb2.StepPlan, sequence: Sequence) -> None:
        plan.seq_ids = columns.pack([sequence.seq_id, sequence.seq_id])

    refuses(worker, change, "seq_ids")


@case("plan", "Sequences whose state the worker drops.")
def a_forgotten_sequence_is_unknown(worker: Worker) -> None:
    with worker.open() as stream:
        sequence = _known(stream, worker)
        stream.step(stream.new(worker.prompt(2)).row(), forget=[sequence])
        stream.send(sequence.row())
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "seq_ids")


@case("plan", "Unknown ids are an error.")
def forgetting_an_unknown_sequence_is_refused(worker: Worker) -> None:
    def change(plan: plan_pb2.StepPlan, sequence: Sequence) -> None:
        plan.forget_seq_ids = columns.pack([sequence.seq_id + 7])

    refuses(worker, change, "forget_seq_ids")


@case("plan", "Order: forget sequences, swap out, swap in, copy, take in new sequences")
def an_id_may_be_forgotten_and_reused_in_one_plan(worker: Worker) -> None:
    with worker.open() as stream:
        first = _known(stream, worker)
        prompt = worker.prompt(2)
        second = stream.new(prompt, seq_id=first.seq_id)
        found = stream.generate(second, 3, forget=[first])
    worker.expect_as_alone("the second sequence of the id", found, prompt)


@case("plan", "unique on the stream while the worker knows it")
def a_new_sequence_with_a_known_id_is_refused(worker: Worker) -> None:
    with worker.open() as stream:
        first = _known(stream, worker)
        stream.send(stream.new(worker.prompt(2), seq_id=first.seq_id).row())
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "new_sequences")


@case("plan", "positive, below 2^31")
def a_sequence_id_of_0_is_refused(worker: Worker) -> None:
    with worker.open() as stream:
        stream.send(stream.new(worker.prompt(1), seq_id=0).row())
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "new_sequences")


@case("plan", "positive, below 2^31")
def the_greatest_sequence_id_works(worker: Worker) -> None:
    prompt = worker.prompt(1)
    with worker.open() as stream:
        found = stream.generate(stream.new(prompt, seq_id=2**31 - 1), 2)
    worker.expect_as_alone("sequence 2^31 - 1", found, prompt)


@case("model", "token ids are less than this.")
def a_token_beyond_the_vocabulary_is_refused(worker: Worker) -> None:
    for token in (worker.vocab_size, -1):
        with worker.open() as stream:
            stream.send(stream.new([*worker.prompt(1), token]).row())
            stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "new_sequences")


@case("plan", "Number of prompt tokens in token_ids")
def more_prompt_tokens_than_tokens_are_refused(worker: Worker) -> None:
    def change(new: plan_pb2.NewSequence) -> None:
        new.num_prompt_tokens = len(new.token_ids) // 4 + 1

    refuses_new(worker, change, "new_sequences")


@case("plan", "Number of tokens whose KV is already in the blocks below")
def more_computed_tokens_than_tokens_are_refused(worker: Worker) -> None:
    def change(new: plan_pb2.NewSequence) -> None:
        new.num_computed_tokens = len(new.token_ids) // 4 + 1

    refuses_new(worker, change, "new_sequences")


@case("plan", "Number of tokens whose KV is already in the blocks below")
def more_computed_tokens_than_blocks_hold_are_refused(worker: Worker) -> None:
    def change(new: plan_pb2.NewSequence) -> None:
        new.num_computed_tokens = len(new.token_ids) // 4 - 1
        new.block_ids = new.block_ids[:4]

    refuses_new(worker, change, "new_sequences")


@case("plan", "as they are before this step's forward pass")
def a_fork_of_an_unknown_parent_is_refused(worker: Worker) -> None:
    def change(new: plan_pb2.NewSequence) -> None:
        new.parent_seq_id = 99

    refuses_new(worker, change, "new_sequences")


@case("model", "Most tokens of prompt and output together.")
def more_tokens_than_the_model_takes_are_refused(worker: Worker) -> None:
    num_tokens = worker.info.model.max_model_len + 2
    with worker.open() as stream:
        plan = stream.plan(stream.new(worker.prompt(1, num_tokens)).row(1, sample=False))
        stream.send_plan(plan)
        stream.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "new_sequences", "num_tokens")

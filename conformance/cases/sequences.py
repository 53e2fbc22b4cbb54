"""The worker's state of sequences: added, forgotten, and invalid updates."""

import grpc

from conformance.case import Alone, case, refusal_case, stream_case
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire import columns

COMPUTED = "Number of tokens whose KV is already in the blocks below"


def send_new(worker: Worker, stream: StepStream, **fields: int | bytes) -> None:
    """Send a plan whose only new sequence is changed like this."""
    plan = stream.plan(stream.new(worker.prompt(1)))
    for name, value in fields.items():
        setattr(plan.new_sequences[0], name, value)
    stream.send_plan(plan)


@refusal_case(
    "plan", "Sequences that the worker does not know (or has been instructed to forget)", "seq_ids"
)
def a_row_of_an_unknown_sequence_is_refused(worker: Worker, stream: StepStream) -> None:
    stream.send_changed(seq_ids=[stream.prefilled(worker.prompt(1)).seq_id + 7])


@refusal_case("plan", "no id twice", "seq_ids")
def two_rows_of_one_sequence_are_refused(worker: Worker, stream: StepStream) -> None:
    stream.send_changed(seq_ids=[stream.prefilled(worker.prompt(1)).seq_id] * 2)


@refusal_case("plan", "Sequences whose state the worker drops.", "seq_ids", "block_updates")
def a_forgotten_sequence_is_unknown(worker: Worker, stream: StepStream) -> None:
    sequence = stream.prefilled(worker.prompt(1))
    stream.step(stream.new(worker.prompt(2)), forget=[sequence])
    stream.send(sequence)


@refusal_case("plan", "Unknown ids are an error.", "forget_seq_ids")
def forgetting_an_unknown_sequence_is_refused(worker: Worker, stream: StepStream) -> None:
    stream.send_changed(forget_seq_ids=[stream.prefilled(worker.prompt(1)).seq_id + 7])


@stream_case("plan", "forget sequences, swap out, swap in, copy, begin leases")
def an_id_may_be_forgotten_and_reused_in_one_plan(worker: Worker, stream: StepStream) -> Alone:
    first = stream.prefilled(worker.prompt(1))
    second = stream.generate(stream.new(worker.prompt(2), seq_id=first.seq_id), 3, forget=[first])
    return {"the second sequence of the id": second}


@refusal_case("plan", "unique on the stream while the worker knows it", "new_sequences")
def a_new_sequence_with_a_known_id_is_refused(worker: Worker, stream: StepStream) -> None:
    first = stream.prefilled(worker.prompt(1))
    stream.send(stream.new(worker.prompt(2), seq_id=first.seq_id))


@refusal_case("plan", "positive, below 2^31", "new_sequences")
def a_sequence_id_of_0_is_refused(worker: Worker, stream: StepStream) -> None:
    stream.send(stream.new(worker.prompt(1), seq_id=0))


@stream_case("plan", "positive, below 2^31")
def the_greatest_sequence_id_works(worker: Worker, stream: StepStream) -> Alone:
    return {"sequence 2^31 - 1": stream.generate(stream.new(worker.prompt(1), seq_id=2**31 - 1), 2)}


@case("model", "token ids are less than this.")
def a_token_beyond_the_vocabulary_is_refused(worker: Worker) -> None:
    for token in (worker.vocab_size, -1):
        with worker.open() as stream:
            stream.send(stream.new([*worker.prompt(1), token]))
            stream.call.refusal().expect(grpc.StatusCode.INVALID_ARGUMENT, "new_sequences")


@refusal_case("plan", "Number of prompt tokens in token_ids", "new_sequences")
def more_prompt_tokens_than_tokens_are_refused(worker: Worker, stream: StepStream) -> None:
    send_new(worker, stream, num_prompt_tokens=len(worker.prompt(1)) + 1)


@refusal_case("plan", COMPUTED, "new_sequences")
def more_computed_tokens_than_tokens_are_refused(worker: Worker, stream: StepStream) -> None:
    send_new(worker, stream, num_computed_tokens=len(worker.prompt(1)) + 1)


@refusal_case("plan", COMPUTED, "new_sequences")
def more_computed_tokens_than_blocks_hold_are_refused(worker: Worker, stream: StepStream) -> None:
    num_computed, first = len(worker.prompt(1)) - 1, stream.blocks.take(1)
    plan = stream.plan(stream.new(worker.prompt(1)))
    plan.new_sequences[0].num_computed_tokens = num_computed
    plan.new_sequences[0].tables[0].block_ids = columns.pack(first)
    stream.send_plan(plan)


@refusal_case("plan", "as they are before this step's forward pass", "new_sequences")
def a_fork_of_an_unknown_parent_is_refused(worker: Worker, stream: StepStream) -> None:
    send_new(worker, stream, parent_seq_id=99)


@refusal_case("model", "Most tokens of prompt and output together.", "new_sequences", "num_tokens")
def more_tokens_than_the_model_takes_are_refused(worker: Worker, stream: StepStream) -> None:
    num_tokens = worker.info.model.max_model_len + 2
    stream.send(stream.new(worker.prompt(1, num_tokens)).row(1, brings=False))

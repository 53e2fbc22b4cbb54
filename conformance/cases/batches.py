"""Batches: independence of rows, their order, and columns of matching lengths."""

from conformance.assertions import expect
from conformance.case import Alone, refusal_case, stream_case
from conformance.sequence import sampler_params
from conformance.step_stream import StepStream
from conformance.worker import Worker

NUM_SEQUENCES = 8
NUM_TOKENS = 4


@stream_case("plan", "The batch: one row per scheduled sequence.")
def tokens_do_not_depend_on_the_rest_of_the_batch(worker: Worker, stream: StepStream) -> Alone:
    sampling = sampler_params(seed=11)
    sequences = []
    # They arrive one after the other, so that prefills and decodes share batches.
    for number in range(NUM_SEQUENCES + NUM_TOKENS - 1):
        if number < NUM_SEQUENCES:
            sequences.append(stream.new(worker.prompt(number, 3 + 5 * number), sampling=sampling))
        stream.step(*(sequence for sequence in sequences if len(sequence.output) < NUM_TOKENS))
    return {
        f"sequence {number} among others": sequence for number, sequence in enumerate(sequences)
    }


@stream_case("plan", "The sampled token of each sampling row, in row order")
def results_are_in_the_order_of_the_rows(worker: Worker, stream: StepStream) -> Alone:
    sequences = [stream.new(worker.prompt(number)) for number in range(4)]
    stream.step(*sequences)
    stream.step(*(sequences[index] for index in (2, 0, 3, 1)))
    return {f"row {number} in another place": sequence for number, sequence in enumerate(sequences)}


@stream_case("plan", "The batch: one row per scheduled sequence.")
def a_known_sequence_may_be_left_out_of_a_step(worker: Worker, stream: StepStream) -> Alone:
    waiting, running = stream.new(worker.prompt(1)), stream.new(worker.prompt(2))
    stream.step(waiting, running)
    stream.generate(running, 3)
    stream.generate(waiting, 2)
    return {"a sequence that paused": waiting}


@stream_case("plan", "One byte per row")
def only_rows_that_bring_tokens_return_them(worker: Worker, stream: StepStream) -> None:
    first, second, third = (stream.new(worker.prompt(number)) for number in range(3))
    result = stream.step(first.row(2, brings=False), second, third.row(3, brings=False))
    expect("sequences that sampled", list(result.sampled), [second.seq_id])


@refusal_case(
    "plan", "Tokens to compute per row, following those already computed.", "num_tokens", "seq_ids"
)
def more_tokens_than_the_sequence_has_are_refused(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1))
    stream.send(sequence.row(len(sequence.tokens) + 1))


@refusal_case("plan", "A row that brings anything", "output", "num_tokens")
def sampling_before_the_last_token_is_refused(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1))
    stream.send(sequence.row(len(sequence.tokens) - 1))


@refusal_case("plan", "Tokens to compute per row, following those already computed.", "num_tokens")
def a_num_tokens_column_of_another_length_is_refused(worker: Worker, stream: StepStream) -> None:
    known = stream.prefilled(worker.prompt(1))
    stream.send_changed(seq_ids=[known.seq_id], num_tokens=[1, 1])


@refusal_case("plan", "Tokens to compute per row, following those already computed.", "num_tokens")
def a_negative_number_of_tokens_is_refused(worker: Worker, stream: StepStream) -> None:
    known = stream.prefilled(worker.prompt(1))
    stream.send_changed(seq_ids=[known.seq_id], num_tokens=[-1])


@refusal_case("plan", "One byte per row", "output")
def an_output_column_of_another_length_is_refused(worker: Worker, stream: StepStream) -> None:
    known = stream.prefilled(worker.prompt(1))
    stream.send_changed(seq_ids=[known.seq_id], output=b"\x01\x01")


def _malformed(field: str, size: int) -> None:
    """A case: a column whose size is not a multiple of an entry's."""
    name = f"a {field.replace('_', ' ')} column of {size} bytes is refused"

    @refusal_case("worker_service", "A plan that is malformed", field, name=name)
    def run(worker: Worker, stream: StepStream) -> None:
        known = stream.prefilled(worker.prompt(1))
        stream.send_changed(**({"seq_ids": [known.seq_id]} | {field: b"\x00" * size}))


for _field, _size in (
    ("seq_ids", 3),
    ("forget_seq_ids", 5),
    ("num_tokens", 2),
    ("swap_out", 4),
    ("swap_in", 12),
    ("copy", 7),
    ("block_updates", 12),
):
    _malformed(_field, _size)

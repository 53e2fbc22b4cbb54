"""Vectors, pooled from the hidden states of a sequence's tokens."""

import math
from typing import Any

from conformance.assertions import Skipped, expect, expect_true
from conformance.case import case, refusal_case, stream_case
from conformance.sequence import TOKEN, VECTOR, Row, Sequence
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire.v1 import model_pb2, pooling_pb2

LAST, MEAN, CLS = (
    pooling_pb2.POOLING_TYPE_LAST,
    pooling_pb2.POOLING_TYPE_MEAN,
    pooling_pb2.POOLING_TYPE_CLS,
)
TOLERANCE = 1e-3
"""Maximum difference of a number, relative to the vector's norm."""


def pooled(
    worker: Worker,
    stream: StepStream,
    tokens: list[int],
    type: pooling_pb2.PoolingType.ValueType,
    **fields: Any,
) -> Sequence:
    """A new sequence for a vector; `fields`: of its parameters, or its own. Raises Skipped if the
    worker pools none."""
    if model_pb2.WORK_KIND_POOLING not in worker.info.model.work_kinds:
        raise Skipped("the worker pools no vectors")
    names = pooling_pb2.PoolingParams.DESCRIPTOR.fields_by_name
    of_params = {name: fields.pop(name) for name in names.keys() & fields.keys()}
    params = pooling_pb2.PoolingParams(type=type, **of_params)
    return stream.new(tokens, pooling=params, **fields)


def vector_of(
    worker: Worker, tokens: list[int], type: pooling_pb2.PoolingType.ValueType, **fields: object
) -> list[float]:
    """The vector of some tokens, computed in one row of a batch of its own."""
    with worker.open() as stream:
        sequence = pooled(worker, stream, tokens, type, **fields)
        return stream.step(sequence).vectors[sequence.seq_id]


def expect_equal(what: str, found: list[float], wanted: list[float]) -> None:
    """Fail unless two vectors agree but for rounding."""
    expect(f"numbers of {what}", len(found), len(wanted))
    distance, norm = math.dist(found, wanted), math.hypot(*wanted)
    expect_true(distance <= TOLERANCE * norm, f"{what}: expected {wanted}, got {found}")


@case("plan", "As many numbers as the sequence's PoolingParams.dimensions, or the model's")
def a_vector_has_as_many_numbers_as_the_model(worker: Worker) -> None:
    for type in (LAST, MEAN, CLS):
        vector = vector_of(worker, worker.prompt(1), type)
        expect("numbers in the vector", len(vector), worker.info.model.pooling.vector_size)
        expect_true(all(map(math.isfinite, vector)), "the vector holds NaN or infinity")


@case("pooling", "Only the first numbers of the vector, taken before it is normalized.")
def dimensions_are_the_first_numbers_of_the_vector(worker: Worker) -> None:
    prompt = worker.prompt(1)
    full = vector_of(worker, prompt, LAST)
    count = max(1, len(full) // 2)
    expect_equal(
        "the first numbers", vector_of(worker, prompt, LAST, dimensions=count), full[:count]
    )
    norm = math.hypot(*vector_of(worker, prompt, LAST, dimensions=count, normalize=True))
    expect_true(
        abs(norm - 1) <= TOLERANCE, f"the norm of the first numbers: expected 1, got {norm}"
    )


@case("pooling", "Divide the vector by its Euclidean norm.")
def a_normalized_vector_has_the_norm_1(worker: Worker) -> None:
    for type in (LAST, MEAN, CLS):
        plain = vector_of(worker, worker.prompt(1), type)
        found = vector_of(worker, worker.prompt(1), type, normalize=True)
        wanted = [value / math.hypot(*plain) for value in plain]
        expect_equal("the normalized vector", found, wanted)


@case("pooling", "Which hidden states")
def types_pool_the_last_all_and_the_first_hidden_states(worker: Worker) -> None:
    """A prefix's last hidden state is that of the token in a longer text."""
    prompt = worker.prompt(1, 6)
    states = [vector_of(worker, prompt[: end + 1], LAST) for end in range(len(prompt))]
    mean = [sum(values) / len(states) for values in zip(*states, strict=True)]
    expect_equal("the mean", vector_of(worker, prompt, MEAN), mean)
    expect_equal("the first hidden state", vector_of(worker, prompt, CLS), states[0])


@case("plan", "3: a vector, in sequences with `pooling`, and only")
def a_vector_does_not_depend_on_chunks(worker: Worker) -> None:
    prompt = worker.prompt(1, 11)
    for type in (LAST, MEAN, CLS):
        wanted = vector_of(worker, prompt, type)
        with worker.open() as stream:
            sequence = pooled(worker, stream, prompt, type)
            stream.step(sequence.row(4, brings=False))
            stream.step(sequence.row(3, brings=False))
            found = stream.step(sequence).vectors[sequence.seq_id]
        expect_equal("the vector in chunks", found, wanted)


@case("plan", "The vectors of rows with the output 3, in row order")
def vectors_and_tokens_share_a_batch(worker: Worker) -> None:
    prompts = [worker.prompt(number, 3 + number) for number in range(4)]
    types = {1: MEAN, 3: LAST}
    wanted = {number: vector_of(worker, prompts[number], types[number]) for number in types}
    with worker.open() as stream:
        rows = [
            pooled(worker, stream, prompt, types[number]) if number in types else stream.new(prompt)
            for number, prompt in enumerate(prompts)
        ]
        result = stream.step(*rows)
        sampled = [row.seq_id for number, row in enumerate(rows) if number not in types]
        expect("rows with tokens", sorted(result.sampled), sampled)
        stream.generate(rows[0], 3)
    for number, vector in wanted.items():
        expect_equal("the vector among others", result.vectors[rows[number].seq_id], vector)
    worker.expect_as_alone("a row among vectors", rows[0])


@stream_case("plan", "Number of tokens whose KV is already in the blocks below")
def the_last_vector_is_the_same_after_a_cached_prefix(worker: Worker, stream: StepStream) -> None:
    prompt = worker.prompt(1, 2 * stream.block_size + 3)
    first = pooled(worker, stream, prompt, LAST)
    wanted = stream.step(first).vectors[first.seq_id]
    shared = first.blocks[: stream.num_full_blocks(prompt)]
    again = pooled(
        worker,
        stream,
        prompt,
        LAST,
        blocks=shared,
        num_computed_tokens=len(shared) * stream.block_size,
    )
    expect_equal("the vector", stream.step(again).vectors[again.seq_id], wanted)


@stream_case("plan", "One byte per row: what it brings. 0: nothing.")
def a_row_may_compute_the_last_token_and_bring_nothing(
    worker: Worker, stream: StepStream
) -> dict[str, Sequence]:
    prompt = worker.prompt(1, 2 * stream.block_size + 3)
    computed = stream.new(prompt)
    result = stream.step(computed.row(brings=False))
    expect("tokens", result.message.token_ids, b"")
    other = stream.borrowed(prompt, computed.blocks)
    stream.generate(other, 3)
    return {"a sequence with the blocks of a row that brought nothing": other}


@refusal_case("plan", "3: a vector, in sequences with `pooling`, and only", "output")
def a_vector_of_a_sequence_that_generates_is_refused(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1))
    stream.send(Row(sequence, len(sequence.tokens), VECTOR))


@refusal_case("plan", "2: candidates for the next token, in sequences", "output")
def candidates_of_a_sequence_that_samples_are_refused(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1))
    stream.send(Row(sequence, len(sequence.tokens), VECTOR - 1))


@refusal_case("plan", "One byte per row: what it brings.", "output")
def an_unknown_output_is_refused(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1))
    stream.send(Row(sequence, len(sequence.tokens), VECTOR + 1))


@refusal_case("plan", "Such a sequence has no", "output")
def a_token_of_a_pooled_sequence_is_refused(worker: Worker, stream: StepStream) -> None:
    sequence = pooled(worker, stream, worker.prompt(1), LAST)
    stream.send(Row(sequence, len(sequence.tokens), TOKEN))


@refusal_case("plan", "Unless the type is LAST, none of its tokens was computed", "num_computed")
def a_mean_over_cached_tokens_is_refused(worker: Worker, stream: StepStream) -> None:
    prompt = worker.prompt(1, 2 * stream.block_size)
    computed = stream.prefilled(prompt)
    blocks = computed.blocks[:1]
    stream.send(
        pooled(worker, stream, prompt, MEAN, blocks=blocks, num_computed_tokens=stream.block_size)
    )


@refusal_case("pooling", "Only the first numbers of the vector", "pooling.dimensions")
def more_dimensions_than_the_model_has_are_refused(worker: Worker, stream: StepStream) -> None:
    size = worker.info.model.pooling.vector_size
    stream.send(pooled(worker, stream, worker.prompt(1), LAST, dimensions=size + 1))


@refusal_case("model", "What the worker does.", "pooling")
def a_worker_that_pools_no_vectors_refuses_them(worker: Worker, stream: StepStream) -> None:
    if model_pb2.WORK_KIND_POOLING in worker.info.model.work_kinds:
        raise Skipped("the worker pools vectors")
    params = pooling_pb2.PoolingParams(type=LAST)
    stream.send(stream.new(worker.prompt(1), pooling=params))

"""Vectors, pooled from the hidden states of a sequence's tokens."""

import math
from typing import Any

from conformance.assertions import Skipped, expect, expect_true
from conformance.case import Alone, case, refusal_case, stream_case
from conformance.sequence import GREEDY, NOTHING, TOKEN, VECTOR, Row, Sequence
from conformance.step_stream import StepStream
from conformance.worker import TOLERANCE, Worker, expect_near
from pagewire.v1 import model_pb2, pooling_pb2

LAST, MEAN, CLS, ALL = (
    pooling_pb2.POOLING_TYPE_LAST,
    pooling_pb2.POOLING_TYPE_MEAN,
    pooling_pb2.POOLING_TYPE_CLS,
    pooling_pb2.POOLING_TYPE_ALL,
)
CLASSIFIER = pooling_pb2.POOLING_HEAD_CLASSIFIER


def types_of(worker: Worker) -> list[pooling_pb2.PoolingType.ValueType]:
    """The types with one vector that the worker pools. Raises Skipped if it pools none."""
    if model_pb2.WORK_KIND_POOLING not in worker.info.model.work_kinds:
        raise Skipped("the worker pools no vectors")
    return [type for type in worker.info.model.pooling.types if type != ALL]


def pooled(
    worker: Worker,
    stream: StepStream,
    tokens: list[int],
    type: pooling_pb2.PoolingType.ValueType,
    **fields: Any,
) -> Sequence:
    """A new sequence for vectors; `fields`: of its parameters, or its own. Raises Skipped if the
    worker pools none of this type."""
    if "head" not in fields and type not in [*types_of(worker), *worker.info.model.pooling.types]:
        raise Skipped(f"the worker does not pool {pooling_pb2.PoolingType.Name(type)}")
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


def states_of(worker: Worker, prompt: list[int]) -> list[list[float]]:
    """The hidden state of each token: as one vector for each, or that of the last token of each
    prefix. Raises Skipped if the worker pools neither."""
    size = worker.info.model.pooling.vector_size
    if ALL in worker.info.model.pooling.types:
        values = vector_of(worker, prompt, ALL)
        expect("numbers of all tokens", len(values), len(prompt) * size)
        return [values[start : start + size] for start in range(0, len(values), size)]
    if worker.info.model.whole_prompt:
        raise Skipped("the worker does not pool POOLING_TYPE_ALL")
    return [vector_of(worker, prompt[: end + 1], LAST) for end in range(len(prompt))]


@case("plan", "As many numbers as the sequence's PoolingParams.dimensions, or the model's")
def a_vector_has_as_many_numbers_as_the_model(worker: Worker) -> None:
    for type in types_of(worker):
        vector = vector_of(worker, worker.prompt(1), type)
        expect("numbers in the vector", len(vector), worker.info.model.pooling.vector_size)
        expect_true(all(map(math.isfinite, vector)), "the vector holds NaN or infinity")


@case("pooling", "Only the first numbers of the vector, taken before it is normalized.")
def dimensions_are_the_first_numbers_of_the_vector(worker: Worker) -> None:
    prompt = worker.prompt(1)
    type = worker.info.model.pooling.default_type
    full = vector_of(worker, prompt, type)
    count = max(1, len(full) // 2)
    expect_near(
        "the first numbers", vector_of(worker, prompt, type, dimensions=count), full[:count]
    )
    norm = math.hypot(*vector_of(worker, prompt, type, dimensions=count, normalize=True))
    expect_true(
        abs(norm - 1) <= TOLERANCE, f"the norm of the first numbers: expected 1, got {norm}"
    )


@case("pooling", "Divide the vector by its Euclidean norm.")
def a_normalized_vector_has_the_norm_1(worker: Worker) -> None:
    for type in types_of(worker):
        plain = vector_of(worker, worker.prompt(1), type)
        found = vector_of(worker, worker.prompt(1), type, normalize=True)
        wanted = [value / math.hypot(*plain) for value in plain]
        expect_near("the normalized vector", found, wanted)


@case("pooling", "Which hidden states")
def types_pool_the_last_all_and_the_first_hidden_states(worker: Worker) -> None:
    prompt, types = worker.prompt(1, 6), types_of(worker)
    states = states_of(worker, prompt)
    mean = [sum(values) / len(states) for values in zip(*states, strict=True)]
    for type, wanted in ((LAST, states[-1]), (MEAN, mean), (CLS, states[0])):
        if type in types:
            name = pooling_pb2.PoolingType.Name(type)
            expect_near(name, vector_of(worker, prompt, type), wanted)


@stream_case("model", "bitwise independent of the rest of the batch")
def vectors_do_not_depend_on_the_rest_of_the_batch(worker: Worker, stream: StepStream) -> Alone:
    types = types_of(worker)
    rows = [
        pooled(worker, stream, worker.prompt(number, 3 + 5 * number), types[number % len(types)])
        for number in range(6)
    ]
    stream.step(*rows)
    return {f"vector {number} among others": row for number, row in enumerate(rows)}


@stream_case("plan", "with the type ALL, those of the tokens that the row computed")
def every_row_brings_the_vectors_of_its_tokens(worker: Worker, stream: StepStream) -> None:
    prompt = worker.prompt(1, 11)
    sequence = pooled(worker, stream, prompt, ALL)
    found: list[float] = []
    for number in (4, 1, 6):
        found += stream.step(sequence.row(number)).vectors[sequence.seq_id]
    expect_near("the vectors in chunks", found, vector_of(worker, prompt, ALL))


@refusal_case("plan", "With the type ALL all its rows have the output 3", "output")
def a_row_without_the_vectors_of_its_tokens_is_refused(worker: Worker, stream: StepStream) -> None:
    stream.send(pooled(worker, stream, worker.prompt(1), ALL).row(brings=False))


@case("pooling", "The logits of the model's labels.")
def a_classifier_brings_a_logit_for_each_label(worker: Worker) -> None:
    types_of(worker)
    model = worker.info.model.pooling
    if not model.labels:
        raise Skipped("the model has no labels")
    prompt = worker.prompt(1, 7)
    wanted = vector_of(worker, prompt, model.classifier_type, head=CLASSIFIER)
    number = len(prompt) if model.classifier_type == ALL else 1
    expect("logits", len(wanted), number * len(model.labels))
    expect_true(all(map(math.isfinite, wanted)), "the logits hold NaN or infinity")
    with worker.open() as stream:
        other = stream.new(worker.prompt(2))
        sequence = pooled(worker, stream, prompt, model.classifier_type, head=CLASSIFIER)
        found = stream.step(other, sequence).vectors[sequence.seq_id]
    expect_near("the logits among others", found, wanted)


@refusal_case("pooling", "Empty: it classifies nothing.", "pooling.head")
def labels_of_a_model_without_any_are_refused(worker: Worker, stream: StepStream) -> None:
    if worker.info.model.pooling.labels or not types_of(worker):
        raise Skipped("the model has labels, or pools no vectors")
    stream.send(pooled(worker, stream, worker.prompt(1), LAST, head=CLASSIFIER))


@refusal_case("model", "Whether a prompt must be computed in one row", "num_tokens")
def a_part_of_a_whole_prompt_is_refused(worker: Worker, stream: StepStream) -> None:
    if not worker.info.model.whole_prompt:
        raise Skipped("prompts may be computed in several rows")
    sequence = stream.new(worker.prompt(1))
    stream.send(Row(sequence, len(sequence.tokens) - 1, NOTHING))


@case("plan", "3: a vector, in sequences with `pooling`, and only")
def a_vector_does_not_depend_on_chunks(worker: Worker) -> None:
    prompt = worker.prompt(1, 11)
    for type in types_of(worker):
        wanted = vector_of(worker, prompt, type)
        with worker.open() as stream:
            sequence = pooled(worker, stream, prompt, type)
            stream.step(sequence.row(4, brings=False))
            stream.step(sequence.row(3, brings=False))
            found = stream.step(sequence).vectors[sequence.seq_id]
        expect_near("the vector in chunks", found, wanted)


@case("plan", "The vectors of rows with the output 3, in row order")
def vectors_and_tokens_share_a_batch(worker: Worker) -> None:
    prompts = [worker.prompt(number, 3 + number) for number in range(4)]
    types = dict(zip((1, 3), types_of(worker), strict=False))
    wanted = {number: vector_of(worker, prompts[number], types[number]) for number in types}
    with worker.open() as stream:
        rows = [
            pooled(worker, stream, prompt, types[number])
            if number in types
            else stream.new(prompt, sampling=GREEDY)
            for number, prompt in enumerate(prompts)
        ]
        result = stream.step(*rows)
        sampled = [row.seq_id for number, row in enumerate(rows) if number not in types]
        expect("rows with tokens", sorted(result.sampled), sampled)
        stream.generate(rows[0], 3)
    for number, vector in wanted.items():
        expect_near("the vector among others", result.vectors[rows[number].seq_id], vector)
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
    expect_near("the vector", stream.step(again).vectors[again.seq_id], wanted)


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
    sequence = stream.new(worker.prompt(1), sampling=GREEDY)
    stream.send(Row(sequence, len(sequence.tokens), VECTOR))


@refusal_case("plan", "2: candidates for the next token, in sequences", "output")
def candidates_of_a_sequence_that_samples_are_refused(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1), sampling=GREEDY)
    stream.send(Row(sequence, len(sequence.tokens), VECTOR - 1))


@refusal_case("plan", "One byte per row: what it brings.", "output")
def an_unknown_output_is_refused(worker: Worker, stream: StepStream) -> None:
    sequence = stream.new(worker.prompt(1))
    stream.send(Row(sequence, len(sequence.tokens), VECTOR + 1))


@refusal_case("plan", "Such a sequence has no", "output")
def a_token_of_a_pooled_sequence_is_refused(worker: Worker, stream: StepStream) -> None:
    sequence = pooled(worker, stream, worker.prompt(1), worker.info.model.pooling.default_type)
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
    type = worker.info.model.pooling.default_type
    stream.send(pooled(worker, stream, worker.prompt(1), type, dimensions=size + 1))


@refusal_case("model", "What the worker does.", "pooling")
def a_worker_that_pools_no_vectors_refuses_them(worker: Worker, stream: StepStream) -> None:
    if model_pb2.WORK_KIND_POOLING in worker.info.model.work_kinds:
        raise Skipped("the worker pools vectors")
    params = pooling_pb2.PoolingParams(type=LAST)
    stream.send(stream.new(worker.prompt(1), pooling=params))

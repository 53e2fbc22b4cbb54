"""Plans arrive and results leave with every field, whatever fields the messages get."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagewire.columns import columns_of, pack
from pagewire.v1 import plan_pb2, pooling_pb2, sampling_pb2
from tests.support.worker_driver import sampler_params
from worker_service.config import MAX_SPECULATIVE_TOKENS
from worker_service.errors import InvalidPlan
from worker_service.plan import (
    Candidates,
    ConstraintKind,
    ContextKind,
    FetchFailure,
    FetchResult,
    PoolingHead,
    PoolingType,
    PromptLogprobs,
    RowErrorReason,
    StepResult,
    StepTimings,
    TokenLogprobs,
)
from worker_service.service import wire

VALUES: dict[int, Any] = {
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
    FieldDescriptor.CPPTYPE_STRING: "text",
    FieldDescriptor.CPPTYPE_BOOL: True,
}
"""Of fields by their type; numbers of integers are the fields' own."""

BYTES = {"digest": 32}
"""Sizes of fields of bytes other than 16."""


def fill(message: Message) -> Message:
    """Set every field, columns to one entry, lists to one element; of a oneof, the first field."""
    columns = columns_of(message.DESCRIPTOR)
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1 and oneof.fields[0] is not field:
            continue
        if field.name in columns:
            column = columns[field.name]
            entry = np.arange(1, 1 + column.width).astype(column.dtype)
            setattr(message, field.name, entry.tobytes())
        elif field.message_type is not None:
            value = getattr(message, field.name)
            fill(value.add() if field.is_repeated else value)
        else:
            is_bytes = field.type == FieldDescriptor.TYPE_BYTES
            size = BYTES.get(field.name, 16)
            scalar = bytes(range(size)) if is_bytes else VALUES.get(field.cpp_type, field.number)
            if field.is_repeated:
                getattr(message, field.name).append(scalar)
            else:
                setattr(message, field.name, scalar)
    return message


def assert_kept(values: object, message: Message, *, other: set[str]) -> None:
    """Every field of an object is the message's of the same name, but those in `other`."""
    columns = columns_of(message.DESCRIPTOR)
    for field in fields(values):  # type: ignore[arg-type]
        if field.name in columns:
            sent = columns[field.name].unpack(getattr(message, field.name))
            assert getattr(values, field.name).ravel().tolist() == sent, field.name
        elif field.name not in other:
            sent = getattr(message, field.name)
            sent = (
                tuple(sent)
                if isinstance(sent, Sequence) and not isinstance(sent, str | bytes)
                else sent
            )
            assert getattr(values, field.name) == sent != field.default, field.name


def plan_with(sampling: sampling_pb2.SamplerParams, **fields: Any) -> plan_pb2.StepPlan:
    return plan_pb2.StepPlan(new_sequences=[plan_pb2.NewSequence(sampling=sampling, **fields)])


def filled_plan() -> plan_pb2.StepPlan:
    """A fork that samples, and a sequence with a context whose hidden states are pooled."""
    message = plan_pb2.StepPlan()
    fill(message)
    message.cached_blocks.keys = bytes(64)  # of three units and one before a tail
    fork, pooled = message.new_sequences[0], message.new_sequences.add()
    pooled.CopyFrom(fork)
    fork.ClearField("context")
    pooled.ClearField("parent_seq_id")
    fill(pooled.pooling)
    pooled.pooling.head = pooling_pb2.POOLING_HEAD_CLASSIFIER
    return message


MESSAGES = ("leases", "fetches", "cached_blocks")


def test_a_plan_keeps_every_field() -> None:
    message = filled_plan()
    plan = wire.decode_plan(plan_pb2.StepPlan.FromString(message.SerializeToString()), 77)
    assert_kept(plan, message, other={"new_sequences", *MESSAGES, "received_us"})
    (entry,) = plan.cached_blocks
    assert (entry.blocks, entry.keys) == ((1,), bytes(64))
    assert wire.encode_cached_blocks([entry]) == message.cached_blocks
    assert_kept(plan.leases[0], message.leases[0], other=set())
    assert_kept(plan.fetches[0], message.fetches[0], other=set())
    assert plan.received_us == 77
    (fork, pooled), (sent_fork, sent_pooled) = plan.new_sequences, message.new_sequences
    assert_kept(fork, sent_fork, other={"sampling", "pooling", "tables", "context"})
    (table,), (sent_table,) = fork.tables, sent_fork.tables
    assert_kept(table, sent_table, other=set())
    (part,), (sent_part,) = pooled.context, sent_pooled.context
    assert_kept(part, sent_part, other={"kind"})
    assert part.kind is ContextKind.SALT
    assert pooled.pooling is not None
    assert_kept(pooled.pooling, sent_pooled.pooling, other={"type", "head"})
    assert pooled.pooling.type is PoolingType.LAST
    assert pooled.pooling.head is PoolingHead.CLASSIFIER


def test_sampling_parameters_keep_every_field() -> None:
    message = filled_plan()
    sent = message.new_sequences[0].sampling
    constraint = sent.constraint
    params = wire.decode_plan(message, 0).new_sequences[0].sampling
    assert params.constraint is not None
    assert_kept(params.constraint, constraint, other={"kind", "texts", "thought"})
    assert params.constraint.thought == ("text", ("text",), ("text",))
    sent.ClearField("constraint")  # it has end tokens of its own, so that none are suppressed
    params = wire.decode_plan(message, 0).new_sequences[0].sampling
    renamed = {f"num_{name}": name for name in ("logprobs", "prompt_logprobs")}
    for name, on_wire in (renamed | {"num_candidates": "num_candidates"}).items():
        assert getattr(params, name) == getattr(sent, on_wire)
    assert params.bias_token_ids.tolist() == [sent.logit_bias[0].token_id]
    assert params.bias_values.tolist() == [sent.logit_bias[0].bias]
    assert params.bad_words == ((1,),)
    compared = {*renamed, "num_candidates", "bias_token_ids", "bias_values", "bad_words"}
    assert_kept(params, sent, other=compared | {"constraint"})
    empty = wire.decode_plan(plan_with(sampler_params()), 0).new_sequences[0].sampling
    assert (empty.num_logprobs, empty.num_prompt_logprobs, empty.constraint) == (None, None, None)


@pytest.mark.parametrize("kind", ConstraintKind)
def test_a_constraint_is_of_its_kind(kind: ConstraintKind) -> None:
    value = {"choices": ["a", "b"]} if kind is ConstraintKind.CHOICE else "a"
    sampling = sampler_params(constraint={kind.value: value})
    plan = plan_with(sampling)
    constraint = wire.decode_plan(plan, 0).new_sequences[0].sampling.constraint
    assert constraint is not None
    assert constraint.kind is kind
    assert constraint.texts == (("a", "b") if kind is ConstraintKind.CHOICE else ("a",))


def test_absent_columns_of_rows_have_their_declared_value_in_every_row() -> None:
    plan = wire.decode_plan(plan_pb2.StepPlan(seq_ids=pack([4, 5])), 0)
    for name, column in columns_of(plan_pb2.StepPlan.DESCRIPTOR).items():
        if column.has_rows:
            assert getattr(plan, name).tolist() == [column.absent] * 2, name


SAMPLING = sampler_params()


LEASE = {
    "lease_id": 1,
    "token": bytes(16),
    "block_ids": pack([0]),
    "keys": bytes(16),
    "timeout_ms": 1,
}
FETCH = {
    "fetch_id": 1,
    "addresses": ["a:1"],
    "source_epoch": 1,
    "lease_id": 1,
    "token": bytes(16),
    "blocks": pack([-1, 2, 0, 3]),
    "keys": bytes(32),
    "timeout_ms": 1,
}


def wrong_moves() -> list[tuple[plan_pb2.StepPlan, str]]:
    """Plans with a wrong lease or fetch, and the field that is wrong."""
    leases = {
        "lease_id": {"lease_id": 0},
        "token": {"token": bytes(15)},
        "block_ids": {"block_ids": b"", "keys": b""},
        "keys": {"keys": bytes(17)},
        "timeout_ms": {"timeout_ms": 0},
    }
    fetches: dict[str, dict[str, Any]] = {
        "fetch_id": {"fetch_id": 0},
        "addresses": {"addresses": []},
        "source_epoch": {"source_epoch": 0},
        "lease_id": {"lease_id": 0},
        "token": {"token": bytes(17)},
        "keys": {"keys": bytes(16)},
        "timeout_ms": {"timeout_ms": 0},
        "blocks": {"blocks": pack([-1, 2, 0, 2])},
    }
    return [
        (plan_pb2.StepPlan(leases=[LEASE | change]), f"leases[0].{field}")  # type: ignore[list-item]
        for field, change in leases.items()
    ] + [
        (plan_pb2.StepPlan(fetches=[FETCH | change]), f"fetches[0].{field}")  # type: ignore[list-item]
        for field, change in fetches.items()
    ]


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        *wrong_moves(),
        (plan_with(SAMPLING, token_ids=b"1"), "new_sequences[0].token_ids"),
        (plan_with(SAMPLING, tables=[{"block_ids": b"1"}]), "new_sequences[0].tables[0].block_ids"),
        *(
            (
                plan_with(sampling),
                f"new_sequences[0].sampling.{field}",
            )
            for field, sampling in {
                "top_p": sampler_params(top_p=2.0),
                "bad_words[0].token_ids": sampler_params(bad_words=[{}]),
                "constraint": sampler_params(constraint={}),
                "constraint.end_token_ids": sampler_params(
                    constraint={"regex": "a", "end_token_ids": b"1"}
                ),
            }.items()
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_malformed_plan_is_refused_by_field(plan: plan_pb2.StepPlan, field: str) -> None:
    with pytest.raises(InvalidPlan) as error:
        wire.decode_plan(plan, 0)
    assert error.value.field == field


def int32(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def float32(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


def test_a_row_with_the_most_drafts_may_bring_one_more_token() -> None:
    most = MAX_SPECULATIVE_TOKENS + 1
    result = StepResult(
        epoch=1,
        step_id=1,
        token_ids=np.zeros(most, np.int32),
        num_sampled=int32(most),
        num_drafts=int32(most - 1),
        timings=StepTimings(**{field.name: 0 for field in fields(StepTimings)}),
    )
    message = wire.encode_result(result)
    assert [*message.num_sampled, *message.num_drafts] == [most, most - 1]


def test_a_result_leaves_with_every_field() -> None:
    first, second = (
        TokenLogprobs(token_ids=int32(5, 6), logprobs=float32(-1, -2), rank=rank) for rank in (1, 2)
    )
    prompt = PromptLogprobs(
        start=3, token_ids=int32(7, 8)[None], logprobs=float32(-3, -4)[None], ranks=int32(9)
    )
    candidates = Candidates(token_ids=int32(1, 2), logprobs=float32(-0.5, -0.75))
    times = {field.name: number for number, field in enumerate(fields(StepTimings), start=10)}
    result = StepResult(
        epoch=2,
        step_id=3,
        token_ids=int32(5, -1),
        num_sampled=int32(2, 1),
        num_drafts=int32(3, 0),
        logprobs={0: first},
        kept_logprobs={0: [second]},
        prompt_logprobs={1: prompt},
        candidates={2: candidates},
        vectors={6: float32(0.5, 0.25)},
        errors=dict(enumerate(RowErrorReason, start=3)),
        timings=StepTimings(**times),
        fetches=(
            FetchResult(
                fetch_id=1,
                failure=FetchFailure.TIMED_OUT,
                message="late",
                num_bytes=2,
                duration_us=3,
                transport="grpc",
            ),
            FetchResult(fetch_id=2),
        ),
    )
    message = wire.encode_result(result)
    assert {field.name for field, _ in message.ListFields()} == {
        field.name for field in plan_pb2.StepResult.DESCRIPTOR.fields
    }
    assert_kept(
        result,
        message,
        other={"logprobs", "kept_logprobs", "prompt_logprobs", "candidates", "vectors", "errors"}
        | {"timings", "fetches"},
    )
    late, arrived = message.fetches
    assert_kept(result.fetches[0], late, other={"failure"})
    assert late.failure == plan_pb2.FETCH_FAILURE_TIMED_OUT
    assert arrived == plan_pb2.FetchResult(fetch_id=2)
    for entry, row, ours in zip(message.logprobs, (0, 0), (first, second), strict=True):
        assert_kept(ours, entry, other={"rank"})
        assert (entry.row, entry.sampled_rank) == (row, ours.rank)
    assert_kept(prompt, message.prompt_logprobs[0], other=set())
    assert (message.prompt_logprobs[0].row, message.prompt_logprobs[0].width) == (1, 2)
    assert_kept(candidates, message.candidates[0], other=set())
    assert message.candidates[0].row == 2
    assert message.vectors == [plan_pb2.RowVector(row=6, values=float32(0.5, 0.25).tobytes())]
    assert {error.row: error.reason for error in message.errors} == {
        row: plan_pb2.RowErrorReason.Value(f"ROW_ERROR_REASON_{reason.name}")
        for row, reason in result.errors.items()
    }
    assert {name: getattr(message.timings, name) for name in times} == times

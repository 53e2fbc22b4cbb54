"""What the core means is what travels, whatever the numbers."""

import re
from dataclasses import MISSING, asdict, fields
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from pagewire.columns import columns_of, pack, pack_floats
from pagewire.v1 import context_pb2, plan_pb2, pooling_pb2, sampling_pb2
from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import scheduler_service_pb2 as pb
from scheduler_service import wire
from scheduler_service.columns import from_column
from scheduler_service.core.beam_search import BeamParams, EarlyStopping
from scheduler_service.core.context import ContextKind, ContextPart
from scheduler_service.core.request import (
    ChoiceFinished,
    EngineOutputs,
    Pooling,
    RequestFinished,
    RequestTimings,
)
from scheduler_service.core.step_plan import (
    BlockFetch,
    BlockLease,
    BlockTable,
    CachedBlocks,
    FetchResult,
    NewSequence,
    RowCandidates,
    RowError,
    RowLogprobs,
    RowPromptLogprobs,
    StepPlan,
    StepResult,
)
from scheduler_service.errors import InvalidArgument, QueueFull


def flat(entries: list[tuple[int, ...]]) -> list[int]:
    return [value for entry in entries for value in entry]


int32 = st.integers(-(2**31), 2**31 - 1)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
count = st.integers(0, 2**31 - 1)
pairs = st.lists(st.tuples(count, count), max_size=9).map(flat)
quadruples = st.lists(st.tuples(count, count, count, count), max_size=9).map(flat)
tables = st.lists(st.builds(BlockTable, group=count, first_index=count, block_ids=ids), max_size=3)
parts = st.builds(
    ContextPart,
    kind=st.sampled_from(ContextKind),
    digest=st.binary(min_size=32, max_size=32),
    start=count,
    length=count,
)

NEW_SEQUENCE = {
    "seq_id": st.integers(1, 2**31 - 1),
    "choice_index": st.integers(0, 127),
    "token_ids": ids,
    "num_prompt_tokens": count,
    "num_computed_tokens": count,
    "tables": tables,
    "sampling": st.builds(
        sampling_pb2.SamplerParams, seed=st.integers(0, 2**64 - 1), logprobs=st.none() | count
    ),
    "pooling": st.none(),
    "parent_seq_id": st.none() | count,
    "prompt_logprobs_start": count,
    "context": st.lists(parts, max_size=3).map(tuple),
    "traceparent": st.sampled_from(["", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"]),
}
POOLED = NEW_SEQUENCE | {
    "sampling": st.none(),
    "pooling": st.builds(pooling_pb2.PoolingParams, type=st.integers(1, 3), dimensions=count),
}
key = st.binary(min_size=16, max_size=16)
LEASE = {
    "lease_id": count,
    "token": key,
    "block_ids": st.lists(int32, max_size=9),
    "keys": st.binary(),
    "timeout_ms": count,
}
FETCH = {
    "fetch_id": count,
    "addresses": st.lists(st.text(), max_size=2),
    "source_epoch": st.integers(1, 2**63),
    "lease_id": count,
    "token": key,
    "blocks": st.lists(st.tuples(int32, count), max_size=9).map(flat),
    "keys": st.binary(),
    "timeout_ms": count,
}
CACHED = {
    "blocks": st.lists(st.tuples(int32, count, count, count, count), max_size=9).map(flat),
    "keys": st.binary(),
}
PLAN = {
    "step_id": st.integers(1, 2**63),
    "forget_seq_ids": ids,
    "swap_out": pairs,
    "swap_in": pairs,
    "copy": pairs,
    "new_sequences": st.lists(
        st.builds(NewSequence, **NEW_SEQUENCE) | st.builds(NewSequence, **POOLED), max_size=3
    ),
    "block_updates": quadruples,
    "saved_states": quadruples,
    "seq_ids": ids,
    "num_tokens": st.none() | ids,
    "output": st.none() | st.lists(st.integers(0, 3), max_size=20),
    "lookahead": st.none() | st.lists(st.integers(0, 255), max_size=20),
    "appended_tokens": pairs,
    "max_results": st.integers(1, 64),
    "leases": st.lists(st.builds(BlockLease, **LEASE), max_size=3),
    "ended_lease_ids": ids,
    "fetches": st.lists(st.builds(BlockFetch, **FETCH), max_size=3),
    "cached_blocks": st.none() | st.builds(CachedBlocks, **CACHED),
    "uncached_blocks": st.lists(int32, max_size=9),
    "key_seed": st.none() | st.integers(0, 2**64 - 1),
    "withdrawn_step_id": st.integers(0, 2**64 - 1),
}


OPTIONAL = ("parent_seq_id", "sampling", "pooling")
"""Fields of NewSequence that may be absent."""


def names_of(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def set_fields(message: Message) -> set[str]:
    return {field.name for field, _ in message.ListFields()}


def all_fields(message: Message) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def test_the_strategies_fill_every_field() -> None:
    assert NEW_SEQUENCE.keys() == names_of(NewSequence)
    assert PLAN.keys() == names_of(StepPlan)
    assert LEASE.keys() == names_of(BlockLease)
    assert FETCH.keys() == names_of(BlockFetch)
    assert CACHED.keys() == names_of(CachedBlocks)


@given(st.lists(int32))
def test_a_column_reads_as_it_was_written(values: list[int]) -> None:
    assert from_column(pack(values), "values") == values


def test_a_column_with_a_rest_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument) as error:
        from_column(b"\1\2\3\4\5", "cancels")
    assert error.value.field == "cancels"


@given(st.builds(StepPlan, **PLAN), st.integers(1, 2**63))
def test_a_plan_keeps_every_field(plan: StepPlan, epoch: int) -> None:
    message = plan_pb2.StepPlan.FromString(wire.encode_plan(plan, epoch).SerializeToString())
    assert (message.epoch, message.step_id) == (epoch, plan.step_id)
    assert max(1, message.max_results) == plan.max_results
    assert_same_columns(message, plan)
    assert (message.key_seed if message.HasField("key_seed") else None) == plan.key_seed
    assert message.withdrawn_step_id == plan.withdrawn_step_id
    assert message.HasField("cached_blocks") == (plan.cached_blocks is not None)
    if plan.cached_blocks is not None:
        assert_same_columns(message.cached_blocks, plan.cached_blocks)
        assert message.cached_blocks.keys == plan.cached_blocks.keys
    for sent, moved in (
        *zip(message.leases, plan.leases, strict=True),
        *zip(message.fetches, plan.fetches, strict=True),
    ):
        assert_same_columns(sent, moved)
        for name in names_of(type(moved)) - columns_of(sent.DESCRIPTOR).keys():
            assert getattr(sent, name) == getattr(moved, name)
    for sent, new in zip(message.new_sequences, plan.new_sequences, strict=True):
        assert_same_columns(sent, new)
        for name in names_of(NewSequence) - columns_of(sent.DESCRIPTOR).keys():
            if name == "tables":
                assert_same_tables(sent, new)
            elif name == "context":
                sent_parts = [{f.name: v for f, v in part.ListFields()} for part in sent.context]
                parts = [asdict(part).items() for part in new.context]
                assert sent_parts == [{name: v for name, v in part if v} for part in parts]
            elif name not in OPTIONAL or sent.HasField(name):
                assert getattr(sent, name) == getattr(new, name)
        for name in OPTIONAL:
            assert sent.HasField(name) == (getattr(new, name) is not None)


def assert_same_tables(sent: plan_pb2.NewSequence, new: NewSequence) -> None:
    for message, table in zip(sent.tables, new.tables, strict=True):
        assert_same_columns(message, table)
        assert (message.group, message.first_index) == (table.group, table.first_index)


def assert_same_columns(message: Message, values: object) -> None:
    for name, column in columns_of(message.DESCRIPTOR).items():
        assert column.unpack(getattr(message, name)) == (getattr(values, name) or [])


def test_a_batch_of_decodes_costs_four_bytes_a_row_and_sixteen_a_new_block() -> None:
    seq_ids = list(range(1000, 1256))
    steady = StepPlan(step_id=5, seq_ids=seq_ids)
    growing = StepPlan(step_id=6, seq_ids=seq_ids, block_updates=[1000, 0, 9, 77])
    assert wire.encode_plan(steady, 1).ByteSize() <= 4 * 256 + 16
    # The new block's column also costs its own tag and length.
    grown = wire.encode_plan(growing, 1).ByteSize() - wire.encode_plan(steady, 1).ByteSize()
    assert grown == 16 + 2


def test_a_result_keeps_every_field() -> None:
    message = plan_pb2.StepResult(
        epoch=3,
        step_id=9,
        token_ids=pack([5, -1, 7, 8]),
        num_sampled=bytes([1, 1, 2]),
        num_drafts=bytes([0, 0, 3]),
        logprobs=[
            plan_pb2.RowLogprobs(row=2, token_ids=b"tttt", logprobs=b"llll", sampled_rank=rank)
            for rank in (4, 5)
        ],
        candidates=[
            plan_pb2.RowCandidates(
                row=3, token_ids=pack([7, 5]), logprobs=pack_floats([-0.5, -1.25])
            )
        ],
        prompt_logprobs=[
            plan_pb2.RowPromptLogprobs(
                row=0, start=1, width=2, token_ids=b"tttt", logprobs=b"llll", ranks=b"rrrr"
            )
        ],
        vectors=[plan_pb2.RowVector(row=4, values=pack_floats([0.5]))],
        errors=[
            plan_pb2.RowError(
                row=1, reason=plan_pb2.ROW_ERROR_REASON_NON_FINITE_LOGITS, message="NaN"
            )
        ],
        timings=plan_pb2.StepTimings(
            received_us=10,
            started_us=20,
            finished_us=95,
            cache_ops_us=1,
            forward_us=50,
            sample_us=9,
        ),
        fetches=[
            plan_pb2.FetchResult(
                fetch_id=7,
                failure=plan_pb2.FETCH_FAILURE_STALLED,
                message="no bytes",
                num_bytes=8,
                duration_us=9,
                transport="grpc",
            ),
            plan_pb2.FetchResult(fetch_id=8),
        ],
    )
    assert set_fields(message) == all_fields(message)
    result = wire.decode_result(message, sent_us=99)
    empty = StepResult(step_id=0, token_ids=[])
    assert all(getattr(result, name) != getattr(empty, name) for name in names_of(StepResult))
    assert (result.step_id, result.token_ids) == (9, [5, -1, 7, 8])
    assert (result.num_sampled, result.num_drafts) == ([1, 1, 2], [0, 0, 3])
    assert result.candidates == {3: RowCandidates(token_ids=[7, 5], logprobs=[-0.5, -1.25])}
    assert [entry.sampled_rank for entry in result.kept_logprobs[2]] == [5]
    assert result.held_us == 4
    assert result.logprobs == {2: RowLogprobs(token_ids=b"tttt", logprobs=b"llll", sampled_rank=4)}
    assert result.prompt_logprobs == {
        0: RowPromptLogprobs(start=1, width=2, token_ids=b"tttt", logprobs=b"llll", ranks=b"rrrr")
    }
    assert result.errors == {1: RowError(reason="NON_FINITE_LOGITS", message="NaN")}
    assert result.fetches == [
        FetchResult(
            fetch_id=7,
            failure="STALLED",
            message="no bytes",
            num_bytes=8,
            duration_us=9,
            transport="grpc",
        ),
        FetchResult(fetch_id=8),
    ]
    assert (result.cache_ops_us, result.forward_us, result.sample_us, result.busy_us) == (
        1,
        50,
        9,
        75,
    )


GENERATION_FIELDS = {field.name for field in pb.Generation.DESCRIPTOR.fields}
SUBMITTED_NUMBERS = {"waited_us", "max_hold_ms", "num_worker_losses", "num_lone_worker_losses"}


def submit(**changes: object) -> pb.Submit:
    fields: dict[str, object] = {
        "handle": 5,
        "request_id": "r",
        "model": "m",
        "tenant": "t",
        "priority": -3,
        "prompt_token_ids": pack([1, 2]),
        "num_choices": 2,
        "max_tokens": 9,
        "stop_token_ids": pack([7, 8]),
        "sampling": sampling_pb2.SamplerParams(min_tokens=4, logprobs=0),
        "timeout_us": 2_500_000,
    }
    fields |= changes
    work = {name: fields.pop(name) for name in GENERATION_FIELDS & fields.keys()}
    return pb.Submit(generation=pb.Generation(**work), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [None, 0, 3])
def test_a_submission_may_limit_its_drafts(limit: int | None) -> None:
    request = wire.decode_submit(submit(num_speculative_tokens=limit), "front", now=0.0)
    assert request.work.num_speculative_tokens == limit


def unset_fields(values: Any) -> set[str]:
    return {
        field.name
        for field in fields(values)
        if field.default is not MISSING and getattr(values, field.name) == field.default
    }


@pytest.mark.parametrize("type", list(wire.POOLING_TYPES))
def test_a_submission_for_a_vector_keeps_every_field(type: Any) -> None:
    params = pooling_pb2.PoolingParams(type=type, normalize=True, dimensions=3)
    message = submit()
    message.pooling.CopyFrom(params)
    work = wire.decode_submit(message, "front", now=0.0).work
    assert work == Pooling(type=wire.POOLING_TYPES[type], dimensions=3, pooling=params)


def test_a_submission_that_wants_nothing_is_refused_by_field() -> None:
    message = submit()
    message.ClearField("generation")
    with pytest.raises(InvalidArgument) as error:
        wire.decode_submit(message, "front", now=0.0)
    assert error.value.field == "work"


def test_a_submission_with_an_unknown_type_of_pooling_is_refused_by_field() -> None:
    message = submit()
    message.pooling.dimensions = 3
    with pytest.raises(InvalidArgument) as error:
        wire.decode_submit(message, "front", now=0.0)
    assert error.value.field == "pooling.type"


def test_a_submission_keeps_every_field() -> None:
    message = submit(
        beam_search=sampling_pb2.BeamSearch(
            width=2, early_stopping=sampling_pb2.EARLY_STOPPING_NEVER
        ),
        generated=[pb.GeneratedTokens(choice_index=1, token_ids=pack([3]))],
        num_speculative_tokens=3,
        **dict.fromkeys(SUBMITTED_NUMBERS, 7),
        attempt=7,
        fingerprint=b"f",
        was_accepted=True,
        traceparent="t",
        context=[context_pb2.ContextPart(kind=context_pb2.CONTEXT_KIND_SALT, digest=bytes(32))],
    )
    message.generation.sampling.prompt_logprobs = 1
    assert set_fields(message) == all_fields(message) - {"pooling"}
    assert set_fields(message.generation) == all_fields(message.generation)
    request = wire.decode_submit(message, "front", now=100.0)
    assert unset_fields(request) == unset_fields(request.work) == set()
    assert request.work.max_hold_us == 7000
    for name in SUBMITTED_NUMBERS - {"max_hold_ms"}:
        assert getattr(request, name) == 7


@pytest.mark.parametrize(
    ("part", "field", "expected"),
    [
        ({"digest": bytes(32)}, "context[0].kind", "expected SALT, ADAPTER or MEDIA, got 0"),
        ({"digest": bytes(32), "kind": 9}, "context[0].kind", "expected SALT, ADAPTER or MEDIA"),
        ({"kind": 2, "digest": b"name"}, "context[0].digest", "expected 32 bytes, got 4"),
        ({"kind": 1}, "context[0].digest", "expected 32 bytes, got 0"),
    ],
)
def test_a_part_without_a_kind_or_a_digest_is_refused_by_name(
    part: dict[str, Any], field: str, expected: str
) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(expected)) as error:
        wire.decode_submit(submit(context=[context_pb2.ContextPart(**part)]), "front", now=0.0)
    assert error.value.field == field


def test_a_submission_becomes_a_request() -> None:
    generated = [
        pb.GeneratedTokens(
            choice_index=1, token_ids=pack([3]), cumulative_logprob=-0.5, finished=True
        )
    ]
    request = wire.decode_submit(submit(generated=generated), "front", now=100.0)
    assert (request.frontend_id, request.handle, request.request_id) == ("front", 5, "r")
    assert (request.model, request.tenant, request.priority) == ("m", "t", -3)
    assert (list(request.prompt_token_ids), request.work.stop_token_ids) == ([1, 2], {7, 8})
    assert (request.work.num_choices, request.work.max_tokens, request.work.min_tokens) == (2, 9, 4)
    assert (request.work.wants_logprobs, request.work.wants_prompt_logprobs) == (True, False)
    assert request.deadline == 102.5
    assert request.work.generated.keys() == {1}
    assert request.work.generated[1].token_ids == [3]
    assert request.work.generated[1].finished
    assert request.work.generated[1].cumulative_logprob == -0.5


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (sampling_pb2.EARLY_STOPPING_WHEN_FULL, EarlyStopping.WHEN_FULL),
        (sampling_pb2.EARLY_STOPPING_WHEN_HOPELESS, EarlyStopping.WHEN_HOPELESS),
        (sampling_pb2.EARLY_STOPPING_NEVER, EarlyStopping.NEVER),
    ],
)
def test_a_search_is_submitted_with_all_that_it_needs(
    sent: sampling_pb2.EarlyStopping.ValueType, expected: EarlyStopping
) -> None:
    beam_search = sampling_pb2.BeamSearch(width=3, length_penalty=0.5, early_stopping=sent)
    request = wire.decode_submit(submit(beam_search=beam_search), "front", now=0.0)
    assert request.work.beam_search == BeamParams(
        width=3, length_penalty=0.5, early_stopping=expected, num_logprobs=0
    )
    assert wire.decode_submit(submit(), "front", now=0.0).work.beam_search is None


@pytest.mark.parametrize("logprobs", [b"", b"123", pack_floats([-0.5])])
def test_candidates_without_their_log_probabilities_are_refused(logprobs: bytes) -> None:
    entry = plan_pb2.RowCandidates(row=0, token_ids=pack([7, 5]), logprobs=logprobs)
    with pytest.raises(InvalidArgument) as error:
        wire.decode_result(plan_pb2.StepResult(step_id=1, candidates=[entry]))
    assert error.value.field == "candidates.logprobs"


def test_a_submission_without_a_timeout_has_no_deadline() -> None:
    message = submit()
    message.ClearField("timeout_us")
    assert wire.decode_submit(message, "front", now=100.0).deadline is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_choices": 0}, "num_choices"),
        ({"handle": 0}, "handle"),
        ({"handle": 2**31 - 1}, "handle"),
        ({"request_id": ""}, "request_id"),
        ({"beam_search": sampling_pb2.BeamSearch(width=2)}, "beam_search.early_stopping"),
        (
            {"beam_search": sampling_pb2.BeamSearch(width=2, early_stopping=99)},  # type: ignore[arg-type]
            "beam_search.early_stopping",
        ),
        ({"prompt_token_ids": b"123"}, "prompt_token_ids"),
        ({"stop_token_ids": b"123"}, "stop_token_ids"),
        ({"generated": [pb.GeneratedTokens(choice_index=2)]}, "generated.choice_index"),
    ],
)
def test_a_submission_that_cannot_be_is_refused_by_field(
    changes: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidArgument) as error:
        wire.decode_submit(submit(**changes), "front", now=0.0)
    assert error.value.field == field


TIMINGS = {field.name: number for number, field in enumerate(fields(RequestTimings), start=1)}


def test_outputs_keep_every_field() -> None:
    outbox = EngineOutputs(
        accepted=[1],
        token_handles=[1, 2, 1],
        token_ids=[10, 20, 11],
        logprobs=[(1, RowLogprobs(token_ids=b"tttt", logprobs=b"llll", sampled_rank=1))],
        prompt_logprobs=[
            (
                1,
                RowPromptLogprobs(
                    start=1, width=1, token_ids=b"tttt", logprobs=b"llll", ranks=b"rrrr"
                ),
            )
        ],
        choices_finished=[
            ChoiceFinished(handle=1, reason="stop", stop_token_id=0),
            ChoiceFinished(handle=2, reason="length"),
        ],
        requests_finished=[
            RequestFinished(
                handle=1,
                cached_tokens=6,
                timings=RequestTimings(**TIMINGS),
            )
        ],
        vectors=[(7, 2, pack_floats([0.5]))],
        requests_failed=[(3, QueueFull("full", retry_delay_s=0.5, details={"limit": 2}))],
        worker_losses=[4, 5],
        lone_worker_losses=[5],
    )
    message = wire.encode_outbox(outbox)
    assert set_fields(message) == names_of(EngineOutputs)
    assert_same_columns(message, outbox)
    assert message.logprobs[0] == pb.ChoiceLogprobs(
        handle=1, token_ids=b"tttt", logprobs=b"llll", rank=1
    )
    assert message.prompt_logprobs[0] == pb.PromptLogprobsUpdate(
        handle=1, start=1, width=1, token_ids=b"tttt", logprobs=b"llll", ranks=b"rrrr"
    )
    stopped, capped = message.choices_finished
    assert (stopped.reason, stopped.HasField("stop_token_id")) == (
        inference_pb.FINISH_REASON_STOP,
        True,
    )
    assert (capped.reason, capped.HasField("stop_token_id")) == (
        inference_pb.FINISH_REASON_LENGTH,
        False,
    )
    sent = message.requests_finished[0].timings
    assert {name: getattr(sent, name) for name in TIMINGS} == TIMINGS
    assert message.requests_finished[0].cached_tokens == 6
    assert message.requests_failed[0] == pb.RequestFailed(
        handle=3,
        code=8,
        reason="QUEUE_FULL",
        message="full",
        details=[pb.ErrorDetail(key="limit", value="2")],
        retry_delay_us=500_000,
    )
    assert not message.HasField("models")

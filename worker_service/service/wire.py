"""Decodes protobuf messages to plans and encodes results, in one place.

Columns are views of the message's bytes, never copied. Errors that the message alone shows are
refused here as `InvalidPlan`; contradictions to the worker's state are refused where that state is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from pagewire.columns import Column, columns_of, pack
from pagewire.v1 import (
    context_pb2,
    model_pb2,
    plan_pb2,
    pooling_pb2,
    sampling_pb2,
    worker_service_pb2,
)
from pagewire.validation import find_violation
from worker_service.array_types import Float32Array, Int32Array
from worker_service.block_transfer.transport import Part, Reader, ReadRequest, SourceMemory
from worker_service.engine.executor import ModelFacts
from worker_service.errors import InvalidPlan
from worker_service.plan import (
    KEY_BYTES,
    ROW_ERROR_MESSAGES,
    BlockFetch,
    BlockLease,
    BlockTable,
    CachedEntry,
    Constraint,
    ConstraintKind,
    ContextKind,
    ContextPart,
    FetchResult,
    KeptSequence,
    NewSequence,
    PoolingHead,
    PoolingParams,
    PoolingType,
    RowOutput,
    SamplerParams,
    StepPlan,
    StepResult,
    StepTimings,
    Thought,
)
from worker_service.pooling_facts import PoolingFacts

AnyMessage = TypeVar("AnyMessage", bound=Message)

_NUMBERS = tuple(
    field.name for field in fields(SamplerParams) if isinstance(field.default, int | float)
)
"""Sampling parameters that the message has under the same name."""

_NO_SAMPLING = SamplerParams()
"""Of sequences that are pooled."""

_MAX_OUTPUT = int(max(RowOutput))

_TIMINGS = tuple(field.name for field in fields(StepTimings))

_CONTEXT_KINDS = {
    context_pb2.ContextKind.Value(f"CONTEXT_KIND_{kind.name}"): kind for kind in ContextKind
}
_POOLING_TYPES = {
    pooling_pb2.PoolingType.Value(f"POOLING_TYPE_{kind.name}"): kind for kind in PoolingType
}
_POOLING_HEADS = {
    pooling_pb2.PoolingHead.Value(f"POOLING_HEAD_{head.name}"): head for head in PoolingHead
}


def decode_plan(message: plan_pb2.StepPlan, received_us: int) -> StepPlan:
    """The plan in a message. Raises InvalidPlan naming the field."""
    columns = _decode_columns(message, num_rows=len(message.seq_ids) // 4)
    if (columns["num_tokens"] < 0).any():
        raise InvalidPlan("num_tokens", "expected no negative numbers")
    if (columns["output"] > _MAX_OUTPUT).any():
        got = columns["output"].max()
        raise InvalidPlan("output", f"expected 0 to {_MAX_OUTPUT} in each row, got {got}")
    return StepPlan(
        epoch=message.epoch,
        step_id=message.step_id,
        new_sequences=tuple(
            _decode_new_sequence(new, f"new_sequences[{index}].")
            for index, new in enumerate(message.new_sequences)
        ),
        leases=tuple(
            _decode_lease(lease, f"leases[{index}].") for index, lease in enumerate(message.leases)
        ),
        fetches=tuple(
            _decode_fetch(fetch, f"fetches[{index}].")
            for index, fetch in enumerate(message.fetches)
        ),
        cached_blocks=tuple(_decode_cached_blocks(message.cached_blocks, "cached_blocks.")),
        key_seed=message.key_seed if message.HasField("key_seed") else None,
        withdrawn_step_id=message.withdrawn_step_id,
        received_us=received_us,
        max_results=message.max_results,
        **columns,
    )


def encode_result(result: StepResult) -> plan_pb2.StepResult:
    """The message for a result."""
    timings = result.timings
    return _encode(
        plan_pb2.StepResult,
        result,
        epoch=result.epoch,
        step_id=result.step_id,
        logprobs=[
            _encode(plan_pb2.RowLogprobs, entry, row=row, sampled_rank=entry.rank)
            for row, first in result.logprobs.items()
            for entry in (first, *result.kept_logprobs.get(row, ()))
        ],
        prompt_logprobs=[
            _encode(
                plan_pb2.RowPromptLogprobs,
                entry,
                row=row,
                start=entry.start,
                width=entry.token_ids.shape[1],
            )
            for row, entry in result.prompt_logprobs.items()
        ],
        candidates=[
            _encode(plan_pb2.RowCandidates, entry, row=row)
            for row, entry in result.candidates.items()
        ],
        vectors=[
            plan_pb2.RowVector(row=row, values=vector.astype("<f4", copy=False).tobytes())
            for row, vector in result.vectors.items()
        ],
        errors=[
            plan_pb2.RowError(
                row=row,
                reason=f"ROW_ERROR_REASON_{reason.name}",  # type: ignore[arg-type]
                message=ROW_ERROR_MESSAGES[reason],
            )
            for row, reason in result.errors.items()
        ],
        timings=plan_pb2.StepTimings(**{name: getattr(timings, name) for name in _TIMINGS}),
        fetches=[_encode_fetch_result(fetch) for fetch in result.fetches],
    )


def _encode_fetch_result(result: FetchResult) -> plan_pb2.FetchResult:
    name = "UNSPECIFIED" if result.failure is None else result.failure.name
    values = asdict(result) | {"failure": f"FETCH_FAILURE_{name}"}
    return plan_pb2.FetchResult(**values)


def encode_model_info(
    facts: ModelFacts, name: str, aliases: Iterable[str] = ()
) -> model_pb2.ModelInfo:
    """The model's properties for the core and the frontends."""
    values = asdict(facts)
    values["eos_token_ids"] = pack(facts.eos_token_ids)
    values["cache_groups"] = [
        model_pb2.CacheGroup(
            **asdict(group) | {"lifetime": f"CACHE_LIFETIME_{group.lifetime.name}"}
        )
        for group in facts.cache_groups
    ]
    if facts.pooling is not None:
        values["pooling"] = _encode_pooling(facts.pooling)
    values["work_kinds"] = [f"WORK_KIND_{kind.name}" for kind in facts.work_kinds]
    for of_worker in ("device", "attention_backend", "num_speculative_tokens"):
        del values[of_worker]
    return model_pb2.ModelInfo(name=name, aliases=aliases, **values)


def _encode_pooling(facts: PoolingFacts) -> pooling_pb2.PoolingInfo:
    kinds = {
        name: f"POOLING_TYPE_{getattr(facts, name).name}"
        for name in ("default_type", "classifier_type")
    }
    return pooling_pb2.PoolingInfo(
        **asdict(facts)
        | kinds
        | {
            "types": [f"POOLING_TYPE_{kind.name}" for kind in facts.types],
            "label_activation": f"LABEL_ACTIVATION_{facts.label_activation.name}",
            "similarity": f"SIMILARITY_{facts.similarity.name}",
            "prompts": [
                pooling_pb2.NamedPrompt(name=name, text=text) for name, text in facts.prompts
            ],
        }
    )


def decode_read_request(message: worker_service_pb2.ReadBlocksRequest) -> ReadRequest:
    """A reader's request. Raises InvalidPlan naming the field."""
    reader = message.reader
    return ReadRequest(
        epoch=message.epoch,
        lease_id=message.lease_id,
        token=message.token,
        block_ids=_decode_columns(message)["block_ids"].tolist(),
        rank=message.rank,
        reader=Reader(reader.machine, reader.pid) if message.HasField("reader") else None,
    )


def encode_read_request(request: ReadRequest) -> worker_service_pb2.ReadBlocksRequest:
    """The message for a request to another worker."""
    reader = request.reader
    return worker_service_pb2.ReadBlocksRequest(
        epoch=request.epoch,
        lease_id=request.lease_id,
        token=request.token,
        block_ids=pack(request.block_ids),
        rank=request.rank,
        reader=None if reader is None else worker_service_pb2.ReaderProcess(**reader._asdict()),
    )


def decode_part(message: worker_service_pb2.ReadBlocksResponse) -> Part:
    """A part of another worker's answer."""
    memory = message.memory
    values = {name: getattr(memory, name) for name in SourceMemory._fields}
    return Part(
        data=message.data,
        digests=message.digests,
        memory=SourceMemory(**values) if message.HasField("memory") else None,
    )


def _decode_lease(message: plan_pb2.BlockLease, path: str) -> BlockLease:
    columns = _decode_columns(message, path)
    _check_positive(message, path, "lease_id", "timeout_ms")
    _check_key(message.token, f"{path}token", 1)
    _check_key(message.keys, f"{path}keys", len(columns["block_ids"]))
    _check_distinct(columns["block_ids"], f"{path}block_ids")
    return BlockLease(
        lease_id=message.lease_id,
        token=message.token,
        keys=message.keys,
        timeout_ms=message.timeout_ms,
        **columns,
    )


def _decode_fetch(message: plan_pb2.BlockFetch, path: str) -> BlockFetch:
    columns = _decode_columns(message, path)
    _check_positive(message, path, "fetch_id", "lease_id", "source_epoch", "timeout_ms")
    if not message.addresses:
        raise InvalidPlan(f"{path}addresses", "expected one for each rank")
    _check_key(message.token, f"{path}token", 1)
    _check_key(message.keys, f"{path}keys", len(columns["blocks"]))
    for column in columns["blocks"].T:
        _check_distinct(column, f"{path}blocks")
    return BlockFetch(
        fetch_id=message.fetch_id,
        addresses=tuple(message.addresses),
        source_epoch=message.source_epoch,
        lease_id=message.lease_id,
        token=message.token,
        keys=message.keys,
        timeout_ms=message.timeout_ms,
        **columns,
    )


def _decode_cached_blocks(message: plan_pb2.CachedBlocks, path: str) -> Iterator[CachedEntry]:
    rows = _decode_columns(message, path)["blocks"]
    if not len(rows):
        return
    if (rows[:, 2:] < 0).any() or rows[0, 2] == 0:
        raise InvalidPlan(f"{path}blocks", "expected no negative numbers, and units in the first")
    firsts = [*np.flatnonzero(rows[:, 2]).tolist(), len(rows)]
    num_keys = rows[:, 2] + (rows[:, 4] > 0)
    _check_key(message.keys, f"{path}keys", int(num_keys[rows[:, 2] > 0].sum()))
    start = 0
    for first, end in pairwise(firsts):
        stop = start + int(num_keys[first]) * KEY_BYTES
        yield CachedEntry(
            blocks=tuple(rows[first:end, 0].tolist()),
            rows=rows[first:end].tobytes(),
            keys=message.keys[start:stop],
        )
        start = stop


def encode_cached_blocks(entries: Sequence[CachedEntry]) -> plan_pb2.CachedBlocks:
    """The core's records, as it has sent them."""
    return plan_pb2.CachedBlocks(
        blocks=b"".join(entry.rows for entry in entries),
        keys=b"".join(entry.keys for entry in entries),
    )


def encode_kept_sequence(sequence: KeptSequence) -> worker_service_pb2.KeptSequence:
    """The message for a sequence of an earlier stream."""
    return worker_service_pb2.KeptSequence(
        seq_id=sequence.seq_id,
        token_ids=pack(sequence.token_ids),
        context=[
            context_pb2.ContextPart(
                kind=f"CONTEXT_KIND_{part.kind.name}",  # type: ignore[arg-type]
                digest=part.digest,
                start=part.start,
                length=part.length,
            )
            for part in sequence.context
        ],
        tables=[
            plan_pb2.BlockTable(
                group=table.group,
                first_index=table.first_index,
                block_ids=pack(table.block_ids),
            )
            for table in sequence.tables
        ],
    )


def _check_positive(message: Message, path: str, *names: str) -> None:
    for name in names:
        if getattr(message, name) == 0:
            raise InvalidPlan(f"{path}{name}", "expected a positive number, got 0")


def _check_key(data: bytes, path: str, count: int) -> None:
    if len(data) != count * KEY_BYTES:
        raise InvalidPlan(path, f"expected {count * KEY_BYTES} bytes, got {len(data)}")


def _check_distinct(blocks: Int32Array, path: str) -> None:
    if len(blocks) == 0:
        raise InvalidPlan(path, "expected at least one block")
    if len(np.unique(blocks)) < len(blocks):
        raise InvalidPlan(path, "expected no block twice")


def _decode_new_sequence(message: plan_pb2.NewSequence, path: str) -> NewSequence:
    if message.context and message.HasField("parent_seq_id"):
        raise InvalidPlan(f"{path}context", "expected none in a fork, which has its parent's")
    return NewSequence(
        seq_id=message.seq_id,
        choice_index=message.choice_index,
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        sampling=(
            _NO_SAMPLING
            if message.HasField("pooling")
            else _decode_sampling(message.sampling, f"{path}sampling")
        ),
        pooling=_decode_pooling(message, f"{path}pooling"),
        parent_seq_id=message.parent_seq_id if message.HasField("parent_seq_id") else None,
        prompt_logprobs_start=message.prompt_logprobs_start,
        traceparent=message.traceparent,
        context=tuple(
            _decode_context_part(part, f"{path}context[{index}].")
            for index, part in enumerate(message.context)
        ),
        tables=tuple(
            BlockTable(
                group=table.group,
                first_index=table.first_index,
                **_decode_columns(table, f"{path}tables[{index}]."),
            )
            for index, table in enumerate(message.tables)
        ),
        **_decode_columns(message, path),
    )


def _decode_context_part(message: context_pb2.ContextPart, path: str) -> ContextPart:
    kind = _CONTEXT_KINDS.get(message.kind)
    if kind is None:
        expected = f"expected SALT, ADAPTER or MEDIA, got {message.kind}"
        raise InvalidPlan(f"{path}kind", expected)
    if len(message.digest) != 32:
        raise InvalidPlan(f"{path}digest", f"expected 32 bytes, got {len(message.digest)}")
    return ContextPart(kind=kind, digest=message.digest, start=message.start, length=message.length)


def _decode_pooling(message: plan_pb2.NewSequence, path: str) -> PoolingParams | None:
    if not message.HasField("pooling"):
        return None
    pooling = message.pooling
    if pooling.type not in _POOLING_TYPES:
        raise InvalidPlan(f"{path}.type", f"expected a type of pooling, got {pooling.type}")
    if pooling.head not in _POOLING_HEADS:
        raise InvalidPlan(f"{path}.head", f"expected a head, got {pooling.head}")
    return PoolingParams(
        type=_POOLING_TYPES[pooling.type],
        normalize=pooling.normalize,
        dimensions=pooling.dimensions,
        head=_POOLING_HEADS[pooling.head],
        second_text_start=pooling.second_text_start,
    )


def _decode_sampling(message: sampling_pb2.SamplerParams, path: str) -> SamplerParams:
    if (violation := find_violation(message)) is not None:
        raise InvalidPlan(f"{path}.{violation.path}", violation.expected)
    return SamplerParams(
        **{name: getattr(message, name) for name in _NUMBERS},
        # Those that are no int32 become negative, and are refused as others beyond the vocabulary.
        bias_token_ids=np.array([bias.token_id for bias in message.logit_bias], np.uint32).view(
            np.int32
        ),
        bias_values=np.array([bias.bias for bias in message.logit_bias], np.float32),
        suppressed_token_ids=_decode_suppressed(message, f"{path}."),
        bad_words=_decode_bad_words(message.bad_words, path),
        num_logprobs=_decode_count(message, "logprobs"),
        num_prompt_logprobs=_decode_count(message, "prompt_logprobs"),
        num_candidates=_decode_count(message, "num_candidates"),
        constraint=_decode_constraint(message, path),
    )


def _decode_suppressed(message: sampling_pb2.SamplerParams, path: str) -> Int32Array:
    """Empty with a constraint, which has its own end tokens."""
    suppressed: Int32Array = _decode_columns(message, path)["suppressed_token_ids"]
    return suppressed[:0] if message.HasField("constraint") else suppressed


def _decode_bad_words(
    words: Iterable[sampling_pb2.TokenSequence], path: str
) -> tuple[tuple[int, ...], ...]:
    decoded = []
    for index, word in enumerate(words):
        ids = _decode_columns(word, f"{path}.bad_words[{index}].")["token_ids"]
        if len(ids) == 0:
            raise InvalidPlan(f"{path}.bad_words[{index}].token_ids", "expected at least one token")
        decoded.append(tuple(ids.tolist()))
    return tuple(decoded)


def _decode_count(message: sampling_pb2.SamplerParams, name: str) -> int | None:
    return getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]


def _decode_constraint(message: sampling_pb2.SamplerParams, path: str) -> Constraint | None:
    if not message.HasField("constraint"):
        return None
    path, constraint = f"{path}.constraint", message.constraint
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidPlan(path, "expected one of json_schema, regex, grammar and choice")
    is_choice = kind == "choice"
    texts = constraint.choice.choices if is_choice else [getattr(constraint, kind)]
    return Constraint(
        kind=ConstraintKind(kind),
        texts=tuple(texts),
        thought=_decode_thought(constraint.thought) if constraint.HasField("thought") else None,
        **_decode_columns(constraint, f"{path}."),
    )


def _decode_thought(message: sampling_pb2.Thought) -> Thought:
    return Thought(message.start, tuple(message.ends), tuple(message.other_starts))


def _encode(kind: type[AnyMessage], values: Any, **fields: Any) -> AnyMessage:
    """A message with fields and the columns of an object that has their elements under the same
    names; None stands for an empty column."""
    for name, column in columns_of(kind.DESCRIPTOR).items():
        if (elements := getattr(values, name)) is not None:
            fields[name] = elements.astype(column.dtype, copy=False).tobytes()
    return kind(**fields)


def _decode_columns(message: Message, prefix: str = "", num_rows: int = 0) -> dict[str, Any]:
    """The columns of a message by name: [n], or [n, width] where an entry has several elements.
    Those of rows have `num_rows` entries, whether the message holds them or not."""
    columns, absent = columns_of(message.DESCRIPTOR), _absent_columns(message.DESCRIPTOR)
    return {
        name: _decode_column(columns[name], data, f"{prefix}{name}", num_rows)
        if (data := getattr(message, name))
        else np.full(num_rows, columns[name].absent, np.int32)
        if empty is None
        else empty
        for name, empty in absent.items()
    }


@lru_cache
def _absent_columns(descriptor: Descriptor) -> dict[str, Int32Array | Float32Array | None]:
    """What the columns of a message type are by name if they are empty; None for those of rows."""
    return {
        name: None if column.has_rows else _decode_column(column, b"", name, 0)
        for name, column in columns_of(descriptor).items()
    }


def _decode_column(
    column: Column, data: bytes, path: str, num_rows: int
) -> Int32Array | Float32Array:
    """The elements; integers are int32, whatever their width on the wire."""
    if len(data) % column.entry_bytes:
        problem = f"expected a multiple of {column.entry_bytes} bytes, got {len(data)}"
        raise InvalidPlan(path, problem)
    values = np.frombuffer(data, column.dtype)
    if column.has_rows and len(values) != num_rows:
        problem = f"expected {num_rows} entries, one per row, or none, got {len(values)}"
        raise InvalidPlan(path, problem)
    if column.dtype == "u1":
        return values.astype(np.int32)
    return values if column.width == 1 else values.reshape(-1, column.width)

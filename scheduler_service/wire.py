"""The core's dataclasses as protobuf messages and back; the only place that knows both.

The protos document what a field means; here it is only converted. Messages of the frontend's
own side of `Attach` are in `scheduler_service/frontend/`.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, TypeVar

from google.protobuf.message import Message

from pagewire.columns import columns_of
from pagewire.v1 import (
    context_pb2,
    model_pb2,
    plan_pb2,
    pooling_pb2,
    sampling_pb2,
    scheduler_service_pb2,
    worker_service_pb2,
)
from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.columns import from_column, from_columns
from scheduler_service.core.beam_search import BeamParams, EarlyStopping
from scheduler_service.core.config import (
    CacheGroup,
    CacheLifetime,
    KeptSequence,
    PoolingHead,
    PoolingType,
)
from scheduler_service.core.context import DIGEST_BYTES, ContextKind, ContextPart
from scheduler_service.core.request import (
    EngineOutputs,
    GeneratedTokens,
    Generation,
    Pooling,
    Request,
    RequestFinished,
)
from scheduler_service.core.step_plan import (
    BlockFetch,
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
from scheduler_service.errors import InvalidArgument, PagewireError
from scheduler_service.status_codes import status_code

MAX_HANDLE = 2**31 - 1
INT32_BYTES = 4

_PLAN = columns_of(plan_pb2.StepPlan.DESCRIPTOR)
_NEW_SEQUENCE = columns_of(plan_pb2.NewSequence.DESCRIPTOR)
_BLOCK_TABLE = columns_of(plan_pb2.BlockTable.DESCRIPTOR)
_CACHED_BLOCKS = columns_of(plan_pb2.CachedBlocks.DESCRIPTOR)
_BLOCK_LEASE = columns_of(plan_pb2.BlockLease.DESCRIPTOR)
_BLOCK_FETCH = columns_of(plan_pb2.BlockFetch.DESCRIPTOR)
_OUTPUTS = columns_of(scheduler_service_pb2.SchedulerMessage.DESCRIPTOR)

FINISH_REASONS: Mapping[str, inference_pb.FinishReason.ValueType] = {
    "stop": inference_pb.FINISH_REASON_STOP,
    "length": inference_pb.FINISH_REASON_LENGTH,
}

POOLING_TYPES: Mapping[int, PoolingType] = {
    pooling_pb2.POOLING_TYPE_LAST: PoolingType.LAST,
    pooling_pb2.POOLING_TYPE_MEAN: PoolingType.MEAN,
    pooling_pb2.POOLING_TYPE_CLS: PoolingType.CLS,
    pooling_pb2.POOLING_TYPE_ALL: PoolingType.ALL,
}

POOLING_HEADS: Mapping[int, PoolingHead] = {
    pooling_pb2.POOLING_HEAD_UNSPECIFIED: PoolingHead.VECTOR,
    pooling_pb2.POOLING_HEAD_CLASSIFIER: PoolingHead.CLASSIFIER,
}

EARLY_STOPPING: Mapping[int, EarlyStopping] = {
    sampling_pb2.EARLY_STOPPING_WHEN_FULL: EarlyStopping.WHEN_FULL,
    sampling_pb2.EARLY_STOPPING_WHEN_HOPELESS: EarlyStopping.WHEN_HOPELESS,
    sampling_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


_Kind = TypeVar("_Kind")


def _copied(kind: Callable[..., _Kind], source: Any, **others: Any) -> _Kind:
    """A message of a dataclass, or a dataclass of a message: with the fields that have equal names
    and are no columns to be packed, and with `others`."""
    source_kind: Any = type(source)
    names = _common_names(kind, source_kind)
    return kind(**{name: getattr(source, name) for name in names} | others)


@lru_cache
def _common_names(kind: Any, source: Any) -> tuple[str, ...]:
    message, other = (kind, source) if issubclass(kind, Message) else (source, kind)
    kinds = {field.name: field.type for field in fields(other)}
    return tuple(
        field.name
        for field in message.DESCRIPTOR.fields
        if field.name in kinds
        and not field.is_repeated
        and (field.type == field.TYPE_BYTES) == (kinds[field.name] is bytes)
    )


def decode_cache_group(message: model_pb2.CacheGroup) -> CacheGroup:
    """One of a model's cache groups. Raises ValueError for one that no group can be."""
    try:
        name = model_pb2.CacheLifetime.Name(message.lifetime)
    except ValueError:  # a newer worker's lifetime
        name = str(message.lifetime)
    lifetime = CacheLifetime(name.removeprefix("CACHE_LIFETIME_").lower())
    return _copied(CacheGroup, message, lifetime=lifetime)


def decode_pooling_info(message: pooling_pb2.PoolingInfo) -> dict[str, Any]:
    """What a model pools, as fields of `WorkerGroupCapacity`; types that this software does not
    know are none of it."""
    types = {POOLING_TYPES[number] for number in message.types if number in POOLING_TYPES}
    return {
        "vector_size": message.vector_size,
        "pooling_types": frozenset(types if message.vector_size else ()),
        "num_labels": len(message.labels),
        "classifier_type": POOLING_TYPES.get(message.classifier_type, PoolingType.LAST),
    }


def encode_plan(plan: StepPlan, epoch: int) -> plan_pb2.StepPlan:
    """`plan` for the stream fenced by `epoch`; columns that say nothing stay empty."""
    return plan_pb2.StepPlan(
        epoch=epoch,
        step_id=plan.step_id,
        new_sequences=[_encode_new_sequence(sequence) for sequence in plan.new_sequences],
        max_results=plan.max_results if plan.max_results > 1 else 0,
        leases=[
            _copied(plan_pb2.BlockLease, lease, **_BLOCK_LEASE.pack(lease)) for lease in plan.leases
        ],
        fetches=[_encode_fetch(fetch) for fetch in plan.fetches],
        cached_blocks=None if plan.cached_blocks is None else _encode_cached(plan.cached_blocks),
        key_seed=plan.key_seed,
        withdrawn_step_id=plan.withdrawn_step_id,
        **_PLAN.pack(plan),
    )


def _encode_cached(cached: CachedBlocks) -> plan_pb2.CachedBlocks:
    return _copied(plan_pb2.CachedBlocks, cached, **_CACHED_BLOCKS.pack(cached))


def _encode_fetch(fetch: BlockFetch) -> plan_pb2.BlockFetch:
    columns = _BLOCK_FETCH.pack(fetch)
    return _copied(plan_pb2.BlockFetch, fetch, addresses=fetch.addresses, **columns)


def _encode_new_sequence(sequence: NewSequence) -> plan_pb2.NewSequence:
    return _copied(
        plan_pb2.NewSequence,
        sequence,
        tables=[
            _copied(plan_pb2.BlockTable, table, **_BLOCK_TABLE.pack(table))
            for table in sequence.tables
        ],
        context=[_copied(context_pb2.ContextPart, part) for part in sequence.context],
        **_NEW_SEQUENCE.pack(sequence),
    )


def decode_result(message: plan_pb2.StepResult, sent_us: int = 0) -> StepResult:
    """A worker's result; raises InvalidArgument when a column is no column.

    sent_us: when it could be sent, on the worker's clock; 0: at once.
    """
    timings = message.timings
    logprobs: dict[int, RowLogprobs] = {}
    kept_logprobs: dict[int, list[RowLogprobs]] = {}
    for entry in message.logprobs:
        decoded = _copied(RowLogprobs, entry)
        if logprobs.setdefault(entry.row, decoded) is not decoded:
            kept_logprobs.setdefault(entry.row, []).append(decoded)
    return StepResult(
        step_id=message.step_id,
        logprobs=logprobs,
        kept_logprobs=kept_logprobs,
        prompt_logprobs={
            entry.row: _copied(RowPromptLogprobs, entry) for entry in message.prompt_logprobs
        },
        candidates={entry.row: _decode_candidates(entry) for entry in message.candidates},
        vectors={entry.row: entry.values for entry in message.vectors},
        errors={entry.row: _decode_row_error(entry) for entry in message.errors},
        cache_ops_us=timings.cache_ops_us,
        forward_us=timings.forward_us,
        sample_us=timings.sample_us,
        busy_us=max(0, timings.finished_us - timings.started_us),
        held_us=max(0, sent_us - timings.finished_us),
        fetches=[decode_fetch_result(fetch) for fetch in message.fetches],
        **from_columns(message),
    )


def decode_fetch_result(message: plan_pb2.FetchResult) -> FetchResult:
    """The end of a fetch on one rank."""
    try:
        name = plan_pb2.FetchFailure.Name(message.failure)
    except ValueError:  # a newer worker's reason
        name = f"FETCH_FAILURE_{message.failure}"
    failure = name.removeprefix("FETCH_FAILURE_") if message.failure else ""
    return _copied(FetchResult, message, failure=failure)


def _decode_candidates(entry: plan_pb2.RowCandidates) -> RowCandidates:
    candidates = RowCandidates(**from_columns(entry, "candidates."))
    if len(candidates.token_ids) != len(candidates.logprobs):
        raise InvalidArgument("candidates.logprobs", "expected one for each of token_ids")
    return candidates


def _decode_row_error(entry: plan_pb2.RowError) -> RowError:
    try:
        name = plan_pb2.RowErrorReason.Name(entry.reason)
    except ValueError:  # a newer worker's reason
        name = f"ROW_ERROR_REASON_{entry.reason}"
    return RowError(reason=name.removeprefix("ROW_ERROR_REASON_"), message=entry.message)


def decode_submit(submit: scheduler_service_pb2.Submit, frontend_id: str, now: float) -> Request:
    """A frontend's request, its deadline on the clock of `now`.

    Raises InvalidArgument for what no request can be; whether this core can serve it is the
    core's to say.
    """
    _check_submit(submit)
    return _copied(
        Request,
        submit,
        frontend_id=frontend_id,
        context=tuple(
            _decode_context_part(part, f"context[{index}].")
            for index, part in enumerate(submit.context)
        ),
        prompt_token_ids=from_column(submit.prompt_token_ids, "prompt_token_ids"),
        work=_decode_work(submit),
        deadline=now + submit.timeout_us / 1e6 if submit.HasField("timeout_us") else None,
    )


def _check_submit(submit: scheduler_service_pb2.Submit) -> None:
    if not 1 <= submit.handle <= MAX_HANDLE - submit.generation.num_choices:
        raise InvalidArgument("handle", "expected a positive number below 2^31 for every choice")
    if not submit.request_id:
        raise InvalidArgument("request_id", "expected a request id")


def _decode_work(submit: scheduler_service_pb2.Submit) -> Generation | Pooling:
    match submit.WhichOneof("work"):
        case "generation":
            return _decode_generation(submit.generation)
        case "pooling":
            return _decode_pooling(submit.pooling, len(submit.prompt_token_ids) // INT32_BYTES)
    raise InvalidArgument("work", "expected one of generation and pooling")


def _decode_pooling(pooling: pooling_pb2.PoolingParams, num_tokens: int) -> Pooling:
    if pooling.type not in POOLING_TYPES:
        raise InvalidArgument("pooling.type", "expected POOLING_TYPE_LAST, _MEAN, _CLS or _ALL")
    if pooling.head not in POOLING_HEADS:
        raise InvalidArgument("pooling.head", "expected none or POOLING_HEAD_CLASSIFIER")
    if pooling.second_text_start >= max(1, num_tokens):
        expected = f"expected less than {num_tokens}, the number of tokens"
        raise InvalidArgument("pooling.second_text_start", expected)
    head = POOLING_HEADS[pooling.head]
    if pooling.normalize and head is PoolingHead.CLASSIFIER:
        raise InvalidArgument("pooling.normalize", "expected false with POOLING_HEAD_CLASSIFIER")
    return Pooling(
        type=POOLING_TYPES[pooling.type], head=head, dimensions=pooling.dimensions, pooling=pooling
    )


def _decode_generation(generation: scheduler_service_pb2.Generation) -> Generation:
    sampling, num_choices = generation.sampling, generation.num_choices
    if num_choices < 1:
        raise InvalidArgument("num_choices", "expected at least 1")
    if any(entry.choice_index >= num_choices for entry in generation.generated):
        raise InvalidArgument("generated.choice_index", "expected less than num_choices")
    return Generation(
        num_choices=num_choices,
        max_tokens=generation.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(from_column(generation.stop_token_ids, "stop_token_ids")),
        sampling=sampling,
        wants_logprobs=sampling.HasField("logprobs"),
        wants_prompt_logprobs=sampling.HasField("prompt_logprobs"),
        beam_search=_decode_beam_search(generation),
        generated={entry.choice_index: _decode_generated(entry) for entry in generation.generated},
        max_hold_us=generation.max_hold_ms * 1000,
        num_speculative_tokens=(
            generation.num_speculative_tokens
            if generation.HasField("num_speculative_tokens")
            else None
        ),
    )


def decode_kept_sequence(message: worker_service_pb2.KeptSequence, path: str) -> KeptSequence:
    """What a worker holds of a sequence of an earlier core. Raises InvalidArgument."""
    return KeptSequence(
        token_ids=from_columns(message, path)["token_ids"],
        context=tuple(
            _decode_context_part(part, f"{path}context[{index}].")
            for index, part in enumerate(message.context)
        ),
        tables={
            table.group: (table.first_index, from_columns(table, path)["block_ids"])
            for table in message.tables
        },
    )


def _decode_context_part(part: context_pb2.ContextPart, path: str) -> ContextPart:
    if part.kind not in list(ContextKind):
        raise InvalidArgument(f"{path}kind", f"expected SALT, ADAPTER or MEDIA, got {part.kind}")
    if len(part.digest) != DIGEST_BYTES:
        expected = f"expected {DIGEST_BYTES} bytes, got {len(part.digest)}"
        raise InvalidArgument(f"{path}digest", expected)
    return ContextPart(ContextKind(part.kind), part.digest, part.start, part.length)


def _decode_beam_search(generation: scheduler_service_pb2.Generation) -> BeamParams | None:
    if not generation.HasField("beam_search"):
        return None
    beam, sampling = generation.beam_search, generation.sampling
    if beam.early_stopping not in EARLY_STOPPING:
        raise InvalidArgument("beam_search.early_stopping", "expected a known value")
    return BeamParams(
        width=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=EARLY_STOPPING[beam.early_stopping],
        num_logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
    )


def _decode_generated(entry: scheduler_service_pb2.GeneratedTokens) -> GeneratedTokens:
    token_ids = from_column(entry.token_ids, "generated.token_ids")
    return _copied(GeneratedTokens, entry, token_ids=token_ids)


def encode_outbox(outbox: EngineOutputs) -> scheduler_service_pb2.SchedulerMessage:
    """Outputs for one frontend."""
    return scheduler_service_pb2.SchedulerMessage(
        logprobs=[
            _copied(
                scheduler_service_pb2.ChoiceLogprobs, entry, handle=handle, rank=entry.sampled_rank
            )
            for handle, entry in outbox.logprobs
        ],
        prompt_logprobs=[
            _copied(scheduler_service_pb2.PromptLogprobsUpdate, entry, handle=handle)
            for handle, entry in outbox.prompt_logprobs
        ],
        vectors=[
            scheduler_service_pb2.PooledVector(handle=handle, first_token=first, values=values)
            for handle, first, values in outbox.vectors
        ],
        choices_finished=[
            _copied(
                scheduler_service_pb2.ChoiceFinished, choice, reason=FINISH_REASONS[choice.reason]
            )
            for choice in outbox.choices_finished
        ],
        requests_finished=[_encode_finished(finished) for finished in outbox.requests_finished],
        requests_failed=[encode_failed(*failed) for failed in outbox.requests_failed],
        **_OUTPUTS.pack(outbox),
    )


def _encode_finished(finished: RequestFinished) -> scheduler_service_pb2.RequestFinished:
    timings = _copied(inference_pb.Timings, finished.timings)
    return _copied(scheduler_service_pb2.RequestFinished, finished, timings=timings)


def encode_failed(handle: int, error: Exception) -> scheduler_service_pb2.RequestFailed:
    """A request's failure, field by field, so that a frontend can make the same error of it."""
    failed = scheduler_service_pb2.RequestFailed(handle=handle, code=status_code(error).value[0])
    if isinstance(error, PagewireError):
        failed.reason = error.reason
        failed.message = error.message
        for key, value in error.details.items():
            failed.details.add(key=key, value=value)
        if error.retry_delay_s is not None:
            failed.retry_delay_us = max(0, round(error.retry_delay_s * 1e6))
    else:  # a bug: its text may hold anything
        failed.reason, failed.message = PagewireError.reason, "internal error"
    return failed

"""Admission control: all checks of a request before it is accepted, in order.

A later attempt at a live request takes it over; `scheduler_service/attempts.py` says why. It is a
request like any other, with the tokens that its client has received: it resumes from there, and
finds what the previous attempt computed in the prefix cache.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from scheduler_service import attempts
from scheduler_service.core import fitting
from scheduler_service.core.admission.deadlines import check_deadline
from scheduler_service.core.admission.request_registry import RequestRegistry
from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity, WorkKind
from scheduler_service.core.context import ContextKind
from scheduler_service.core.request import Pooling, Request
from scheduler_service.core.request_queue import AnyQueue
from scheduler_service.core.request_timing import to_us
from scheduler_service.core.routing.fleet import Fleet
from scheduler_service.core.routing.poison import resume_suspicion
from scheduler_service.core.scheduling.beams import check_beam_search
from scheduler_service.core.scheduling.pooling import MAX_ROW_BYTES, row_bytes
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.throughput import QueueThroughput, retry_delay_s
from scheduler_service.errors import (
    DuplicateRequest,
    InvalidArgument,
    PagewireError,
    PromptTooLong,
    QueueFull,
    TenantLimit,
    UnknownAdapter,
    UnsupportedByModel,
)


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raise InvalidArgument for a request that is invalid for every model."""
    if not request.prompt_token_ids:
        raise InvalidArgument("prompt", "must not be empty")
    if request.work.max_tokens < 1:
        raise InvalidArgument("max_tokens", "must be at least 1")
    if not 1 <= request.work.num_choices <= config.max_num_seqs:
        raise InvalidArgument(
            "num_choices", f"must be 1 to {config.max_num_seqs}, the scheduler's max_num_seqs"
        )
    if request.work.beam_search is not None:
        check_beam_search(request, request.work.beam_search, config)
    for index, generated in request.work.generated.items():
        if not 0 <= index < request.work.num_choices:
            raise InvalidArgument(
                "resume", f"index must be below num_choices, {request.work.num_choices}"
            )
        if len(generated.token_ids) > request.work.max_tokens:
            raise InvalidArgument("resume", "must not hold more than max_tokens tokens")


def refusal_of(
    seq_group: SequenceGroup, capacities: Iterable[WorkerGroupCapacity], config: SchedulerConfig
) -> PagewireError | None:
    """The reason why no worker group can serve a request; None if one can."""
    error: PagewireError | None = None
    for capacity in capacities:
        error = _refusal_by(seq_group, capacity, config)
        if error is None:
            return None
    return error


def _refusal_by(
    seq_group: SequenceGroup, capacity: WorkerGroupCapacity, config: SchedulerConfig
) -> PagewireError | None:
    request = seq_group.request
    tokens = request.prompt_token_ids
    if request.work.kind not in capacity.work_kinds:
        return _unsupported(request, capacity)
    if (without_adapters := adapter_refusal(seq_group, capacity)) is not None:
        return without_adapters
    if isinstance(request.work, Pooling) and (refusal := request.work.refusal(capacity)):
        field, problem = refusal
        return InvalidArgument(f"pooling.{field}", problem)
    if min(tokens) < 0 or max(tokens) >= capacity.vocab_size:
        return InvalidArgument(
            "prompt", f"token ids must be below the model's {capacity.vocab_size}"
        )
    for index, part in enumerate(request.context):
        if part.kind is ContextKind.MEDIA and part.length == 0 and capacity.reads_sources:
            expected = "must be the number of tokens of the encoder's output, is 0"
            return InvalidArgument(f"context[{index}].length", expected)
    error = None
    # A continued request may wait for the worker group that held it, so it is not too long until
    # that wait is over. If it has output, it then fails with another error.
    if not request.is_continued or (
        seq_group.placement.exceeded_tokens and not request.work.generated
    ):
        error = _too_long_error(seq_group, capacity, config)
    error = error or _step_error(request, capacity, config)
    return error or _tenant_error(seq_group, capacity)


def adapter_refusal(
    seq_group: SequenceGroup, capacity: WorkerGroupCapacity
) -> UnknownAdapter | None:
    """The error of a request with an adapter, if the worker group has none."""
    if seq_group.adapter is None or capacity.max_loras:
        return None
    return UnknownAdapter(
        f"the workers of the model {capacity.model!r} have no adapters; the request needs "
        f"{seq_group.adapter.hex()}",
        details={"model": capacity.model, "digest": seq_group.adapter.hex()},
    )


def _unsupported(request: Request, capacity: WorkerGroupCapacity) -> UnsupportedByModel:
    kinds = " and ".join(sorted(capacity.work_kinds))
    return UnsupportedByModel(
        f"the workers of the model {capacity.model!r} do {kinds}, not {request.work.kind}: send "
        f"the request to a model that does {request.work.kind}",
        reason="WORK_KIND_UNSUPPORTED",
        details={"model": capacity.model, "work_kind": request.work.kind, "work_kinds": kinds},
    )


def _too_long_error(
    seq_group: SequenceGroup, capacity: WorkerGroupCapacity, config: SchedulerConfig
) -> PagewireError | None:
    tokens = seq_group.request.prompt_token_ids
    details = {"num_prompt_tokens": len(tokens), "max_model_len": capacity.max_model_len}
    if fitting.max_output_tokens(seq_group, capacity) < 1:
        generates = seq_group.request.work.kind is WorkKind.GENERATION
        return PromptTooLong(
            f"the prompt has {len(tokens)} tokens; {'with one to generate, ' * generates}"
            f"the model takes {capacity.max_model_len}",
            details=details,
        )
    # A sequence's last token is never computed: one that ends with its next token needs no slots
    # beyond those of its known tokens.
    num_tokens = seq_group.max_known_tokens if seq_group.num_unfinished else 0
    num_cache_tokens = fitting.num_cache_tokens(seq_group, capacity)
    if num_tokens > num_cache_tokens:
        num_source = seq_group.num_source_tokens if capacity.reads_sources else 0
        num_states = capacity.num_state_blocks and seq_group.num_joint - 1
        others = f" beside the {num_source} tokens of the request's media" if num_source else ""
        others += f" beside the states of {num_states} other beams" if num_states else ""
        return PromptTooLong(
            f"the prompt's {num_tokens} tokens do not fit the KV cache of "
            f"{max(0, num_cache_tokens)}{others}",
            reason="PROMPT_LARGER_THAN_CACHE",
            details=details
            | {
                "num_cache_tokens": max(0, num_cache_tokens),
                "num_source_tokens": num_source,
                "num_gpu_blocks": capacity.num_gpu_blocks,
                "block_size": capacity.block_size,
            },
        )
    return None


def _step_error(
    request: Request, capacity: WorkerGroupCapacity, config: SchedulerConfig
) -> PagewireError | None:
    """Why a prompt that is computed in one row exceeds a step."""
    if config.enable_chunked_prefill and not capacity.whole_prompt:
        return None
    num_tokens, work = len(request.prompt_token_ids), request.work
    num_bytes = row_bytes(work, num_tokens, capacity) if isinstance(work, Pooling) else 0
    maxima = {"max_num_batched_tokens": (num_tokens, config.max_num_batched_tokens)}
    maxima["max_row_bytes"] = num_bytes, MAX_ROW_BYTES
    for name, (number, maximum) in maxima.items():
        if number > maximum:
            kind = "bytes of vectors" if name == "max_row_bytes" else "tokens"
            return PromptTooLong(
                f"the prompt has {number} {kind}, which the model computes in one step; a step "
                f"computes {name}={maximum}",
                reason="PROMPT_LARGER_THAN_STEP",
                details={"num_prompt_tokens": num_tokens, name: maximum},
            )
    return None


def _tenant_error(seq_group: SequenceGroup, capacity: WorkerGroupCapacity) -> PagewireError | None:
    tenant = seq_group.tenant
    num_blocks = fitting.max_kv_quota(seq_group, capacity)
    if tenant.may_ever_hold(num_blocks):
        return None
    return PromptTooLong(
        f"the request may come to need {num_blocks} KV blocks; its tenant has "
        f"{tenant.config.max_kv_blocks}: request fewer output tokens or choices",
        reason="LARGER_THAN_TENANT_LIMIT",
        details={
            "tenant": tenant.name,
            "num_blocks": num_blocks,
            "max_kv_blocks": tenant.config.max_kv_blocks,
            "block_size": capacity.block_size,
        },
    )


def check_tenant(
    seq_group: SequenceGroup, throughputs: Iterable[QueueThroughput], config: SchedulerConfig
) -> None:
    """Raise TenantLimit if the tenant is at its limit of live requests or of waiting tokens."""
    tenant = seq_group.tenant
    details: dict[str, object] = {"tenant": tenant.name}
    max_requests, max_tokens = tenant.config.max_requests, tenant.config.max_queued_tokens
    queued = tenant.num_queued_tokens
    if max_requests is not None and tenant.num_requests >= max_requests:
        message = f"the tenant has {tenant.num_requests} live requests, max_requests={max_requests}"
        details |= {"num_requests": tenant.num_requests, "max_requests": max_requests}
        delay_s = retry_delay_s(
            [tenant.ends],
            num_requests=tenant.num_requests - max_requests + 1,
            unmeasured_s=config.queue_retry_delay_s,
        )
    elif max_tokens is not None and 0 < queued > max_tokens - seq_group.num_prompt_tokens:
        message = (
            f"tenant queue full: it holds {queued} prompt tokens, and this request's "
            f"{seq_group.num_prompt_tokens} would exceed max_queued_tokens={max_tokens}"
        )
        details |= {"num_queued_tokens": queued, "max_queued_tokens": max_tokens}
        delay_s = retry_delay_s(
            throughputs,
            num_tokens=min(queued, queued + seq_group.num_prompt_tokens - max_tokens),
            unmeasured_s=config.queue_retry_delay_s,
        )
    else:
        return
    raise TenantLimit(message, details=details, retry_delay_s=delay_s)


def check_tenant_adapters(
    seq_group: SequenceGroup,
    live: Callable[[], Iterable[SequenceGroup]],
    config: SchedulerConfig,
) -> None:
    """Raise TenantLimit if the tenant's live requests have as many adapters as they may, and not
    this one's."""
    tenant, limit = seq_group.tenant, seq_group.tenant.config.max_loras
    if limit is None or seq_group.adapter is None:
        return
    used = {other.adapter for other in live() if other.tenant is tenant} - {None}
    if seq_group.adapter not in used and len(used) >= limit:
        raise TenantLimit(
            f"the tenant's live requests use {len(used)} adapters, max_loras={limit}",
            reason="TENANT_ADAPTER_LIMIT",
            details={"tenant": tenant.name, "num_loras": len(used), "max_loras": limit},
            retry_delay_s=config.queue_retry_delay_s,
        )


def check_queue(
    request: Request,
    queues: Sequence[AnyQueue],
    throughputs: Iterable[QueueThroughput],
    config: SchedulerConfig,
) -> None:
    """Raise QueueFull if the queues hold as many requests or tokens as they may in total."""
    num_waiting = sum(map(len, queues))
    num_waiting_tokens = sum(queue.num_tokens for queue in queues)
    if num_waiting == 0:
        return
    details = {"num_waiting": num_waiting, "num_waiting_tokens": num_waiting_tokens}
    requests_over = num_waiting + 1 - config.max_queue_requests
    tokens_over = num_waiting_tokens + len(request.prompt_token_ids) - config.max_queue_tokens
    if requests_over > 0:
        message = (
            f"queue full: it holds {num_waiting} requests, "
            f"max_queue_requests={config.max_queue_requests}"
        )
    elif tokens_over > 0:
        message = (
            f"queue full: it holds {num_waiting_tokens} prompt tokens, and this request's "
            f"{len(request.prompt_token_ids)} would exceed "
            f"max_queue_tokens={config.max_queue_tokens}"
        )
    else:
        return
    delay_s = retry_delay_s(
        throughputs,
        num_requests=max(0, requests_over),
        num_tokens=min(num_waiting_tokens, max(0, tokens_over)),
        unmeasured_s=config.queue_retry_delay_s,
    )
    raise QueueFull(message, details=details, retry_delay_s=delay_s)


def continuation(request: Request, previous: SequenceGroup, now_us: int) -> Request:
    """A later attempt at a live request, with its place in the queue and its counts."""
    arrived_us = previous.clock.submitted_us - previous.request.waited_us
    return replace(
        request,
        was_accepted=True,
        waited_us=max(request.waited_us, now_us - arrived_us),
        num_worker_losses=max(request.num_worker_losses, previous.losses.num_workers),
        num_lone_worker_losses=previous.losses.num_lone if previous.is_before_loss else 0,
    )


@dataclass(slots=True, eq=False)
class AdmissionControl:
    """Runs every admission check in order; ends and registers nothing."""

    config: SchedulerConfig
    registry: RequestRegistry
    fleet: Fleet

    def admit(self, request: Request, now: float) -> tuple[SequenceGroup, SequenceGroup | None]:
        """Make a group for the request, which is not live yet; also returns the live group that
        it takes over, which must end first. Raises as `SchedulerCore.submit` says."""
        check_request(request, self.config)
        previous = self.registry.find(request.tenant, request.request_id)
        if previous is not None:
            live = previous.request
            attempts.check_later(
                request.request_id,
                request.attempt,
                live_attempt=live.attempt,
                is_same=bool(request.fingerprint)
                and (request.fingerprint, request.model) == (live.fingerprint, live.model),
            )
            request = continuation(request, previous, to_us(now))
        if self.registry.has_handles_of(request):
            raise DuplicateRequest(
                f"the frontend has a live request of handle {request.handle}",
                reason="DUPLICATE_HANDLE",
                details={"request_id": request.request_id},
            )
        self.fleet.check_served(request.model)
        self.fleet.check_adapter(request)
        seq_group = self.registry.make_seq_group(request, to_us(now))
        if previous is not None:
            seq_group.placement.was_placed = previous.placement.was_placed
        model = self.fleet.models.get(request.model)
        # While all worker groups of a model are away, they may return with other capacities.
        capacities = model.capacities() if model is not None and model.schedulers else ()
        error = refusal_of(seq_group, capacities, self.config)
        if error is not None:
            raise error
        if not request.is_continued:  # else it was accepted before the loss
            throughputs = [model.throughput for model in self.fleet.models.values()]
            check_tenant(seq_group, throughputs, self.config)
            check_tenant_adapters(seq_group, self.registry.seq_groups, self.config)
            check_queue(request, self.fleet.queues(), throughputs, self.config)
        check_deadline(seq_group, model, self.registry.seq_groups, now)
        resume_suspicion(seq_group, previous, self.config)
        return seq_group, previous

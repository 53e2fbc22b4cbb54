"""The open requests of this frontend: accepted, limited, found by id and ended.

A request may be ended early by its client, an abort, its deadline or the end of the service. Each
frees its capacity and cancels it at the core at once, whether or not its client reads.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, TypeAlias

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service import attempts
from scheduler_service.errors import DeadlineExceeded, PagewireError, RequestAborted
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.capacity import RequestCapacity, shutting_down
from scheduler_service.frontend.core_client import CoreClient
from scheduler_service.frontend.input import validation
from scheduler_service.frontend.input.processor import (
    draw_request_id,
    fingerprint,
    off_the_loop,
    resolve_request,
)
from scheduler_service.frontend.input.tool_choice import (
    constraint_field,
    fields_that_exclude,
    with_call_schema,
)
from scheduler_service.frontend.metrics import FrontendMetrics, RequestSummary
from scheduler_service.frontend.models.served_models import ModelDirectory
from scheduler_service.frontend.requests.request_span import RequestSpan
from scheduler_service.frontend.requests.request_stream import RequestStream
from scheduler_service.frontend.structured_output.constraint import ConstraintChecker, to_lark
from service_common.tracing import Tracing

logger = logging.getLogger(__name__)

CHECKED_INLINE_BYTES = 1 << 16
"""Requests up to this size are checked on the event loop, in a few milliseconds at most."""

CANCEL_LATENCY_S = 0.25
"""How long after a new call the cancellation of an earlier one may become visible here."""

_Key: TypeAlias = tuple[str, str]
"""Tenant and request id: no tenant can find another's request, or learn that it exists."""


class OpenCall(Protocol):
    """A call that ends when the service does."""

    def fail(self, error: PagewireError) -> None:
        """End it with an error."""


@dataclass(slots=True)
class _Open:
    stream: RequestStream
    request: inference_pb.GenerateRequest
    preparing: asyncio.Task[None]
    timer: asyncio.TimerHandle | None
    closed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class RequestManager:
    """All open requests of one frontend."""

    core_client: CoreClient
    models: ModelDirectory
    checker: ConstraintChecker
    _: KW_ONLY
    capacity: RequestCapacity
    default_timeout_s: float | None
    metrics: FrontendMetrics
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        self._open: dict[_Key, _Open] = {}
        self._calls: dict[OpenCall, None] = {}
        """Calls for vectors, scores and labels."""

    def __len__(self) -> int:
        return self.capacity.num_open

    def open(
        self,
        request: inference_pb.GenerateRequest,
        deadline: float | None,
        on_update: Callable[[], object],
        tenant: Principal,
        is_late: bool = False,
    ) -> RequestStream:
        """Open a tenant's request; `close` must follow. A later attempt at an open request takes
        it over, and the earlier one ends.

        `deadline` is on the monotonic clock. `is_late`: accept it during a shutdown, which its
        client cannot see. Raises the error that refuses the request at once; errors that are found
        later are the stream's.
        """
        with self._counting_refusals(tenant, request.priority):
            self.capacity.check_accepting(is_late=is_late)
            validation.check_request_id(request)
            if request.ByteSize() <= CHECKED_INLINE_BYTES:
                validation.check_request(request)
            request_id = request.request_id or draw_request_id()
            previous = self._open.get((tenant.name, request_id))
            if previous is None:
                self.capacity.check_room(tenant)
            else:
                _check_takes_over(request, previous.request)
            deadline = self.deadline_or_default(deadline)
            stream = RequestStream(request_id, deadline, on_update, tenant.name)
            stream.priority = request.priority
            stream.hold_s = request.max_hold_ms / 1000
            if self.tracing is not None:
                arrived = stream.stopwatch.arrived
                stream.span = RequestSpan(self.tracing, request_id, tenant.name, arrived)
            if previous is not None:
                stream.submission.replace(previous.stream.submission)
                self._fail(previous, attempts.taken_over(request_id, request.attempt))
            else:
                self.capacity.add(tenant.name)
            self._open[_key(stream)] = _Open(
                stream,
                request,
                preparing=asyncio.create_task(self._prepare(stream, request, tenant)),
                timer=self._start_timer(stream),
            )
            return stream

    async def open_soon(
        self,
        request: inference_pb.GenerateRequest,
        deadline: float | None,
        on_update: Callable[[], object],
        tenant: Principal,
        is_late: bool = False,
    ) -> RequestStream:
        """`open`, but wait briefly for the end of an open request that `request` duplicates.

        A client may cancel a call and make another with the same request id at once. gRPC and HTTP
        report the end of the one and the start of the other in any order.
        """
        opened = self._open.get((tenant.name, request.request_id))
        if opened is not None and request.attempt == opened.request.attempt:
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_LATENCY_S):
                    await opened.closed.wait()
        return self.open(request, deadline, on_update, tenant, is_late)

    @contextmanager
    def _counting_refusals(self, tenant: Principal, priority: int) -> Iterator[None]:
        try:
            yield
        except PagewireError as error:
            self.metrics.count_refused(tenant.name, priority, error)
            raise

    def close(self, stream: RequestStream) -> None:
        """Release a request in any state; if it still runs, it is cancelled at the core."""
        if not stream.is_closed:
            stream.is_closed = True
            summary = stream.summary()
            self.metrics.count_end(summary)
            _log_end(summary)
            if stream.span is not None:
                stream.span.end(summary)
        opened = self._open.get(_key(stream))
        if opened is None or opened.stream is not stream:
            return
        del self._open[_key(stream)]
        opened.closed.set()
        self._stop(opened)
        self.capacity.remove(stream.tenant)

    def enter(self, call: OpenCall, tenant: Principal, *, is_late: bool = False) -> None:
        """Count a call for vectors, scores or labels as an open request until `leave`. Raises
        Unavailable during a shutdown, and QueueFull."""
        with self._counting_refusals(tenant, priority=0):
            self.capacity.check_accepting(is_late=is_late)
            self.capacity.check_room(tenant)
        self.capacity.add(tenant.name)
        self._calls[call] = None

    def leave(self, call: OpenCall, tenant: Principal) -> None:
        """Stop counting a call."""
        del self._calls[call]
        self.capacity.remove(tenant.name)

    def deadline_or_default(self, deadline: float | None) -> float | None:
        """A request's deadline on the monotonic clock, or the default one."""
        if deadline is None and self.default_timeout_s is not None:
            return time.monotonic() + self.default_timeout_s
        return deadline

    def abort(self, request_id: str, tenant: Principal) -> bool:
        """End a tenant's request from outside its call; False if it is not open here."""
        opened = self._open.get((tenant.name, request_id))
        if opened is not None:
            self._fail(opened, RequestAborted("the request was aborted"))
        return opened is not None

    async def drain(self, grace_s: float, last_arrivals: Awaitable[object]) -> None:
        """Refuse new requests, except late ones until `last_arrivals` is done; give open requests
        `grace_s` seconds to finish, then end them."""
        await self.capacity.drain(grace_s, last_arrivals)
        if self:
            logger.warning("ending open requests num_requests=%d", len(self))
        for opened in list(self._open.values()):
            self._fail(opened, shutting_down())
        for call in list(self._calls):
            call.fail(shutting_down())

    def _start_timer(self, stream: RequestStream) -> asyncio.TimerHandle | None:
        """End the request at its deadline, as the core does, even if the core is away."""
        if stream.submission.deadline is None:
            return None
        delay_s = stream.submission.deadline - time.monotonic()
        return asyncio.get_running_loop().call_later(delay_s, self._expire, stream)

    def _expire(self, stream: RequestStream) -> None:
        opened = self._open.get(_key(stream))
        if opened is not None and opened.stream is stream:
            self._fail(opened, DeadlineExceeded("the request's deadline has passed"))

    def _fail(self, opened: _Open, error: PagewireError) -> None:
        """End a request with an error, which its reader gets."""
        opened.stream.fail(error)
        self._stop(opened)

    def _stop(self, opened: _Open) -> None:
        opened.preparing.cancel()
        if opened.timer is not None:
            opened.timer.cancel()
        self.core_client.close(opened.stream)

    async def _prepare(
        self, stream: RequestStream, request: inference_pb.GenerateRequest, tenant: Principal
    ) -> None:
        """Check, resolve and submit a request. Work whose time grows with the request's size
        runs in threads for large requests, so that other streams' tokens do not wait for it."""
        try:
            if request.ByteSize() > CHECKED_INLINE_BYTES:
                await asyncio.to_thread(validation.check_request, request)
            is_continued = request.attempt > 0 or len(request.resume) > 0
            model, adapter = await self.models.resolve_with_adapter(
                validation.value_or(request, "model", None),
                tenant,
                lora=validation.value_or(request, "lora", None),
                lora_digest=request.lora_digest,
                is_continued=is_continued,
            )
            stream.counts = self.metrics.model(model.info.name)
            began = time.monotonic()
            stream.stopwatch.model_wait_s = began - stream.stopwatch.arrived
            constrained = await off_the_loop(request, lambda: _constrained(request))
            resolved = await off_the_loop(
                request, lambda: resolve_request(constrained, stream.request_id, model, adapter)
            )
            field = constraint_field(request)
            stream.excluding = fields_that_exclude(request)
            await self.checker.check(constrained.sampling_params, tenant.name, field)
            await off_the_loop(
                request, lambda: to_lark(resolved.submit.generation.sampling.constraint)
            )
            await off_the_loop(request, lambda: stream.begin(resolved))
            stream.stopwatch.tokenize_s = time.monotonic() - began
            self.core_client.submit(stream)
        except PagewireError as error:
            stream.fail(error)
        except Exception:  # a bug, which must end this request and no other
            logger.exception("request failed request_id=%s", stream.request_id)
            stream.fail(PagewireError("internal error"))


def _constrained(request: inference_pb.GenerateRequest) -> inference_pb.GenerateRequest:
    """The request with the constraint of a required call, whose size is checked."""
    constrained = with_call_schema(request)
    validation.check_structured_output(constrained.sampling_params, constraint_field(request))
    return constrained


def _log_end(request: RequestSummary) -> None:
    error = request.error
    level = logging.DEBUG if error is None else logging.INFO
    logger.log(
        level,
        "request ended request_id=%s tenant=%s lora=%s outcome=%s reason=%s num_tokens=%d",
        request.request_id,
        request.tenant,
        request.lora,
        request.outcome,
        "" if error is None else error.reason,
        request.num_tokens,
    )


def _key(stream: RequestStream) -> _Key:
    return stream.tenant, stream.request_id


def _check_takes_over(
    request: inference_pb.GenerateRequest, live: inference_pb.GenerateRequest
) -> None:
    """Raise an error unless a request is a later attempt at the live one with its id."""
    attempts.check_later(
        request.request_id,
        request.attempt,
        live_attempt=live.attempt,
        is_same=fingerprint(request, request.lora) == fingerprint(live, live.lora),
    )

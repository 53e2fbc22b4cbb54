"""Calls for vectors, scores, ranks and labels, as gRPC and HTTP make them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import model_pb2
from scheduler_service.errors import InvalidArgument, PagewireError
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.input import validation
from scheduler_service.frontend.metrics import CANCELLED, OK
from scheduler_service.frontend.models.adapters import RequestAdapter
from scheduler_service.frontend.models.frontend_model import FrontendModel
from scheduler_service.frontend.pooling.call import PoolingCall, PoolingResult
from scheduler_service.frontend.pooling.work import INPUTS, PoolingRequest
from scheduler_service.frontend.request_manager import RequestManager
from scheduler_service.status_codes import status_code
from service_common.metadata import TRACEPARENT
from service_common.tracing import Attributes

logger = logging.getLogger(__name__)

MAX_OPEN_INPUTS = 512
"""Most inputs of one call that are open: more than a step's usual batch, so that the core always
has another one to compute."""

MAX_DOCUMENTS = 100_000
"""Most documents of a call of Rank, whose scores are kept until its end."""

Read = Callable[[], Awaitable[PoolingRequest | None]]
"""The next message of a call; None after the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingAnswer:
    """The results of a call."""

    model: FrontendModel
    name: str
    """The name of the model, or of the adapter that the call names."""
    results: Sequence[PoolingResult]
    """By index, of Rank by descending score; failed ones come last there."""
    usage: inference_pb.PoolingUsage
    labels: Sequence[str]
    """Names of the numbers that Classify returns; else empty."""


@dataclass(eq=False)
class PoolingService:
    """Opens calls within the limits that open requests have: each call counts as one."""

    requests: RequestManager

    async def collect_all(
        self, read: Read, tenant: Principal, *, deadline: float | None, is_late: bool = False
    ) -> PoolingAnswer:
        """All results of a call. Raises the PagewireError with which the call as a whole fails;
        those of single inputs are in their results."""
        found: dict[int, PoolingResult] = {}
        async with self.open(read, tenant, deadline=deadline, is_late=is_late) as call:
            while (part := await call.next()) is not None:
                for result in part:
                    before = found.setdefault(result.index, result)
                    if before is not result:  # further tokens
                        before.values += result.values
                        before.error = result.error
        results = [found[index] for index in sorted(found)]
        if isinstance(call.first, inference_pb.RankRequest):
            results = _ranked(results, validation.value_or(call.first, "top_n", None))
        return PoolingAnswer(
            model=call.work.model,
            name=call.model_name if call.adapter is None else call.adapter.name,
            results=results,
            usage=call.usage,
            labels=call.work.labels,
        )

    @asynccontextmanager
    async def open(
        self, read: Read, tenant: Principal, *, deadline: float | None, is_late: bool = False
    ) -> AsyncIterator[PoolingCall]:
        """A context with a call that has begun; leaving it frees everything. Its inputs are read
        while there is room for them. `is_late`: as in `RequestManager.open`."""
        requests = self.requests

        async def begin() -> tuple[PoolingRequest, FrontendModel, RequestAdapter | None]:
            first = await read()
            if first is None:
                raise InvalidArgument("request", "expected at least one message")
            validation.check_limits(first)
            name = validation.value_or(first.options, "model", None)
            model, adapter = await requests.models.resolve_with_adapter(
                name, tenant, model_pb2.WORK_KIND_POOLING
            )
            return first, model, adapter

        call = PoolingCall(
            requests.core_client,
            tenant,
            requests.deadline_or_default(deadline),
            lambda: min(MAX_OPEN_INPUTS, requests.capacity.share_of_call(tenant)),
        )
        requests.enter(call, tenant, is_late=is_late)
        outcome, reading = CANCELLED, None
        try:
            await call.begin(begin())
            reading = asyncio.create_task(_read_all(call, read))
            yield call
            outcome = OK
        except PagewireError as error:
            outcome = status_code(error).name.lower()
            if reading is None:
                requests.metrics.count_refused(tenant.name, 0, error)
            raise
        finally:
            call.close()
            requests.leave(call, tenant)
            if reading is not None:
                reading.cancel()
                self._record_end(call, outcome)

    def _record_end(self, call: PoolingCall, outcome: str) -> None:
        """Count a call that had begun, and make its span."""
        name = type(call.first).__name__.removesuffix("Request").lower()
        self.requests.metrics.count_call(
            name,
            call.model_name,
            call.first.options,
            call.usage,
            {
                "ok": call.num_answered,
                "error": call.num_failed,
                "unanswered": call.num_inputs - call.num_answered - call.num_failed,
            },
            tenant=call.tenant.name,
            outcome=outcome,
            seconds=time.monotonic() - call.arrived,
        )
        tracing = self.requests.tracing
        if tracing is not None:
            attributes: Attributes = {
                "pagewire.tenant": call.tenant.name,
                "pagewire.outcome": outcome,
                "pagewire.num_inputs": call.num_inputs,
                "pagewire.num_failed": call.num_failed,
                "gen_ai.request.model": call.model_name,
                "gen_ai.usage.input_tokens": call.usage.prompt_tokens,
            }
            span = tracing.start(f"pagewire.{name}", TRACEPARENT.get(), call.arrived, attributes)
            if outcome not in (OK, CANCELLED):
                tracing.mark_failed(span)
            tracing.end(span, time.monotonic())


async def _read_all(call: PoolingCall, read: Read) -> None:
    """Put the inputs of all messages; what is wrong with a message ends the call."""
    message = call.first
    field = INPUTS[type(message).__name__]
    try:
        while message is not None:
            if isinstance(message, inference_pb.RankRequest):
                _check_number(call.num_inputs + len(message.documents))
            await call.put(message)
            message = await read()
            for descriptor, _ in () if message is None else message.ListFields():
                if descriptor.name != field:
                    raise InvalidArgument(descriptor.name, "expected in the first message only")
        if not call.num_inputs and call.error is None:
            raise InvalidArgument(field, "expected at least one, got none")
        call.complete()
    except PagewireError as error:
        call.fail(error)
    except Exception:  # a bug, which must end this call and no other
        logger.exception("call failed call_id=%s", call.call_id)
        call.fail(PagewireError("internal error"))


def _check_number(num_documents: int) -> None:
    if num_documents > MAX_DOCUMENTS:
        expected = f"expected at most {MAX_DOCUMENTS} documents, got {num_documents}"
        raise InvalidArgument("documents", expected)


def _ranked(results: Sequence[PoolingResult], top_n: int | None) -> list[PoolingResult]:
    """By descending score, by index among equals; failed ones last, which `top_n` does not
    limit."""
    ranked = sorted((r for r in results if r.error is None), key=lambda r: (-r.score, r.index))
    return ranked[:top_n] + [result for result in results if result.error is not None]

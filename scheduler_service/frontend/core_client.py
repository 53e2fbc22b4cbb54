"""The frontend's side of the stream to the core: submissions and cancellations out, tokens in.

Everything to be sent is collected until the stream accepts the next message, so that a burst of
submissions is one message and at most one message is in flight. When the stream has broken, the
next one gets every open request again, with its tokens so far.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import grpc

from pagewire.columns import pack
from pagewire.connection_errors import in_words
from pagewire.v1 import adapter_pb2, model_pb2, status_pb2
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from scheduler_service.columns import from_column
from scheduler_service.errors import InvalidArgument, PagewireError, UnknownAdapter, UnknownModel
from scheduler_service.frontend.requests.choice_stream import ChoiceStream
from scheduler_service.frontend.requests.pooled_text import PooledText
from scheduler_service.frontend.requests.request_stream import RequestStream
from scheduler_service.status_codes import from_failed
from scheduler_service.tasks import run_until_first
from service_common.cluster import Cluster
from service_common.grpc_options import channel_options
from service_common.logging_config import LogThrottle

logger = logging.getLogger(__name__)

CORE_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 32 << 10)]
"""Bytes that the core may send ahead of what this process has read. They are few, so that an
overloaded frontend does not fall seconds behind: the core merges the outputs of several steps into
one message, and clients get fewer and larger responses."""


_DRAIN_S = 24 * 3600.0
"""How long calls may continue on a channel of former certificates: as long as they like."""


class CoreConnection:
    """A stub of the core's `SchedulerService`, on one channel at a time.

    A channel keeps the certificates that it was made with; `renew` replaces it for newer ones.
    """

    def __init__(self, cluster: Cluster, address: str) -> None:
        self._cluster = cluster
        self.address = address
        self._draining: dict[grpc.aio.Channel, asyncio.Task[None]] = {}
        """Former channels, each with the task that closes it when its calls have ended."""
        self._open()

    def _open(self) -> None:
        options = [*channel_options(), *CORE_WINDOW]
        self._credentials = self._cluster.channel_credentials()
        self._channel = self._cluster.channel(self.address, options)
        self._stub = self._cluster.stub(SchedulerServiceStub, self._channel)

    @property
    def stub(self) -> SchedulerServiceStub:
        """The stub on the current channel."""
        return self._stub

    async def renew(self) -> None:
        """Replace the channel if the certificates have changed; calls on the old one continue."""
        if self._cluster.channel_credentials() is not self._credentials:
            former = self._channel
            self._open()
            closing = asyncio.create_task(former.close(_DRAIN_S))
            self._draining[former] = closing
            closing.add_done_callback(lambda _: self._draining.pop(former, None))

    async def close(self) -> None:
        """End all calls."""
        draining = list(self._draining.items())
        for channel in (self._channel, *(former for former, _ in draining)):
            await channel.close()
        await asyncio.gather(*(closing for _, closing in draining))


MAX_SUBMITS, MAX_SUBMIT_BYTES = 512, 4 << 20
"""Number and approximate size of the submissions in one message: a reconnect may have many. Writing
the message takes a few milliseconds at most, in which no client is answered."""

CoreRequest: TypeAlias = RequestStream | PooledText
"""What the core counts as a request: to be continued, or a text to be pooled."""


class SendBuffer:
    """The messages that one stream has yet to write."""

    def __init__(self, frontend_id: str | None = None) -> None:
        """frontend_id: sent in the first message, which is then due at once."""
        self._frontend_id = frontend_id
        self._submits: dict[CoreRequest, None] = {}
        self._cancels: list[int] = []
        self._stops: list[scheduler_pb.StopChoice] = []
        self._wake = asyncio.Event()
        if frontend_id is not None:
            self._wake.set()

    def submit(self, request: CoreRequest) -> None:
        """Submit a request, with the tokens that it has when the message is made."""
        self._submits[request] = None
        self._wake.set()

    def cancel(self, request: CoreRequest) -> None:
        """Cancel a request."""
        if request in self._submits:  # not sent to the core yet
            del self._submits[request]
            return
        self._cancels.append(request.submission.handle)
        self._wake.set()

    def stop(self, request: RequestStream, choice: ChoiceStream) -> None:
        """End a choice, with the tokens it has now."""
        handle = request.submission.handle + choice.index
        stop = scheduler_pb.StopChoice(handle=handle, num_tokens=len(choice.token_ids))
        self._stops.append(stop)
        self._wake.set()

    async def next(self) -> scheduler_pb.FrontendMessage:
        """Wait until there is something to send; a message with all of it."""
        await self._wake.wait()
        self._wake.clear()
        message = scheduler_pb.FrontendMessage(cancels=pack(self._cancels), stops=self._stops)
        if self._frontend_id is not None:
            message.frontend_id, self._frontend_id = self._frontend_id, None
        self._cancels.clear()
        self._stops.clear()
        self._write_submits(message)
        return message

    def _write_submits(self, message: scheduler_pb.FrontendMessage) -> None:
        num_bytes = 0
        while self._submits and num_bytes < MAX_SUBMIT_BYTES and len(message.submits) < MAX_SUBMITS:
            request = next(iter(self._submits))
            del self._submits[request]
            submit = request.submit_message()
            num_bytes += submit.ByteSize()
            message.submits.append(submit)
        if self._submits:
            self._wake.set()


SUBMIT_INTERVAL_S = 0.002
"""Shortest time between messages with submissions, so that those of a burst share messages: a
message costs both sides as much as a submission."""

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 0.5
MAX_HANDLE = 2**31 - 1


class CoreClient:
    """Submits requests to the core and passes its outputs to their streams."""

    def __init__(
        self,
        core: CoreConnection,
        frontend_id: str,
        on_models: Callable[
            [
                Iterable[model_pb2.ModelInfo],
                Iterable[str],
                Iterable[status_pb2.WorkerLoading],
                Iterable[adapter_pb2.ModelAdapters],
            ],
            None,
        ],
    ) -> None:
        """`on_models` is called with the models that can be served, none while the core is away,
        with the names of all models that the core knows, with workers that load theirs, and with
        the adapters of the models."""
        self._core = core
        self._frontend_id = frontend_id
        self._on_models = on_models
        self._requests: dict[int, CoreRequest] = {}
        self._choices: dict[int, tuple[RequestStream, ChoiceStream]] = {}
        self._without_model: dict[CoreRequest, None] = {}
        """Requests whose model or adapter the core does not know yet, in order."""
        self._next_handle = 1
        self.is_attached = False
        """Whether a stream is open and the core has sent its first message."""
        self.num_core_losses = 0
        """Streams that broke after the core's first message."""
        self._is_settling = True
        """Whether the core may get to know more adapters soon."""
        self._outgoing = SendBuffer()
        self._failures = LogThrottle()

    # Called for requests.

    def submit(self, request: CoreRequest) -> None:
        """Submit a resolved request, and again to later cores, until `close`; also one that a core
        has refused before."""
        request.submission.has_ended = False
        request.submission.handle = handle = self._allocate_handles(len(request.choices) or 1)
        self._requests[handle] = request
        if isinstance(request, RequestStream):
            for choice in request.choices:
                self._choices[handle + choice.index] = (request, choice)
        self._outgoing.submit(request)

    def close(self, request: CoreRequest) -> None:
        """Forget a request, and cancel it at the core unless it has ended there."""
        handle = request.submission.handle
        if self._requests.pop(handle, None) is None:
            return
        self._without_model.pop(request, None)
        for choice in request.choices:
            del self._choices[handle + choice.index]
        if not request.submission.has_ended:
            self._outgoing.cancel(request)

    def _allocate_handles(self, count: int) -> int:
        """The first of `count` free handles in a row."""
        while True:
            first = self._next_handle
            if first + count > MAX_HANDLE:
                self._next_handle = 1
                continue
            self._next_handle = first + count
            handles = range(first, first + count)
            if all(used.keys().isdisjoint(handles) for used in (self._requests, self._choices)):
                return first

    def _unfinished(self) -> list[CoreRequest]:
        """Requests that have not ended at the core; the others only wait for a slow reader."""
        return [request for request in self._requests.values() if not request.submission.has_ended]

    # The stream.

    async def run(self) -> None:
        """Attach, again and again, until cancelled."""
        backoff_s = MIN_BACKOFF_S
        while True:
            try:
                await self._core.renew()
                await self._attach()
            except grpc.aio.AioRpcError as error:
                self._log_lost(error)
            except Exception:  # a bug; a new stream may work, and without one nothing is served
                logger.exception("core stream failed")
            if self.is_attached:
                backoff_s = MIN_BACKOFF_S
                self._detach()
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _attach(self) -> None:
        """One stream from its first to its last message."""
        self._without_model.clear()
        self._outgoing = SendBuffer(self._frontend_id)
        for request in self._unfinished():
            self._outgoing.submit(request)
        call = self._core.stub.Attach()
        try:
            # No TaskGroup: one that is failing swallows a cancellation (until Python 3.13), and the
            # loop in `run` would then never end.
            await run_until_first(self._read(call), self._write(call))
        finally:
            call.cancel()

    async def _read(self, call: Any) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:
            self._receive(response.message)

    async def _write(self, call: Any) -> None:
        with suppress(asyncio.InvalidStateError):
            while True:
                message = await self._outgoing.next()
                await call.write(scheduler_pb.AttachRequest(message=message))
                if message.submits:
                    await asyncio.sleep(SUBMIT_INTERVAL_S)
        # A write on a stream that has ended fails without a reason; `_read` raises the reason.
        await asyncio.get_running_loop().create_future()

    def _log_lost(self, error: grpc.aio.AioRpcError) -> None:
        failure = f"{error.code().name}: {in_words(error.details())}"
        may_start = error.code() is grpc.StatusCode.UNAVAILABLE
        if (level := self._failures.level(failure, may_start=may_start)) is not None:
            message = "no core, trying until it answers core=%s num_requests=%d reason=%s"
            logger.log(level, message, self._core.address, len(self._requests), failure)

    def _detach(self) -> None:
        self.is_attached = False
        self.num_core_losses += 1
        for request in self._unfinished():
            request.record_loss()
        self._is_settling = True
        self._on_models((), (), (), ())

    # The core's outputs.

    def _receive(self, message: scheduler_pb.SchedulerMessage) -> None:
        """Deliver in the message's order, then advance each request that got something."""
        if not self.is_attached:
            self.is_attached = True
            self._failures.end()
            logger.info("attached to core num_requests=%d", len(self._requests))
        for handle in from_column(message.accepted, "accepted"):
            if request := self._requests.get(handle):
                request.receive_accepted()
        for request in self._deliver(message):
            # It has passed the point at which workers died.
            request.submission.num_lone_worker_losses = 0
            with self._failing_alone(request):
                for choice in request.advance():
                    self._outgoing.stop(request, choice)
        for handle in from_column(message.worker_losses, "worker_losses"):
            if request := self._requests.get(handle):
                request.submission.num_worker_losses += 1
        for handle in from_column(message.lone_worker_losses, "lone_worker_losses"):
            if request := self._requests.get(handle):
                request.submission.num_lone_worker_losses += 1
        for finished in message.requests_finished:
            if request := self._requests.get(finished.handle):
                with self._failing_alone(request):
                    request.receive_finished(finished)
        for failed in message.requests_failed:
            if request := self._requests.get(failed.handle):
                self._fail(request, _error_of(failed, request))
        if message.HasField("models"):  # after refusals because they were missing
            self._receive_models(message.models)

    def _deliver(self, message: scheduler_pb.SchedulerMessage) -> Iterable[RequestStream]:
        """Deliver each output to its choice or request; return the requests that got any, in
        order."""
        touched: dict[RequestStream, None] = {}
        token_ids = from_column(message.token_ids, "token_ids")
        handles = from_column(message.token_handles, "token_handles")
        for handle, token_id in zip(handles, token_ids, strict=True):
            if known := self._choices.get(handle):
                request, choice = known
                choice.received_token_ids.append(token_id)
                touched[request] = None
        for entry in message.logprobs:
            if known := self._choices.get(entry.handle):
                known[1].received_logprobs.append(entry)
        for update in message.prompt_logprobs:
            if known := self._choices.get(update.handle):
                with self._failing_alone(known[0]):
                    known[0].receive_prompt_logprobs(update)
                touched[known[0]] = None
        for vector in message.vectors:
            text = self._requests.get(vector.handle)
            if isinstance(text, PooledText):
                with self._failing_alone(text):
                    text.receive_vector(vector)
        for finished in message.choices_finished:
            if known := self._choices.get(finished.handle):
                known[1].receive_finish(finished)
                touched[known[0]] = None
        return touched

    def _fail(self, request: CoreRequest, error: PagewireError) -> None:
        """End a request with the core's error, unless the request can succeed later.

        A request waits if the core does not know its model or its adapter yet, which a new core
        learns from its workers, or if the core is shutting down and another will take its place.
        """
        is_expected = isinstance(error, UnknownAdapter) and self._is_settling
        if isinstance(error, UnknownModel) or is_expected:
            self._without_model[request] = None
        elif error.reason != "SHUTTING_DOWN":
            request.receive_failed(error)
            return
        logger.info("request waits request_id=%s reason=%s", request.request_id, error.reason)
        request.record_loss()

    def _receive_models(self, announced: scheduler_pb.ServedModels) -> None:
        self._is_settling = any(table.settling for table in announced.adapters)
        self._on_models(
            announced.models, announced.known_models, announced.loading, announced.adapters
        )
        served = {info.name for info in announced.models}
        for request in [r for r in self._without_model if r.model_name in served]:
            del self._without_model[request]
            self._outgoing.submit(request)

    @contextmanager
    def _failing_alone(self, request: CoreRequest) -> Iterator[None]:
        """A context whose exceptions end this request, and no other."""
        try:
            yield
        except Exception:  # a bug, which must end this request and no other
            logger.exception("request failed request_id=%s", request.request_id)
            request.fail(PagewireError("internal error"))
            self.close(request)


def _error_of(failed: scheduler_pb.RequestFailed, request: CoreRequest) -> PagewireError:
    retry_delay_s = failed.retry_delay_us / 1e6 if failed.HasField("retry_delay_us") else None
    details = {detail.key: detail.value for detail in failed.details}
    error = from_failed(failed.code, failed.reason, failed.message, details, retry_delay_s)
    if isinstance(error, InvalidArgument):
        return InvalidArgument(request.client_field(error.field), error.expected)
    return error

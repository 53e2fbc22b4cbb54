"""The streams of attached frontends: requests in, outputs out, and how long outputs may be held.

All outputs of a step for one frontend are one message; many vectors travel in later ones, each with
the tokens that have come meanwhile. Requests that allow it (`max_hold_ms`) have
their tokens held, so that more of them travel in one message.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import accumulate
from typing import TypeAlias

import grpc

from pagewire.v1 import adapter_pb2, model_pb2, status_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from scheduler_service import wire
from scheduler_service.columns import from_column
from scheduler_service.core.request import EngineOutputs
from scheduler_service.core.scheduling.pooling import MAX_PART_BYTES
from scheduler_service.core_service.counters import EventCounters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.errors import InvalidArgument, PagewireError, Unavailable
from scheduler_service.status_codes import rpc

logger = logging.getLogger(__name__)


ACCEPTANCE_HOLD_S = 0.01
"""How long the acceptance of a text may wait for its vector, with which it then shares a message: a
message of its own would take both processes time while a short text is computed. The frontend needs
to know of it only once texts are refused, or the core is gone."""


class HoldTimes:
    """The hold time of each live request of the frontend that generates tokens.

    Tokens wait as long as the request with the shortest hold time allows, acceptances of texts to
    be pooled for `ACCEPTANCE_HOLD_S`. All other outputs are sent at once, together with those that
    wait.
    """

    def __init__(self) -> None:
        self._holds_s: dict[int, float] = {}
        """Hold times by the request's handle."""
        self._shortest_s: float | None = None
        """The shortest hold time; None if it must be computed again."""

    def __len__(self) -> int:
        """The number of live requests."""
        return len(self._holds_s)

    def begin(self, handle: int, hold_s: float) -> None:
        """Add a request that was accepted."""
        self._holds_s[handle] = hold_s
        self._shortest_s = None

    def end(self, handle: int) -> None:
        """Remove a request that has ended; no effect for an unknown one."""
        if self._holds_s.pop(handle, None) is not None:
            self._shortest_s = None

    def delay_s(self, outputs: EngineOutputs) -> float:
        """Seconds for which `outputs` may be held; also removes requests that they report as
        ended."""
        for finished in outputs.requests_finished:
            self.end(finished.handle)
        for handle, _ in outputs.requests_failed:
            self.end(handle)
        if outputs.has_urgent or not self._holds_s.keys().isdisjoint(outputs.accepted):
            return 0.0
        if not outputs.token_handles:
            return ACCEPTANCE_HOLD_S
        if self._shortest_s is None:
            self._shortest_s = min(self._holds_s.values(), default=0.0)
        return min(self._shortest_s, ACCEPTANCE_HOLD_S) if outputs.accepted else self._shortest_s


LAST_WRITE_TIMEOUT_S = 1.0
"""Time limit for a message that is being written when the stream ends."""

Context: TypeAlias = grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse]


class FrontendStream:
    """One frontend's stream, from its first message to its end."""

    def __init__(self, frontend_id: str, driver: CoreDriver) -> None:
        self.frontend_id = frontend_id
        self.accepts_requests = True
        self._driver = driver
        self._pending = EngineOutputs()
        self._models: pb.ServedModels | None = None
        self._wake = asyncio.Event()
        self._hold_times = HoldTimes()
        self._hold: asyncio.TimerHandle | None = None
        """The timer that ends the wait of tokens and acceptances."""
        self._closed: Exception | None = None
        self._has_ended = False
        """Whether nothing more is written."""

    def deliver(self, outbox: EngineOutputs) -> None:
        """Add to the next message, and send it as soon as its requests require."""
        merge(self._pending, outbox)
        delay_s = self._hold_times.delay_s(outbox)
        if delay_s == 0:
            self._wake.set()
            return
        loop = asyncio.get_running_loop()
        if self._hold is not None:
            if self._hold.when() <= loop.time() + delay_s:
                return
            self._hold.cancel()
        self._hold = loop.call_later(delay_s, self._wake.set)

    def announce_models(self, models: pb.ServedModels) -> None:
        """Announce in the next message which models can be served."""
        self._models = models
        self._wake.set()

    def close(self, error: Exception) -> None:
        """End the stream with `error` once what is pending has been sent."""
        self._closed = error
        self._wake.set()

    def apply(self, message: pb.FrontendMessage) -> None:
        """Apply a message of the frontend; a refused request becomes an output.

        Cancels and stops come first: they are for requests of earlier messages, and a submit may
        reuse the id of a request that the same message cancels. Raises InvalidArgument when the
        message itself is malformed.
        """
        core, now = self._driver.core, self._driver.clock()
        cancels = from_column(message.cancels, "cancels")
        for handle in cancels:
            self._hold_times.end(handle)
            core.cancel(self.frontend_id, handle, now)
        if cancels and self._pending.vectors:
            unwanted, vectors = set(cancels), self._pending.vectors
            self._pending.vectors = [entry for entry in vectors if entry[0] not in unwanted]
        for stop in message.stops:
            core.stop_choice(self.frontend_id, stop.handle, stop.num_tokens, now)
        for submit in message.submits:
            self._submit(submit)
        self._driver.follow_up()

    def _submit(self, submit: pb.Submit) -> None:
        try:
            if not self.accepts_requests:
                raise Unavailable("the scheduler is shutting down", reason="SHUTTING_DOWN")
            now = self._driver.clock()
            self._driver.core.submit(wire.decode_submit(submit, self.frontend_id, now), now)
            if submit.HasField("generation"):  # a vector is sent at once, and holds up no token
                self._hold_times.begin(submit.handle, submit.generation.max_hold_ms / 1000)
        except PagewireError as error:
            logger.debug("request refused request_id=%s reason=%s", submit.request_id, error.reason)
            self.deliver(EngineOutputs(requests_failed=[(submit.handle, error)]))
        except Exception as error:  # a bug; it must not end the stream of all other requests
            logger.exception("request failed request_id=%s", submit.request_id)
            self.deliver(EngineOutputs(requests_failed=[(submit.handle, error)]))

    async def run(self, context: Context) -> None:
        """Read and write until the frontend ends the stream, or it is closed; raises the error that
        was given to `close`."""
        reading = asyncio.create_task(self.read_all(context))
        writing = asyncio.create_task(self.write_all(context))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, writing):
                if task.done():
                    task.result()
        finally:
            reading.cancel()
            # A call whose write was cut off cannot be given a status.
            self._has_ended = True
            self._wake.set()
            await asyncio.wait({writing}, timeout=LAST_WRITE_TIMEOUT_S)
            writing.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def read_all(self, context: Context) -> None:
        """Apply messages until the frontend ends the stream.

        Once it is closed, for example by a newer stream of the same frontend, they are ignored.
        """
        while (request := await context.read()) is not grpc.aio.EOF:
            if self._closed is None:
                self.apply(request.message)

    async def write_all(self, context: Context) -> None:
        """Send outputs as they come; raises the error that was given to `close`."""
        while True:
            await self._wake.wait()
            if self._has_ended:
                return
            self._wake.clear()
            if (message := self._next_message()) is not None:
                await context.write(pb.AttachResponse(message=message))
            if self._pending.vectors:
                self._wake.set()
            if self._closed is not None and not self._wake.is_set():
                raise self._closed

    def _next_message(self) -> pb.SchedulerMessage | None:
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        if not self._pending and self._models is None:
            return None
        outputs, self._pending = split(self._pending)
        message = wire.encode_outbox(outputs)
        if self._models is not None:
            message.models.CopyFrom(self._models)
            self._models = None
        return message


class FrontendStreams:
    """The streams of all frontends, at most one per frontend id."""

    def __init__(self, driver: CoreDriver, counts: EventCounters) -> None:
        self._driver = driver
        self._counts = counts
        self._models = pb.ServedModels()
        """The models as last announced."""
        self._streams: dict[str, FrontendStream] = {}
        self._accepts_requests = True

    def __len__(self) -> int:
        """The number of attached frontends."""
        return len(self._streams)

    def announce_models(
        self,
        models: list[model_pb2.ModelInfo],
        registered: Iterable[str],
        loading: Iterable[status_pb2.WorkerLoading],
        adapters: Iterable[adapter_pb2.ModelAdapters],
    ) -> None:
        """Announce the models that can be served, those with workers now or before, those being
        loaded, and the adapters, to every frontend: now, and to later ones when they attach.

        registered: the names of models that have workers, ready or not.
        """
        names = {*self._models.known_models, *registered}
        self._models = pb.ServedModels(
            models=models, known_models=sorted(names), loading=loading, adapters=adapters
        )
        for stream in self._streams.values():
            stream.announce_models(self._models)

    def refuse_requests(self) -> None:
        """Make every new request fail with Unavailable from now on."""
        self._accepts_requests = False
        for stream in self._streams.values():
            stream.accepts_requests = False

    def close(self, error: Exception) -> None:
        """End every stream with `error`."""
        for stream in self._streams.values():
            stream.close(error)

    @rpc
    async def serve(self, _requests: object, context: Context) -> None:
        """The RPC `Attach`: run one stream to its end; a frontend's requests end with it.

        Raises InvalidArgument for a malformed message, and Unavailable when the frontend has
        attached again or the service is shutting down.
        """
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        stream = self._open(first.message)
        try:
            stream.apply(first.message)
            await stream.run(context)
        finally:
            self._leave(stream)

    def _open(self, first: pb.FrontendMessage) -> FrontendStream:
        if not first.frontend_id:
            raise InvalidArgument("frontend_id", "expected a name in the stream's first message")
        previous = self._streams.get(first.frontend_id)
        if previous is not None:
            self._leave(previous)
            previous.close(Unavailable("the frontend has attached again", reason="STREAM_REPLACED"))
        stream = FrontendStream(first.frontend_id, self._driver)
        stream.accepts_requests = self._accepts_requests
        stream.announce_models(self._models)
        self._streams[first.frontend_id] = stream
        self._driver.add_frontend(first.frontend_id, stream)
        self._counts.num_attaches += 1
        logger.info("frontend attached frontend_id=%s", first.frontend_id)
        return stream

    def _leave(self, stream: FrontendStream) -> None:
        if self._streams.get(stream.frontend_id) is stream:
            del self._streams[stream.frontend_id]
            self._driver.remove_frontend(stream.frontend_id)
            logger.info("frontend detached frontend_id=%s", stream.frontend_id)


def split(outputs: EngineOutputs) -> tuple[EngineOutputs, EngineOutputs]:
    """What the next message holds, and what waits for later ones: vectors beyond `MAX_PART_BYTES`,
    and the ends of their requests. No token waits for a vector."""
    sizes = accumulate(len(values) for _, _, values in outputs.vectors)
    number = max(1, sum(size <= MAX_PART_BYTES for size in sizes))
    later = EngineOutputs(vectors=outputs.vectors[number:])
    if not later.vectors:
        return outputs, later
    waiting = {handle for handle, _, _ in later.vectors}
    ended, failed = outputs.requests_finished, outputs.requests_failed
    later.requests_finished = [end for end in ended if end.handle in waiting]
    later.requests_failed = [end for end in failed if end[0] in waiting]
    now = replace(
        outputs,
        vectors=outputs.vectors[:number],
        requests_finished=[end for end in ended if end.handle not in waiting],
        requests_failed=[end for end in failed if end[0] not in waiting],
    )
    return now, later


_COLUMNS = tuple(column.name for column in fields(EngineOutputs))


def merge(pending: EngineOutputs, outputs: EngineOutputs) -> None:
    """Append `outputs` to `pending`, column by column."""
    for column in _COLUMNS:
        getattr(pending, column).extend(getattr(outputs, column))

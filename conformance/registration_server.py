"""The core's side of `RegisterWorker`: a server with which one worker registers."""

import queue
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from itertools import chain

import grpc

from conformance.assertions import fail
from conformance.credentials import NO_CREDENTIALS, Credentials
from pagewire.v1 import scheduler_service_pb2 as pb

SERVICE = "pagewire.v1.SchedulerService"
LEASE_MS = 1600
"""Short, so that several heartbeats take little time, even on a busy machine."""


@dataclass(slots=True)
class TimedHeartbeat:
    """One heartbeat and its arrival time."""

    heartbeat: pb.WorkerHeartbeat
    at_s: float


@dataclass(slots=True)
class Registration:
    """One `RegisterWorker` stream."""

    heartbeats: list[TimedHeartbeat] = field(default_factory=list)
    has_ended: bool = False


class RegistrationServer:
    """Listens like a core, until closed."""

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        """Raises RuntimeError if the address cannot be listened on."""
        self._changed = threading.Condition()
        self._registration = Registration()
        self._directives: queue.SimpleQueue[pb.WorkerDirective | None] = queue.SimpleQueue()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=8), options=[("grpc.so_reuseport", 0)]
        )
        register = grpc.stream_stream_rpc_method_handler(
            self._register_worker,
            request_deserializer=pb.RegisterWorkerRequest.FromString,
            response_serializer=pb.RegisterWorkerResponse.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"RegisterWorker": register})
        self._server.add_generic_rpc_handlers((handlers,))
        self.port = credentials.add_port(self._server, address)
        self._server.start()

    def _register_worker(
        self, request_iterator: Iterator[pb.RegisterWorkerRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.RegisterWorkerResponse]:
        """Accept a worker, and send it directives until its stream ends. Of a stream that reports
        how a worker loads its model, nothing is kept."""
        first = next(request_iterator, None)
        yield _response(pb.WorkerDirective(serve=pb.Serve(lease_ms=LEASE_MS)))
        if first is None or first.heartbeat.HasField("loading"):
            for _ in request_iterator:
                pass
            return
        registration = Registration()
        reader = threading.Thread(
            target=self._read, args=(chain([first], request_iterator), registration), daemon=True
        )
        reader.start()
        while (directive := self._directives.get()) is not None:
            yield _response(directive)

    def wait(self, timeout_s: float) -> pb.WorkerRegistration:
        """The first worker that registers."""
        heartbeats = self.wait_for_heartbeats(1, timeout_s)
        return heartbeats[0].heartbeat.registration

    def wait_for_heartbeats(self, count: int, timeout_s: float) -> list[TimedHeartbeat]:
        """All heartbeats so far, once there are `count`."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._registration.heartbeats) >= count, timeout_s)
            heartbeats = list(self._registration.heartbeats)
        if len(heartbeats) < count:
            fail(f"expected {count} heartbeats within {timeout_s:g} s, got {len(heartbeats)}")
        return heartbeats

    def wait_for_end(self, timeout_s: float) -> bool:
        """Whether the worker's stream ends in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._registration.has_ended, timeout_s)

    def send(self, directive: pb.WorkerDirective) -> None:
        """Send a directive to the worker."""
        self._directives.put(directive)

    def close(self) -> None:
        """Stop listening."""
        self._directives.put(None)
        self._server.stop(None)

    def _read(
        self, requests: Iterator[pb.RegisterWorkerRequest], registration: Registration
    ) -> None:
        try:
            for request in requests:
                with self._changed:
                    self._registration = registration
                    registration.heartbeats.append(
                        TimedHeartbeat(request.heartbeat, time.monotonic())
                    )
                    self._changed.notify_all()
        except grpc.RpcError:
            pass  # the worker cancelled its stream, which also ends it
        with self._changed:
            registration.has_ended = True
            self._changed.notify_all()


def _response(directive: pb.WorkerDirective) -> pb.RegisterWorkerResponse:
    return pb.RegisterWorkerResponse(directive=directive)

"""A worker with a fault: a proxy before a healthy one that changes what passes through.

It knows the contract only, so the worker behind it may be of any make.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from pagewire.v1 import model_pb2, plan_pb2
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1 import worker_service_pb2_grpc as pb_grpc


@dataclass(kw_only=True)
class Fault:
    """What is changed; each function changes its message in place. One object per stream."""

    plan: Callable[[plan_pb2.StepPlan], None] = lambda plan: None
    result: Callable[[plan_pb2.StepResult], None] = lambda result: None
    part: Callable[[pb.ReadBlocksResponse], None] = lambda part: None
    """Of what a reader of blocks is sent."""

    read_timeout_s: float | None = None
    """After which time a reader of blocks is refused."""

    kept: Callable[[pb.GetCachedBlocksResponse], None] = lambda kept: None
    """Of what another core is sent of records and sequences."""

    info: Callable[[pb.GetInfoResponse], None] = lambda info: None
    num_gpu_blocks: int | None = None
    """Blocks that fit, instead of the worker's own answer."""

    files: Sequence[tuple[str, bytes]] = ()
    """Pieces of the model's files, after the worker's own."""

    profile_path: str | None = None
    """Where profiles are; None: it has no profiler."""

    status: Callable[[grpc.StatusCode, str], tuple[grpc.StatusCode, str]] = lambda *status: status
    """What a call ends with, instead of what it should; OK hides the error."""

    is_lazy: bool = False
    """Keeps each result until the next one is there, or the stream ends."""

    forgets_epochs: bool = False
    """Takes any epoch for the greatest."""

    keeps_any_table: bool = False
    """Keeps tables of adapters that it does not have."""


@dataclass
class Proxy(pb_grpc.WorkerServiceServicer):
    """A worker with a fault."""

    upstream: pb_grpc.WorkerServiceStub
    make_fault: Callable[[], Fault]
    epoch: int = 0

    def GetInfo(self, request: Any, context: Any) -> Any:
        info = self._call(self.upstream.GetInfo, request, context)
        self.make_fault().info(info)
        return info

    def GetModelAssets(self, request: Any, context: Any) -> Any:
        yield from self.upstream.GetModelAssets(request)
        for name, data in self.make_fault().files:
            chunk = model_pb2.ModelAssetChunk(file_name=name, data=data)
            yield pb.WorkerServiceGetModelAssetsResponse(chunk=chunk)

    def ProfileBlocks(self, request: Any, context: Any) -> Any:
        blocks = self._call(self.upstream.ProfileBlocks, request, context)
        fault = self.make_fault()
        if fault.num_gpu_blocks is not None:
            blocks.num_gpu_blocks = fault.num_gpu_blocks
        return blocks

    def InitializeCache(self, request: Any, context: Any) -> Any:
        if self.make_fault().forgets_epochs:
            request.epoch = self._greater_epoch()
        return self._call(self.upstream.InitializeCache, request, context)

    def ExecuteSteps(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        fault, told = self.make_fault(), {}

        def plans() -> Iterator[pb.ExecuteStepsRequest]:
            epoch = 0
            for request in _until_cancelled(request_iterator):
                for plan in request.plans:
                    if fault.forgets_epochs:
                        epoch = epoch or self._greater_epoch()
                        told[epoch] = plan.epoch
                        plan.epoch = epoch
                    fault.plan(plan)
                yield request

        call = self.upstream.ExecuteSteps(plans())
        context.add_callback(call.cancel)
        kept = []
        try:
            for response in call:
                for result in response.results:
                    result.epoch = told.get(result.epoch, result.epoch)
                    fault.result(result)
                kept.append(response)
                if len(kept) > fault.is_lazy:
                    yield kept.pop(0)
        except grpc.RpcError as error:
            yield from kept
            self._end(error, context, fault)
        yield from kept

    def ReadBlocks(self, request: Any, context: Any) -> Iterator[Any]:
        fault = self.make_fault()
        request.ClearField("reader")  # else the proxy has nothing to change
        try:
            for part in self.upstream.ReadBlocks(request, timeout=fault.read_timeout_s):
                fault.part(part)
                yield part
        except grpc.RpcError as error:
            self._end(error, context, fault)

    def GetCachedBlocks(self, request: Any, context: Any) -> Iterator[Any]:
        fault = self.make_fault()
        try:
            for kept in self.upstream.GetCachedBlocks(request):
                fault.kept(kept)
                yield kept
        except grpc.RpcError as error:
            self._end(error, context, fault)

    def StartProfile(self, request: Any, context: Any) -> Any:
        if self.make_fault().profile_path is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no profiler")
        return pb.StartProfileResponse()

    def StopProfile(self, request: Any, context: Any) -> Any:
        return pb.StopProfileResponse(path=self.make_fault().profile_path)

    def LoadAdapter(self, request: Any, context: Any) -> Any:
        return self._call(self.upstream.LoadAdapter, request, context)

    def GetAdapter(self, request: Any, context: Any) -> Iterator[Any]:
        yield from self._call(lambda r: list(self.upstream.GetAdapter(r)), request, context) or ()

    def SetAdapters(self, request: Any, context: Any) -> Any:
        response = self._call(self.upstream.SetAdapters, request, context)
        if response is not None and self.make_fault().keeps_any_table:
            del response.missing[:]
        return response

    def _greater_epoch(self) -> int:
        self.epoch = max(self.epoch, self.upstream.GetInfo(pb.GetInfoRequest()).last_epoch) + 1
        return self.epoch

    def _call(self, method: Any, request: Any, context: Any) -> Any:
        try:
            return method(request)
        except grpc.RpcError as error:
            self._end(error, context, self.make_fault())

    def _end(self, error: Any, context: Any, fault: Fault) -> None:
        code, details = fault.status(error.code(), error.details())
        if code is not grpc.StatusCode.OK and context.is_active():
            context.abort(code, details)


@contextmanager
def mutant(address: str, make_fault: Callable[[], Fault]) -> Iterator[str]:
    """The address of a proxy with a fault, before the worker at another address."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
    with grpc.insecure_channel(address) as channel:
        proxy = Proxy(pb_grpc.WorkerServiceStub(channel), make_fault)
        pb_grpc.add_WorkerServiceServicer_to_server(proxy, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait(60)


def _until_cancelled(requests: Any) -> Iterator[Any]:
    """The requests of a stream; when the caller breaks it off there are no more."""
    with suppress(grpc.RpcError):
        yield from requests

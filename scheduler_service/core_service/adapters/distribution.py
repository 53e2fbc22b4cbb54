"""Tables and contents of adapters on their way to workers."""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from pagewire.connection_errors import in_words
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.adapter_pb2 import Adapter, AdapterInfo, AdapterSet
from scheduler_service.core_service.adapters.tables import contents, without_contents
from scheduler_service.core_service.workers.errors import SessionFailed
from scheduler_service.core_service.workers.worker_session import Dial
from scheduler_service.errors import AdapterRefused, PagewireError, Unavailable, UnknownAdapter

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 600.0
"""Timeout of reading a content from a disk or from another worker."""

SET_TIMEOUT_S = 10.0
"""Timeout of replacing a worker's table."""

Workers: TypeAlias = Sequence[pb.WorkerRegistration]


@dataclass(frozen=True, slots=True)
class AdapterDistribution:
    """Makes workers read contents, send them to each other, and take tables."""

    dial: Dial

    # Workers that join.

    async def supply(self, table: AdapterSet, workers: Workers, others: Workers) -> AdapterSet:
        """Set a table on workers, with its contents, which the others have. Returns it, or if no
        worker has some of the contents and they cannot be read any more, one without these, which
        no worker has yet. Raises SessionFailed."""
        while True:
            missing = {w.worker_id: await _joining(w, self._set(w, table)) for w in workers}
            if not any(missing.values()):
                return table
            lost: set[bytes] = set()
            for digest in set().union(*missing.values()):
                holders = [w for w in workers if digest not in missing[w.worker_id]]
                holders += others
                receivers = [w for w in workers if digest in missing[w.worker_id]]
                adapter = contents(table)[digest]
                if not await self._spread(adapter, holders, receivers):
                    lost.add(digest)
                    logger.error(
                        "adapter lost: no worker has its content, and it cannot be read again "
                        "name=%s digest=%s path=%s",
                        adapter.name,
                        digest.hex(),
                        adapter.path,
                    )
            if lost:
                return without_contents(table, lost)

    async def _spread(self, adapter: Adapter, holders: Workers, receivers: Workers) -> bool:
        """Send a content to workers, or make them read it if no other has it. Returns whether any
        worker has it now; raises SessionFailed if one refuses it."""
        remaining = list(receivers)
        for receiver in receivers if not holders else ():
            try:
                info = await self._load(receiver, adapter.path)
            except grpc.aio.AioRpcError as error:
                logger.info("adapter not read reason=%s", _failure(receiver, error))
                continue
            if info.digest == adapter.digest:
                remaining.remove(receiver)
                holders = [receiver]
                break
        if not holders:
            return False
        for receiver in remaining:
            await _joining(receiver, self._relay(adapter.digest, holders[0], receiver))
        return True

    # All workers of a model.

    async def read_on_all(self, workers: Workers, path: str) -> AdapterInfo:
        """Make all workers read a content; those that do not find it get it from another one.
        Raises UnknownAdapter, AdapterRefused or Unavailable."""
        found: list[tuple[pb.WorkerRegistration, AdapterInfo]] = []
        absent: dict[str, pb.WorkerRegistration] = {}
        answers = await _all(self._load(worker, path) for worker in workers)
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, AdapterInfo):
                found.append((worker, answer))
            elif _code(answer) is grpc.StatusCode.NOT_FOUND:
                absent[_failure(worker, answer)] = worker
            else:
                raise _refusal(worker, answer)
        if not found:
            raise UnknownAdapter("; ".join(absent))
        (holder, info), *others = found
        for worker, other in others:
            if other.digest != info.digest:
                raise AdapterRefused(
                    f"workers {holder.worker_id} and {worker.worker_id} read different contents "
                    f"at {path!r}: {info.digest.hex()} and {other.digest.hex()}",
                    reason="ADAPTERS_DIFFER",
                )
        for worker in absent.values():
            (answer,) = await _all([self._relay(info.digest, holder, worker)])
            if isinstance(answer, BaseException):
                raise _refusal(worker, answer)
        return info

    async def set_on_all(self, workers: Workers, table: AdapterSet) -> dict[str, PagewireError]:
        """Set a table on workers; returns what is wrong with those that do not take it, or lack a
        content, by id: AdapterRefused or Unavailable."""
        answers = await _all(self._set(worker, table) for worker in workers)
        failed: dict[str, PagewireError] = {}
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, BaseException):
                failed[worker.worker_id] = _refusal(worker, answer)
            elif answer:
                failed[worker.worker_id] = Unavailable(
                    f"worker {worker.worker_id} has lost the content {answer[0].hex()}; try again",
                    reason="ADAPTER_LOST",
                )
        return failed

    # Calls to one worker.

    async def _load(self, worker: pb.WorkerRegistration, path: str) -> AdapterInfo:
        async with self.dial(worker.address) as stub:
            request = worker_pb.WorkerServiceLoadAdapterRequest(path=path)
            return (await stub.LoadAdapter(request, timeout=LOAD_TIMEOUT_S)).adapter

    async def _set(self, worker: pb.WorkerRegistration, table: AdapterSet) -> Sequence[bytes]:
        """Set a worker's table; returns the contents that it lacks."""
        async with self.dial(worker.address) as stub:
            request = worker_pb.SetAdaptersRequest(adapters=table)
            return (await stub.SetAdapters(request, timeout=SET_TIMEOUT_S)).missing

    async def _relay(
        self, digest: bytes, holder: pb.WorkerRegistration, receiver: pb.WorkerRegistration
    ) -> None:
        """Send a content from a worker to another. Raises SessionFailed if the first one cannot."""
        async with self.dial(holder.address) as source, self.dial(receiver.address) as target:
            reading = source.GetAdapter(
                worker_pb.GetAdapterRequest(digest=digest), timeout=LOAD_TIMEOUT_S
            )
            # Not by a generator of requests: gRPC answers its failure with CancelledError.
            writing = target.PutAdapter(timeout=LOAD_TIMEOUT_S)
            with suppress(asyncio.InvalidStateError):  # the call has ended; its status says why
                async for response in _read(holder, reading):
                    await writing.write(worker_pb.PutAdapterRequest(data=response.data))
                await writing.done_writing()
            await writing


async def _all(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """What all calls return or raise, in order."""
    return await asyncio.gather(*calls, return_exceptions=True)


async def _joining(worker: pb.WorkerRegistration, call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a call to a worker that joins. Raises SessionFailed."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise SessionFailed(_failure(worker, error)) from error


async def _read(
    worker: pb.WorkerRegistration, call: AsyncIterable[worker_pb.GetAdapterResponse]
) -> AsyncIterator[worker_pb.GetAdapterResponse]:
    """The answers of a worker. Raises SessionFailed."""
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise SessionFailed(_failure(worker, error)) from error


def _code(error: BaseException) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.aio.AioRpcError) else None


def _failure(worker: pb.WorkerRegistration, error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        what = f"{error.code().name}: {in_words(error.details())}"
    else:
        what = f"{type(error).__name__}: {error}"
    return f"worker {worker.worker_id} of group {worker.group_id!r}: {what}"


def _refusal(worker: pb.WorkerRegistration, error: BaseException) -> PagewireError:
    """The error of a change that a worker has not made, and that was undone elsewhere."""
    refused = (
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.NOT_FOUND,
    )
    details = {"worker_id": worker.worker_id, "group_id": worker.group_id}
    if _code(error) in refused:
        return AdapterRefused(_failure(worker, error), details=details)
    return Unavailable(_failure(worker, error), reason="WORKER_FAILED", details=details)

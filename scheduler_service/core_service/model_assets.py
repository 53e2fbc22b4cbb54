"""The models' files, fetched from a worker once per fingerprint and kept in memory.

A worker has them before it has loaded the weights, so that frontends build tokenizers meanwhile.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import grpc

from pagewire.v1 import model_pb2
from pagewire.v1 import worker_service_pb2 as worker_pb
from scheduler_service.core_service.workers.worker_registry import WorkerRegistry
from scheduler_service.core_service.workers.worker_session import Dial
from scheduler_service.errors import Unavailable, UnknownModel

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
FETCH_TIMEOUT_S = 60.0

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class _Holder:
    """A worker that has the files of a fingerprint."""

    name: str
    """Of the worker or its group, for the log."""
    address: str
    fingerprint: str


@dataclass(eq=False)
class AssetCache:
    """Files by fingerprint; concurrent callers share one fetch."""

    registry: WorkerRegistry
    dial: Dial

    def __post_init__(self) -> None:
        self._fetches: dict[str, asyncio.Task[Files]] = {}

    async def get(self, model: str, fingerprint: str = "") -> Files:
        """A model's files by name.

        `fingerprint`: of the files; empty: those of the workers that serve the model. Raises
        UnknownModel when no worker has the model, Unavailable when none has files of this
        fingerprint or answered.
        """
        holders = self._holders(model)
        if not holders:
            raise UnknownModel(f"no worker has a model named {model!r}", details={"model": model})
        wanted = fingerprint or holders[0].fingerprint
        fetch = self._fetches.get(wanted)
        if fetch is None:
            for other in self._fetches.keys() - self._present_fingerprints():
                if self._fetches[other].done():  # else callers still wait for it
                    del self._fetches[other]
            # A group may have lost its workers by the time the task starts.
            workers = [holder for holder in holders if holder.fingerprint == wanted]
            fetch = self._fetches[wanted] = asyncio.create_task(_fetch_from_any(workers, self.dial))
            fetch.add_done_callback(lambda done: self._forget_failed(wanted, done))
        return await asyncio.shield(fetch)

    async def close(self) -> None:
        """Stop fetching."""
        for fetch in self._fetches.values():
            fetch.cancel()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)

    def _holders(self, model: str) -> list[_Holder]:
        """The workers that have the files of a model of this name, those that serve it first."""
        registered = [group.registration for group in self.registry.groups_with(model)]
        loading = [report for report in self.registry.loading() if report.model == model]
        return [
            *(_Holder(of.worker_id, of.address, of.model.fingerprint) for of in registered),
            *(_Holder(of.group_id, of.address, of.fingerprint) for of in loading if of.address),
        ]

    def _present_fingerprints(self) -> set[str]:
        registered = {group.registration.model.fingerprint for group in self.registry}
        return registered | {report.fingerprint for report in self.registry.loading()}

    def _forget_failed(self, fingerprint: str, fetch: "asyncio.Task[Files]") -> None:
        failed = fetch.cancelled() or fetch.exception() is not None
        if failed and self._fetches.get(fingerprint) is fetch:
            del self._fetches[fingerprint]


async def _fetch_from_any(workers: list[_Holder], dial: Dial) -> Files:
    for worker in workers:
        try:
            files = await _fetch(worker.address, dial)
        except grpc.aio.AioRpcError as error:
            logger.warning(
                "assets not fetched worker=%s code=%s details=%s",
                worker.name,
                error.code().name,
                error.details(),
            )
            continue
        logger.info(
            "assets fetched worker=%s fingerprint=%s num_files=%d num_bytes=%d",
            worker.name,
            worker.fingerprint,
            len(files),
            sum(map(len, files.values())),
        )
        return files
    raise Unavailable("no worker could send the model's files", reason="NO_ASSETS")


async def _fetch(address: str, dial: Dial) -> Files:
    pieces: dict[str, list[bytes]] = {}
    async with dial(address) as worker:
        request = worker_pb.WorkerServiceGetModelAssetsRequest()
        async for response in worker.GetModelAssets(request, timeout=FETCH_TIMEOUT_S):
            pieces.setdefault(response.chunk.file_name, []).append(response.chunk.data)
    return {name: b"".join(data) for name, data in pieces.items()}


def chunks_of(files: Files) -> Iterator[model_pb2.ModelAssetChunk]:
    """The files in pieces of at most CHUNK_BYTES; an empty file is one empty piece."""
    for name, data in files.items():
        for start in range(0, max(len(data), 1), CHUNK_BYTES):
            yield model_pb2.ModelAssetChunk(file_name=name, data=data[start : start + CHUNK_BYTES])

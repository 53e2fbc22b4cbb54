"""The served models' files, fetched from a worker once per fingerprint and kept in memory."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import grpc

from pagewire.v1 import model_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from scheduler_service.core_service.worker_registry import WorkerRegistry
from scheduler_service.core_service.worker_session import Dial
from scheduler_service.errors import Unavailable, UnknownModel

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
FETCH_TIMEOUT_S = 60.0

Files = Mapping[str, bytes]


@dataclass(eq=False)
class AssetCache:
    """Files by fingerprint; concurrent callers share one fetch."""

    registry: WorkerRegistry
    dial: Dial

    def __post_init__(self) -> None:
        self._fetches: dict[str, asyncio.Task[Files]] = {}

    async def get(self, model: str) -> Files:
        """A model's files by name.

        Raises UnknownModel when no worker has the model, Unavailable when no worker answered.
        """
        holders = self.registry.groups_with(model)
        if not holders:
            raise UnknownModel(f"no worker has a model named {model!r}", details={"model": model})
        fingerprint = holders[0].registration.model.fingerprint
        fetch = self._fetches.get(fingerprint)
        if fetch is None:
            self._forget_all_but({group.registration.model.fingerprint for group in self.registry})
            # A group may have lost its workers by the time the task starts.
            workers = [group.registration for group in holders]
            fetch = self._fetches[fingerprint] = asyncio.create_task(
                _fetch_from_any(workers, self.dial)
            )
            fetch.add_done_callback(lambda done: self._forget_failed(fingerprint, done))
        return await asyncio.shield(fetch)

    async def close(self) -> None:
        """Stop fetching."""
        for fetch in self._fetches.values():
            fetch.cancel()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)

    def _forget_all_but(self, fingerprints: set[str]) -> None:
        for fingerprint in self._fetches.keys() - fingerprints:
            self._fetches.pop(fingerprint).cancel()

    def _forget_failed(self, fingerprint: str, fetch: "asyncio.Task[Files]") -> None:
        failed = fetch.cancelled() or fetch.exception() is not None
        if failed and self._fetches.get(fingerprint) is fetch:
            del self._fetches[fingerprint]


async def _fetch_from_any(workers: list[pb.WorkerRegistration], dial: Dial) -> Files:
    for registration in workers:
        try:
            files = await _fetch(registration.address, dial)
        except grpc.aio.AioRpcError as error:
            logger.warning(
                "assets not fetched worker_id=%s code=%s details=%s",
                registration.worker_id,
                error.code().name,
                error.details(),
            )
            continue
        logger.info(
            "assets fetched worker_id=%s fingerprint=%s num_files=%d num_bytes=%d",
            registration.worker_id,
            registration.model.fingerprint,
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

"""The adapters of a worker: the table that the core sets, and the contents that it means."""

import asyncio
from collections.abc import AsyncIterable

from pagewire.v1 import adapter_pb2
from pagewire.v1.adapter_pb2 import AdapterSet
from worker_service.adapters.store import AdapterInfo
from worker_service.config import WorkerConfig
from worker_service.engine.model_host import ModelHost
from worker_service.errors import (
    AdapterNotFound,
    AdaptersFull,
    BadAdapter,
    InvalidOption,
    StaleTable,
)


def encode_info(info: AdapterInfo) -> adapter_pb2.AdapterInfo:
    """What was found in an adapter's files, as on the wire."""
    return adapter_pb2.AdapterInfo(
        digest=info.digest,
        rank=info.rank,
        num_bytes=info.num_bytes,
        targets=info.targets,
        num_virtual_tokens=info.num_virtual_tokens,
    )


class AdapterTable:
    """The table of names. Invariant: the worker has the contents of all adapters in it."""

    def __init__(self, config: WorkerConfig, model: ModelHost) -> None:
        self._config = config
        self._model = model
        self._set_lock = asyncio.Lock()
        self.current = AdapterSet()
        """The table as last set; before, the adapters that the worker was started with."""

    async def load_modules(self) -> None:
        """Load the adapters that the worker was started with. Raises InvalidOption for a name that
        is a model's, a base model that is another, and an adapter that cannot be loaded."""
        names = (self._config.model_name, *self._config.model_aliases)
        for module in self._config.adapters.modules:
            if module.name in names:
                raise InvalidOption(f"lora_modules: expected no model's name, got {module.name!r}")
            if module.base_model_name not in (None, *names):
                raise InvalidOption(
                    f"lora_modules: expected a base_model_name of {', '.join(names)} for "
                    f"{module.name!r}, got {module.base_model_name!r}"
                )
            try:
                info = await asyncio.to_thread(self._model.adapters.load, module.path)
            except (AdapterNotFound, AdaptersFull, BadAdapter) as error:
                raise InvalidOption(f"lora_modules: {module.name}: {error}") from None
            self.current.adapters.add(
                name=module.name,
                digest=info.digest,
                path=module.path,
                rank=info.rank,
                num_bytes=info.num_bytes,
                num_virtual_tokens=info.num_virtual_tokens,
            )

    async def replace(self, table: AdapterSet) -> list[bytes]:
        """Keep another table, and drop all other contents; returns the contents that are missing,
        with nothing changed then. Raises StaleTable."""
        async with self._set_lock:
            if table.version < self.current.version:
                raise StaleTable(
                    f"version: expected at least {self.current.version}, which this worker has, "
                    f"got {table.version}"
                )
            digests = {adapter.digest for adapter in (*table.adapters, *table.retained)}
            missing = [digest for digest in sorted(digests) if not self._has(digest)]
            if not missing:
                await asyncio.to_thread(self._model.adapters.retain, digests)
                self.current = table
            return missing

    def _has(self, digest: bytes) -> bool:
        try:
            self._model.adapters.chunks(digest)
        except AdapterNotFound:
            return False
        return True

    async def put(self, chunks: AsyncIterable[bytes]) -> adapter_pb2.AdapterInfo:
        """Keep a content that another worker sends."""
        content = await self._model.adapters.receive(chunks)
        return encode_info(await asyncio.to_thread(self._model.adapters.add, content))

    async def load(self, path: str) -> adapter_pb2.AdapterInfo:
        """Read a content from the disk and keep it."""
        return encode_info(await asyncio.to_thread(self._model.adapters.load, path))

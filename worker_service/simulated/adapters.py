"""Adapters of a simulated model: the files of a folder, which are not interpreted."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from worker_service.adapters.store import AdapterInfo, AdapterLoader
from worker_service.config import AdapterConfig
from worker_service.errors import AdapterNotFound, BadAdapter

_MAX_BYTES = 1 << 30

_MALFORMED = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""What reading the fields of any JSON text may raise."""


@dataclass(frozen=True)
class SimulatedAdapter:
    """The names and contents of files. Implements `adapters.store.Adapter`."""

    content: bytes
    """A JSON object of rank, virtual tokens and sizes by name, a line end, and the files in this
    order."""

    @cached_property
    def info(self) -> AdapterInfo:
        """What the core learns of it. Raises BadAdapter if the content is malformed."""
        header, _, files = self.content.partition(b"\n")
        try:
            values = json.loads(header)
            rank, sizes = int(values["rank"]), list(map(int, values["sizes"].values()))
            num_virtual_tokens = int(values.get("virtual_tokens", 0))
        except _MALFORMED as error:
            raise BadAdapter(f"chunks: expected an adapter's content, got {error!r}") from None
        if sum(sizes) != len(files):
            raise BadAdapter(f"chunks: expected {sum(sizes)} bytes of files, got {len(files)}")
        return AdapterInfo(
            digest=hashlib.sha256(self.content).digest(),
            rank=rank,
            num_bytes=len(self.content),
            targets=("simulated",),
            num_virtual_tokens=num_virtual_tokens,
        )

    @classmethod
    def read(cls, path: Path) -> "SimulatedAdapter":
        """Read all files of a folder, but not those of folders in it; the rank and the number of
        virtual tokens are those of `adapter_config.json`, if it is there."""
        if not path.is_dir():
            raise AdapterNotFound(f"path: expected the folder of an adapter, got {str(path)!r}")
        files = (file for file in sorted(path.iterdir()) if file.is_file())
        contents = {file.name: file.read_bytes() for file in files}
        values: dict[str, int] = {"rank": 1}
        if "adapter_config.json" in contents:
            try:
                config = json.loads(contents["adapter_config.json"])
                values["rank"] = int(config.get("r", 8))
                if (number := config.get("num_virtual_tokens")) is not None:
                    values = {"rank": 0, "virtual_tokens": int(number)}
            except _MALFORMED as error:
                raise BadAdapter(f"adapter_config.json: expected an object: {error}") from None
        sizes = {name: len(content) for name, content in contents.items()}
        header = json.dumps({**values, "sizes": sizes}).encode()
        return cls(b"\n".join([header, b"".join(contents.values())]))


class SimulatedAdapters(AdapterLoader[SimulatedAdapter]):
    """Loads the adapters of a simulated worker."""

    def __init__(self, config: AdapterConfig, *, generates: bool = True) -> None:
        """generates: whether the model also generates tokens, and does not only make vectors."""
        super().__init__(config, _MAX_BYTES)
        self._max_rank, self._generates = config.max_lora_rank, generates

    def _read(self, path: str) -> SimulatedAdapter:
        return SimulatedAdapter.read(Path(path))

    def _of_content(self, content: bytearray) -> SimulatedAdapter:
        return SimulatedAdapter(bytes(content))

    def _prepare(self, adapter: SimulatedAdapter) -> None:
        num_tokens = adapter.info.num_virtual_tokens
        if not 0 <= num_tokens < 2**31:
            raise BadAdapter(f"num_virtual_tokens: expected 0 to 2^31 - 1, got {num_tokens}")
        if num_tokens and not self._generates:
            got = "the embeddings of a prompt"
            raise BadAdapter(f"peft_type: expected LORA for a model that makes vectors, got {got}")
        least = 0 if num_tokens else 1
        if not least <= adapter.info.rank <= self._max_rank:
            expected = f"1 to {self._max_rank}, --max-lora-rank"
            raise BadAdapter(f"r: expected {expected}, got {adapter.info.rank}")

"""The adapters that a worker holds on the host, by digest. Nothing here imports torch."""

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterable, Iterator, Mapping, Set
from dataclasses import dataclass
from mmap import mmap
from typing import Generic, Protocol, TypeVar

from worker_service.config import AdapterConfig
from worker_service.errors import (
    AdapterNotFound,
    AdaptersFull,
    BadAdapter,
    InvalidOption,
    InvalidPlan,
)
from worker_service.plan import ContextKind, NewSequence

CHUNK_BYTES = 1 << 20
"""Size of the pieces in which an adapter is sent to another worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterInfo:
    """What the core learns of an adapter."""

    digest: bytes
    """SHA-256 of its content, 32 bytes."""

    rank: int
    """The greatest rank of its modules; 0 if it changes none."""

    num_bytes: int
    """Size of its content."""

    targets: tuple[str, ...]
    """The last parts of the names of the modules that it changes, sorted, such as `q_proj`."""

    num_virtual_tokens: int = 0
    """Tokens before a sequence's prompt whose embeddings are the adapter's."""


class Adapter(Protocol):
    """An adapter on the host."""

    @property
    def info(self) -> AdapterInfo:
        """What the core learns of it."""
        ...

    @property
    def content(self) -> bytes | mmap:
        """What its digest is that of, and what another worker makes it from."""
        ...


AdapterT = TypeVar("AdapterT", bound=Adapter)


class AdapterStore(Generic[AdapterT]):
    """Adapters by digest, with the numbers of sequences that use them.

    An adapter stays as long as it is retained or a sequence uses it; one that is added is retained
    until `retain` is called without it. May be used on any thread.
    """

    def __init__(self, max_adapters: int) -> None:
        """max_adapters: how many are held, those in use included."""
        self._max_adapters = max_adapters
        self._held: dict[bytes, AdapterT] = {}
        self._retained: set[bytes] = set()
        self._num_users: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def add(self, adapter: AdapterT) -> AdapterInfo:
        """Hold and retain an adapter, once. Raises AdaptersFull if there is no room for it."""
        digest = adapter.info.digest
        with self._lock:
            if digest not in self._held and len(self._held) >= self._max_adapters:
                raise AdaptersFull(
                    f"max_cpu_loras: expected at most {self._max_adapters} adapters, which are"
                    " held already; unload one or increase the flag"
                )
            self._retained.add(digest)
            return self._held.setdefault(digest, adapter).info

    def get(self, digest: bytes) -> AdapterT:
        """The adapter with this digest. Raises AdapterNotFound."""
        with self._lock:
            found = self._held.get(digest)
        if found is None:
            raise AdapterNotFound(f"digest: expected that of a loaded adapter, got {digest.hex()}")
        return found

    def chunks(self, digest: bytes) -> Iterator[bytes]:
        """The content of an adapter, in pieces. Raises AdapterNotFound."""
        content = memoryview(self.get(digest).content)
        return (
            bytes(content[start : start + CHUNK_BYTES])
            for start in range(0, len(content), CHUNK_BYTES)
        )

    def retain(self, digests: Set[bytes]) -> None:
        """Drop all other adapters, those in use once no sequence uses them."""
        with self._lock:
            self._retained = set(digests) & self._held.keys()
            for digest in self._held.keys() - self._retained:
                if not self._num_users[digest]:
                    del self._held[digest]

    def acquire(self, digest: bytes) -> None:
        """Count a sequence that uses an adapter, which `adapter_of` has found."""
        with self._lock:
            self._num_users[digest] += 1

    def release_all(self) -> None:
        """Count no sequence any more."""
        for digest in list(self._num_users.elements()):
            self.release(digest)

    def release(self, digest: bytes) -> None:
        """Count a sequence that uses an adapter no longer."""
        with self._lock:
            self._num_users[digest] -= 1
            if not self._num_users[digest]:
                del self._num_users[digest]
                if digest not in self._retained:
                    self._held.pop(digest, None)

    def adapter_of(self, new: NewSequence, field: str) -> bytes:
        """The digest of a sequence's adapter; empty if it has none.

        Raises InvalidPlan if it has several, one that is not held here, or one for some positions,
        one of a prompt although it becomes a vector, and if its prompt has no tokens after the
        adapter's.
        """
        found = b""
        for index, part in enumerate(new.context):
            if part.kind is not ContextKind.ADAPTER:
                continue
            path = f"{field}.context[{index}]"
            if found:
                raise InvalidPlan(path, "expected one ADAPTER, got another one")
            if part.start or part.length:
                problem = f"expected start 0 and length 0, got {part.start} and {part.length}"
                raise InvalidPlan(path, problem)
            found = part.digest
            with self._lock:
                held = self._held.get(found)
            if held is None:
                problem = f"expected an adapter that is loaded here, got {found.hex()}"
                raise InvalidPlan(f"{path}.digest", problem)
            number = held.info.num_virtual_tokens
            if number and new.pooling is not None:
                expected = "expected an adapter of layers for a sequence that becomes a vector"
                problem = f"{expected}, got one with {number} virtual tokens"
                raise InvalidPlan(f"{path}.digest", problem)
            if new.parent_seq_id is None and 0 < new.num_prompt_tokens <= number:
                expected = f"expected more than the {number} virtual tokens of its adapter"
                got = new.num_prompt_tokens
                raise InvalidPlan(f"{field}.num_prompt_tokens", f"{expected}, got {got}")
        return found


class AdapterLoader(ABC, Generic[AdapterT]):
    """Loads adapters of some kind for an executor. May be used on any thread.

    Its methods raise InvalidOption without --enable-lora, NotReady before the model is loaded, and
    AdapterNotFound, BadAdapter and AdaptersFull.
    """

    def __init__(self, config: AdapterConfig, max_bytes: int) -> None:
        """max_bytes: of an adapter that another worker sends."""
        self._max_bytes = max_bytes
        self.store: AdapterStore[AdapterT] | None = None
        """None without --enable-lora."""
        if config.enable_lora:
            self.store = AdapterStore(config.max_cpu_loras)

    @abstractmethod
    def _read(self, path: str) -> AdapterT:
        """Read an adapter."""

    @abstractmethod
    def _of_content(self, content: bytearray) -> AdapterT:
        """The adapter with this content."""

    @abstractmethod
    def _prepare(self, adapter: AdapterT) -> None:
        """Check an adapter, and prepare it for steps."""

    def load(self, path: str) -> AdapterInfo:
        """Read an adapter from a folder or file and hold it until `retain` is called without it;
        again if it is held already."""
        self.require_store()
        return self._hold(self._read(path))

    async def receive(self, chunks: AsyncIterable[bytes]) -> bytearray:
        """The content that chunks make up, for `add`. Raises BadAdapter as soon as they are too
        many."""
        self.require_store()
        content = bytearray()
        async for chunk in chunks:
            content += chunk
            if len(content) > self._max_bytes:
                raise BadAdapter(f"chunks: expected at most {self._max_bytes} bytes, got more")
        return content

    def add(self, content: bytearray) -> AdapterInfo:
        """As `load`, from the content that another worker has sent."""
        self.require_store()
        return self._hold(self._of_content(content))

    def chunks(self, digest: bytes) -> Iterator[bytes]:
        """The content of an adapter, for `add` of another worker of the model."""
        return self.require_store().chunks(digest)

    def retain(self, digests: Set[bytes]) -> None:
        """Drop all other adapters, those in use once no sequence uses them."""
        self.require_store().retain(digests)

    @property
    def slot_changes(self) -> Mapping[str, int]:
        """Adapters that were `filled` into slots of steps, and `evicted` by others, since the
        start; empty if there are no slots."""
        return {}

    def require_store(self) -> AdapterStore[AdapterT]:
        """The adapters that are held."""
        if self.store is None:
            raise InvalidOption("enable_lora: expected --enable-lora on a worker with adapters")
        return self.store

    def _hold(self, adapter: AdapterT) -> AdapterInfo:
        self._prepare(adapter)
        return self.require_store().add(adapter)

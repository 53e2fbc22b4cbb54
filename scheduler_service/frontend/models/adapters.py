"""The adapters that requests can name, as the core announces them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pagewire.v1 import adapter_pb2, context_pb2
from pagewire.v1.adapter_pb2 import Adapter


@dataclass(frozen=True, slots=True)
class RequestAdapter:
    """The adapter of a request, by its content: it stays the same when the name gets another."""

    model: str
    """The model that it is of."""
    name: str
    digest: bytes
    num_virtual_tokens: int = 0
    """Tokens before the prompt whose embeddings are the adapter's."""

    @property
    def context_part(self) -> context_pb2.ContextPart:
        """What KV depends on because of it."""
        return context_pb2.ContextPart(kind=context_pb2.CONTEXT_KIND_ADAPTER, digest=self.digest)


class AnnouncedAdapters:
    """The tables of all models, and names that earlier cores have announced."""

    def __init__(self) -> None:
        self._tables: Sequence[adapter_pb2.ModelAdapters] = ()
        self._expected: dict[str, str] = {}
        """Models by the names of adapters that have been announced, and not been unloaded since as
        far as it is known."""

    def update(self, tables: Iterable[adapter_pb2.ModelAdapters]) -> bool:
        """Replace the tables; returns whether they differ from the previous ones."""
        previous, self._tables = self._tables, tuple(tables)
        for table in self._tables:
            if not table.settling:
                self._expected = {n: m for n, m in self._expected.items() if m != table.model}
            self._expected |= {adapter.name: table.model for adapter in table.adapters.adapters}
        return previous != self._tables

    @property
    def is_settling(self) -> bool:
        """Whether the core may learn of more adapters soon."""
        return any(table.settling for table in self._tables)

    def may_come(self, name: str) -> bool:
        """Whether an adapter that is not listed may be listed soon."""
        return self.is_settling or name in self._expected

    def by_model(self) -> Iterator[tuple[str, Sequence[Adapter]]]:
        """The named adapters of each model."""
        return ((table.model, table.adapters.adapters) for table in self._tables)

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(adapter.name for _, adapters in self.by_model() for adapter in adapters)

    def digest_of(self, name: str) -> bytes | None:
        """The content that a name means."""
        found = self.find(name)
        return None if found is None else found.digest

    def find(self, name: str, digest: bytes = b"") -> RequestAdapter | None:
        """The adapter that a name means, or meant when a request with this digest began."""
        for table in self._tables:
            named, retained = table.adapters.adapters, table.adapters.retained
            for adapter in (*named, *retained) if digest else named:
                if adapter.name == name and digest in (b"", adapter.digest):
                    return RequestAdapter(
                        table.model, name, adapter.digest, adapter.num_virtual_tokens
                    )
        return None

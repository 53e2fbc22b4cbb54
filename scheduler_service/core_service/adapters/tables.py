"""Tables of adapters: values, of which a change makes a new one with a greater version."""

import logging
from collections.abc import Container, Iterable

from pagewire.v1.adapter_pb2 import Adapter, AdapterSet
from scheduler_service.errors import InvalidArgument

logger = logging.getLogger(__name__)

_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:/-")
MAX_NAME_LENGTH = 128


def is_name(name: str) -> bool:
    """Whether this can be an adapter's name."""
    return 1 <= len(name) <= MAX_NAME_LENGTH and _NAME_CHARACTERS.issuperset(name)


def check_name(name: str) -> None:
    """Raise InvalidArgument unless this can be an adapter's name."""
    if not is_name(name):
        raise InvalidArgument(
            "name", f"expected 1 to {MAX_NAME_LENGTH} characters of [A-Za-z0-9._:/-], got {name!r}"
        )


def find(table: AdapterSet, name: str) -> Adapter | None:
    """The adapter that a name means."""
    return next((adapter for adapter in table.adapters if adapter.name == name), None)


def contents(table: AdapterSet) -> dict[bytes, Adapter]:
    """Adapters by digest, those that a name means rather than retained ones."""
    return {adapter.digest: adapter for adapter in (*table.retained, *table.adapters)}


def _changed(
    table: AdapterSet,
    *,
    adapters: Iterable[Adapter],
    retained: Iterable[Adapter],
    unloaded: Iterable[str] | None = None,
) -> AdapterSet:
    """The next version of a table. No name means a content that is retained for it. `unloaded`:
    None: as before."""
    named = sorted(adapters, key=lambda adapter: adapter.name)
    kept = {(adapter.name, adapter.digest): adapter for adapter in retained}
    for adapter in named:
        kept.pop((adapter.name, adapter.digest), None)
    return AdapterSet(
        version=table.version + 1,
        adapters=named,
        retained=kept.values(),
        unloaded=sorted(set(table.unloaded if unloaded is None else unloaded)),
    )


def with_adapter(table: AdapterSet, adapter: Adapter) -> AdapterSet:
    """A table in which the adapter's name means it; what the name meant is retained."""
    others = [other for other in table.adapters if other.name != adapter.name]
    previous = [other for other in table.adapters if other.name == adapter.name]
    return _changed(
        table,
        adapters=[*others, adapter],
        retained=[*table.retained, *previous],
        unloaded=set(table.unloaded) - {adapter.name},
    )


def without_name(table: AdapterSet, name: str) -> AdapterSet:
    """A table in which a name means nothing; what it meant is retained."""
    return _changed(
        table,
        adapters=[adapter for adapter in table.adapters if adapter.name != name],
        retained=[*table.retained, *(a for a in table.adapters if a.name == name)],
        unloaded=[*table.unloaded, name],
    )


def without_contents(table: AdapterSet, digests: set[bytes]) -> AdapterSet:
    """A table without these contents, under whatever name."""
    return _changed(
        table,
        adapters=[adapter for adapter in table.adapters if adapter.digest not in digests],
        retained=[adapter for adapter in table.retained if adapter.digest not in digests],
    )


def without_retained(table: AdapterSet, digests: set[bytes]) -> AdapterSet:
    """A table in which these contents are retained for no name."""
    return _changed(
        table,
        adapters=table.adapters,
        retained=[adapter for adapter in table.retained if adapter.digest not in digests],
    )


def merged(
    table: AdapterSet, others: Iterable[AdapterSet], elsewhere: Container[str] = ()
) -> AdapterSet:
    """The valid one of a core's table and those of workers, and what they were started with.

    What a table of a lower version has beyond it is retained, because requests may use it. Workers
    that have never had a table add the adapters that they were started with, unless their names are
    taken, here or for another model (`elsewhere`), or were unloaded.
    """
    others = list(others)
    newest = max([table, *others], key=lambda candidate: candidate.version)
    result, present = newest, contents(newest)
    replaced = [
        adapter
        for other in (table, *others)
        if 0 < other.version < newest.version
        for digest, adapter in contents(other).items()
        if digest not in present
    ]
    if replaced:
        retained = [*result.retained, *replaced]
        result = _changed(result, adapters=result.adapters, retained=retained)
    for adapter in (a for other in others if other.version == 0 for a in other.adapters):
        reason = _refusal_of(adapter, result, elsewhere)
        if reason is None:
            result = with_adapter(result, adapter)
        elif reason:
            logger.warning("adapter of a worker ignored name=%r reason=%s", adapter.name, reason)
    return result


def _refusal_of(adapter: Adapter, table: AdapterSet, elsewhere: Container[str]) -> str | None:
    """Why a table does not get the adapter of a worker; empty if it has it."""
    taken = find(table, adapter.name)
    if taken is not None:
        return "" if taken.digest == adapter.digest else "the name is taken"
    if not is_name(adapter.name):
        return "no name of an adapter"
    if adapter.name in elsewhere:
        return "the name means an adapter of another model"
    return "unloaded by an operator" if adapter.name in table.unloaded else None

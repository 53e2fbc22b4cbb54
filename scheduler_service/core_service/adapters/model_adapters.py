"""The adapters of one model: the valid table, and the workers that have it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Container
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.adapter_pb2 import Adapter, AdapterSet
from scheduler_service.core_service.adapters.distribution import AdapterDistribution, Workers
from scheduler_service.core_service.adapters.tables import (
    contents,
    find,
    merged,
    with_adapter,
    without_name,
    without_retained,
)
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.workers.errors import SessionFailed
from scheduler_service.errors import DuplicateAdapter, Unavailable, UnknownAdapter

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ModelAdapters:
    """Changes a model's table on all of its workers, and then here."""

    name: str
    driver: CoreDriver
    distribution: AdapterDistribution
    on_change: Callable[[], None]
    """Called when the table has changed."""
    is_settling: Callable[[], bool]
    """Whether workers may register that have tables which this core does not know."""
    names_elsewhere: Callable[[], Container[str]] = tuple
    """The names of other models' adapters."""
    table: AdapterSet = field(default_factory=AdapterSet)

    _members: dict[str, pb.WorkerRegistration] = field(default_factory=dict)
    """Workers that have the table, by worker id."""
    _behind: set[str] = field(default_factory=set)
    """Those of them that did not answer when a change was undone, or have lost a content."""
    _highest_sent: int = 0
    """The greatest version that a worker may have, also of a table that did not become valid."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the table changes."""
    _retained_at: dict[bytes, float] = field(default_factory=dict)
    """When this core first saw a content retained, or last saw that requests have used it."""
    _num_users: dict[bytes, int] = field(default_factory=dict)
    """Requests that had used a retained content at that time."""

    # Workers.

    async def join(self, ranks: Workers) -> None:
        """Bring the ranks of a group, and all other workers, to one table; until they leave, the
        ranks get every change. Raises SessionFailed."""
        joining = {rank.worker_id: rank for rank in ranks}
        async with self._lock:
            others = [w for i, w in self._members.items() if i not in joining]
            supplied: AdapterSet | None = None
            tables = [rank.adapters for rank in ranks]
            table = merged(self.table, tables, self.names_elsewhere())
            while supplied is not table:  # it may be without contents that are lost
                supplied = self._numbered(table)
                if supplied.version == self.table.version:  # the others have it
                    table = await self.distribution.supply(supplied, ranks, others)
                else:
                    table = await self.distribution.supply(supplied, [*ranks, *others], ())
            self._members |= joining
            self._behind -= joining.keys()
            self._commit(table)

    def leave(self, ranks: Workers) -> None:
        """Forget ranks, unless they have joined again."""
        for rank in ranks:
            if self._members.get(rank.worker_id) is rank:
                del self._members[rank.worker_id]
                self._behind.discard(rank.worker_id)

    async def bring_up(self) -> None:
        """Set the table, with its contents, on workers that are behind."""
        if not self._behind:
            return
        async with self._lock:
            for worker_id in sorted(self._behind):
                if (worker := self._members.get(worker_id)) is None:  # it has left meanwhile
                    continue
                others = [w for i, w in self._members.items() if i not in self._behind]
                try:
                    table = self._numbered(self.table)
                    table = await self.distribution.supply(table, [worker], others)
                except SessionFailed as error:
                    logger.warning("adapters not restored reason=%s", error)
                    continue
                self._behind.discard(worker_id)
                if table.version != self.table.version:  # a content is lost, or it is a later one
                    await self._impose([worker, *others], table)

    # Operators.

    async def load(self, name: str, path: str, *, replace: bool) -> Adapter:
        """Make an adapter usable under a name; for errors see `AdapterDirectory.load`."""
        async with self._lock, self._undone_on_failure() as workers:
            previous = find(self.table, name)
            info = await self.distribution.read_on_all(workers, path)
            adapter = Adapter(
                name=name,
                digest=info.digest,
                path=path,
                rank=info.rank,
                num_bytes=info.num_bytes,
                num_virtual_tokens=info.num_virtual_tokens,
            )
            if previous is not None and previous.digest == info.digest:
                return previous
            if previous is not None and not replace:
                raise DuplicateAdapter(
                    f"the name {name!r} means an adapter of another content, read from "
                    f"{previous.path!r}: set replace, or unload it",
                    details={"name": name, "digest": previous.digest.hex()},
                )
            await self._change(workers, with_adapter(self.table, adapter))
        logger.info(
            "adapter loaded name=%s model=%s digest=%s rank=%d num_bytes=%d num_workers=%d",
            name,
            self.name,
            adapter.digest.hex(),
            adapter.rank,
            adapter.num_bytes,
            len(workers),
        )
        return adapter

    async def unload(self, name: str) -> int:
        """Make a name mean nothing; for the result see `AdapterDirectory.unload`."""
        async with self._lock:
            adapter = find(self.table, name)
            if adapter is None:
                raise UnknownAdapter(f"no adapter {name!r} is loaded", details={"name": name})
            async with self._undone_on_failure() as workers:
                await self._change(workers, without_name(self.table, name))
        num_requests = self.driver.core.requests.num_with(self.name, adapter.digest)
        logger.info(
            "adapter unloaded name=%s model=%s num_requests=%d", name, self.name, num_requests
        )
        return num_requests

    async def collect(self, retain_s: float) -> None:
        """Drop retained contents that no request has used for as long. That is not undone if a
        worker does not answer: others have dropped them."""
        if not self.table.retained or not self._members:
            return
        async with self._lock:
            now, unused = self.driver.clock(), set()
            requests = self.driver.core.requests
            for digest, since in self._retained_at.items():
                num_users = requests.num_ever_with(self.name, digest)
                # Since the last check one may have come and ended, whose plan workers still have.
                has_new = num_users != self._num_users.get(digest, num_users)
                self._num_users[digest] = num_users
                if has_new or requests.num_with(self.name, digest):
                    self._retained_at[digest] = now  # a retry of such a request may follow
                elif now - since >= retain_s:
                    unused.add(digest)
            workers = list(self._members.values())
            if not unused or not workers:
                return
            table = without_retained(self.table, unused)
            self._allow(table)  # no request that needs them may come while workers drop them
            await self._impose(workers, table)

    # Changes of the table.

    @asynccontextmanager
    async def _undone_on_failure(self) -> AsyncIterator[Workers]:
        """All workers; what they have of a change that fails is undone. Raises Unavailable if there
        are none."""
        if not self._members:
            raise Unavailable(
                f"no worker of the model {self.name!r} is ready; try again later",
                reason="NO_MODEL_SERVED",
            )
        workers = list(self._members.values())
        try:
            yield workers
        except BaseException:
            await self._restore(workers)
            raise

    async def _change(self, workers: Workers, table: AdapterSet) -> None:
        """Set a table on all workers, then here. Raises AdapterRefused or Unavailable."""
        table = self._numbered(table)
        for error in (await self.distribution.set_on_all(workers, table)).values():
            raise error
        self._commit(table)

    async def _restore(self, workers: Workers) -> None:
        """Undo what workers have of a change that failed."""
        await self._impose(workers, self.table)

    async def _impose(self, workers: Workers, table: AdapterSet) -> None:
        """Set a table on workers, and make it valid. Those that do not answer, or lack a content,
        get it later, or when they join again."""
        table = self._numbered(table)
        failed = await self.distribution.set_on_all(workers, table)
        for error in failed.values():
            logger.warning("table of adapters not set reason=%s", error)
        self._behind |= failed.keys()
        self._behind &= self._members.keys()  # a worker may have left meanwhile
        self._commit(table)

    def _numbered(self, table: AdapterSet) -> AdapterSet:
        """A table as it is sent: with a later version if workers may have another table of its own
        version, or a later one, as when a change or the supply of workers that join has failed.
        They refuse earlier versions."""
        if table.version == self.table.version == self._highest_sent:
            return table
        if table.version <= self._highest_sent:
            later = AdapterSet()
            later.CopyFrom(table)
            later.version = self._highest_sent + 1
            table = later
        self._highest_sent = table.version
        return table

    def _commit(self, table: AdapterSet) -> None:
        """Make a table valid, which all workers have."""
        self.table = table
        for worker in self._members.values():
            worker.adapters.CopyFrom(table)
        now = self.driver.clock()
        self._retained_at = {
            adapter.digest: self._retained_at.get(adapter.digest, now) for adapter in table.retained
        }
        requests = self.driver.core.requests
        self._num_users = {
            digest: self._num_users.get(digest, requests.num_ever_with(self.name, digest))
            for digest in self._retained_at
        }
        self._allow(table)
        self.on_change()

    def settle(self) -> None:
        """End requests with adapters that no worker has brought, now that all have registered."""
        self._allow(self.table)

    def _allow(self, table: AdapterSet) -> None:
        """Let the core have requests for the contents of a table, and no others."""
        names = {digest.hex(): adapter.name for digest, adapter in contents(table).items()}
        self.driver.set_adapters(self.name, names, is_settling=self.is_settling())

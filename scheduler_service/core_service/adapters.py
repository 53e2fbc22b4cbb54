"""The adapters of each model: which name means which content, on all workers of the model.

The *table* of a model is an `AdapterSet`. Every worker keeps it, with the contents of all adapters
in it, and sends it when it registers. Each change has a greater version, and of several tables the
one with the greatest version is valid: so a core that restarts gets the table back from its
workers, and a worker that joins gets it from the core, before it serves.

    load      every worker has the content ──▶ every worker has the new table ──▶ the core and its
              frontends know the name. A failure on the way restores the previous table everywhere.
    unload    the other way round. The content is *retained* while requests may use it.

A content goes by its digest. A request has the digest in its context, so that it continues with the
same weights when its adapter's name is loaded again with others, or unloaded. Nobody can ask a
frontend that is away whether it has such requests: retained contents are kept for at least
`retain_s`, in which it returns and submits them again.

A core that has just started does not know all tables. Until `settle_s` have passed, in which every
worker that is alive registers, it announces its tables as *settling*.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from pagewire.connection_errors import in_words
from pagewire.v1 import adapter_pb2, model_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.adapter_pb2 import Adapter, AdapterInfo, AdapterSet
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.errors import SessionFailed
from scheduler_service.core_service.worker_session import Dial
from scheduler_service.errors import (
    AdapterRefused,
    DuplicateAdapter,
    InvalidArgument,
    PagewireError,
    Unavailable,
    UnknownAdapter,
    UnknownModel,
)

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 600.0
"""Timeout of reading a content from a disk or from another worker."""

SET_TIMEOUT_S = 10.0
"""Timeout of replacing a worker's table."""

RETAIN_S = 60.0
COLLECT_INTERVAL_S = 5.0
"""Time between two checks for retained contents that nobody uses any more."""

_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:/-")
MAX_NAME_LENGTH = 128


def check_name(name: str) -> None:
    """Raise InvalidArgument unless this can be an adapter's name."""
    if not 1 <= len(name) <= MAX_NAME_LENGTH or not _NAME_CHARACTERS.issuperset(name):
        raise InvalidArgument(
            "name", f"expected 1 to {MAX_NAME_LENGTH} characters of [A-Za-z0-9._:/-], got {name!r}"
        )


# Tables are values: a change makes a new one.


def find(table: AdapterSet, name: str) -> Adapter | None:
    """The adapter that a name means."""
    return next((adapter for adapter in table.adapters if adapter.name == name), None)


def contents(table: AdapterSet) -> dict[bytes, Adapter]:
    """Adapters by digest, those that a name means rather than retained ones."""
    return {adapter.digest: adapter for adapter in (*table.retained, *table.adapters)}


def _changed(
    table: AdapterSet,
    *,
    adapters: Iterable[Adapter] | None = None,
    retained: Iterable[Adapter] | None = None,
    unloaded: Iterable[str] | None = None,
) -> AdapterSet:
    """The next version of a table; None: as before. No content is both named and retained."""
    named = sorted(table.adapters if adapters is None else adapters, key=lambda a: a.name)
    digests = {adapter.digest for adapter in named}
    kept = table.retained if retained is None else retained
    return AdapterSet(
        version=table.version + 1,
        adapters=named,
        retained=[adapter for adapter in kept if adapter.digest not in digests],
        unloaded=sorted(set(table.unloaded if unloaded is None else unloaded)),
    )


def with_adapter(table: AdapterSet, adapter: Adapter) -> AdapterSet:
    """A table in which the adapter's name means it; what the name meant is retained."""
    others = [other for other in table.adapters if other.name != adapter.name]
    previous = [other for other in table.adapters if other.name == adapter.name]
    return _changed(
        table,
        adapters=[*others, adapter],
        retained=[*(a for a in table.retained if a.digest != adapter.digest), *previous],
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


def merged(table: AdapterSet, others: Iterable[AdapterSet]) -> AdapterSet:
    """The valid one of a core's table and those of workers, and what they were started with.

    What a table of a lower version has beyond it is retained, because requests may use it. Workers
    that have never had a table add the adapters that they were started with, unless their names are
    taken or were unloaded.
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
        result = _changed(result, retained=[*result.retained, *replaced])
    for adapter in (a for other in others if other.version == 0 for a in other.adapters):
        taken = find(result, adapter.name)
        if taken is None and adapter.name not in result.unloaded:
            result = with_adapter(result, adapter)
        elif taken is None or taken.digest != adapter.digest:
            reason = "unloaded by an operator" if taken is None else "the name is taken"
            logger.warning("adapter of a worker ignored name=%s reason=%s", adapter.name, reason)
    return result


@dataclass(eq=False)
class _Model:
    name: str
    table: AdapterSet = field(default_factory=AdapterSet)
    members: dict[str, pb.WorkerRegistration] = field(default_factory=dict)
    """Workers that have the table, by worker id."""
    behind: set[str] = field(default_factory=set)
    """Those of them that did not answer when a change was undone, or have lost a content."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the table changes."""
    retained_at: dict[bytes, float] = field(default_factory=dict)
    """When this core first saw a content retained."""


@dataclass(eq=False)
class AdapterDirectory:
    """The tables of all models, and the workers that have them."""

    driver: CoreDriver
    dial: Dial
    on_change: Callable[[], None]
    """Called when what is to be announced has changed."""
    settle_s: float
    retain_s: float = RETAIN_S
    collect_interval_s: float = COLLECT_INTERVAL_S

    def __post_init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self.num_changes: Counter[tuple[str, ...]] = Counter()
        """Loads and unloads by outcome, `done` or `failed`."""
        self._settled_at = self.driver.clock() + self.settle_s

    @property
    def is_settling(self) -> bool:
        """Whether workers may register that have tables which this core does not know."""
        return self.driver.clock() < self._settled_at

    def require_settled(self, unknown: str) -> None:
        """Raise Unavailable, which clients retry, while workers may register that know what is
        `unknown` here."""
        if self.is_settling:
            raise Unavailable(f"{unknown}; workers may still register", reason="SETTLING")

    def announced(self) -> list[adapter_pb2.ModelAdapters]:
        """The tables of all models whose workers may have adapters, by model."""
        return [
            adapter_pb2.ModelAdapters(
                model=name, adapters=self._models[name].table, settling=self.is_settling
            )
            for name in sorted(self._models)
        ]

    def usage(self) -> Iterator[tuple[str, Adapter, str, int]]:
        """(model, adapter, `running` or `waiting`, live requests) of all contents."""
        numbers = self.driver.core.requests_by_adapter()
        for model in self._models.values():
            for digest, adapter in contents(model.table).items():
                for state, runs in (("running", True), ("waiting", False)):
                    yield model.name, adapter, state, numbers[model.name, digest, runs]

    async def run(self) -> NoReturn:
        """Announce that the tables are settled, and drop retained contents that nobody uses."""
        while True:
            was_settling = self.is_settling
            pause_s = self.collect_interval_s
            if was_settling:
                pause_s = min(pause_s, self._settled_at - self.driver.clock())
            await asyncio.sleep(max(0.0, pause_s))
            if was_settling and not self.is_settling:
                self.on_change()
            for model in list(self._models.values()):
                await self._bring_up(model)
                await self._collect(model)

    # Workers.

    @asynccontextmanager
    async def joined(self, ranks: Sequence[pb.WorkerRegistration]) -> AsyncIterator[None]:
        """Bring the ranks of a group, and all other workers of their model, to one table; while the
        context lasts, the ranks get every change. Raises SessionFailed."""
        info = ranks[0].model
        if not info.max_loras:
            yield
            return
        model = self._models.setdefault(info.name, _Model(info.name))
        async with model.lock:
            others = [w for i, w in model.members.items() if i not in {r.worker_id for r in ranks}]
            table = merged(model.table, [rank.adapters for rank in ranks])
            if table.version == model.table.version:  # the others have it
                table = await self._supply(table, ranks, others)
            if table.version != model.table.version:
                table = await self._supply(table, [*ranks, *others], ())
            model.members.update({rank.worker_id: rank for rank in ranks})
            model.behind.difference_update(rank.worker_id for rank in ranks)
            self._commit(model, table)
        try:
            yield
        finally:
            for rank in ranks:
                if model.members.get(rank.worker_id) is rank:
                    del model.members[rank.worker_id]
                    model.behind.discard(rank.worker_id)

    async def _supply(
        self,
        table: AdapterSet,
        workers: Sequence[pb.WorkerRegistration],
        others: Sequence[pb.WorkerRegistration],
    ) -> AdapterSet:
        """Set a table on workers, with its contents, which the others have; returns the table
        without those that no worker has, and that cannot be read any more."""
        while True:
            missing = {w.worker_id: await self._offer(w, table) for w in workers}
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
                table = without_contents(table, lost)

    async def _offer(self, worker: pb.WorkerRegistration, table: AdapterSet) -> set[bytes]:
        """Set a worker's table; returns the contents that it lacks. Raises SessionFailed."""
        try:
            return set(await self._set(worker, table))
        except grpc.aio.AioRpcError as error:
            raise SessionFailed(_failure(worker, error)) from error

    async def _spread(
        self,
        adapter: Adapter,
        holders: Sequence[pb.WorkerRegistration],
        receivers: Sequence[pb.WorkerRegistration],
    ) -> bool:
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
            try:
                await self._relay(adapter.digest, holders[0], receiver)
            except grpc.aio.AioRpcError as error:
                raise SessionFailed(_failure(receiver, error)) from error
        return True

    # Operators.

    async def load(
        self, name: str, path: str, model_name: str, *, replace: bool, names: Iterable[str]
    ) -> Adapter:
        """Make an adapter usable under a name. `names`: those of models, which it cannot have.

        Raises InvalidArgument, UnknownModel, UnknownAdapter if no worker finds the path,
        DuplicateAdapter, AdapterRefused or Unavailable;
        nothing has changed then.
        """
        check_name(name)
        if not path:
            raise InvalidArgument("path", "required")
        if name in set(names):
            raise InvalidArgument("name", f"expected no model's name, got {name!r}")
        for other in self._models.values():
            if other.name != model_name and find(other.table, name) is not None:
                raise DuplicateAdapter(
                    f"the name {name!r} means an adapter of the model {other.name!r}: unload it, "
                    "or use another name",
                    details={"name": name, "model": other.name},
                )
        model = self._model(model_name)
        # The change is completed or undone even if its caller leaves.
        change = self._load_on_all(model, name, path, replace=replace)
        return await _shielded(self._counted("load", change))

    async def unload(self, name: str) -> int:
        """Make a name mean nothing; returns how many live requests still use the content. Raises
        UnknownAdapter, and Unavailable if a worker fails, with nothing changed."""
        for model in self._models.values():
            if find(model.table, name) is not None:
                return await _shielded(self._counted("unload", self._unload_on_all(model, name)))
        loaded = sorted(a.name for model in self._models.values() for a in model.table.adapters)
        raise UnknownAdapter(
            f"no adapter {name!r} is loaded; adapters: {', '.join(loaded) or 'none'}",
            details={"name": name},
        )

    async def _counted(self, kind: str, change: Coroutine[Any, Any, Any]) -> Any:
        """The result of a change, which `num_changes` counts."""
        outcome = "failed"
        try:
            result = await change
            outcome = "done"
            return result
        finally:
            self.num_changes[kind, outcome] += 1

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            able = ", ".join(sorted(self._models)) or "none"
            unknown = (
                f"no worker of a model {name!r} that was started with --enable-lora is registered; "
                f"models with adapters: {able}"
            )
            self.require_settled(unknown)
            raise UnknownModel(unknown, details={"model": name})
        return model

    async def _load_on_all(self, model: _Model, name: str, path: str, *, replace: bool) -> Adapter:
        async with model.lock:
            workers = self._workers(model)
            previous = find(model.table, name)
            try:
                info = await self._read_on_all(workers, path)
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
                await self._change(model, workers, with_adapter(model.table, adapter))
            except BaseException:
                await self._restore(model, workers)
                raise
            logger.info(
                "adapter loaded name=%s model=%s digest=%s rank=%d num_bytes=%d num_workers=%d",
                name,
                model.name,
                adapter.digest.hex(),
                adapter.rank,
                adapter.num_bytes,
                len(workers),
            )
            return adapter

    async def _unload_on_all(self, model: _Model, name: str) -> int:
        async with model.lock:
            adapter = find(model.table, name)
            if adapter is None:
                raise UnknownAdapter(f"no adapter {name!r} is loaded", details={"name": name})
            workers = self._workers(model)
            try:
                await self._change(model, workers, without_name(model.table, name))
            except BaseException:
                await self._restore(model, workers)
                raise
            num_requests = self.driver.core.num_requests_with(model.name, adapter.digest)
            logger.info(
                "adapter unloaded name=%s model=%s num_requests=%d", name, model.name, num_requests
            )
            return num_requests

    def _workers(self, model: _Model) -> list[pb.WorkerRegistration]:
        if not model.members:
            raise Unavailable(
                f"no worker of the model {model.name!r} is ready; try again later",
                reason="NO_MODEL_SERVED",
            )
        return list(model.members.values())

    async def _read_on_all(
        self, workers: Sequence[pb.WorkerRegistration], path: str
    ) -> AdapterInfo:
        """Make all workers read a content; those that do not find it get it from another one."""
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

    async def _change(
        self, model: _Model, workers: Sequence[pb.WorkerRegistration], table: AdapterSet
    ) -> None:
        """Set a table on all workers, then here. Raises AdapterRefused or Unavailable."""
        answers = await _all(self._set(worker, table) for worker in workers)
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, BaseException):
                raise _refusal(worker, answer)
            if answer:
                raise Unavailable(
                    f"worker {worker.worker_id} has lost the content {answer[0].hex()}; try again",
                    reason="ADAPTER_LOST",
                )
        self._commit(model, table)

    async def _restore(self, model: _Model, workers: Sequence[pb.WorkerRegistration]) -> None:
        """Undo what workers have of a change that failed: as a later version, because a worker may
        have its table."""
        newer = AdapterSet()
        newer.CopyFrom(model.table)
        newer.version += 2
        await self._impose(model, workers, newer)

    async def _impose(
        self, model: _Model, workers: Sequence[pb.WorkerRegistration], table: AdapterSet
    ) -> None:
        """Make a table valid, and set it on workers. Those that do not answer, or lack a content,
        get it later, or when they join again."""
        answers = await _all(self._set(worker, table) for worker in workers)
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, BaseException):
                reason = _failure(worker, answer)
            elif answer:
                reason = f"{len(answer)} contents are missing"
            else:
                continue
            logger.warning("adapters not restored worker=%s reason=%s", worker.worker_id, reason)
            model.behind.add(worker.worker_id)
        model.behind &= model.members.keys()  # a worker may have left meanwhile
        self._commit(model, table)

    async def _bring_up(self, model: _Model) -> None:
        """Set the table, with its contents, on workers that are behind."""
        if not model.behind:
            return
        async with model.lock:
            for worker in [model.members[i] for i in sorted(model.behind & model.members.keys())]:
                others = [w for i, w in model.members.items() if i not in model.behind]
                try:
                    table = await self._supply(model.table, [worker], others)
                except SessionFailed as error:
                    logger.warning("adapters not restored reason=%s", error)
                    continue
                model.behind.discard(worker.worker_id)
                if table.version != model.table.version:  # a content is lost
                    await self._impose(model, others, table)

    def _commit(self, model: _Model, table: AdapterSet) -> None:
        """Make a table valid, which all workers have."""
        model.table = table
        for worker in model.members.values():
            worker.adapters.CopyFrom(table)
        now = self.driver.clock()
        model.retained_at = {
            adapter.digest: model.retained_at.get(adapter.digest, now) for adapter in table.retained
        }
        names = {digest.hex(): adapter.name for digest, adapter in contents(table).items()}
        self.driver.core.set_adapters(model.name, names, now)
        self.on_change()

    async def _collect(self, model: _Model) -> None:
        """Drop retained contents that no request has used for a while."""
        if not model.table.retained or not model.members:
            return
        async with model.lock:
            now, unused = self.driver.clock(), set()
            for digest, since in model.retained_at.items():
                if self.driver.core.num_requests_with(model.name, digest):
                    model.retained_at[digest] = now  # a retry of such a request may follow
                elif now - since >= self.retain_s:
                    unused.add(digest)
            if not unused or not model.members:
                return
            workers = self._workers(model)
            try:
                await self._change(model, workers, without_contents(model.table, unused))
            except PagewireError as error:
                logger.warning("retained adapters not dropped model=%s error=%s", model.name, error)
                await self._restore(model, workers)

    # Calls to one worker.

    async def _load(self, worker: pb.WorkerRegistration, path: str) -> AdapterInfo:
        async with self.dial(worker.address) as stub:
            request = worker_pb.WorkerServiceLoadAdapterRequest(path=path)
            return (await stub.LoadAdapter(request, timeout=LOAD_TIMEOUT_S)).adapter

    async def _set(self, worker: pb.WorkerRegistration, table: AdapterSet) -> Sequence[bytes]:
        async with self.dial(worker.address) as stub:
            request = worker_pb.SetAdaptersRequest(adapters=table)
            return (await stub.SetAdapters(request, timeout=SET_TIMEOUT_S)).missing

    async def _relay(
        self, digest: bytes, holder: pb.WorkerRegistration, receiver: pb.WorkerRegistration
    ) -> None:
        """Send a content from a worker to another."""
        async with self.dial(holder.address) as source, self.dial(receiver.address) as target:
            reading = source.GetAdapter(
                worker_pb.GetAdapterRequest(digest=digest), timeout=LOAD_TIMEOUT_S
            )

            async def chunks() -> AsyncIterator[worker_pb.PutAdapterRequest]:
                async for response in reading:
                    yield worker_pb.PutAdapterRequest(data=response.data)

            await target.PutAdapter(chunks(), timeout=LOAD_TIMEOUT_S)


async def _all(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """What all calls return or raise, in order."""
    return await asyncio.gather(*calls, return_exceptions=True)


async def _shielded(change: Coroutine[Any, Any, Any]) -> Any:
    """Complete a change even if the call that has begun it ends."""
    task = asyncio.ensure_future(change)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # as if it was read
    return await asyncio.shield(task)


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


def served_name(infos: Iterable[model_pb2.ModelInfo], name: str | None) -> str:
    """The name of the model that a call names, by any of its names, or of the only one that may
    have adapters. Raises InvalidArgument and UnknownModel."""
    able = [info for info in infos if info.max_loras]
    found = [i.name for i in able if name is None or name == i.name or name in i.aliases]
    names = ", ".join(sorted(info.name for info in able)) or "none"
    if not found:
        wanted = "there is no model with adapters" if name is None else f"unknown model {name!r}"
        raise UnknownModel(f"{wanted}; models with adapters: {names}", details={"model": name})
    if len(found) > 1 and name is None:
        raise InvalidArgument("model", f"required, since several may have adapters: {names}")
    return name if name in found else found[0]

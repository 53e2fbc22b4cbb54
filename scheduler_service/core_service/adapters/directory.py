"""The adapters of all models: what is announced of them, and what operators change."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from pagewire.v1 import adapter_pb2, model_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.adapter_pb2 import Adapter
from scheduler_service.core_service.adapters.distribution import AdapterDistribution
from scheduler_service.core_service.adapters.model_adapters import ModelAdapters
from scheduler_service.core_service.adapters.tables import check_name, contents, find
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.workers.worker_session import Dial
from scheduler_service.errors import (
    DuplicateAdapter,
    InvalidArgument,
    Unavailable,
    UnknownAdapter,
    UnknownModel,
)


@dataclass(eq=False)
class AdapterDirectory:
    """The tables of all models, and the workers that have them."""

    driver: CoreDriver
    dial: Dial
    on_change: Callable[[], None]
    """Called when what is to be announced has changed."""
    settle_s: float
    retain_s: float = 60.0
    collect_interval_s: float = 5.0
    """Time between two checks for retained contents that nobody uses any more."""

    def __post_init__(self) -> None:
        self._models: dict[str, ModelAdapters] = {}
        self._distribution = AdapterDistribution(self.dial)
        self.num_changes: Counter[tuple[str, ...]] = Counter()
        """Loads and unloads by outcome, `done` or `failed`."""
        self._loads: list[tuple[str, str]] = []
        """The names of adapters that are being loaded, with their models."""
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
        numbers = self.driver.core.requests.by_adapter()
        for model in self._models.values():
            for digest, adapter in contents(model.table).items():
                for state, runs in (("running", True), ("waiting", False)):
                    yield model.name, adapter, state, numbers[model.name, digest, runs]

    async def run(self) -> NoReturn:
        """Announce that the tables are settled, and drop retained contents that nobody uses."""
        was_settling = True
        while True:
            pause_s = self.collect_interval_s
            if was_settling:
                pause_s = min(pause_s, self._settled_at - self.driver.clock())
            await asyncio.sleep(max(0.0, pause_s))
            if was_settling and not self.is_settling:
                was_settling = False
                for model in self._models.values():
                    model.settle()
                self.on_change()
            for model in list(self._models.values()):
                await model.bring_up()
                await model.collect(self.retain_s)

    # Workers.

    @asynccontextmanager
    async def joined(self, ranks: Sequence[pb.WorkerRegistration]) -> AsyncIterator[None]:
        """Bring the ranks of a group, and all other workers of their model, to one table; while the
        context lasts, the ranks get every change. Raises SessionFailed."""
        info = ranks[0].model
        if not info.max_loras:
            yield
            return
        model = self._models.setdefault(
            info.name,
            ModelAdapters(
                info.name,
                self.driver,
                self._distribution,
                self.on_change,
                lambda: self.is_settling,
                lambda: self._names_elsewhere(info.name),
            ),
        )
        await model.join(ranks)
        try:
            yield
        finally:
            model.leave(ranks)

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
        other = self._names_elsewhere(model_name).get(name)
        if other is not None:
            raise DuplicateAdapter(
                f"the name {name!r} means an adapter of the model {other!r}: unload it, or use "
                "another name",
                details={"name": name, "model": other},
            )
        model = self._models.get(model_name)
        if model is None:
            able = ", ".join(sorted(self._models)) or "none"
            unknown = (
                f"no worker of a model {model_name!r} that was started with --enable-lora is "
                f"registered; models with adapters: {able}"
            )
            self.require_settled(unknown)
            raise UnknownModel(unknown, details={"model": model_name})
        self._loads.append((name, model_name))
        return await self._complete("load", self._load(model, name, path, replace=replace))

    async def _load(self, model: ModelAdapters, name: str, path: str, *, replace: bool) -> Adapter:
        try:
            return await model.load(name, path, replace=replace)
        finally:
            self._loads.remove((name, model.name))

    def _names_elsewhere(self, model_name: str) -> dict[str, str]:
        """The names of adapters of other models, and those that are being loaded there, with their
        models."""
        tables = {name: model.table for name, model in self._models.items()}
        names = [(a.name, name) for name, table in tables.items() for a in table.adapters]
        return {name: model for name, model in [*names, *self._loads] if model != model_name}

    async def unload(self, name: str) -> int:
        """Make a name mean nothing; returns how many live requests still use the content. Raises
        UnknownAdapter, and Unavailable if a worker fails, with nothing changed."""
        for model in self._models.values():
            if find(model.table, name) is not None:
                return await self._complete("unload", model.unload(name))
        loaded = sorted(a.name for model in self._models.values() for a in model.table.adapters)
        raise UnknownAdapter(
            f"no adapter {name!r} is loaded; adapters: {', '.join(loaded) or 'none'}",
            details={"name": name},
        )

    async def _complete(self, kind: str, change: Coroutine[Any, Any, Any]) -> Any:
        """Complete and count a change even if the call that has begun it ends."""
        task = asyncio.ensure_future(change)
        task.add_done_callback(partial(self._count, kind))
        return await asyncio.shield(task)

    def _count(self, kind: str, change: asyncio.Future[Any]) -> None:
        is_done = not change.cancelled() and change.exception() is None
        self.num_changes[kind, "done" if is_done else "failed"] += 1


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

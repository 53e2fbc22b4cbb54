"""The models that can be used, by name."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from pagewire.loading import describe_load
from pagewire.v1 import adapter_pb2, model_pb2, status_pb2
from scheduler_service.errors import (
    InvalidArgument,
    Unavailable,
    UnknownAdapter,
    UnknownModel,
    UnsupportedByModel,
)
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.models.adapters import AnnouncedAdapters, RequestAdapter
from scheduler_service.frontend.models.frontend_model import (
    Files,
    FrontendModel,
    does,
    may_use,
    work_name,
)
from scheduler_service.frontend.models.model_loader import ModelLoader

MAX_UNKNOWN_WAIT_S = 30.0
"""How long a continued request waits for a model that no core has announced to this frontend."""


class _Patience:
    """The end of a wait that is bounded while models are served, and then since the first was."""

    def __init__(self) -> None:
        self._ends_at: float | None = None

    def ends_at(self, *, is_bounded: bool) -> float | None:
        """When the wait ends, on the event loop's clock; None if it is not bounded now."""
        if not is_bounded:
            self._ends_at = None
        elif self._ends_at is None:
            self._ends_at = asyncio.get_running_loop().time() + MAX_UNKNOWN_WAIT_S
        return self._ends_at


class ModelDirectory:
    """Models by name: `update` takes an announcement, `resolve` waits for a model and its files."""

    def __init__(self, fetch: Callable[[str, str], Awaitable[Files]]) -> None:
        """`fetch` gets the files of a model by name and fingerprint; it raises Unavailable if it
        cannot now."""
        self._served: dict[str, model_pb2.ModelInfo] = {}
        self._named: dict[str, model_pb2.ModelInfo] = {}
        """Served models by name and by alias."""
        self._known: set[str] = set()
        """Names of models that are or were served, by this or an earlier core."""
        self.adapters = AnnouncedAdapters()
        self._workers_loading: list[status_pb2.WorkerLoading] = []
        self._loader = ModelLoader(fetch, self._notify)
        self.changed = asyncio.Event()
        """Set when other models are served, ready or known, and then replaced by a fresh one."""

    @property
    def is_serving(self) -> bool:
        """Whether any model is served and ready."""
        return any(self._loader.find(info) for info in self._served.values())

    @property
    def served(self) -> list[model_pb2.ModelInfo]:
        """The models that are served and ready, by name."""
        served = sorted(self._served.values(), key=lambda info: info.name)
        return [info for info in served if self._loader.find(info)]

    def update(
        self,
        models: Iterable[model_pb2.ModelInfo],
        known: Iterable[str] = (),
        loading: Iterable[status_pb2.WorkerLoading] = (),
        adapters: Iterable[adapter_pb2.ModelAdapters] = (),
    ) -> None:
        """Store which models are served now, with their adapters, and fetch the files of new ones.

        `known`: names of models whose workers the core has or had; `loading`: workers that
        load their model, which waiting tasks are not notified of. Reading files continues if their
        model is announced again or is away for a moment; other files under its name end it.
        """
        previous = self._served, self._known
        self._served = {info.name: info for info in models}
        aliases = {alias: info for info in self._served.values() for alias in info.aliases}
        self._named = aliases | self._served
        self._known = self._known.union(self._named, known)
        self._workers_loading = list(loading)
        self._loader.update(self._served, self._workers_loading)
        has_other_adapters = self.adapters.update(adapters)
        if (self._served, self._known) != previous or has_other_adapters:
            self._notify()

    async def resolve(
        self,
        name: str | None,
        tenant: Principal,
        work: model_pb2.WorkKind.ValueType = model_pb2.WORK_KIND_GENERATION,
        *,
        is_continued: bool = False,
    ) -> FrontendModel:
        """The model of this name, or the only one that a tenant may use and that does `work`; waits
        while there is none or none ready.

        Raises PermissionDenied for a name that the tenant may not use, UnknownModel for one that
        no core has announced while others are served, UnsupportedByModel if the model, or every
        one without a name, does other work and none is away or loading, and InvalidArgument if
        no name is given where it is needed. A request that `is_continued`, because another frontend
        or core has accepted it before, waits even for a model of which nothing is known here yet;
        after `MAX_UNKNOWN_WAIT_S` that raises Unavailable, which clients retry. So does waiting
        without a name while only models are served that the tenant may not use.
        """
        patience = _Patience()
        while True:
            changed = self.changed
            model = self._find(name, tenant, work, is_continued=is_continued)
            if model is not None:
                self._check_does(model.info, work, tenant)
                return model
            if name is None:
                wanted = f"no model for {work_name(work)} that this API key may use is"
                infos = self._served.values()
                may_come = any(may_use(tenant, info) and does(info, work) for info in infos)
            else:
                wanted, may_come = f"model {name!r} is not", name in self._known
            is_bounded = bool(self._served) and not may_come
            try:
                async with asyncio.timeout_at(patience.ends_at(is_bounded=is_bounded)):
                    await changed.wait()
            except TimeoutError:
                raise self.unavailable(f"{wanted} being served now") from None

    async def resolve_with_adapter(
        self,
        model_name: str | None,
        tenant: Principal,
        work: model_pb2.WorkKind.ValueType = model_pb2.WORK_KIND_GENERATION,
        *,
        lora: str | None = None,
        lora_digest: bytes = b"",
        is_continued: bool = False,
    ) -> tuple[FrontendModel, RequestAdapter | None]:
        """The model and the adapter of a request, `model_name` being the name of either; waits as
        `resolve` does, also for an adapter that an earlier core has announced.

        Raises what `resolve` raises, UnknownAdapter, and InvalidArgument for an adapter of another
        model. The answer never comes from the model alone when an adapter is named.
        """
        name = model_name if lora is None else lora
        patience = _Patience()
        while name is not None and (lora is not None or name not in self._named):
            changed = self.changed
            adapter = self.adapters.find(name, lora_digest)
            if adapter is not None:
                return await self._with_adapter(model_name, adapter, tenant, work), adapter
            is_serving = bool(self._served)
            if is_serving and not (is_continued or self.adapters.may_come(name)):
                break
            try:
                async with asyncio.timeout_at(patience.ends_at(is_bounded=is_serving)):
                    await changed.wait()
            except TimeoutError:
                if self.adapters.may_come(name):
                    raise self.unavailable(f"adapter {name!r} is not being served now") from None
                break
        if lora is not None:
            names = ", ".join(self.adapters.names()) or "none"
            raise UnknownAdapter(
                f"unknown adapter {lora!r}; adapters: {names}", details={"lora": lora}
            )
        return await self.resolve(model_name, tenant, work, is_continued=is_continued), None

    async def _with_adapter(
        self,
        model_name: str | None,
        adapter: RequestAdapter,
        tenant: Principal,
        work: model_pb2.WorkKind.ValueType,
    ) -> FrontendModel:
        """The model of an adapter."""
        tenant.check_lora(adapter.name, adapter.model)
        if model_name not in (None, adapter.name, adapter.model):
            named = self._named.get(model_name)
            if named is None or named.name != adapter.model:
                raise InvalidArgument(
                    "lora",
                    f"expected an adapter of the model {model_name!r}; {adapter.name!r} is of "
                    f"{adapter.model!r}",
                )
        return await self.resolve(adapter.model, Principal(), work)

    def current(self, name: str | None, tenant: Principal) -> FrontendModel:
        """Like `resolve`, but raises Unavailable instead of waiting. Without a name: the only
        model, or the only one that generates; an adapter's name means its model."""
        if name is not None and name not in self._named:
            adapter = self.adapters.find(name)
            if adapter is not None:
                tenant.check_lora(name, adapter.model)
                name, tenant = adapter.model, Principal()
        model = self._find(name, tenant)
        if model is None:
            raise self.unavailable("the model is not being served now")
        return model

    def unavailable(self, what: str) -> Unavailable:
        """The error of a model that is not served, with how far workers have loaded theirs."""
        loads = "; ".join(map(describe_load, self._workers_loading))
        return Unavailable(f"{what}: {loads}" if loads else what, reason="NO_MODEL_SERVED")

    async def close(self) -> None:
        """Stop fetching."""
        await self._loader.close()

    def _find(
        self,
        name: str | None,
        tenant: Principal,
        work: model_pb2.WorkKind.ValueType | None = None,
        *,
        is_continued: bool = False,
    ) -> FrontendModel | None:
        served = [name for name, info in self._served.items() if may_use(tenant, info)]
        if name is None:
            capable = [name for name in served if does(self._served[name], work)]
            if served and not capable:
                # One that is away for a moment, or is being loaded, may do the work.
                is_complete = self._known <= self._named.keys() and not self._workers_loading
                if is_continued or not is_complete:
                    return None
                assert work is not None
                self._check_does(self._served[min(served)], work, tenant)
            served = capable
            if len(served) > 1 and work is None:  # as calls that generate choose
                generation = model_pb2.WORK_KIND_GENERATION
                served = [n for n in served if does(self._served[n], generation)] or served
            if len(served) > 1:
                names = ", ".join(sorted(served))
                raise InvalidArgument("model", f"required, since several are served: {names}")
            name = next(iter(served), None)
        elif name not in self._named or not may_use(tenant, self._named[name]):
            tenant.check_model(name)
        if name in self._named:
            return self._loader.find(self._named[name])
        if served and name not in self._known and not is_continued:
            raise self.unknown_model(name, tenant)
        return None

    def _check_does(
        self, info: model_pb2.ModelInfo, work: model_pb2.WorkKind.ValueType, tenant: Principal
    ) -> None:
        if does(info, work):
            return
        usable = (i.name for i in self._served.values() if may_use(tenant, i) and does(i, work))
        kinds = [work_name(kind) for kind in info.work_kinds] or ["generation"]
        done, names = " and ".join(sorted(kinds)), ", ".join(sorted(usable)) or "none"
        kind = work_name(work)
        raise UnsupportedByModel(
            f"the workers of the model {info.name!r} do {done}, not {kind}; models served for "
            f"{kind}: {names}",
            reason="WORK_KIND_UNSUPPORTED",
            details={"model": info.name, "work_kind": kind, "work_kinds": done, "served": names},
        )

    def unknown_model(self, name: str | None, tenant: Principal) -> UnknownModel:
        """The error for a name that is not served, with the names that are."""
        usable = [n for n, info in self._named.items() if may_use(tenant, info)]
        names = ", ".join(sorted(usable))
        adapters = [
            adapter.name
            for model, found in self.adapters.by_model()
            if model in usable
            for adapter in found
        ]
        with_adapters = f"; adapters: {', '.join(sorted(adapters))}" if adapters else ""
        return UnknownModel(
            f"unknown model {name!r}; available models: {names or 'none'}{with_adapters}",
            details={"model": name or "", "served": names},
        )

    def _notify(self) -> None:
        """Wake all waiting tasks; later ones wait for the next change."""
        self.changed.set()
        self.changed = asyncio.Event()

"""Models, made of the files that workers send."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from pagewire.v1 import model_pb2, status_pb2
from scheduler_service.errors import Unavailable
from scheduler_service.frontend.models.frontend_model import Files, FrontendModel, build_model

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 0.5
"""Delay after files could not be fetched, usually because their worker has just ended."""


class ModelLoader:
    """Fetches the files of announced models and builds these; `find` returns what is ready.

    The files of a model that workers are still loading are fetched, too, as soon as a worker has
    them: a tokenizer of a large vocabulary takes a second to build.
    """

    def __init__(
        self, fetch: Callable[[str, str], Awaitable[Files]], on_ready: Callable[[], None]
    ) -> None:
        """`fetch` gets the files of a model by name and fingerprint; it raises Unavailable if it
        cannot now. `on_ready` is called when a served model becomes ready later than `update`."""
        self._fetch = fetch
        self._on_ready = on_ready
        self._served: Mapping[str, model_pb2.ModelInfo] = {}
        self._wanted: set[tuple[str, str]] = set()
        """Names and fingerprints of models that are served or being loaded."""
        self._ready: dict[str, FrontendModel] = {}
        """Models by name, with their files as last fetched, whether or not they are served now."""
        self._prepared: dict[str, FrontendModel] = {}
        """Models by name that were not served when their files had been read; of their facts they
        have name and fingerprint."""
        self._loading: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Tasks by name and fingerprint."""

    def update(
        self,
        served: Mapping[str, model_pb2.ModelInfo],
        loading: Sequence[status_pb2.WorkerLoading],
    ) -> None:
        """Fetch the files of new models: `served` by name, or loaded by workers. Reading files
        continues if their model is away for a moment; other files under its name end it."""
        self._served = served
        self._wanted = {(info.name, info.fingerprint) for info in served.values()}
        self._wanted.update(
            (report.model, report.fingerprint) for report in loading if report.address
        )
        names = {name for name, _ in self._wanted}
        for key in [key for key in self._loading if key[0] in names and key not in self._wanted]:
            self._loading.pop(key).cancel()
        for info in served.values():
            if (model := self._built(info.name, info.fingerprint)) is not None:
                self._set_ready(model, info)
        files = [(info.name, info.fingerprint) for info in served.values()]
        files += [(report.model, report.fingerprint) for report in loading if report.fingerprint]
        for key in files:
            if key not in self._loading and self._built(*key) is None:
                self._loading[key] = asyncio.create_task(self._load(*key))

    def find(self, info: model_pb2.ModelInfo) -> FrontendModel | None:
        """The served model with these facts; None while its files are read."""
        model = self._ready.get(info.name)
        return model if model is not None and model.info == info else None

    async def close(self) -> None:
        """Stop fetching."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _built(self, name: str, fingerprint: str) -> FrontendModel | None:
        """The model of these files, if they have been read."""
        found = (self._ready.get(name), self._prepared.get(name))
        return next((m for m in found if m is not None and m.info.fingerprint == fingerprint), None)

    async def _load(self, name: str, fingerprint: str) -> None:
        """Fetch a model's files and build it; gives up if no worker is there to send them."""
        key = (name, fingerprint)
        try:
            while (files := await self._try_fetch(name, fingerprint)) is None:
                if key not in self._wanted:
                    return
                await asyncio.sleep(RETRY_DELAY_S)
            bare = model_pb2.ModelInfo(name=name, fingerprint=fingerprint)
            model = await asyncio.to_thread(build_model, bare, files)
        finally:
            if self._loading.get(key) is asyncio.current_task():
                del self._loading[key]
        served = self._served.get(name)
        if served is not None and served.fingerprint == fingerprint:
            self._set_ready(model, served)
            self._on_ready()
        else:
            self._prepared[name] = model
            logger.info("model files read model=%s fingerprint=%s", name, fingerprint)

    async def _try_fetch(self, name: str, fingerprint: str) -> Files | None:
        """A model's files; None if no worker can send them now."""
        try:
            return await self._fetch(name, fingerprint)
        except Unavailable as error:
            logger.warning("no model files yet model=%s error=%s", name, error)
            return None

    def _set_ready(self, model: FrontendModel, info: model_pb2.ModelInfo) -> None:
        """Let a model be used, with facts other than the files that may have changed."""
        previous, ready = self._ready.get(info.name), model.with_info(info)
        self._ready[info.name] = ready
        prepared = self._prepared.get(info.name)
        if prepared is not None and prepared.info.fingerprint == info.fingerprint:
            del self._prepared[info.name]
        if previous is not None and previous.info.fingerprint == info.fingerprint:
            return
        parts = ready.chat_format.reasoning, ready.chat_format.calls
        logger.info(
            "model ready model=%s fingerprint=%s reasoning=%s tool_calls=%s",
            info.name,
            info.fingerprint,
            *(part.names[0] if part is not None else "none" for part in parts),
        )

"""The engines of a run: those requested and available, and why the others are not."""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.engines import in_process, llama_cpp, nano_vllm, pagewire, transformers_static, vllm
from benchmarks.engines.child import ChildEngine
from benchmarks.engines.engine import Engine, Settings

logger = logging.getLogger(__name__)

OURS = (pagewire.NAME, in_process.NAME)
NAMES = (*OURS, pagewire.DENSE, vllm.NAME, llama_cpp.NAME, nano_vllm.NAME, transformers_static.NAME)
DEFAULT_NAMES = tuple(name for name in NAMES if name != pagewire.DENSE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """Locations of peers in other environments; None: not available."""

    vllm_python: Path | None = None
    nano_vllm_python: Path | None = None
    llama_server: Path | None = None


class EngineUnavailable(Exception):
    """An engine is not available; the message says why."""


def make(name: str, settings: Settings, programs: Programs) -> Engine:
    """The engine of this name, not yet started. Raises EngineUnavailable."""
    return _MAKERS[name](settings, programs)


def start_all(
    names: Sequence[str], settings: Settings, programs: Programs, stack: ExitStack
) -> tuple[list[Engine], dict[str, str]]:
    """Start engines one after the other; each is paused once it is ready. Also returns the reasons
    for those that are left out."""
    engines: list[Engine] = []
    absent: dict[str, str] = {}
    for name in names:
        try:
            engine = stack.enter_context(make(name, settings, programs))
        except EngineUnavailable as reason:
            absent[name] = str(reason)
            continue
        except RuntimeError as error:
            if name in OURS:
                raise
            # If a peer does not start, the comparison continues with the others.
            logger.warning("%s does not start: %s", name, error)
            absent[name] = f"does not start: {str(error).splitlines()[0]}"
            continue
        engine.pause()
        engines.append(engine)
    return engines, absent


def _pagewire(settings: Settings, _: Programs) -> Engine:
    if missing := pagewire.missing_modules():
        raise EngineUnavailable(f"its services need {', '.join(missing)}")
    if settings.http:
        return _served(settings, pagewire.flags(settings))
    return pagewire.Pagewire(settings)


def _pagewire_dense(settings: Settings, _: Programs) -> Engine:
    if settings.shape.weights is None:
        raise EngineUnavailable("the weights are dense")
    return pagewire.Pagewire(settings.dense(), pagewire.DENSE)


def _vllm(settings: Settings, programs: Programs) -> Engine:
    python = _given(programs.vllm_python, "--vllm-python")
    if settings.http:
        return _served(settings, vllm.described(settings), python)
    return ChildEngine(vllm, python, settings, vllm.environment(python, settings))


def _served(
    settings: Settings, described: dict[str, Any], vllm_python: Path | None = None
) -> Engine:
    """The server of Pagewire, or vLLM's."""
    # Imported only if it is used: machines with GPUs may lack the packages of clients.
    from benchmarks.engines.over_http import OverHTTP
    from benchmarks.engines.servers import ServedPagewire, ServedVllm

    if vllm_python is None:
        return OverHTTP(ServedPagewire(settings), described)
    return OverHTTP(ServedVllm(vllm_python, settings), described)


def _nano_vllm(settings: Settings, programs: Programs) -> Engine:
    if settings.device == "cpu":
        raise EngineUnavailable("needs a GPU")
    python = _given(programs.nano_vllm_python, "--nano-vllm-python")
    return ChildEngine(nano_vllm, python, settings)


def _llama_cpp(settings: Settings, programs: Programs) -> Engine:
    server = _given(programs.llama_server, "--llama-server")
    if settings.device != "cpu":
        raise EngineUnavailable("compared on CPUs only")
    if find_spec("gguf") is None:
        raise EngineUnavailable("requires the package gguf to write its files")
    model = settings.model_path
    if (model or settings.shape.weights) and not str(model).endswith(".gguf"):
        raise EngineUnavailable("requires a GGUF file")
    return llama_cpp.LlamaCpp(server, settings, Path(model) if model else None)


def _given(program: Path | None, flag: str) -> Path:
    if program is None:
        raise EngineUnavailable(f"not given by {flag}")
    if not program.exists():
        raise EngineUnavailable(f"{flag}: no such file")
    # Not resolved: the link identifies a virtual environment's Python.
    return program.absolute()


_MAKERS: dict[str, Callable[[Settings, Programs], Engine]] = {
    pagewire.NAME: _pagewire,
    pagewire.DENSE: _pagewire_dense,
    in_process.NAME: lambda settings, _: ChildEngine(
        in_process, sys.executable, settings, in_process.environment()
    ),
    vllm.NAME: _vllm,
    llama_cpp.NAME: _llama_cpp,
    nano_vllm.NAME: _nano_vllm,
    transformers_static.NAME: lambda settings, _: ChildEngine(
        transformers_static, sys.executable, settings
    ),
}

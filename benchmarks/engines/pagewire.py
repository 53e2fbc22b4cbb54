"""Pagewire as users run it: frontend, core and worker as processes, driven over gRPC."""

import time
from importlib.util import find_spec
from typing import Any, Self

import psutil

from benchmarks.engines.engine import About, Outputs, Settings
from benchmarks.engines.workloads import Job
from service_common.version import VERSION

NAME = "pagewire"
DENSE = "pagewire dense"
"""With the dense weights of the same shape, to compare quantized ones with."""

_OF_SERVICES = ("google.rpc", "grpc_health", "grpc_reflection", "llguidance")
"""Modules that the services need, and scheduler core and worker in one process do not."""


def missing_modules() -> list[str]:
    """Modules of the services that are not installed here."""
    return [name for name in _OF_SERVICES if find_spec(name) is None]


class Pagewire:
    """The offline `LLM`. Its clock includes the client and the wire.

    It is not stopped while others run, because its services would consider each other lost. They
    wait for messages, which takes no measurable time; it would show as foreign load.
    """

    def __init__(self, settings: Settings, name: str = NAME, **further: Any) -> None:
        """further: flags that the settings do not have."""
        self.name = name
        self._flags = flags(settings) | further
        self._model = settings.model()
        self.about = About(version=VERSION, settings=self._flags)

    @property
    def pids(self) -> list[int]:
        """The services."""
        return self._pids

    def run(self, jobs: list[Job]) -> Outputs:
        """Run all jobs together."""
        from pagewire_client import SamplingParams

        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=job.num_output_tokens)
            for job in jobs
        ]
        prompts = [job.prompt for job in jobs]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return Outputs(token_ids=token_ids, seconds=seconds)

    def pause(self) -> None:
        """Nothing to do."""

    def resume(self) -> None:
        """Nothing to do."""

    def __enter__(self) -> Self:
        from pagewire_client import LLM

        others = _children()
        self._llm = LLM(self._model, **self._flags)
        self._pids = sorted(_children() - others)
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


def flags(settings: Settings) -> dict[str, Any]:
    """The services' flags for the settings that all engines share."""
    chosen = {
        **settings.named("device", "dtype", *settings.LIMITS),
        "kv_cache_memory": f"{settings.kv_cache_gib}GiB",
    }
    chosen |= {name: value for name, value in settings.named(*settings.FLAGS).items() if value}
    return chosen | ({"threads": settings.threads} if settings.device == "cpu" else {})

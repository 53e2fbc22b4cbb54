"""The command that starts each service, and the package extra that it needs."""

import importlib.util
import os
from pathlib import Path

from pagewire_client.errors import LocalServiceError

_PACKAGES = ("scheduler_service", "worker_service", "conformance", "pagewire_kernels", "pagewire")

_SCHEDULER = ("scheduler", "scheduler_service", "tokenizers", "grpc_health")
_NEEDS = {
    "worker": ("worker", "worker_service", "torch", "transformers"),
    "simulated worker": ("simulate", "worker_service", "numpy", "grpc_health", "grpc_reflection"),
    "scheduler": _SCHEDULER,
    "frontend": _SCHEDULER,
    "replay": _SCHEDULER,
}
"""Requirements by program: the extra of the package, and modules whose presence shows that the
extra is installed. The others need the package alone."""

_TRUE = ("1", "true", "t", "yes", "y", "on")

COMMANDS = {
    "worker": ("worker_service",),
    "scheduler": ("scheduler_service", "scheduler"),
    "frontend": ("scheduler_service", "frontend"),
    "conformance": ("conformance",),
    "replay": ("scheduler_service", "replay"),
}
"""Arguments of `python -m` that start each program."""


def require(*services: str) -> None:
    """Raise LocalServiceError unless the extras that these services need are installed."""
    missing = [
        service
        for service in services
        if not all(map(importlib.util.find_spec, _NEEDS.get(service, ())[1:]))
    ]
    if missing:
        extras = ",".join(dict.fromkeys(_NEEDS[service][0] for service in missing))
        raise LocalServiceError(
            f"this needs the {' and the '.join(missing)}: in a checkout, pip install '.[{extras}]'"
        )


def kind_of_worker(*, simulate: bool) -> str:
    """The kind of worker to `require`: a simulated one (by flag or environment) needs less."""
    from_environment = os.environ.get("PAGEWIRE_SIMULATE", "").lower() in _TRUE
    return "simulated worker" if simulate or from_environment else "worker"


def environment() -> dict[str, str]:
    """This process's environment, in which a child finds the packages that this process finds.

    They may be on `sys.path` only, as in a plain checkout under pytest.
    """
    roots = {_root(package): None for package in _PACKAGES}
    path = [root for root in roots if root] + [os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}


def _root(package: str) -> str | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return str(Path(next(iter(spec.submodule_search_locations))).parent)

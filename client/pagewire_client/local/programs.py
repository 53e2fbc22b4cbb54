"""Where the services are installed, and a clear word where one is not."""

import importlib.util
import os
from pathlib import Path

from pagewire_client.errors import LocalServiceError

_PACKAGES = ("scheduler_service", "worker_service", "pagewire_kernels", "pagewire")

# The modules by which an extra is recognised as installed.
_NEEDS = {
    "worker": ("worker_service", "torch", "transformers"),
    "scheduler": ("scheduler_service", "tokenizers", "grpc_health"),
    "frontend": ("scheduler_service", "tokenizers", "grpc_health"),
}
_EXTRAS = {"worker": "worker", "scheduler": "scheduler", "frontend": "scheduler"}

COMMANDS = {
    "worker": ("worker_service",),
    "scheduler": ("scheduler_service", "scheduler"),
    "frontend": ("scheduler_service", "frontend"),
}
"""What follows `python -m` to start each service."""


def require(*services: str) -> None:
    """Raises LocalServiceError unless all that these services import is installed."""
    missing = [service for service in services if not _is_installed(service)]
    if missing:
        extras = ",".join(dict.fromkeys(_EXTRAS[service] for service in missing))
        raise LocalServiceError(
            f"this needs the {' and the '.join(missing)}: pip install 'pagewire[{extras}]'"
        )


def _is_installed(service: str) -> bool:
    return all(importlib.util.find_spec(module) for module in _NEEDS[service])


def environment() -> dict[str, str]:
    """This process's environment, in which a child finds the packages that this process finds.

    They may be on `sys.path` only, as in a plain checkout under pytest.
    """
    roots = {_root(package): None for package in _PACKAGES}
    path = [root for root in roots if root] + [os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
    }


def _root(package: str) -> str | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return str(Path(next(iter(spec.submodule_search_locations))).parent)

"""Writes the versions of all packages that the images install: those of the test environment.

    python -m tools.image_pins        # or: make image-pins

The packages are all direct and indirect dependencies of the extras `scheduler`, `worker` and
`tracing`, in the versions installed here. The Dockerfile selects torch and the packages that its
builds pin, since these differ by device.
"""

import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "deploy/docker/constraints.txt"
EXTRAS = ("scheduler", "worker", "tracing")
BY_DEVICE = ("torch", "triton")

HEADER = """\
# Made by `make image-pins`: do not edit. The versions that the images install.
"""


def declared() -> list[Requirement]:
    """The requirements of the images in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = project["dependencies"] + [text for extra in EXTRAS for text in extras[extra]]
    return [Requirement(text) for text in texts]


def versions(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Installed versions by name, of these packages and all their dependencies."""
    found: dict[str, str] = {}
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in BY_DEVICE:
            continue
        if name not in found:
            found[name] = distribution(name).version
            waiting += _needs(name, "")
        for extra in requirement.extras:
            waiting += _needs(name, extra)
    return found


def _needs(name: str, extra: str) -> Iterator[Requirement]:
    """The dependencies of a package, or of an extra of it, on this platform."""
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        of_extra = marker is not None and not marker.evaluate({"extra": ""})
        if marker is not None and not marker.evaluate({"extra": extra}):
            continue
        if of_extra == bool(extra):
            yield requirement


def main() -> None:
    """Write the file."""
    lines = [f"{name}=={version}\n" for name, version in sorted(versions(declared()).items())]
    CONSTRAINTS.write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main()

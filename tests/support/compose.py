"""docker-compose.yml as Compose reads it: variables, profiles, replicas."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tools.launch import ROOT

COMPOSE_FILE = ROOT / "docker-compose.yml"
DOTENV = ROOT / ".env"

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class ComposedService:
    """One service, with all variables filled in."""

    name: str
    spec: Mapping[str, Any]

    @property
    def command(self) -> list[str]:
        """What follows the image's entry point, `pagewire`."""
        return list(self.spec["command"])

    @property
    def environment(self) -> dict[str, str]:
        return dict(self.spec.get("environment", {}))

    @property
    def health_command(self) -> list[str]:
        """The words after `pagewire` of its health check."""
        kind, program, *words = self.spec["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "pagewire")
        return list(words)

    @property
    def stop_grace_s(self) -> float:
        return seconds(self.spec["stop_grace_period"])

    @property
    def is_ours(self) -> bool:
        """Whether its image is built here."""
        return "build" in self.spec


def seconds(duration: str) -> float:
    """`40s`."""
    number, unit = duration[:-1], duration[-1]
    assert unit == "s", duration
    return float(number)


def dotenv() -> dict[str, str]:
    """What `.env` sets."""
    lines = [line for line in DOTENV.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def services(variables: Mapping[str, str] | None = None) -> dict[str, ComposedService]:
    """All services, whatever their profiles. `variables`: the environment's, on top of `.env`'s."""
    known = dotenv() | dict(variables or {})
    composed = _fill_in(yaml.safe_load(COMPOSE_FILE.read_text()), known)
    return {name: ComposedService(name, spec) for name, spec in composed["services"].items()}


def started(*profiles: str, variables: Mapping[str, str] | None = None) -> Iterator[str]:
    """Names of the services that `docker compose up` starts.

    `profiles` are those of --profile, which take the place of COMPOSE_PROFILES.
    """
    known = dotenv() | dict(variables or {})
    active = set(profiles or known["COMPOSE_PROFILES"].split(","))
    for name, service in services(variables).items():
        its_own = service.spec.get("profiles", [])
        if not its_own or active & set(its_own):
            yield name


def _fill_in(value: Any, known: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _fill_in(element, known) for key, element in value.items()}
    if isinstance(value, list):
        return [_fill_in(element, known) for element in value]
    if not isinstance(value, str):
        return value
    filled = _VARIABLE.sub(lambda found: known.get(found[1]) or found[2] or "", value)
    assert "$" not in filled, f"{value}: not a variable that this reader knows"
    return filled

"""What torchrun, or anybody who speaks its language, tells a process of its rank."""

from collections.abc import Mapping
from dataclasses import dataclass

from worker_service.errors import InvalidOption

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Torchrun:
    """A rank's place, as its variables tell."""

    rank: int
    world_size: int
    local_rank: int
    master: str
    """`HOST:PORT`."""

    @property
    def group_id(self) -> str:
        """A name that all its ranks come to."""
        return f"torchrun-{self.master}"


def read_torchrun(variables: Mapping[str, str]) -> Torchrun | None:
    """What the environment's `variables` tell, or None where torchrun has not set them.

    Raises InvalidOption for numbers that are none.
    """
    if any(name not in variables for name in _NEEDED):
        return None
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = variables.get(name, "0")
        if not text.isdecimal():
            raise InvalidOption(f"{name}: expected a number in the environment, got {text!r}")
        numbers[name] = int(text)
    return Torchrun(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        master=f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}",
    )

"""What a run has shown, for people and as JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.chaos.config import ChaosConfig


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run has shown."""

    config: ChaosConfig
    network: str
    duration_s: float
    kills: dict[str, int]
    disturbances: dict[str, int]
    num_streams: int
    num_left: int
    """Streams, besides these, whose clients went away."""
    num_tokens: int
    kinds: dict[str, int]
    faults: list[str] = field(default_factory=list)
    """Everything that must not be; empty for a good run."""

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in asdict(self).items() if name != "faults"]
        return "\n".join([*lines, f"faults: {len(self.faults)}", *self.faults])

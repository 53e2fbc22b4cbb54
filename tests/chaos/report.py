"""Results of a run, as text and as JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring.machine import describe
from tests.chaos.config import ChaosConfig
from tests.chaos.drawing import ROLES

COLUMNS = {
    "dtype": "type",
    "seed": "seed",
    "streams": "streams",
    "tokens": "tokens",
    "vectors": "vectors",
    "killed_workers": "workers killed",
    "killed_embedders": "embedders killed",
    "killed_cores": "cores killed",
    "killed_frontends": "frontends killed",
    "killed_young": "killed while starting",
    "other_disturbances": "stopped, cut off, drained",
    "faults": "faults",
}
"""Titles of a table by the names in a row of results."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of a run."""

    config: ChaosConfig
    network: str
    duration_s: float
    kills: dict[str, int]
    disturbances: dict[str, int]
    num_streams: int
    num_left: int
    """Additional streams whose clients disconnected."""
    num_tokens: int
    num_vectors: int
    kinds: dict[str, int]
    faults: list[str] = field(default_factory=list)
    """All faults; empty for a good run."""

    def add_to(self, path: Path, foreign_cores: float) -> None:
        """Add the run to a file of results, which is created if necessary."""
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        rows.append(self._row() | {"foreign_cores": foreign_cores})
        num_kills = sum(row.get(f"killed_{role}s", 0) for row in rows for role in ROLES)
        results = {
            "machine": describe(),
            "foreign_cores": round(sum(row["foreign_cores"] for row in rows) / len(rows), 2),
            "facts": f"{num_kills:,} kills under {sum(row['streams'] for row in rows):,} streams.",
            "columns": COLUMNS,
            "rows": rows,
        }
        path.write_text(json.dumps(results, indent=2) + "\n")

    def _row(self) -> dict[str, Any]:
        """Its figures, one beside the other."""
        killing = ("kill ", "powercut ", "young ")
        others = [n for name, n in self.disturbances.items() if not name.startswith(killing)]
        return {
            "dtype": self.config.dtype,
            "seed": self.config.seed,
            "network": self.network,
            "duration_s": self.duration_s,
            "streams": self.num_streams,
            "left": self.num_left,
            "tokens": self.num_tokens,
            "vectors": self.num_vectors,
            **{f"killed_{role}s": self.kills.get(role, 0) for role in ROLES},
            "killed_young": sum(
                n for name, n in self.disturbances.items() if name.startswith("young ")
            ),
            "other_disturbances": sum(others),
            "faults": len(self.faults),
            "disturbances": self.disturbances,
            "kinds": self.kinds,
        }

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in asdict(self).items() if name != "faults"]
        return "\n".join([*lines, f"faults: {len(self.faults)}", *self.faults])

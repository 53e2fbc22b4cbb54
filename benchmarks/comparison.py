"""What the engines' runs amount to: medians, ratios, shares of the floor."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.table import Table

from benchmarks.contest import Results, Run
from benchmarks.engines.choice import OURS

PAGEWIRE, IN_PROCESS = OURS

Row = dict[str, object]


def compare(results: Results, floors_s: Mapping[str, float]) -> list[Row]:
    """A line for each workload."""
    return [_row(workload, runs, floors_s.get(workload)) for workload, runs in results.runs.items()]


def _row(workload: str, runs: Mapping[str, Sequence[Run]], floor_s: float | None) -> Row:
    rates = {name: statistics.median(r.tokens_per_s for r in rs) for name, rs in runs.items()}
    row: Row = {
        "workload": workload,
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "repeats": {name: len(rs) for name, rs in runs.items()},
        "spread": {name: _spread(rs) for name, rs in runs.items()},
        "foreign_cores": max(run.foreign_cores for rs in runs.values() for run in rs),
    }
    peers = [name for name in rates if name not in OURS]
    ours = rates.get(PAGEWIRE)
    if ours is not None and peers:
        best = max(peers, key=lambda name: rates[name])
        row |= {"best_peer": best, "ratio": round(ours / rates[best], 3)}
    if ours is not None and IN_PROCESS in rates:
        row["services_over_in_process"] = round(ours / rates[IN_PROCESS], 3)
    if ours is not None and floor_s is not None:
        taken = statistics.median(run.seconds for run in runs[PAGEWIRE])
        row |= {"floor_s": round(floor_s, 4), "share_of_floor": round(floor_s / taken, 3)}
    return row


def _spread(runs: Sequence[Run]) -> float:
    """Fastest over slowest run, less one."""
    rates = [run.tokens_per_s for run in runs]
    return round(max(rates) / min(rates) - 1, 3)


def all_runs(results: Results) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Every run, for the record."""
    return {
        workload: {
            name: [{key: round(value, 4) for key, value in asdict(run).items()} for run in its_runs]
            for name, its_runs in runs.items()
        }
        for workload, runs in results.runs.items()
    }


def table(rows: Sequence[Row], title: str) -> Table:
    """For the terminal."""
    names = list(dict.fromkeys(name for row in rows for name in _of(row, "tokens_per_s")))
    ours = ["best peer", "ratio", "÷ in-process", "share of floor", "foreign cores"]
    shown = Table("workload", *names, *ours, title=title)
    for row in rows:
        cells = [_cell(row, name) for name in names]
        keys = ("best_peer", "ratio", "services_over_in_process", "share_of_floor")
        facts = [str(row.get(key, "")) for key in keys]
        shown.add_row(str(row["workload"]), *cells, *facts, str(row["foreign_cores"]))
    return shown


def _cell(row: Row, name: str) -> str:
    """Rate, number of repeats, spread."""
    rate = _of(row, "tokens_per_s").get(name)
    if rate is None:
        return ""
    return f"{rate:g} ({_of(row, 'repeats')[name]} runs, ±{_of(row, 'spread')[name] / 2:.0%})"


def _of(row: Row, key: str) -> dict[str, float]:
    value = row[key]
    assert isinstance(value, dict)
    return value

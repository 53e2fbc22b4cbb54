"""Summary of the engines' runs: medians, ratios, shares of the floor, equal greedy tokens."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.engines.choice import OURS
from benchmarks.engines.engine import Engine
from benchmarks.engines.interleaved_runs import Results, Run
from benchmarks.engines.workloads import Job
from benchmarks.measuring.ceilings import Ceilings

PAGEWIRE, IN_PROCESS = OURS

Row = dict[str, object]

Floor = Callable[[Ceilings], float]
"""The least seconds for a workload on a machine with these ceilings."""


def compare(results: Results, floors: Mapping[str, Floor]) -> list[Row]:
    """One row per workload, with the tokens per second of each engine under its name."""
    return [_row(workload, runs, floors.get(workload)) for workload, runs in results.runs.items()]


def _row(workload: str, runs: Mapping[str, Sequence[Run]], floor: Floor | None) -> Row:
    rates = {name: statistics.median(r.tokens_per_s for r in rs) for name, rs in runs.items()}
    row: Row = {
        "workload": workload,
        **{name: round(rate, 1) for name, rate in rates.items()},
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
    floors = [
        (floor(run.ceilings), run.seconds)
        for run in runs.get(PAGEWIRE, ())
        if floor is not None and run.ceilings is not None
    ]
    if floors:
        # Over all turns: the bandwidth during one is not exactly the one measured around it.
        row["share_of_floor"] = round(sum(f for f, _ in floors) / sum(s for _, s in floors), 3)
        row["shares_of_floor"] = [round(floor_s / seconds, 3) for floor_s, seconds in floors]
    return row


def ceilings_range(results: Results) -> dict[str, list[float]]:
    """The minimum and maximum of each ceiling over all measurements."""
    measured = [
        asdict(run.ceilings)
        for by_engine in results.runs.values()
        for runs in by_engine.values()
        for run in runs
        if run.ceilings is not None
    ]
    names = measured[0] if measured else ()
    return {name: [f(one[name] for one in measured) for f in (min, max)] for name in names}


def _spread(runs: Sequence[Run]) -> float:
    """Fastest over slowest run, less one."""
    rates = [run.tokens_per_s for run in runs]
    return round(max(rates) / min(rates) - 1, 3)


def all_runs(results: Results) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Every run, for the results file."""
    return {
        workload: {
            name: [_rounded(asdict(run)) for run in its_runs] for name, its_runs in runs.items()
        }
        for workload, runs in results.runs.items()
    }


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: round(value, 4) if isinstance(value, float) else value for key, value in fields.items()
    }


NUM_PROMPTS = 4
NUM_TOKENS = 24


def agreements(
    engines: Sequence[Engine], reference: Engine, vocab_size: int
) -> dict[str, dict[str, int]]:
    """The tokens of all engines (prompts together) that equal those of a reference (each prompt
    alone): `equal_tokens` of `tokens`, up to the first that differs.

    For float32 only: in bfloat16, the most probable tokens of random weights often have equal
    logits, so that a difference means nothing.
    """
    draw = np.random.default_rng(1)
    jobs = [
        Job(prompt=draw.integers(0, vocab_size, size=length).tolist(), num_output_tokens=NUM_TOKENS)
        for length in draw.integers(32, 256, size=NUM_PROMPTS).tolist()
    ]
    expected = [tokens for job in jobs for tokens in _run(reference, [job])]
    return {
        engine.name: {
            "equal_tokens": sum(map(num_equal, _run(engine, jobs), expected)),
            "tokens": NUM_PROMPTS * NUM_TOKENS,
        }
        for engine in engines
    }


def num_equal(got: Sequence[int], expected: Sequence[int]) -> int:
    """Number of tokens before the first difference."""
    pairs = enumerate(zip(got, expected, strict=True))
    return next((index for index, (one, other) in pairs if one != other), len(expected))


def _run(engine: Engine, jobs: list[Job]) -> list[list[int]]:
    engine.resume()
    outputs = engine.run(jobs)
    engine.pause()
    return outputs.token_ids


_SUMMARY = {
    "best_peer": "best peer",
    "ratio": "ours ÷ best peer",
    "services_over_in_process": "ours ÷ in-process",
    "share_of_floor": "share of floor",
}


def columns_of(rows: Sequence[Row]) -> dict[str, str]:
    """Titles by the names in a row: the tokens per second of each engine, and the summary."""
    engines = {name: name for row in rows for name in _of(row, "repeats")}
    return {"workload": "workload"} | engines | _SUMMARY


def facts_of(results: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """What the table of a run's rows does not say."""
    engines = ", ".join(f"{name} {about['version']}" for name, about in results["engines"].items())
    patience, least_s = results["patience"], results["patience"]["least_s"]
    more = f" (more of short workloads, until {least_s:g} s)" if least_s else ""
    facts = [
        f"{results['shape']} in {results['dtype']} on {results['device']}"
        f"{', over HTTP' if results['http'] else ''}; {engines}.",
        *_ceilings_facts(results["ceilings"]),
        f"Medians of {patience['repeats']} turns{more}, of {patience['slow_repeats']} where an "
        f"engine takes more than {patience['slow_factor']:g} times as long as the fastest; "
        f"{_widest_spread(rows)}.",
    ]
    if results["absent"]:
        absent = "; ".join(f"{name}: {reason}" for name, reason in results["absent"].items())
        facts.append(f"Absent: {absent}.")
    if agreed := results["greedy_tokens_equal_transformers"]:
        counts = (f"{name} {n['equal_tokens']} of {n['tokens']}" for name, n in agreed.items())
        facts.append(f"Greedy tokens that equal those of transformers: {', '.join(counts)}.")
    return " ".join(facts)


def _ceilings_facts(ceilings: Mapping[str, Sequence[float]]) -> list[str]:
    if not ceilings:
        return []
    read, products = ceilings["read_bytes_per_s"], ceilings["flops_per_s"]
    return [
        f"Around our turns memory was read at {read[0] / 1e9:.1f} to {read[1] / 1e9:.1f} GB/s, and "
        f"matrix products made at {products[0] / 1e9:,.0f} to {products[1] / 1e9:,.0f} GFLOP/s; "
        "the share of the floor is that of the ceilings just then."
    ]


def _widest_spread(rows: Sequence[Row]) -> str:
    spread, name, workload = max(
        (spread, name, row["workload"])
        for row in rows
        for name, spread in _of(row, "spread").items()
    )
    return f"the fastest turn is at most {spread:.0%} above the slowest ({name}, {workload})"


def _of(row: Row, key: str) -> dict[str, float]:
    value = row[key]
    assert isinstance(value, dict)
    return value

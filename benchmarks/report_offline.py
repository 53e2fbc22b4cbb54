"""What docs/benchmarks.md says of whole engines: throughput, start-up and memory."""

from collections.abc import Mapping, Sequence
from typing import Any

Columns = Mapping[str, str]
"""Titles by the names in a result's rows."""

STARTUP: Columns = {
    "shape": "model",
    "dtype": "dtype",
    "engine": "server",
    "first_token_s": "launch to first token, s",
    "first_token_s_worst": "at worst",
    "times_pagewire_first_token": "÷ ours",
    "peak_mib": "peak memory, MiB",
    "times_pagewire_peak": "÷ ours",
}
_SUMMARY: Columns = {
    "best_peer": "best peer",
    "ratio": "ours ÷ best peer",
    "services_over_in_process": "ours ÷ in-process",
    "share_of_floor": "share of floor",
}


def offline_rows(results: Mapping[str, Any]) -> tuple[Columns, list[dict[str, Any]]]:
    """Columns and rows of one shape in one dtype: tokens per second of each engine that ran."""
    engines = list(dict.fromkeys(name for row in results["rows"] for name in row["tokens_per_s"]))
    columns = {"workload": "workload"} | {name: name for name in engines} | _SUMMARY
    return columns, [row | row["tokens_per_s"] for row in results["rows"]]


def offline_facts(results: Mapping[str, Any]) -> str:
    """What the table does not say."""
    engines = ", ".join(f"{name} {about['version']}" for name, about in results["engines"].items())
    facts = [
        f"{results['shape']} in {results['dtype']} on {results['device']}; {engines}.",
        *_ceilings(results["ceilings"]),
        f"Medians of {_turns(results['patience'])}, of "
        f"{results['patience']['slow_repeats']} where an engine takes more than "
        f"{results['patience']['slow_factor']:g} times as long as the fastest; "
        f"{_widest_spread(results['rows'])}.",
    ]
    if results["absent"]:
        facts.append(f"Without {', '.join(results['absent'])}.")
    agreed = results["greedy_tokens_equal_transformers"]
    if agreed:
        said = (f"{name} {one['equal_tokens']} of {one['tokens']}" for name, one in agreed.items())
        facts.append(f"Greedy tokens that equal those of transformers: {', '.join(said)}.")
    return " ".join(facts)


def _turns(patience: Mapping[str, Any]) -> str:
    turns = f"{patience['repeats']} turns"
    if not patience.get("least_s"):
        return turns
    return f"{turns} (more of short workloads, until {patience['least_s']:g} s)"


def _ceilings(ceilings: Mapping[str, Sequence[float]]) -> list[str]:
    if not ceilings:
        return []
    read, products = ceilings["read_bytes_per_s"], ceilings["flops_per_s"]
    return [
        f"Around our turns memory was read at {read[0] / 1e9:.1f} to {read[1] / 1e9:.1f} GB/s, and "
        f"matrix products made at {products[0] / 1e9:,.0f} to {products[1] / 1e9:,.0f} GFLOP/s; "
        "the share of the floor is that of the ceilings just then."
    ]


def _widest_spread(rows: Sequence[Mapping[str, Any]]) -> str:
    spread, name, workload = max(
        (spread, name, row["workload"]) for row in rows for name, spread in row["spread"].items()
    )
    return f"the fastest turn is at most {spread:.0%} above the slowest ({name}, {workload})"

"""Copies the latest results into docs/benchmarks.md, so that no figure there is typed by hand.

    python -m benchmarks.report

The page has a pair of comments for each file under `benchmarks/results/`; the text between them is
replaced by the machine and a table.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import loading_memory, many_groups, online, speculation, startup
from benchmarks.machine import RESULTS, VECTOR_EXTENSIONS

Columns = Mapping[str, str]
"""Titles by the names in a result's rows."""

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
    """Facts that the table does not show."""
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


PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"
_SECTION = re.compile(r"<!-- results of (\w+) -->\n.*?<!-- end of results -->", re.DOTALL)

NOT_MEASURED = "Not measured yet."

OVERHEAD: Columns = {
    "groups": "groups",
    "running": "running",
    "prompt_tokens": "prompt",
    "deciding_us": "deciding, µs",
    "all_us": "all, µs",
    "all_us_per_row": "all per row, µs",
    "budget_us": "budget, µs",
    "vllm_deciding_us": "vLLM deciding, µs",
    "vllm_all_us": "vLLM all, µs",
    "all_ratio": "vLLM all ÷ ours",
}
RECOVERY: Columns = {
    "victim": "killed",
    "kills": "times",
    "streams": "streams",
    "p50_ms": "next token p50, ms",
    "p99_ms": "p99, ms",
    "max_ms": "longest, ms",
    "foreign_cores": "others used, cores",
}
FRONTEND: Columns = {
    "way": "way",
    "frontends": "frontends",
    "pace": "steps a second",
    "cpu_us_per_token": "CPU µs a token",
    "tokens_per_cpu_s": "tokens/s of a core",
    "tokens_per_s": "tokens/s of all",
    "cost_to_grpc": "÷ gRPC's cost",
    "cost_to_one_frontend": "÷ one frontend's cost",
}
CHAOS: Columns = {
    "dtype": "type",
    "seed": "seed",
    "streams": "streams",
    "tokens": "tokens",
    "killed_workers": "workers killed",
    "killed_cores": "cores killed",
    "killed_frontends": "frontends killed",
    "killed_young": "killed while starting",
    "other_disturbances": "stopped, cut off, drained",
    "faults": "faults",
}

KERNELS: Columns = {
    "kernel": "kernel",
    "size": "size",
    "dtype": "type",
    "implementation": "by",
    "us": "µs",
    "achieved": "achieved",
    "ceiling": "ceiling",
    "bound": "in",
    "share": "share",
}

Section = Callable[[Mapping[str, Any]], tuple[str, str]]
"""From results to a text and a table."""


def _overhead(results: Mapping[str, Any]) -> tuple[str, str]:
    worst = results["growth"]
    facts = (
        f"At worst, a row of a larger batch costs {worst['with_rows']} times one of a smaller "
        f"(from 256 rows on), and one in a longer context {worst['with_length']} times one in "
        "a shorter. "
    )
    facts += f"vLLM {results['vllm']}." if results["vllm"] else "Without vLLM."
    return facts, _table(OVERHEAD, results["rows"])


def _recovery(results: Mapping[str, Any]) -> tuple[str, str]:
    facts = (
        f"{results['streams']} streams at a time. The budget for a worker: {results['budget_ms']} "
        "ms, two leases, and the time to compute again what its streams had."
    )
    return facts, _table(RECOVERY, results["rows"])


def _chaos(results: Mapping[str, Any]) -> tuple[str, str]:
    runs = results["runs"]
    kills = sum(run[f"killed_{role}s"] for run in runs for role in ("worker", "core", "frontend"))
    facts = f"{kills:,} kills under {sum(run['streams'] for run in runs):,} streams."
    return facts, _table(CHAOS, runs)


def _many_groups(results: Mapping[str, Any]) -> tuple[str, str]:
    row = results["rows"][0]
    facts = (
        f"Batches of {row['rows']}, prompts of {results['prompt_tokens']} tokens, answers of "
        f"{results['output_tokens']}; {results['seconds']:g} s a line."
    )
    return facts, _table(many_groups.COLUMNS, results["rows"])


def _frontend(results: Mapping[str, Any]) -> tuple[str, str]:
    row = results["rows"][0]
    rows = [each | {"pace": each["pace"] or "as they come"} for each in results["rows"]]
    return f"{row['streams']} streams of {row['tokens']} tokens.", _table(FRONTEND, rows)


def _online(results: Mapping[str, Any]) -> tuple[str, str]:
    limits = f"{results['ttft_limit_ms']:g} ms, further ones {results['itl_limit_ms']:g} ms apart"
    best = (f"{engine} {rate:g}/s" for engine, rate in results["highest_good_rate"].items())
    facts = (
        f"{results['shape']} in {results['dtype']} on {results['device']}, prompts of "
        f"{results['input_tokens']} tokens, answers of {results['output_tokens']}; arrivals for "
        f"{results['seconds']:g} s at each rate, {results['repeats']} times, medians. Good: first "
        f"token within {limits} on average. The highest rate up to which 90 % were good: "
        f"{', '.join(best)}."
    )
    return facts, _table(online.COLUMNS, results["rows"])


def _offline(results: Mapping[str, Any]) -> tuple[str, str]:
    return offline_facts(results), _table(*offline_rows(results))


def _speculation(results: Mapping[str, Any]) -> tuple[str, str]:
    """A table without the lines of single prompts, of which it has the range."""
    kept, ratios = [], defaultdict[tuple[str, int], list[float]](list)
    for row in results["rows"]:
        if "prompt" in row:
            ratios[row["workload"], row["streams"]].append(row["ratio"])
        else:
            kept.append(row)
    for row in kept:
        if by_prompt := ratios[row["workload"], row.get("streams", 0)]:
            row["prompt"] = f"{min(by_prompt)} to {max(by_prompt)}"
    columns = speculation.COLUMNS | {"prompt": "by prompt"}
    weights = results["quantization"] or results["dtype"]
    facts = (
        f"{results['model']}, {weights}, `--speculative {results['speculative']}`; at "
        f"most {results['tokens']} tokens per output, medians of {results['turns']} pairs of turns."
    )
    return facts, _table(columns, kept)


def _startup(results: Mapping[str, Any]) -> tuple[str, str]:
    facts = f"{results['kv_cache_gib']} GiB for KV. Medians of {results['rows'][0]['repeats']}."
    return facts, _table(startup.COLUMNS, results["rows"])


def _loading_memory(results: Mapping[str, Any]) -> tuple[str, str]:
    return "In bfloat16.", _table(loading_memory.COLUMNS, results["rows"])


def _kernels(results: Mapping[str, Any]) -> tuple[str, str]:
    threads = f", {results['threads']} threads" if results["threads"] else ""
    facts = (
        f"{results['device']}{threads}: reads {results['read_gb_per_s']:g} GB/s, copies "
        f"{results['copy_gb_per_s']:g} GB/s (read and written). Medians."
    )
    return facts, _table(KERNELS, results["rows"])


SECTIONS: Mapping[str, Section] = {
    "scheduler_overhead": _overhead,
    "chaos": _chaos,
    "recovery_embedded": _recovery,
    "recovery_simulated": _recovery,
    "many_groups": _many_groups,
    "core_saturation": _many_groups,
    "frontend": _frontend,
    "online": _online,
    "startup": _startup,
    "loading_memory": _loading_memory,
    "kernels": _kernels,
    "kernels_gpu": _kernels,
}
"""By the names of result files, but for the many of `offline` and `speculation`."""


def render(name: str, results: Mapping[str, Any]) -> str:
    """A result as Markdown."""
    kinds = {"offline": _offline, "speculation": _speculation}
    section = SECTIONS.get(name) or kinds[name.partition("_")[0]]
    return _section(results, *section(results))


def _section(results: Mapping[str, Any], facts: str, table: str) -> str:
    machine = results["machine"]
    extensions = [VECTOR_EXTENSIONS[name] for name in machine.get("vector_extensions", ())]
    where = (
        f"{' with '.join([machine['processor'], *extensions[-1:]])}, {machine['cores']} cores, "
        f"Python {machine['python']}, protobuf {machine['protobuf']}, grpcio {machine['grpcio']}; "
        f"other processes used {results['foreign_cores']} cores meanwhile. {facts}"
    )
    return f"{where}\n\n{table}"


def _table(columns: Columns, rows: list[Mapping[str, Any]]) -> str:
    lines = [list(columns.values()), ["---"] * len(columns)]
    lines += [[_cell(row.get(name)) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def rewritten(page: str, folder: Path = RESULTS) -> str:
    """The page with the latest results in it."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        path = folder / f"{name}.json"
        body = render(name, json.loads(path.read_text())) if path.exists() else NOT_MEASURED
        return f"<!-- results of {name} -->\n{body}\n<!-- end of results -->"

    return _SECTION.sub(replace, page)


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(rewritten(PAGE.read_text()))


if __name__ == "__main__":
    main()

"""The plots in docs/benchmarks.md, drawn from the same results as the tables there."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

IMAGES = Path(__file__).parents[1] / "docs/images/benchmarks"

COLOURS = {
    "pagewire": "#1f6feb",
    "pagewire in-process": "#79b8ff",
    "pagewire gRPC": "#79b8ff",
    "vllm": "#d29922",
    "llama.cpp": "#3fb950",
    "nano-vllm": "#a371f7",
    "transformers": "#f85149",
    "transformers cb": "#ffa198",
}
"""Colours of engines, the same in all plots."""

Results = Mapping[str, Any]
Row = Mapping[str, Any]


def draw(name: str, results: Results, folder: Path = IMAGES) -> Path:
    """Write FOLDER/NAME.svg; the same results give the same bytes."""
    figure = Figure(layout="constrained")
    PLOTS[name](figure, results)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    return path


def _online(figure: Figure, results: Results) -> None:
    """Latencies and goodput by rate, a line for each engine."""
    figure.set_size_inches(12, 4)
    rows = results["rows"]
    panels: list[Axes] = list(figure.subplots(1, 3))
    for axes, name, title, limit in (
        (panels[0], "first_token_ms", "first token, ms", results["ttft_limit_ms"]),
        (panels[1], "inter_token_ms", "between tokens, ms", results["itl_limit_ms"]),
    ):
        for engine, line in _by(rows, "engine"):
            rates = [row["rate"] for row in line]
            for part, style in (("p50", "-"), ("p99", "--")):
                values = [row[f"{name}_{part}"] for row in line]
                label = f"{engine} {part}"
                axes.plot(rates, values, style, marker="o", color=COLOURS.get(engine), label=label)
        axes.axhline(limit, color="grey", linewidth=0.8, linestyle=":")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_ylabel(title)
    for engine, line in _by(rows, "engine"):
        rates = [row["rate"] for row in line]
        good = [row["good_requests_per_s"] for row in line]
        panels[2].plot(rates, good, marker="o", color=COLOURS.get(engine), label=engine)
    panels[2].set_ylabel("good requests/s")
    for axes in panels:
        axes.set_xlabel("arrivals/s")
        axes.legend(fontsize=8)


def _offline(figure: Figure, results: Results) -> None:
    """Each engine's throughput over the best peer's, a panel for each shape and dtype."""
    cells = results["cells"]
    figure.set_size_inches(11, 2.6 * len(cells))
    panels = figure.subplots(len(cells), 1, squeeze=False)[:, 0]
    for axes, cell in zip(panels, cells, strict=True):
        rows = [row for row in cell["rows"] if "best_peer" in row]
        engines = list(dict.fromkeys(name for row in rows for name in row["tokens_per_s"]))
        width = 0.8 / max(1, len(engines))
        for index, engine in enumerate(engines):
            ratios = [_over_best(row, engine) for row in rows]
            places = [place + width * index for place in range(len(rows))]
            colour = COLOURS.get(engine)
            bars = axes.bar(places, ratios, 0.9 * width, color=colour, label=engine)
            axes.bar_label(bars, fmt="%.2f", fontsize=6)
        axes.axhline(1, color="black", linewidth=0.8)
        middle = width * (len(engines) - 1) / 2
        axes.set_xticks(
            [place + middle for place in range(len(rows))],
            [f"{row['workload']} (best peer: {row['best_peer']})" for row in rows],
        )
        axes.set_ylabel("÷ best peer")
        axes.set_title(f"{cell['shape']}, {cell['dtype']}, {cell['device']}", fontsize=10)
    panels[0].legend(fontsize=7, ncols=4)


def _over_best(row: Row, engine: str) -> float:
    rates = row["tokens_per_s"]
    return float(rates.get(engine, 0) / rates[row["best_peer"]])


def _wire(figure: Figure, results: Results) -> None:
    """Round trips by size, and a plan's bytes per sequence by batch."""
    figure.set_size_inches(9, 3.6)
    left, right = figure.subplots(1, 2)
    for index, (transport, line) in enumerate(_by(results["round_trips"], "transport")):
        sizes = [row["bytes"] for row in line]
        for part, style in (("p50", "-"), ("p99", "--")):
            values = [row[f"{part}_us"] for row in line]
            label = f"{transport} {part}"
            left.plot(sizes, values, style, marker="o", color=f"C{index}", label=label)
    left.set_xscale("log", base=2)
    left.set_ylim(bottom=0)
    left.set_xlabel("message, bytes")
    left.set_ylabel("round trip, µs")
    left.legend(fontsize=8)
    steady = [row for row in results["messages"] if row["case"] == "steady decoding"]
    batches = [row["sequences"] for row in steady]
    right.plot(batches, [row["plan_bytes_per_sequence"] for row in steady], marker="o")
    right.axhline(results["budget_bytes"], color="grey", linewidth=0.8, linestyle=":")
    right.annotate("budget", (batches[-1], results["budget_bytes"]), ha="right", va="bottom")
    right.set_xscale("log", base=2)
    right.set_ylim(bottom=0)
    right.set_xlabel("running sequences")
    right.set_ylabel("plan, bytes per sequence and step")


def _pipelining(figure: Figure, results: Results) -> None:
    """The share of time that a device stands idle, by pipeline depth."""
    figure.set_size_inches(7, 3.6)
    axes = figure.subplots()
    workers = list(dict.fromkeys(row["worker"] for row in results["rows"]))
    depths = list(_by(results["rows"], "pipeline_depth"))
    for index, (depth, line) in enumerate(depths):
        places = [workers.index(row["worker"]) + 0.25 * index for row in line]
        shares = [100 * row["idle_share"] for row in line]
        bars = axes.bar(places, shares, 0.23, label=f"depth {depth}")
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks([place + 0.125 * (len(depths) - 1) for place in range(len(workers))], workers)
    axes.set_ylabel("idle, % of time")
    axes.legend()


def _kernels(figure: Figure, results: Results) -> None:
    """Each kernel's share of its ceiling, a panel for each type of number."""
    groups = list(_by(results["rows"], "dtype"))
    most = max(len(rows) for _, rows in groups)
    figure.set_size_inches(7 * len(groups), 1 + 0.28 * most)
    for axes, (dtype, rows) in zip(
        figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True
    ):
        names = [f"{row['kernel']}, {row['size']} ({row['implementation']})" for row in rows]
        axes.barh(range(len(rows)), [row["share"] for row in rows], color=COLOURS["pagewire"])
        axes.set_yticks(range(len(rows)), names, fontsize=7)
        axes.invert_yaxis()
        axes.axvline(1.0, color="grey", linewidth=0.8, linestyle=":")
        axes.set_xlabel(f"share of the ceiling, {dtype}")


def _startup(figure: Figure, results: Results) -> None:
    """How long each server takes to its first token, and what memory it takes at most."""
    rows = results["rows"]
    figure.set_size_inches(9, 1 + 0.4 * len(rows))
    names = [f"{row['engine']}, {row['shape']}, {row['dtype']}" for row in rows]
    colours = [COLOURS.get(row["engine"]) for row in rows]
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, figure_of, title in (
        (left, "first_token_s", "launch to first token, s"),
        (right, "peak_mib", "peak memory, MiB"),
    ):
        bars = axes.barh(range(len(rows)), [row[figure_of] for row in rows], color=colours)
        axes.bar_label(bars, fmt="{:,.4g}", fontsize=8, padding=2)
        axes.margins(x=0.15)
        axes.set_xlabel(title)
    left.set_yticks(range(len(rows)), names, fontsize=8)
    left.invert_yaxis()


def _by(rows: Sequence[Row], name: str) -> Iterable[tuple[Any, list[Row]]]:
    """Rows grouped by a column, in the order in which its values first appear."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups.items()


PLOTS: Mapping[str, Callable[[Figure, Results], None]] = {
    "online": _online,
    "wire": _wire,
    "pipelining": _pipelining,
    "startup": _startup,
    "offline": _offline,
    "kernels": _kernels,
    "kernels_gpu": _kernels,
}
"""By the names of result files; `offline` has several, and is given all of them."""

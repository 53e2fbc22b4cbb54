"""A comparison as a picture: how many requests had to wait how long."""

from collections.abc import Sequence
from pathlib import Path

from tools.what_if.comparison import RECORDED, Row

INSTALL = "plots need matplotlib: pip install 'pagewire[plot]'"

_PANELS = (
    ("time to first token", lambda latencies: latencies.first_token),
    ("time between tokens", lambda latencies: latencies.between_tokens),
    ("end to end", lambda latencies: latencies.end_to_end),
)


class CannotPlot(Exception):
    """matplotlib is not there, or cannot write such a file."""


def check_plot(path: Path) -> None:
    """Raise CannotPlot for what `write_plot` could not do, before any work is done."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise CannotPlot(INSTALL) from error
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise CannotPlot(f"{path}: expected a name that ends in .{', .'.join(sorted(formats))}")
    if not path.parent.is_dir():
        raise CannotPlot(f"{path}: there is no such folder")


def write_plot(path: Path, rows: Sequence[Row]) -> None:
    """Distributions of three latencies, a curve per configuration; the format is by the suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    for axes, (title, values_of) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for row in rows:
            style = {"color": "black", "linestyle": "--"} if row.name == RECORDED else {}
            values = [1000 * value for value in values_of(row.latencies)]
            if values:
                axes.ecdf(values, label=row.name, **style)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlabel(f"{title}, ms")
        axes.grid(alpha=0.3, which="both")
    figure.axes[0].set_ylabel("share")
    handles, names = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    figure.savefig(path)

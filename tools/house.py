"""Figures by which the layout of the code is judged, for one checkout or for several side by side.

    python -m tools.house                    # this directory
    python -m tools.house BEFORE AFTER       # before and after a re-layout
    python -m tools.house --details          # also what the figures count

Runs on any checkout. Nothing depends on where modules are within their packages: the scheduler's
core is the sub-package that defines the class `Scheduler`, and `Sequence` is looked up in it.
`source_tree.py` defines what counts as a module, a collaborator and an import circle.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.source_tree import (
    SKIPPED_FOLDERS,
    Classes,
    ClassKey,
    Module,
    circles,
    import_graph,
    read_modules,
)

NATIVE_SUFFIXES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
SEQUENCE_FIELDS = ("length", "num_computed")
MAX_COLLABORATORS = 6

MIN_ENTANGLED = 3
"""A collaborator of `Scheduler` with at least this many of its own is counted with its parameters.
Counted by hand, commit 15bee58 has 11 of them with 72 parameters; 3 gives the same figures."""

FIGURES = {
    "core_modules": ("modules in the scheduler's core", "<= 42"),
    "frontend_modules": ("modules in scheduler_service/frontend", "<= 60"),
    "worker_modules": ("modules in worker_service", "<= 90"),
    "kernel_modules": ("modules in kernels", "<= 50"),
    "kernel_files": ("the same with C++ files", ""),
    "scheduler_collaborators": ("collaborators of Scheduler", f"<= {MAX_COLLABORATORS}"),
    "entangled": (f"those it makes that have {MIN_ENTANGLED} or more of their own", ""),
    "entangled_parameters": ("constructor parameters of these", ""),
    "max_collaborators": ("most collaborators of a class in the core", f"<= {MAX_COLLABORATORS}"),
    "above_max": (f"classes in the core with more than {MAX_COLLABORATORS}", "0"),
    "length_writers": ("modules that assign Sequence.length", "1"),
    "num_computed_writers": ("modules that assign Sequence.num_computed", "1"),
    "field_writers": ("most modules that assign one field of Sequence", "1"),
    "import_circles": ("import circles, type-only ones included", "0"),
    "lines": ("Python lines outside tests", "<= 63,000"),
}
"""Title and goal of each figure."""


def assigned_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that code assigns or deletes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node


def field_writers(classes: Classes, modules: list[Module], owner: ClassKey) -> dict[str, list[str]]:
    """The modules that assign each field of a class: those in SEQUENCE_FIELDS, and those that no
    other class there has. `self.field` elsewhere is another class's own field."""
    names = {module.name for module in modules}
    other: set[str] = set()
    for key, node in classes.nodes.items():
        if key != owner and key[0] in names:
            other |= classes.fields(key).keys()
            other |= {
                each.attr for each in assigned_attributes(node) if ast.unparse(each.value) == "self"
            }
    found: dict[str, set[str]] = {
        name: set()
        for name in classes.fields(owner)
        if name in SEQUENCE_FIELDS or name not in other
    }
    for module in modules:
        for each in assigned_attributes(module.tree):
            is_own = ast.unparse(each.value) != "self" or module.name == owner[0]
            if each.attr in found and is_own:
                found[each.attr].add(module.name)
    return {name: sorted(writers) for name, writers in found.items()}


@dataclass(frozen=True)
class Report:
    """The figures of one checkout, and the items that they count."""

    checkout: str
    figures: dict[str, int | None]
    """Figures by name; None if what they count was not found."""
    details: dict[str, dict[str, str]]


def measure(checkout: Path) -> Report:
    """The figures of a checkout."""
    modules = read_modules(checkout)

    def within(package: str) -> list[Module]:
        return [each for name, each in modules.items() if f"{name}.".startswith(f"{package}.")]

    lines = Counter[str]()
    for module in modules.values():
        lines[str(module.file.parts[0])] += module.num_lines
    num_native = sum(
        file.suffix in NATIVE_SUFFIXES and not SKIPPED_FOLDERS.intersection(file.parts)
        for file in (checkout / "kernels").rglob("*")
    )
    num_kernels = sum(module.file.parts[0] == "kernels" for module in modules.values())
    found = circles(import_graph(modules))
    figures: dict[str, int | None] = dict.fromkeys(FIGURES) | {
        "frontend_modules": len(within("scheduler_service.frontend")),
        "worker_modules": len(within("worker_service")),
        "kernel_modules": num_kernels,
        "kernel_files": num_kernels + num_native,
        "import_circles": len(found),
        "lines": lines.total(),
    }
    details: dict[str, dict[str, str]] = {
        "import circles": {str(i): " - ".join(each) for i, each in enumerate(found, 1)},
        "Python lines": {name: str(number) for name, number in lines.most_common()},
    }
    classes = Classes(modules)
    if scheduler := classes.find("Scheduler", "scheduler_service."):
        core = ".".join(scheduler[0].split(".")[:2])
        _measure_core(classes, scheduler, within(core), figures, details)
        if sequence := classes.find("Sequence", f"{core}."):
            written = field_writers(classes, within(core), sequence)
            for name in SEQUENCE_FIELDS:
                figures[f"{name}_writers"] = len(written[name])
            figures["field_writers"] = max(map(len, written.values()))
            details["fields of Sequence assigned in several modules"] = {
                name: ", ".join(names) for name, names in written.items() if len(names) > 1
            }
    return Report(str(checkout), figures, details)


def _measure_core(
    classes: Classes,
    scheduler: ClassKey,
    core: list[Module],
    figures: dict[str, int | None],
    details: dict[str, dict[str, str]],
) -> None:
    """Add the figures of the core's classes, and of those that `Scheduler` constructs."""
    made = {key for keys in classes.constructed(scheduler) for key in keys}
    entangled = [key for key in made if len(classes.collaborators(key)) >= MIN_ENTANGLED]
    names = {module.name for module in core}
    counts = {
        f"{key[0]}.{key[1]}": classes.collaborators(key)
        for key in classes.nodes
        if key[0] in names and not classes.is_value(key)
    }
    figures |= {
        "core_modules": len(core),
        "scheduler_collaborators": len(classes.collaborators(scheduler)),
        "entangled": len(entangled),
        "entangled_parameters": sum(len(classes.parameters(key)) for key in entangled),
        "max_collaborators": max(map(len, counts.values())),
        "above_max": sum(len(each) > MAX_COLLABORATORS for each in counts.values()),
    }
    details["collaborators"] = {
        name: f"{len(each)}: {', '.join(each)}"
        for name, each in sorted(counts.items(), key=lambda item: -len(item[1]))
        if len(each) >= MAX_COLLABORATORS
    }


def table(reports: list[Report]) -> str:
    """A line for each figure, a column for each checkout."""
    names = ["before", "after"] if len(reports) == 2 else [each.checkout for each in reports]
    rows = [["", *names, "goal"]]
    for name, (title, goal) in FIGURES.items():
        values = [report.figures[name] for report in reports]
        shown = ["not found" if value is None else f"{value:,}" for value in values]
        rows.append([title, *shown, goal])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description="Layout figures.")
    parser.add_argument(
        "checkouts",
        nargs="*",
        type=Path,
        default=[Path()],
        metavar="CHECKOUT",
        help="root of a checkout; two are shown as before and after (default: this directory)",
    )
    parser.add_argument("--details", action="store_true", help="also print what is counted")
    options = parser.parse_args()
    for checkout in options.checkouts:
        if not (checkout / "scheduler_service").is_dir():
            parser.error(f"expected a checkout with scheduler_service in it, got {checkout}")
    reports = [measure(checkout) for checkout in options.checkouts]
    print(table(reports))
    for report in reports if options.details else []:
        print(f"\n{report.checkout}")
        for title, entries in report.details.items():
            print(f"  {title}")
            print("".join(f"    {name}: {entry}\n" for name, entry in entries.items()), end="")


if __name__ == "__main__":
    main()

"""Figures about the layout of the code: `python -m tests.architecture.layout`.

Only structure has bounds: who assigns a field, and which modules import each other. Counts of
modules and collaborators are printed for a reader; a bound on them merges unrelated modules.

Nothing depends on where modules are within their packages: the scheduler's core is the sub-package
that defines the class `Scheduler`, and `Sequence` is looked up in it. `source_tree.py` defines what
counts as a module, a collaborator and an import circle.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.source_tree import (
    SKIPPED_FOLDERS,
    Classes,
    ClassKey,
    Module,
    circles,
    import_graph,
    read_modules,
)
from tools.launch import ROOT

NATIVE_SUFFIXES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
SEQUENCE_FIELDS = ("length", "num_computed")
MANY_COLLABORATORS = 6
"""Classes of the core with at least this number of collaborators are listed."""

FIGURES: dict[str, tuple[str, int | None]] = {
    "core_modules": ("modules in the scheduler's core", None),
    "frontend_modules": ("modules in scheduler_service/frontend", None),
    "worker_modules": ("modules in worker_service", None),
    "kernel_modules": ("modules in kernels", None),
    "kernel_files": ("the same with C++ files", None),
    "scheduler_collaborators": ("collaborators of Scheduler", None),
    "max_collaborators": ("most collaborators of a class in the core", None),
    "length_writers": ("modules that assign Sequence.length", 1),
    "num_computed_writers": ("modules that assign Sequence.num_computed", 1),
    "field_writers": ("most modules that assign one field of Sequence", 1),
    "import_circles": ("import circles, type-only ones included", 0),
    "lines": ("Python lines outside tests", None),
}
"""Title and upper bound of each figure."""


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
    """The figures of a checkout by name, and the items that they count."""

    figures: dict[str, int]
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
    figures = {
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
    scheduler = classes.find("Scheduler", "scheduler_service.")
    assert scheduler is not None
    core = ".".join(scheduler[0].split(".")[:2])
    _measure_core(classes, scheduler, within(core), figures, details)
    sequence = classes.find("Sequence", f"{core}.")
    assert sequence is not None
    written = field_writers(classes, within(core), sequence)
    for name in SEQUENCE_FIELDS:
        figures[f"{name}_writers"] = len(written[name])
    figures["field_writers"] = max(map(len, written.values()))
    details["fields of Sequence assigned in several modules"] = {
        name: ", ".join(names) for name, names in written.items() if len(names) > 1
    }
    return Report(figures, details)


def _measure_core(
    classes: Classes,
    scheduler: ClassKey,
    core: list[Module],
    figures: dict[str, int],
    details: dict[str, dict[str, str]],
) -> None:
    """Add the figures of the core's classes."""
    names = {module.name for module in core}
    counts = {
        f"{key[0]}.{key[1]}": classes.collaborators(key)
        for key in classes.nodes
        if key[0] in names and not classes.is_value(key)
    }
    figures |= {
        "core_modules": len(core),
        "scheduler_collaborators": len(classes.collaborators(scheduler)),
        "max_collaborators": max(map(len, counts.values())),
    }
    details["collaborators"] = {
        name: f"{len(each)}: {', '.join(each)}"
        for name, each in sorted(counts.items(), key=lambda item: -len(item[1]))
        if len(each) >= MANY_COLLABORATORS
    }


def main() -> None:
    """Print the figures of this checkout, and what they count."""
    report = measure(ROOT)
    for name, (title, bound) in FIGURES.items():
        goal = "" if bound is None else f"  (at most {bound})"
        print(f"{report.figures[name]:7,}  {title}{goal}")
    for title, entries in report.details.items():
        print(f"\n{title}", *(f"  {name}: {entry}" for name, entry in entries.items()), sep="\n")


if __name__ == "__main__":
    main()

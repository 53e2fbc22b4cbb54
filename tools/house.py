"""Figures by which the layout of the code is judged, for one checkout or for several side by side.

    python -m tools.house                    # this directory
    python -m tools.house BEFORE AFTER       # before and after a re-layout
    python -m tools.house --details          # also what the figures count
    python -m tools.house --json

Reads source files only (with `ast`) and imports nothing but the standard library, so that it runs
on any checkout. Nothing depends on where modules are within their packages: the scheduler's core
is the sub-package that defines the class `Scheduler`, and `Sequence` is looked up in it.

- Module: a `.py` file outside tests, `__init__.py` included, generated `*_pb2*` excluded. The lines
  of other generated modules, which begin with `# Generated`, do not count.
- Constructor parameters: those of `__init__` besides `self`; of a dataclass, its init fields.
- Value: an enumeration, exception, named tuple, typed dictionary or frozen dataclass, or a class
  whose name ends in `Config`, `Options` or `Settings`.
- Collaborator of a class: a class of this project that is not a value and that annotates a
  constructor parameter or is constructed in the constructor. Elements of containers and callbacks
  do not count.
- Import circle: modules that import one another. Imports in functions and under `TYPE_CHECKING`
  count; importing a submodule does not count as importing its package.
"""

import argparse
import ast
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

SOURCE_ROOTS = (".", "kernels", "client", "protos")
"""Folders of a checkout that are on the import path."""
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "build", "dist", "site", "venv"}
NATIVE_SUFFIXES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
CONFIGURATION_SUFFIXES = ("Config", "Options", "Settings")
VALUE_BASES = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "NamedTuple", "TypedDict"}
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


# Sources.


@dataclass(frozen=True)
class Module:
    """One Python module of a checkout."""

    name: str
    """As it is imported."""
    file: Path
    """Relative to the checkout."""
    tree: ast.Module
    num_lines: int

    @property
    def is_package(self) -> bool:
        """Whether it is the `__init__` of a package."""
        return self.file.name == "__init__.py"


def python_files(checkout: Path) -> Iterator[Path]:
    """Python files outside tests, relative to the checkout; no generated ones."""
    for path, folders, files in os.walk(checkout):
        folder = Path(path)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in SKIPPED_FOLDERS
            and not (folder == checkout and name == "tests")
            and not (folder / name / "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            if name.endswith(".py") and "_pb2" not in name:
                yield (folder / name).relative_to(checkout)


def module_name(file: Path) -> str:
    """The name by which a file, relative to the checkout, is imported."""
    parts = file.with_suffix("").parts
    if len(parts) > 1 and parts[0] in SOURCE_ROOTS:
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_modules(checkout: Path) -> dict[str, Module]:
    """All modules of a checkout outside tests, by name."""
    modules = {}
    for file in python_files(checkout):
        text = (checkout / file).read_text(encoding="utf-8")
        name = module_name(file)
        num_lines = 0 if text.startswith("# Generated") else text.count("\n")
        modules[name] = Module(name, file, ast.parse(text, str(file)), num_lines)
    return modules


# Imports.


def imported_names(module: Module) -> Iterator[tuple[str, str, str | None]]:
    """(bound name, module, name within it or None) of each import anywhere in a module."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name, None
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*base, *filter(None, [source])])
            for alias in node.names:
                yield alias.asname or alias.name, source, alias.name


def import_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """The modules that each one imports."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, module in modules.items():
        for _, source, member in imported_names(module):
            target = f"{source}.{member}" if f"{source}.{member}" in modules else source
            if target in modules and target != name:
                graph[name].add(target)
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for root in graph:
        if root in index:
            continue
        # A stack of our own: import chains may be longer than Python's recursion limit.
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    work.append((target, iter(sorted(graph[target]))))
                    break
                if target in stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    component = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    if len(component) > 1:
                        found.append(sorted(component))
    return sorted(found)


# Classes.

ClassKey = tuple[str, str]
"""A class's module and name."""


@dataclass
class Classes:
    """The classes of a checkout, and what names mean in each module."""

    modules: Mapping[str, Module]
    nodes: dict[ClassKey, ast.ClassDef] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = {
            (name, node.name): node
            for name, module in self.modules.items()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
        }

    @cached_property
    def _imports(self) -> dict[str, dict[str, tuple[str, str | None]]]:
        return {
            name: {bound: (source, member) for bound, source, member in imported_names(module)}
            for name, module in self.modules.items()
        }

    def resolve(self, module: str, name: str) -> ClassKey | None:
        """The class of ours that a (dotted) name in a module means; None if it is none."""
        first, _, rest = name.partition(".")
        seen = set()
        while module in self.modules and (module, first) not in seen:
            seen.add((module, first))
            if not rest and (module, first) in self.nodes:
                return module, first
            source, member = self._imports[module].get(first, ("", None))
            if not source:
                return None
            target = f"{source}.{member}" if member else source
            if target in self.modules and rest:
                module, (first, _, rest) = target, rest.partition(".")
            elif member:
                module, first = source, member
            else:
                return None
        return None

    def bases(self, key: ClassKey) -> Iterator[tuple[str, ClassKey | None]]:
        """Name and, where it is ours, class of each base."""
        for base in self.nodes[key].bases:
            target = base.value if isinstance(base, ast.Subscript) else base
            dotted = ast.unparse(target)
            yield dotted.rpartition(".")[2], self.resolve(key[0], dotted)

    def is_value(self, key: ClassKey) -> bool:
        """Whether a class only carries data, or is an exception."""
        decorator = self._dataclass_decorator(key)
        if key[1].endswith(CONFIGURATION_SUFFIXES) or _has_flag(decorator, "frozen"):
            return True
        return any(
            name in VALUE_BASES
            or name.endswith(("Error", "Exception", "Warning"))
            or (base is not None and base != key and self.is_value(base))
            for name, base in self.bases(key)
        )

    def _dataclass_decorator(self, key: ClassKey) -> ast.expr | None:
        for decorator in self.nodes[key].decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(target).rpartition(".")[2] == "dataclass":
                return decorator
        return None

    def method(self, key: ClassKey, name: str) -> tuple[str, ast.FunctionDef] | None:
        """A method of a class or of its bases, and the module that it is in."""
        for node in self.nodes[key].body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return key[0], node
        for _, base in self.bases(key):
            if base is not None and base != key and (found := self.method(base, name)):
                return found
        return None

    def parameters(self, key: ClassKey) -> list[tuple[str, str, ast.expr | None]]:
        """(name, module, annotation) of the constructor's parameters."""
        if found := self.method(key, "__init__"):
            module, node = found
            spec = node.args
            arguments = [*spec.posonlyargs, *spec.args][1:] + spec.kwonlyargs
            return [(each.arg, module, each.annotation) for each in arguments]
        if self._dataclass_decorator(key) is None:
            return []
        inherited = [
            parameter
            for _, base in self.bases(key)
            if base is not None and base != key
            for parameter in self.parameters(base)
        ]
        own = [
            (node.target.id, key[0], node.annotation)
            for node in self.fields(key)
            if isinstance(node.target, ast.Name) and not _is_false(_field_option(node, "init"))
        ]
        names = {name for name, _, _ in own}
        return [each for each in inherited if each[0] not in names] + own

    def fields(self, key: ClassKey) -> list[ast.AnnAssign]:
        """The annotated fields in a class's body."""
        return [
            node
            for node in self.nodes[key].body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and "ClassVar" not in ast.unparse(node.annotation)
        ]

    def collaborators(self, key: ClassKey) -> list[str]:
        """By name; alternatives for one place (`A | B`, `A() if x else B()`) count as one."""
        found = [
            self._classes_in(module, annotation)
            for _, module, annotation in self.parameters(key)
            if annotation is not None
        ]
        for module, node in self._constructions(key):
            targets = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
            keys = [
                self.resolve(module, ast.unparse(target.func))
                for target in targets
                if isinstance(target, ast.Call) and isinstance(target.func, ast.Name)
            ]
            found.append(sorted({each for each in keys if each and not self.is_value(each)}))
        names = {" | ".join(name for _, name in keys) for keys in found if keys}
        return sorted(names - {key[1]})

    def constructed(self, key: ClassKey) -> list[ClassKey]:
        """The collaborators that a class makes itself."""
        keys = {
            each
            for module, node in self._constructions(key)
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
            if (each := self.resolve(module, call.func.id)) and not self.is_value(each)
        }
        return sorted(keys)

    def _constructions(self, key: ClassKey) -> Iterator[tuple[str, ast.expr]]:
        """Calls, and choices between calls, in a constructor, and the module they are in."""
        bodies: list[tuple[str, ast.AST]] = []
        for name in ("__init__", "__post_init__"):
            if found := self.method(key, name):
                bodies.append(found)
        if self.method(key, "__init__") is None:
            for each in self.fields(key):
                factory = _field_option(each, "default_factory")
                if isinstance(factory, ast.Name):
                    yield key[0], ast.Call(func=factory, args=[], keywords=[])
        for module, body in bodies:
            chosen: set[int] = set()
            for node in ast.walk(body):
                if isinstance(node, ast.IfExp):
                    chosen |= {id(node.body), id(node.orelse)}
                    yield module, node
                elif isinstance(node, ast.Call) and id(node) not in chosen:
                    yield module, node

    def _classes_in(self, module: str, annotation: ast.expr) -> list[ClassKey]:
        """The classes, but values, that an annotation names: alone, in a union, or as a string."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                return self._classes_in(module, ast.parse(annotation.value, mode="eval").body)
            except SyntaxError:
                return []
        if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
            parts = [annotation.left, annotation.right]
            keys = [key for part in parts for key in self._classes_in(module, part)]
            return sorted(set(keys))
        if isinstance(annotation, ast.Subscript):
            head = ast.unparse(annotation.value).rpartition(".")[2]
            inner = annotation.slice if head == "Optional" else annotation.value
            return self._classes_in(module, inner)
        if isinstance(annotation, ast.Name | ast.Attribute):
            name = ast.unparse(annotation)
            if key := self.resolve(module, name):
                return [] if self.is_value(key) else [key]
            if alias := self._alias(module, name):
                return self._classes_in(*alias)
        return []

    def _alias(self, module: str, name: str) -> tuple[str, ast.expr] | None:
        """What a type alias of ours stands for, and the module that defines it."""
        source, member = self._imports[module].get(name, (module, name))
        if source not in self.modules or member is None:
            return None
        if source != module:
            return self._alias(source, member)
        for node in self.modules[module].tree.body:
            if isinstance(node, ast.Assign):
                if ast.unparse(node.targets[0]) == name and _is_type(node.value):
                    return module, node.value
            elif (
                isinstance(node, ast.AnnAssign)
                and ast.unparse(node.annotation) == "TypeAlias"
                and ast.unparse(node.target) == name
                and node.value is not None
            ):
                return module, node.value
        return None

    def find(self, name: str, package: str) -> ClassKey | None:
        """The class of this name in a package, in the shallowest module that defines one."""
        keys = [key for key in self.nodes if key[1] == name and f"{key[0]}.".startswith(package)]
        return min(keys, key=lambda key: (key[0].count("."), key), default=None)


def _is_type(node: ast.expr) -> bool:
    """Whether an assigned value may be a type: a name, a string or a union of them."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr) and _is_type(node.left) and _is_type(node.right)
    return isinstance(node, ast.Name | ast.Attribute | ast.Constant)


def _has_flag(decorator: ast.expr | None, name: str) -> bool:
    return isinstance(decorator, ast.Call) and any(
        each.arg == name and isinstance(each.value, ast.Constant) and each.value.value is True
        for each in decorator.keywords
    )


def _field_option(node: ast.AnnAssign, name: str) -> ast.expr | None:
    """An argument of `dataclasses.field`, where a field has it."""
    if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith("field"):
        for each in node.value.keywords:
            if each.arg == name:
                return each.value
    return None


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


# Writers of a class's fields.


def assigned_attributes(module: Module) -> Iterator[tuple[str, str]]:
    """(receiver, attribute) of each assignment to an attribute in a module."""
    for node in ast.walk(module.tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
            targets = [node.target]
        elif isinstance(node, ast.With | ast.AsyncWith):
            targets = [item.optional_vars for item in node.items if item.optional_vars]
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple | ast.List):
                targets += target.elts
            elif isinstance(target, ast.Starred):
                targets.append(target.value)
            elif isinstance(target, ast.Attribute):
                yield ast.unparse(target.value), target.attr


def writers(
    modules: Iterable[Module], owner: ClassKey, fields: Iterable[str]
) -> dict[str, list[str]]:
    """The modules that assign each field, that of its class included.

    `self.field` elsewhere is another class's own field, and does not count.
    """
    found: dict[str, set[str]] = {name: set() for name in fields}
    for module in modules:
        for receiver, attribute in assigned_attributes(module):
            if attribute in found and (receiver != "self" or module.name == owner[0]):
                found[attribute].add(module.name)
    return {name: sorted(names) for name, names in found.items()}


def unambiguous_fields(classes: Classes, owner: ClassKey, package: str) -> list[str]:
    """The fields of a class that no other class in the package has: an assignment to one of them
    is one to an instance of the class."""
    other: set[str] = set()
    for key, node in classes.nodes.items():
        if key == owner or not key[0].startswith(package):
            continue
        other |= {ast.unparse(each.target) for each in classes.fields(key)}
        other |= {
            each.attr
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and ast.unparse(each.value) == "self"
        }
    return [
        name for each in classes.fields(owner) if (name := ast.unparse(each.target)) not in other
    ]


# The table.


@dataclass(frozen=True)
class Report:
    """The figures of one checkout, and what they count."""

    checkout: str
    figures: dict[str, int | None]
    """By name; None where what they count was not found."""
    details: dict[str, dict[str, object]]


def measure(checkout: Path) -> Report:
    """The figures of a checkout."""
    modules = read_modules(checkout)
    classes = Classes(modules)
    figures: dict[str, int | None] = dict.fromkeys(FIGURES)
    details: dict[str, dict[str, object]] = {}
    if scheduler := classes.find("Scheduler", "scheduler_service."):
        core = ".".join(scheduler[0].split(".")[:2])
        in_core = _within(modules, core)
        figures["core_modules"] = len(in_core)
        _measure_collaborators(classes, scheduler, in_core, figures, details)
        if sequence := classes.find("Sequence", f"{core}."):
            own = unambiguous_fields(classes, sequence, f"{core}.")
            written = writers(in_core, sequence, [*SEQUENCE_FIELDS, *own])
            for name in SEQUENCE_FIELDS:
                figures[f"{name}_writers"] = len(written[name])
            figures["field_writers"] = max(map(len, written.values()))
            details["fields of Sequence assigned in several modules"] = {
                name: ", ".join(names) for name, names in written.items() if len(names) > 1
            }
    found = circles(import_graph(modules))
    details["import circles"] = {
        str(index): " - ".join(each) for index, each in enumerate(found, 1)
    }
    lines = Counter[str]()
    for module in modules.values():
        lines[str(module.file.parts[0])] += module.num_lines
    details["Python lines"] = dict(lines.most_common())
    native = [
        file
        for file in (checkout / "kernels").rglob("*")
        if file.suffix in NATIVE_SUFFIXES and not SKIPPED_FOLDERS.intersection(file.parts)
    ]
    kernels = sum(module.file.parts[0] == "kernels" for module in modules.values())
    figures |= {
        "frontend_modules": len(_within(modules, "scheduler_service.frontend")),
        "worker_modules": len(_within(modules, "worker_service")),
        "kernel_modules": kernels,
        "kernel_files": kernels + len(native),
        "import_circles": len(found),
        "lines": lines.total(),
    }
    return Report(str(checkout), figures, details)


def _within(modules: Mapping[str, Module], package: str) -> list[Module]:
    return [each for name, each in modules.items() if f"{name}.".startswith(f"{package}.")]


def _measure_collaborators(
    classes: Classes,
    scheduler: ClassKey,
    in_core: Iterable[Module],
    figures: dict[str, int | None],
    details: dict[str, dict[str, object]],
) -> None:
    """Add the figures of `Scheduler`'s collaborators, and those of all classes in the core."""
    entangled = {
        key[1]: len(classes.parameters(key))
        for key in classes.constructed(scheduler)
        if len(classes.collaborators(key)) >= MIN_ENTANGLED
    }
    names = {module.name for module in in_core}
    keys = [key for key in classes.nodes if key[0] in names and not classes.is_value(key)]
    counts = {f"{key[0]}.{key[1]}": classes.collaborators(key) for key in keys}
    most = max(map(len, counts.values()))
    figures |= {
        "scheduler_collaborators": len(classes.collaborators(scheduler)),
        "entangled": len(entangled),
        "entangled_parameters": sum(entangled.values()),
        "max_collaborators": most,
        "above_max": sum(len(each) > MAX_COLLABORATORS for each in counts.values()),
    }
    details["parameters of what Scheduler constructs"] = dict(entangled)
    details["collaborators"] = {
        name: f"{len(each)}: {', '.join(each)}"
        for name, each in sorted(counts.items(), key=lambda item: -len(item[1]))
        if len(each) > min(MAX_COLLABORATORS, most - 1)
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
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    options = parser.parse_args()
    for checkout in options.checkouts:
        if not (checkout / "scheduler_service").is_dir():
            parser.error(f"expected a checkout with scheduler_service in it, got {checkout}")
    reports = [measure(checkout) for checkout in options.checkouts]
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
        return
    print(table(reports))
    for report in reports if options.details else []:
        print(f"\n{report.checkout}")
        for title, entries in report.details.items():
            print(f"  {title}")
            print("".join(f"    {name}: {entry}\n" for name, entry in entries.items()), end="")


if __name__ == "__main__":
    main()

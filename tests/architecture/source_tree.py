"""The modules and classes of a checkout, read with `ast`: nothing is imported.

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

import ast
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE_ROOTS = (".", "kernels", "client", "protos")
"""Folders of a checkout that are on the import path."""
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "build", "dist", "site", "venv"}
VALUE_NAMES = ("Config", "Options", "Settings", "Error", "Exception", "Warning")
VALUE_BASES = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "NamedTuple", "TypedDict"}


@dataclass(frozen=True)
class Module:
    """One Python module of a checkout."""

    name: str
    """The name by which it is imported."""
    file: Path
    """Relative to the checkout."""
    tree: ast.Module
    num_lines: int
    imports: dict[str, tuple[str, str | None]]
    """The module, and the name within it or None, by bound name."""


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


def read_modules(checkout: Path) -> dict[str, Module]:
    """All modules of a checkout outside tests, by name."""
    modules = {}
    for file in python_files(checkout):
        text = (checkout / file).read_text(encoding="utf-8")
        parts = file.with_suffix("").parts
        parts = parts[1:] if len(parts) > 1 and parts[0] in SOURCE_ROOTS else parts
        package = parts[:-1]
        name = ".".join(package if parts[-1] == "__init__" else parts)
        num_lines = 0 if text.startswith("# Generated") else text.count("\n")
        tree = ast.parse(text, str(file))
        modules[name] = Module(name, file, tree, num_lines, _imports(tree, package))
    return modules


def _imports(tree: ast.Module, package: tuple[str, ...]) -> dict[str, tuple[str, str | None]]:
    imports: dict[str, tuple[str, str | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imports[alias.asname or alias.name.partition(".")[0]] = alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                imports[alias.asname or alias.name] = source, alias.name
    return imports


# Imports.


def import_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """The modules that each one imports."""
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        targets = {
            f"{source}.{member}" if f"{source}.{member}" in modules else source
            for source, member in module.imports.values()
        }
        graph[name] = targets & modules.keys() - {name}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """The sets of more than one node that can all be reached from one another."""
    reachable = {}
    for root in graph:
        found: set[str] = set()
        todo = [root]
        while todo:
            new = graph[todo.pop()] - found
            found |= new
            todo += new
        reachable[root] = found
    in_circles = [node for node in graph if node in reachable[node]]
    return sorted(
        {tuple(sorted(n for n in reachable[root] if root in reachable[n])) for root in in_circles}
    )


# Classes.

ClassKey = tuple[str, str]
"""A class's module and name."""


class Classes:
    """The classes of a checkout, and what names mean in each module."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.modules = modules
        self.nodes: dict[ClassKey, ast.ClassDef] = {}
        self.aliases: dict[ClassKey, ast.expr] = {}
        """Type aliases: `X: TypeAlias = A | B`, and plain assignments of such values."""
        for name, module in modules.items():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    self.nodes[name, node.name] = node
            for node in module.tree.body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                    self.aliases[name, ast.unparse(target)] = node.value

    def resolve(self, module: str, name: str) -> ClassKey | None:
        """The module that defines a (dotted) name, class or alias, and its name there."""
        first, _, rest = name.partition(".")
        seen = set()
        while module in self.modules and (module, first) not in seen:
            seen.add((module, first))
            if not rest and ((module, first) in self.nodes or (module, first) in self.aliases):
                return module, first
            source, member = self.modules[module].imports.get(first, ("", None))
            target = f"{source}.{member}" if member else source
            if target in self.modules and rest:
                module, (first, _, rest) = target, rest.partition(".")
            elif member:
                module, first = source, member
            else:
                return None
        return None

    def bases(self, key: ClassKey) -> Iterator[tuple[str, ClassKey | None]]:
        """Name and, if it is of this project, class of each base."""
        for base in self.nodes[key].bases:
            dotted = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            found = self.resolve(key[0], dotted)
            is_class = found in self.nodes and found != key
            yield dotted.rpartition(".")[2], found if is_class else None

    def is_value(self, key: ClassKey) -> bool:
        """Whether a class only carries data, or is an exception."""
        names = [key[1]]
        for name, base in self.bases(key):
            names.append(name)
            if name in VALUE_BASES or (base is not None and self.is_value(base)):
                return True
        return "frozen=True" in self._dataclass(key) or any(
            name.endswith(VALUE_NAMES) for name in names
        )

    def _dataclass(self, key: ClassKey) -> str:
        """The text of a class's dataclass decorator; empty if it has none."""
        decorators = map(ast.unparse, self.nodes[key].decorator_list)
        return next((text for text in decorators if text.startswith("dataclass")), "")

    def method(self, key: ClassKey, name: str) -> tuple[str, ast.FunctionDef] | None:
        """A method of a class or of its bases, and the module that it is in."""
        for node in self.nodes[key].body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return key[0], node
        inherited = (self.method(base, name) for _, base in self.bases(key) if base is not None)
        return next(filter(None, inherited), None)

    def parameters(self, key: ClassKey) -> dict[str, tuple[str, ast.expr | None]]:
        """Module and annotation of each of the constructor's parameters."""
        if found := self.method(key, "__init__"):
            module, node = found
            arguments = [*node.args.posonlyargs, *node.args.args][1:] + node.args.kwonlyargs
            return {each.arg: (module, each.annotation) for each in arguments}
        parameters: dict[str, tuple[str, ast.expr | None]] = {}
        if self._dataclass(key):
            for _, base in self.bases(key):
                parameters |= self.parameters(base) if base is not None else {}
            for name, field in self.fields(key).items():
                if "init=False" not in ast.unparse(field):
                    parameters[name] = key[0], field.annotation
        return parameters

    def fields(self, key: ClassKey) -> dict[str, ast.AnnAssign]:
        """The annotated fields in a class's body, by name."""
        return {
            node.target.id: node
            for node in self.nodes[key].body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and "ClassVar" not in ast.unparse(node.annotation)
        }

    def collaborators(self, key: ClassKey) -> list[str]:
        """Collaborators' names; alternatives (`A | B`, `A() if x else B()`) count once."""
        places = [self._classes_in(*each) for each in self.parameters(key).values()]
        names = {
            " | ".join(name for _, name in sorted(keys))
            for keys in (*places, *self.constructed(key))
            if keys
        }
        return sorted(names - {key[1]})

    def constructed(self, key: ClassKey) -> Iterator[set[ClassKey]]:
        """The classes that a constructor calls, alternatives (`A() if x else B()`) together, and
        those that are default factories of fields."""
        for name in ("__init__", "__post_init__"):
            if not (found := self.method(key, name)):
                continue
            module, body = found
            alternatives: set[ast.expr] = set()
            for node in ast.walk(body):
                if isinstance(node, ast.IfExp):
                    alternatives |= {node.body, node.orelse}
                    yield self._called(module, node.body) | self._called(module, node.orelse)
                elif isinstance(node, ast.Call) and node not in alternatives:
                    yield self._called(module, node)
        if self.method(key, "__init__") is None:
            for field in self.fields(key).values():
                for option in field.value.keywords if isinstance(field.value, ast.Call) else ():
                    if option.arg == "default_factory":
                        yield self._classes_in(key[0], option.value)

    def _called(self, module: str, node: ast.expr) -> set[ClassKey]:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._classes_in(module, node.func)
        return set()

    def _classes_in(self, module: str, annotation: ast.expr | None) -> set[ClassKey]:
        """The classes, except values, that an annotation names: alone, in a union, as a string or
        as an alias."""
        match annotation:
            case ast.Constant(value=str(text)):
                return self._classes_in(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(left, ast.BitOr(), right):
                return self._classes_in(module, left) | self._classes_in(module, right)
            case ast.Subscript(ast.Name("Optional"), inner):
                return self._classes_in(module, inner)
            case ast.Subscript(generic):
                return self._classes_in(module, generic)
            case ast.Name() | ast.Attribute():
                key = self.resolve(module, ast.unparse(annotation))
                if key in self.nodes:
                    return set() if self.is_value(key) else {key}
                if key in self.aliases:
                    return self._classes_in(key[0], self.aliases[key])
        return set()

    def find(self, name: str, package: str) -> ClassKey | None:
        """The class of this name in a package, in the shallowest module that defines one."""
        keys = [key for key in self.nodes if key[1] == name and f"{key[0]}.".startswith(package)]
        return min(keys, key=lambda key: (key[0].count("."), key), default=None)

"""The folders of the worker form layers, and so do those of its loader, models and runner."""

from collections.abc import Iterable, Mapping

import pytest

from tests.architecture.source_tree import circles, import_graph, read_modules
from tools.launch import ROOT


def graph_of_folders(graph: Mapping[str, Iterable[str]], package: str) -> dict[str, set[str]]:
    """The import graph of a package's folders, and of its modules in no folder."""

    def part_of(module: str) -> str:
        return module.removeprefix(f"{package}.").split(".")[0]

    parts: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if module.startswith(f"{package}."):
            others = {part_of(name) for name in imported if name.startswith(f"{package}.")}
            parts.setdefault(part_of(module), set()).update(others - {part_of(module)})
    return parts


@pytest.mark.parametrize(
    "package",
    [
        "worker_service",
        "worker_service.loader",
        "worker_service.models",
        "worker_service.runner",
    ],
)
def test_folders_form_layers(package: str) -> None:
    assert circles(graph_of_folders(import_graph(read_modules(ROOT)), package)) == []


def test_the_layers_of_the_runner_are_those_that_its_docstring_lists() -> None:
    graph = graph_of_folders(import_graph(read_modules(ROOT)), "worker_service.runner")
    below: set[str] = set()
    for folder in ("state", "batch", "drafting", "host", "device"):
        assert graph[folder] <= below, folder
        below.add(folder)

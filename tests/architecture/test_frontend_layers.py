"""The frontend's folders form layers, and it and the core's process know nothing of each other."""

import pytest

from tests.architecture.source_tree import circles, import_graph, read_modules
from tests.architecture.test_worker_layers import graph_of_folders
from tools.launch import ROOT

FRONTEND = "scheduler_service.frontend"
CORE = ("scheduler_service.core", "scheduler_service.core_service")


@pytest.mark.parametrize("package", [FRONTEND, f"{FRONTEND}.http", CORE[1], "scheduler_service"])
def test_the_folders_of_the_scheduler_service_form_layers(package: str) -> None:
    assert circles(graph_of_folders(import_graph(read_modules(ROOT)), package)) == []


def _is_in(module: str, *packages: str) -> bool:
    return f"{module}.".startswith(tuple(f"{package}." for package in packages))


def test_the_frontend_imports_nothing_of_the_core_and_the_core_nothing_of_it() -> None:
    graph = import_graph(read_modules(ROOT))
    arrows = [(module, name) for module, imported in graph.items() for name in imported]
    assert any(_is_in(module, FRONTEND) and _is_in(name, FRONTEND) for module, name in arrows)
    assert any(_is_in(module, *CORE) and _is_in(name, *CORE) for module, name in arrows)
    assert [
        (module, name)
        for module, name in arrows
        if (_is_in(module, FRONTEND) and _is_in(name, *CORE))
        or (_is_in(module, *CORE) and _is_in(name, FRONTEND))
    ] == []

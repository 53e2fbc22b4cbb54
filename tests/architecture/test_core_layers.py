"""The parts of the scheduler's core form layers, and only some of them speak of blocks."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.architecture.source_tree import circles, import_graph, read_modules
from tools.launch import ROOT

CORE = "scheduler_service.core"

SPEAKS_OF_BLOCKS = {
    "kv_cache": "allocates them",
    "step_plan.py": "the plan, whose columns name them",
    "scheduling/batch.py": "fills the plan's columns",
    "config.py": "limits as users state them, and capacities as workers report them",
    "admission/admission_control.py": "errors that name these limits and capacities",
    "inspection.py": "status pages",
    "scheduler_stats.py": "counters of status pages",
}
"""Files and folders of the core, and why; elsewhere the core counts in tokens."""
BLOCK = re.compile(r"(?i)block(?!ed|ing)")
FLAG = "max_kv_blocks"
"""A user's name for a limit, by which it is read everywhere."""


def part_of(module: str) -> str:
    """The folder or module directly in the core that a module belongs to."""
    return module.removeprefix(f"{CORE}.").split(".")[0]


def graph_of_parts(graph: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """The import graph of the core's folders, and of its modules in no folder."""
    parts: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if module.startswith(f"{CORE}."):
            part = part_of(module)
            others = {part_of(name) for name in imported if name.startswith(f"{CORE}.")}
            parts.setdefault(part, set()).update(others - {part})
    return parts


def lines_about_blocks(core: Path, allowed: Iterable[str]) -> Iterator[str]:
    """Lines with the word outside the allowed files and folders."""
    for file in sorted(core.rglob("*.py")):
        path = file.relative_to(core).as_posix()
        if not any(path == name or path.startswith(f"{name}/") for name in allowed):
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if BLOCK.search(line.replace(FLAG, "")):
                    yield f"{path}:{number}: {line.strip()}"


def test_the_parts_of_the_core_form_layers() -> None:
    assert circles(graph_of_parts(import_graph(read_modules(ROOT)))) == []


def test_the_core_counts_memory_in_tokens_wherever_it_does_not_allocate_or_show_it() -> None:
    assert list(lines_about_blocks(ROOT / "scheduler_service/core", SPEAKS_OF_BLOCKS)) == []


@pytest.mark.parametrize("name", SPEAKS_OF_BLOCKS)
def test_every_exception_is_needed(name: str) -> None:
    others = SPEAKS_OF_BLOCKS.keys() - {name}
    found = lines_about_blocks(ROOT / "scheduler_service/core", others)
    assert any(line.startswith(name) for line in found)

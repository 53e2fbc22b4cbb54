"""The layout of the code keeps its bounds, and its figures count what they say."""

from pathlib import Path

import pytest

from tests.architecture import layout
from tools.launch import ROOT

FILES = {
    "scheduler_service/__init__.py": "",
    "scheduler_service/core/__init__.py": "",
    "scheduler_service/core/scheduler.py": """
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler_service.core.pool import Config, Pool
from scheduler_service.core.queue import Queue

if TYPE_CHECKING:
    from scheduler_service.core.sequence import Sequence

class Scheduler:
    def __init__(self, config: Config, pool: Pool) -> None:
        self.length = 0
        self.queue = Queue(pool, Pool(), limit=3)

    def run(self, sequence: "Sequence") -> None:
        sequence.num_computed += 1
""",
    "scheduler_service/core/pool.py": """
from dataclasses import dataclass

@dataclass(frozen=True)
class Config:
    size: int

class Pool: ...
""",
    "scheduler_service/core/queue.py": """
from scheduler_service.core.pool import Pool

class Queue:
    def __init__(self, pool: Pool, other: "Pool | None", *, limit: int) -> None: ...
""",
    "scheduler_service/core/sequence.py": """
from dataclasses import dataclass

@dataclass
class Sequence:
    length: int
    num_computed: int = 0

    def restart(self) -> None:
        from scheduler_service.core import scheduler

        self.length, self.num_computed = 0, 0
""",
    "scheduler_service/frontend/__init__.py": "",
    "worker_service/runner.py": "# Generated from runner.txt.\n\n",
    "kernels/pagewire_kernels/cpu.py": "\n",
    "kernels/pagewire_kernels/cpu.cpp": "int one;\n",
    "protos/pagewire/v1/step_pb2.py": "x = 1\n",
    "tests/test_it.py": "y = 2\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_every_figure_counts_what_its_title_says(checkout: Path) -> None:
    assert layout.measure(checkout).figures == {
        "core_modules": 5,
        "frontend_modules": 1,
        "worker_modules": 1,
        "kernel_modules": 1,
        "kernel_files": 2,
        "scheduler_collaborators": 2,  # Pool and Queue; the configuration is a value
        "max_collaborators": 2,
        "length_writers": 1,  # the scheduler's own `self.length` is another field
        "num_computed_writers": 2,
        "field_writers": 2,
        "import_circles": 1,  # scheduler and sequence: a type-only import, one in a function
        "lines": sum(
            text.count("\n")
            for name, text in FILES.items()
            if name.startswith("scheduler_service/") or name == "kernels/pagewire_kernels/cpu.py"
        ),
    }


def test_details_name_what_is_counted(checkout: Path) -> None:
    details = layout.measure(checkout).details
    assert details["import circles"] == {
        "1": "scheduler_service.core.scheduler - scheduler_service.core.sequence"
    }
    assert details["fields of Sequence assigned in several modules"] == {
        "num_computed": "scheduler_service.core.scheduler, scheduler_service.core.sequence"
    }


def test_the_layout_of_this_project_keeps_its_bounds() -> None:
    report = layout.measure(ROOT)
    for name, (title, bound) in layout.FIGURES.items():
        found = report.figures[name]
        assert bound is None or found <= bound, f"{title}: {found}\n{report.details}"

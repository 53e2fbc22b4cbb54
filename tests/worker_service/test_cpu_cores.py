"""Usable cores are counted, and threads stay on the CPUs that they are pinned to."""

import os
import threading
from pathlib import Path

import pytest
import torch

from worker_service import cpu_cores
from worker_service.errors import InvalidOption
from worker_service.loader.device import pin_threads

CPUS = sorted(os.sched_getaffinity(0))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_limits_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert cpu_cores.num_usable_cores(tmp_path) == len(CPUS)


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu in CPUS:
        write(tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", "0-255\n")
    assert cpu_cores.num_usable_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"fs/cgroup/cpu.max": "max 100000\n"}, len(CPUS)),
        ({"fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ({"fs/cgroup/cpu.max": "20000 100000\n"}, 1),
        (
            {
                "fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            len(CPUS),
        ),
        (
            {
                "fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "fs/cgroup/cpu/cpu.cfs_period_us": "50000\n",
            },
            1,
        ),
    ],
)
def test_a_containers_quota_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    assert cpu_cores.num_usable_cores(tmp_path) == expected


def test_openmp_threads_sleep_soon_unless_the_user_says_otherwise() -> None:
    environment: dict[str, str] = {}
    cpu_cores.limit_spinning(environment)
    assert environment == {"GOMP_SPINCOUNT": str(cpu_cores.SPIN_COUNT)}
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        environment = {name: "active"}
        cpu_cores.limit_spinning(environment)
        assert environment == {name: "active"}


def test_lists_of_cpus_are_read_in_their_order() -> None:
    text = ",".join(map(str, reversed(CPUS)))
    assert cpu_cores.parse_cpus(text) == tuple(reversed(CPUS))
    assert cpu_cores.parse_cpus(f"{CPUS[0]}-{CPUS[0]}") == (CPUS[0],)


@pytest.mark.parametrize("text", ["", "a", "0-", "-1", "0,,1", "1-0", "100000"])
def test_what_is_no_list_of_our_cpus_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="cpu_affinity"):
        cpu_cores.parse_cpus(text)


def test_the_model_threads_are_pinned_one_to_each_cpu() -> None:
    seen: list[frozenset[int]] = []

    def work() -> None:
        before = cpu_cores.thread_ids()
        pin_threads(CPUS)
        torch.zeros(len(CPUS) << 16).add_(1)
        new = [threading.get_native_id(), *sorted(cpu_cores.thread_ids() - before)]
        seen.extend(frozenset(os.sched_getaffinity(thread)) for thread in new)

    number = torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(number)
    assert seen[0] == {CPUS[0]}, "the one that calls"
    assert set(seen) >= {frozenset({cpu}) for cpu in CPUS}
    assert os.sched_getaffinity(0) == set(CPUS)

"""Usable cores are counted, and threads stay on the CPUs that they are pinned to."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from worker_service import cpu_cores
from worker_service.cpu_cores import CpuShare
from worker_service.errors import InvalidOption
from worker_service.loader.device import pin_threads, set_threads

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


@pytest.mark.parametrize(
    ("count", "parts"),
    [
        (1, ["abcde"]),
        (2, ["ab", "cde"]),
        (5, ["a", "b", "c", "d", "e"]),
        (7, ["a", "b", "c", "d", "e", "a", "b"]),
    ],
)
def test_shares_divide_a_list_and_repeat_where_it_is_too_short(
    count: int, parts: list[str]
) -> None:
    found = [CpuShare(index, count).of("abcde") for index in range(count)]
    assert ["".join(part) for part in found] == parts


def test_the_ranks_of_a_worker_divide_its_share() -> None:
    worker = CpuShare.parse("1/2")
    assert [worker.part(rank, 3) for rank in range(3)] == [CpuShare(i, 6) for i in (3, 4, 5)]


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "0/0", "a/b", "0/2/3"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="cpu_share: expected INDEX/COUNT such as 0/2"):
        CpuShare.parse(text)


def test_a_share_of_a_containers_quota_counts(tmp_path: Path) -> None:
    for cpu in CPUS:
        write(tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu}\n")
    write(tmp_path / "fs/cgroup/cpu.max", "200000 100000\n")
    assert cpu_cores.num_usable_cores(tmp_path, CpuShare(0, 2)) == 1


RESTRICT = """
import os, pathlib, sys, threading
from worker_service import cpu_cores
ended = threading.Event()
threading.Thread(target=ended.wait, daemon=True).start()
cpu_cores.restrict_to(cpu_cores.CpuShare.parse(sys.argv[1]), pathlib.Path(sys.argv[2]))
print([sorted(os.sched_getaffinity(thread)) for thread in sorted(cpu_cores.thread_ids())])
"""


def restricted(share: str, root: Path) -> tuple[list[list[int]], str]:
    """The CPUs of a process's threads, and its log."""
    code = f"import logging; logging.basicConfig(level='INFO')\n{RESTRICT}"
    done = subprocess.run(
        [sys.executable, "-c", code, share, str(root)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_every_thread_of_a_process_keeps_to_its_share_of_the_cores(tmp_path: Path) -> None:
    middle = len(CPUS) // 2
    for index, part in enumerate((CPUS[:middle], CPUS[middle:])):
        threads, log = restricted(f"{index}/2", tmp_path)
        assert threads == [part, part]
        assert f"cores divided share={index}/2 cpus={part}" in log
        assert "WARNING" not in log


def test_threads_of_one_core_are_not_divided(tmp_path: Path) -> None:
    for cpu in CPUS:
        write(tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", "0-255\n")
    threads, log = restricted("1/2", tmp_path)
    assert threads == [CPUS, CPUS]
    assert "WARNING" in log
    assert "more workers than cores num_workers=2 num_cores=1" in log


def test_more_threads_than_cores_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_num_threads()
    try:
        set_threads(1000, 10**9)
        assert torch.get_num_threads() == 1000
    finally:
        torch.set_num_threads(before)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("more threads than cores, which wait for each other: lower --threads")
    assert "num_threads=1000" in warning

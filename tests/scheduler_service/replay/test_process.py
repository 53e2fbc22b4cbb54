"""Recording and replay as processes: a core that is killed, a disk that is full."""

import asyncio
import resource
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pagewire_client import Client, SamplingParams
from tests.support.cluster import Cluster
from tests.support.waiting import until
from tools.launch import environment

WORKER = ["--simulate", "--simulate-vocab-size", "997", "--simulate-gpu-blocks", "24"]


def run(arguments: Sequence[str], **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-m", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def replay(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """By the command line that users have."""
    return run(["pagewire_cli", "replay", *arguments])


def generate(cluster: Cluster, num_requests: int) -> None:
    def one(i: int) -> None:
        params = SamplingParams(max_tokens=8 + i, seed=i, n=1 + i % 3)
        client.generate([5, 6, 7 + i] * (3 + i % 9), params)

    with Client(cluster.frontend_address()) as client, ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(num_requests)))


def test_what_a_killed_core_was_told_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    flags = ["--record", str(path), "--record-plans"]
    with Cluster(tmp_path, worker_flags=WORKER, core_flags=flags) as cluster:
        cluster.start()
        generate(cluster, 20)
        asyncio.run(until(lambda: path.stat().st_size > 0, "what is written twice a second"))
        assert cluster.core is not None
        cluster.core.kill()
        shown = replay(str(path))
        assert shown.returncode == 0, shown.stderr + shown.stdout
        assert " by version " in shown.stdout
        first = path.read_bytes()

        # The next core keeps what there is.
        cluster.start_core()
        cluster.wait_serving()
        generate(cluster, 3)
        cluster.stop()
        assert path.read_bytes() == first
        shown = replay(str(tmp_path / "trace.2.jsonl.gz"))
        assert shown.returncode == 0, shown.stderr
        assert "requests: 3 accepted" in shown.stdout
        assert "notice" not in shown.stdout


def test_a_full_disk_ends_the_recording_and_the_core_serves_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    core_flags = ["--record", str(path), "--log-level", "error"]
    with Cluster(tmp_path, worker_flags=WORKER, core_flags=core_flags) as cluster:
        core = cluster.start_core()
        size = 4096
        # More than this no file can hold that the core writes; its log is one, and must stay short.
        resource.prlimit(core.process.pid, resource.RLIMIT_FSIZE, (size, size))
        cluster.start_frontend()
        cluster.start_worker()
        cluster.wait_serving()
        generate(cluster, 20)
        cluster.stop()
        assert (
            f"ERROR scheduler_service.replay.recording_file recording ended early path={path}"
            in core.log
        )
    assert path.stat().st_size == size
    shown = replay(str(path))
    assert shown.returncode == 0
    assert "notice:   the file ends within a line" in shown.stdout


def test_files_that_cannot_be_read_or_made_end_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("{}\n")
    shown = replay(str(tmp_path / "bad"))
    assert shown.returncode == 2
    assert f"error: {tmp_path}/bad, line 1: not a recording" in shown.stderr
    shown = replay(str(tmp_path / "none"))
    assert shown.returncode == 2
    assert f"error: {tmp_path}/none: No such file" in shown.stderr
    listen = ["--listen", f"unix:{tmp_path}/core.sock"]
    command = ["scheduler_service", "scheduler", *listen, "--record", f"{tmp_path}/none/trace"]
    shown = run(command)
    assert shown.returncode == 2
    assert f"error: --record: {tmp_path}/none/trace: No such file" in shown.stderr

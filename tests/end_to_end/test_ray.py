"""A group of four ranks on a Ray cluster of two nodes: one rank's tokens, whatever is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from tests.support.cluster import Cluster
from tests.support.ray_nodes import RayNodes
from tests.support.requests import Answer, generate_together, inference_stub, request_for
from tools.launch import environment

NUM_TOKENS = 300
LAUNCH = ("--launcher", "ray", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes(cpus_of_head=4, cpus_of_other=2) as nodes:
        yield nodes


def request() -> pb.GenerateRequest:
    return request_for("Once upon a time", temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def rank_processes(core: str) -> dict[int, psutil.Process]:
    """The processes of the ranks that serve a core, wherever they are."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--rank" in words and core in words:
            found[int(words[words.index("--rank") + 1])] = process
    return found


def nodes_of(log: str) -> dict[int, str]:
    """The node on which each rank was started last."""
    return {int(rank): node for rank, node in re.findall(r"starting rank=(\d) node_id=(\w+)", log)}


def generate_disturbed(address: str, disturb: list[Callable[[], object]]) -> Answer:
    """An answer in the course of which this happens, at equal distances."""
    answer, waiting = Answer(), list(disturb)
    with inference_stub(address) as stub:
        for response in stub.Generate(request(), timeout=280):
            answer.add(response)
            num_done = len(disturb) - len(waiting)
            due = (num_done + 1) * NUM_TOKENS // (len(disturb) + 1)
            if waiting and answer.choices and len(answer.token_ids) >= due:
                waiting.pop(0)()
    assert waiting == []
    return answer


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_are_placed_and_survive_the_death_of_one_and_of_a_node(
    nodes: RayNodes, cluster: Cluster, tmp_path: Path
) -> None:
    with inference_stub(cluster.frontend_address()) as stub:
        (alone,) = generate_together(stub, [request()])
    flags = ["--dtype", "float32", "--threads", "1", "--ray-address", nodes.address, *LAUNCH]
    flags += ["--kv-cache-memory", "16MiB"]
    core_flags = ["--max-num-batched-tokens", "256"]
    with Cluster(tmp_path, core_flags=core_flags) as group:
        group.start_core()
        group.start_frontend()
        command = ["worker_service", "--core", group.core_address, "--model", "embedded", *flags]
        # Not `start_worker`, which would have it listen on a unix socket.
        group.start_foreign_worker([sys.executable, "-m", *command])
        group.wait_serving(timeout_s=240)
        launcher = group.workers[0]

        placed = nodes_of(launcher.log)
        assert placed[0] == placed[1] != placed[2] == placed[3]

        before = rank_processes(group.core_address)
        assert sorted(before) == [0, 1, 2, 3]
        disturbed = generate_disturbed(
            group.frontend_address(),
            [before[2].kill, nodes.lose_other],
        )
        assert disturbed.token_ids == alone.token_ids
        assert len(disturbed.token_ids) == NUM_TOKENS
        assert len(set(nodes_of(launcher.log).values())) == 1, "only the head is left"
        assert "actor lost rank=" in launcher.log

        launcher.kill(signal.SIGTERM)
        assert launcher.process.returncode == 0
        assert rank_processes(group.core_address) == {}


def test_a_group_for_which_there_is_no_room_is_refused_after_the_timeout(nodes: RayNodes) -> None:
    flags = ["--ray-address", nodes.address, "--ray-timeout", "1", "--tensor-parallel-size", "64"]
    told = run_launcher(*flags)
    assert "no room for the group after 1 s: 1 times 0 GPU and 64 CPU on one node wanted" in told
    assert re.search(r"has 0 GPU and 4 CPU.*; free are 0 GPU and \d CPU", told)


def run_launcher(*flags: str, **variables: str) -> str:
    """What a launcher that cannot start says."""
    done = subprocess.run(
        [sys.executable, "-m", "worker_service", "--launcher", "ray", *flags],
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_where_there_is_no_cluster_is_told() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        told = run_launcher("--ray-address", address)
    assert f"--ray-address: no Ray cluster at {address}: connection refused" in told
    told = run_launcher("--ray-address", "ray://127.0.0.1:10001")
    assert "--ray-address: expected HOST:PORT of a cluster that this machine belongs to" in told


def test_without_ray_its_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('as if it were not installed')")
    path = f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"
    assert "pip install '.[ray]'" in run_launcher(PYTHONPATH=path)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--device", "cuda:1"], "--device: expected auto, cpu or cuda with --launcher ray"),
        (["--advertise", "host:7620"], "--advertise: expected none with --launcher ray"),
        (["--listen", "unix:/a"], "--listen: expected HOST:PORT with Ray"),
        (["--ray-cpus-per-rank", "0"], "--ray-cpus-per-rank: expected at least 1, got 0"),
    ],
)
def test_what_ray_decides_cannot_be_told(flags: list[str], problem: str) -> None:
    assert problem in run_launcher(*flags)


def test_ranks_end_with_the_command_that_launched_them(nodes: RayNodes, tmp_path: Path) -> None:
    with Cluster(tmp_path) as group:
        group.start_core()
        group.start_frontend()
        flags = ["--launcher", "ray", "--ray-address", nodes.address, "--simulate"]
        command = ["-m", "worker_service", "--core", group.core_address, *flags]
        launcher = group.start_foreign_worker([sys.executable, *command])
        group.wait_serving()
        rank = rank_processes(group.core_address)[0]
        launcher.kill(signal.SIGKILL)
        rank.wait(timeout=60)

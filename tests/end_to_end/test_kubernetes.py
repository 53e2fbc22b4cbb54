"""The commands of the manifests for groups of several machines, as processes on this one."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.cluster import SERVING, Cluster
from tests.support.manifests import containers, overlay
from tests.support.requests import generate, inference_stub, request_for
from tools import launch
from tools.launch import Service
from worker_service.launcher.launcher import free_port

HERE = "127.0.0.1"
FEWER = {"--tensor-parallel-size=8": "--tensor-parallel-size=1"}
"""The pods' GPUs are a CPU each here, so a stage is one rank."""

PODS = (("core", 0), ("frontend", 0), ("worker", 0), ("worker", 1))


class Pods:
    """The group overlay's pods as processes; addresses become loopback ports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._containers = {c.name: c for c in containers(overlay("group"))}
        self._ports: dict[tuple[str, int], int] = {}
        self.processes: list[Service] = []

    def start(self, name: str, index: int) -> None:
        container = self._containers[name]
        words = [self._local(FEWER.get(word, word), index) for word in container.arguments]
        words += ["--log-level", container.variables["PAGEWIRE_LOG_LEVEL"]]
        if name != "core":
            words += ["--core", self._local(container.variables["PAGEWIRE_CORE"], 0)]
        if name == "worker":
            words += ["--model", "embedded", "--dtype", "float32", "--kv-cache-memory", "64MiB"]
        log = self._folder / f"{name}-{index}.log"
        self.processes.append(Service(name, launch.module("pagewire_cli", *words), log))

    def address(self, name: str, index: int = 0) -> str:
        return self._local(f"{HERE}:{self._containers[name].port}", index)

    def wait_for_probes(self, name: str, index: int) -> None:
        """Return when each probe of a pod has found what it asks for."""
        deadline = time.monotonic() + 200
        with grpc.insecure_channel(self.address(name, index)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for _, action in self._containers[name].probes():
                assert action["port"] == self._containers[name].port
                request = health_pb2.HealthCheckRequest(service=action["service"])
                while stub.Check(request, timeout=60, wait_for_ready=True).status != SERVING:
                    assert time.monotonic() < deadline, self.logs()
                    assert all(process.process.poll() is None for process in self.processes)
                    time.sleep(0.05)

    def logs(self) -> list[str]:
        return [process.log for process in self.processes]

    def _local(self, word: str, index: int) -> str:
        """A word of a command line, with this machine's address instead of others'."""
        if word.startswith("--node-rank="):
            return f"--node-rank={index}"
        found = re.fullmatch(r"(--[a-z-]+=)?([\w.-]+):(\d+)", word)
        if found is None:
            return word
        flag, host, port = found.groups()
        # What listens everywhere is one pod's own, any other address the same for all.
        of_pod = (port, index if host in ("0.0.0.0", HERE) else 0)
        number = self._ports.setdefault(of_pod, free_port(HERE))
        return f"{flag or ''}{HERE}:{number}"


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path)
    try:
        yield pods
    finally:
        for process in pods.processes:
            process.process.terminate()
        for process in pods.processes:
            process.wait()


def test_two_pods_make_one_group_and_every_probe_finds_what_it_asks_for(
    pods: Pods, cluster: Cluster
) -> None:
    for name, index in PODS:
        pods.start(name, index)
    for name, index in PODS:
        pods.wait_for_probes(name, index)
    request = request_for("27 + 45 =", temperature=0, max_tokens=12)
    with inference_stub(pods.address("frontend")) as stub:
        answer = generate(stub, request)
    with inference_stub(cluster.frontend_address()) as stub:
        assert answer.token_ids == generate(stub, request).token_ids
    assert "num_ranks=2" in pods.processes[0].log

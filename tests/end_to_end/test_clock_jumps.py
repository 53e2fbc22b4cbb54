"""The wall clocks of all processes jump, each by itself; only the expiry of keys follows them."""

import json
import mmap
import os
import shlex
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

import grpc
import pytest

from pagewire_client import Client, NotAuthorized
from scheduler_service.frontend.auth import hash_of
from tests.support.cluster import Cluster
from tests.support.requests import inference_stub, request_for
from tests.support.streaming_client import EVERY, TIMEOUT_S
from tests.support.waiting import wait_until
from tests.support.worker_flags import SMALL_CACHE
from tools.launch import ROOT, environment, module

HOUR, YEAR = 3600, 365 * 24 * 3600
CXX = shlex.split(os.environ.get("CXX", "c++"))

pytestmark = pytest.mark.skipif(shutil.which(CXX[0]) is None, reason="needs a C++ compiler")


class Clocks:
    """The wall clock of each process, as an offset in seconds from the system's."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._folder = folder
        self._library = library
        self._offsets: dict[str, mmap.mmap] = {}

    def variables(self, name: str) -> Mapping[str, str]:
        """The environment of a process, whose clock keeps its offset over restarts."""
        file = self._folder / f"{name}.clock"
        if name not in self._offsets:
            file.write_bytes(bytes(8))
            with file.open("r+b") as opened:
                self._offsets[name] = mmap.mmap(opened.fileno(), 8)
        return {"LD_PRELOAD": str(self._library), "CLOCK_FILE": str(file)}

    def jump(self, seconds: int, *names: str) -> None:
        """Move the clocks of some processes; of all if none is named."""
        for name in names or self._offsets:
            offset = self._offsets[name]
            [former] = struct.unpack("<q", offset[:8])
            offset[:8] = struct.pack("<q", former + seconds)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("clock") / "moved_clock.so"
    source = ROOT / "tests/support/moved_clock.cpp"
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*CXX, *options, "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def clocks(tmp_path: Path, library: Path) -> Clocks:
    return Clocks(tmp_path, library)


@pytest.fixture
def cluster(tmp_path: Path, clocks: Clocks) -> Iterator[Cluster]:
    with Cluster(tmp_path, worker_flags=SMALL_CACHE, variables=clocks.variables) as cluster:
        yield cluster


NODE_PROGRAM = f"""
import {{ Client }} from "{ROOT}/client/node/src/client.js";
const client = new Client(process.argv[1]);
const params = {{ maxTokens: 400, ignoreEos: true, temperature: 0.8, seed: 1 }};
let text = "";
for await (const delta of client.stream("One day", params, {{ timeoutMs: {TIMEOUT_S * 1000} }})) {{
  text += delta.text;
}}
console.log(JSON.stringify(text));
client.close();
"""


class Clients:
    """Programs that stream requests to an address, in processes with clocks of their own."""

    def __init__(self, address: str, clocks: Clocks) -> None:
        self._address = address
        self._clocks = clocks
        self._processes: list[subprocess.Popen[str]] = []
        self._num_tokens = 0
        self._start("python", module("tests.support.streaming_client", self._address))
        self._start("node", ["node", "--input-type=module", "--eval", NODE_PROGRAM, self._address])

    def _start(self, name: str, command: list[str]) -> None:
        variables = environment() | dict(self._clocks.variables(name))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
        self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def wait_tokens(self) -> None:
        """Wait until the one in Python has received `EVERY` more tokens."""
        output = self._processes[0].stdout
        assert output is not None
        wanted = self._num_tokens + EVERY
        while self._num_tokens < wanted:
            self._num_tokens = int(output.readline())

    def answers(self) -> list[str]:
        """All that each has received, once it has ended."""
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in self._processes]
        assert [process.returncode for process in self._processes] == [0, 0]
        return [output.splitlines()[-1] for output in outputs]


def test_no_stream_lease_or_retry_notices(cluster: Cluster, clocks: Clocks) -> None:
    cluster.core_flags += ["--lease-ms", str(HOUR * 1000 // 6)]
    cluster.start()
    address = cluster.frontend_address()
    with Clients(address, clocks) as clients:
        undisturbed = clients.answers()
    with Clients(address, clocks) as clients:
        for seconds, names in [
            (HOUR, ["core"]),
            (-HOUR, ["worker-0"]),
            (HOUR, ["frontend-0"]),
            (-HOUR, ["python", "node"]),
        ]:
            clients.wait_tokens()
            clocks.jump(seconds, *names)
        clients.wait_tokens()
        cluster.workers[0].kill()
        clocks.jump(2 * HOUR)
        cluster.start_worker()
        clients.wait_tokens()
        cluster.frontends[0].kill()
        clocks.jump(2 * HOUR)
        cluster.restart_frontend(0)
        clients.wait_tokens()
        clocks.jump(-YEAR)
        clients.wait_tokens()
        clocks.jump(2 * YEAR)
        assert clients.answers() == undisturbed
    assert "lease expired" not in cluster.logs()


def test_a_clock_set_ahead_while_a_client_connects(cluster: Cluster, clocks: Clocks) -> None:
    [frontend] = cluster.start().frontends
    address = cluster.frontend_address()
    wait_until(lambda: num_connections(address) == 1, "the checks of health have disconnected")
    frontend.process.send_signal(signal.SIGSTOP)
    command = ["node", "--input-type=module", "--eval", NODE_PROGRAM, address]
    variables = environment() | dict(clocks.variables("node"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as client:
        wait_until(lambda: num_connections(address) > 1, "a connection of the client")
        clocks.jump(HOUR, "node")
        frontend.process.send_signal(signal.SIGCONT)
        output, _ = client.communicate(timeout=TIMEOUT_S)
    assert client.returncode == 0
    assert json.loads(output)


def num_connections(address: str) -> int:
    """Connections to a Unix socket, accepted or not, and the socket that listens."""
    path = address.removeprefix("unix:")
    return Path("/proc/net/unix").read_text().split().count(path)


def test_leases_and_deadlines_end_in_spite_of_a_clock_set_back(
    cluster: Cluster, clocks: Clocks
) -> None:
    cluster.core_flags += ["--lease-ms", "500"]
    [worker] = cluster.start().workers
    with inference_stub(cluster.frontend_address()) as stub:
        request = request_for("One day", max_tokens=900, ignore_eos=True)
        responses = stub.Generate(request, timeout=5)
        next(responses)
        worker.process.send_signal(signal.SIGSTOP)
        clocks.jump(-HOUR)
        with pytest.raises(grpc.RpcError) as late:
            list(responses)
        worker.process.send_signal(signal.SIGCONT)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert cluster.core is not None
    assert "lease expired" in cluster.core.log


def test_a_key_expires_by_the_wall_clock(cluster: Cluster, clocks: Clocks) -> None:
    expires = (datetime.now(UTC) + timedelta(seconds=HOUR)).isoformat()
    keys = cluster.folder / "keys.toml"
    digest = hash_of("secret")
    keys.write_text(
        f'[[key]]\nsha256 = "{digest}"\ntenant = "one"\nexpires = {expires}\noperator = true\n'
    )
    cluster.frontend_flags += ["--api-keys", str(keys)]
    cluster.start_core()
    cluster.start_frontend()
    cluster.wait_attached()
    with Client(cluster.frontend_address(), api_key="secret") as client:
        client.get_status()
        clocks.jump(2 * HOUR, "frontend-0")
        with pytest.raises(NotAuthorized) as refused:
            client.get_status()
        assert refused.value.reason == "EXPIRED_API_KEY"
        clocks.jump(-2 * HOUR, "frontend-0")
        client.get_status()

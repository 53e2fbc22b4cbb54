"""`python -m worker_service` as a process."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import typer
from typer.testing import CliRunner

from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from service_common.config_flags import Flags, takes_flags
from service_common.end_signals import SAME_REQUEST_S
from tests.support.checkpoints import checkpoint
from tests.support.cluster import SERVING, health
from tests.support.worker_driver import PlanBuilder
from tools.launch import environment
from worker_service.__main__ import app
from worker_service.config import CacheConfig, RunnerConfig
from worker_service.launcher.flags import CACHE, RUNNER, parse_bytes

GIB = 2**30
ONE_CPU = str(min(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("512MiB", 512 * 2**20),
        ("4GiB", 4 * GIB),
        ("1.5 GiB", GIB * 3 // 2),
        ("2gb", 2 * 10**9),
        ("0", 0),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4GiBs", "4 apples", "-1GiB", "nan", "inf", "1e400"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a size such as 512MiB"):
        parse_bytes(text)


class Process:
    """A worker's process and what it has said so far."""

    def __init__(self, *flags: str, **variables: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "worker_service", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | variables,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                with self._news:
                    self.lines.append(line)
                    self._news.notify_all()

    def wait_for(self, text: str) -> str:
        """The first line with this text."""
        with self._news:
            found = self._news.wait_for(
                lambda: next((line for line in self.lines if text in line), None), timeout=60
            )
        assert found, "".join(self.lines)
        return found

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        return self._process.wait(timeout=60)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()


@contextmanager
def process(*flags: str, **variables: str) -> Iterator[Process]:
    running = Process(*flags, **variables)
    try:
        yield running
    finally:
        running.kill()


@contextmanager
def serving(*flags: str) -> Iterator[tuple[Process, WorkerServiceStub]]:
    """A worker with a tiny model on a free port, and a stub that reaches it once it is loaded."""
    with process("--model", str(checkpoint("llama")), "--listen", "127.0.0.1:0", *flags) as running:
        address = running.wait_for("listening address=").split("address=")[1].strip()
        running.wait_for("model loaded")
        deadline = time.monotonic() + 30
        while health(address) != SERVING:  # the line comes a moment before the event loop knows
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with grpc.insecure_channel(address) as channel:
            yield running, WorkerServiceStub(channel)


def test_flags_reach_the_worker_and_sigterm_ends_it_well() -> None:
    names = ["--served-model-name", "tiny", "--served-model-name", "small"]
    flags = [*names, "--block-size", "8", "--max-model-len", "64", "--reasoning-parser", "qwen3"]
    with serving(*flags, "--kv-cache-memory", "1MiB", "--threads", "1") as (running, stub):
        info = stub.GetInfo(pb.GetInfoRequest(), timeout=30, wait_for_ready=True)
        assert (info.model.name, info.model.cache_groups[0].block_tokens) == ("tiny", 8)
        assert info.model.aliases == ["small"]
        assert info.model.max_model_len == 64
        parsers = info.model.reasoning_parser, info.model.tool_call_parser
        assert parsers == ("qwen3", "auto")
        blocks = stub.ProfileBlocks(
            pb.ProfileBlocksRequest(max_num_seqs=4, max_num_batched_tokens=64), timeout=60
        )
        assert blocks.num_gpu_blocks == 2**20 // info.model.block_bytes
        running.signal()
        assert running.exit_code() == 0


def test_the_end_of_the_terminal_drains_and_is_signalled_twice() -> None:
    with serving() as (running, _):
        running.signal(signal.SIGHUP)
        running.signal(signal.SIGHUP)
        assert running.exit_code() == 0


def test_a_second_signal_ends_the_process_in_the_middle_of_a_stream() -> None:
    with serving() as (running, stub):
        request = pb.InitializeCacheRequest(num_gpu_blocks=4, epoch=1)
        stub.InitializeCache(request, timeout=30, wait_for_ready=True)
        may_end = threading.Event()

        def plans() -> Iterator[pb.ExecuteStepsRequest]:
            yield pb.ExecuteStepsRequest(plans=[PlanBuilder(epoch=1).plan([])])
            may_end.wait(60)

        results = stub.ExecuteSteps(plans())
        assert next(results).results[0].step_id == 1
        running.signal()
        running.wait_for("draining")
        time.sleep(SAME_REQUEST_S)
        running.signal()
        assert running.exit_code() == 1
        with pytest.raises(grpc.RpcError):
            next(results)
        may_end.set()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--listen", "nowhere"], 2, "--listen: expected HOST:PORT or unix:PATH, got 'nowhere'"),
        (["--core", "nowhere"], 2, "--core: expected HOST:PORT or unix:PATH, got 'nowhere'"),
        (["--advertise", "x"], 2, "--advertise: expected HOST:PORT or unix:PATH, got 'x'"),
        (
            ["--block-size", "12"],
            2,
            "--block-size: expected a multiple of 16, or 1, 2, 4 or 8, got 12",
        ),
        (["--dtype", "float8"], 2, "--dtype: expected one of"),
        (["--dtype", "float8", "--tensor-parallel-size", "2"], 2, "--dtype: expected one of"),
        (["--threads", "0"], 2, "--threads: expected at least 1, got 0"),
        (["--threads", "100000"], 2, "--threads: expected at most 4096, got 100000"),
        (
            ["--simulate-cache-groups", "fixed:x"],
            2,
            "--simulate-cache-groups: expected none without --simulate, got 'fixed:x'",
        ),
        (["--simulate-step-us", "5"], 2, "--simulate-step-us: expected none without --simulate"),
        (["--cpu-affinity", "0-x"], 2, "--cpu-affinity: expected a list such as 0,2-5, got '0-x'"),
        (["--cpu-affinity", f"{ONE_CPU},{ONE_CPU}"], 2, "--cpu-affinity: expected CPUs of"),
        (["--cpu-affinity", ONE_CPU, "--threads", "2"], 2, "--threads: expected at most the 1 of"),
        (
            ["--cpu-affinity", ONE_CPU, "--tensor-parallel-size", "2"],
            2,
            "--cpu-affinity: expected --ra",
        ),
    ],
)
def test_what_is_wrong_is_one_line_and_an_exit_code(
    flags: list[str], code: int, message: str
) -> None:
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == code
    assert result.output.startswith(f"error: {message}")
    assert result.output.count("\n") == 1


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = CliRunner().invoke(app, ["--listen", address])
    assert result.exit_code == 1
    assert result.output == f"error: cannot listen on {address}: address already in use\n"


def test_a_worker_loads_its_model_although_its_working_directory_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(checkpoint("llama"))
    folder = tmp_path / "release"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with process("--model", model, "--listen", "127.0.0.1:0") as running:
        running.wait_for("model loaded")


def test_a_process_that_cannot_load_its_model_says_so_without_a_traceback() -> None:
    with process("--model", "/nowhere", "--listen", "127.0.0.1:0") as running:
        assert running.exit_code() == 1
        assert "error: --model: /nowhere: " in running.wait_for("error: ")
        assert not any("Traceback" in line for line in running.lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--runner", "pooling", "--role", "decode"], "--role: expected both for a model that"),
        (["--enable-lora", "--lora-modules", "sql=/x"], "--lora-modules: sql: path: expected a"),
    ],
)
def test_what_contradicts_the_loaded_model_is_named(flags: list[str], message: str) -> None:
    model = "--model", str(checkpoint("llama"))
    with process(*model, "--listen", "127.0.0.1:0", *flags) as running:
        assert running.exit_code() == 2
        assert f"error: {message}" in running.wait_for("error: ").lower()


FLAGS = json.loads((Path(__file__).parent / "flags.json").read_text())
"""By flag: the environment variables and the default."""


def test_flags_variables_and_defaults_are_as_documented() -> None:
    assert {
        "/".join([*param.opts, *param.secondary_opts]): [
            param.envvar,  # type: ignore[attr-defined]
            getattr(param.default, "value", param.default),
        ]
        for param in typer.main.get_command(app).params
        if param.name != "help"
    } == FLAGS


def test_flags_are_the_fields_of_configurations() -> None:
    calls: list[tuple[CacheConfig, RunnerConfig]] = []

    @takes_flags(CACHE.parameters, RUNNER.parameters)
    def command(flags: Flags) -> None:
        """What it does."""
        cache, runner = CACHE.fields_of(flags), RUNNER.fields_of(flags)
        calls.append((CacheConfig(**cache), RunnerConfig(**runner)))

    app = typer.Typer()
    app.command()(command)
    flags = ["--block-size", "8", "--no-cuda-graphs"]
    result = CliRunner().invoke(app, flags, env={"PAGEWIRE_SWAP_SPACE": "1KiB"})
    assert result.exit_code == 0, result.output
    assert calls == [(CacheConfig(block_size=8, swap_space=1024), RunnerConfig(cuda_graphs=False))]
    assert "What it does." in CliRunner().invoke(app, ["--help"]).output

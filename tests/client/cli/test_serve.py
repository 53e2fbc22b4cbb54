"""`pagewire serve` and `pagewire demo` with the real services."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import psutil
import pytest

from pagewire_cli.local import LocalServices, service_commands
from pagewire_cli.local.runtime_directory import RuntimeDirectory
from pagewire_cli.serve import SAME_REQUEST_S, still_checking
from pagewire_client import Client, SamplingParams
from pagewire_client.errors import LocalServiceError
from tests.support.checkpoints import checkpoint
from tests.support.fake_frontend import FakeFrontend
from tests.support.waiting import wait_until
from tools.launch import free_port

FLAGS = ["--dtype", "float32", "--threads", "1", "--kv-cache-memory", "16MiB"]
ELSEWHERE = ["--listen", "127.0.0.1:0", "--http", "off"]
"""Others may use the usual ports of this machine."""
SIMULATED = ["--simulate", "--simulate-step-us", "5000"]
PROMPT = [5, 6, 7]
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
"""Half a second of a simulated worker's."""


def command(*arguments: str) -> dict[str, object]:
    """The `pagewire` command, as arguments of `subprocess`."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {
        "args": [sys.executable, "-m", "pagewire_cli", *arguments],
        "env": {"PAGEWIRE_HTTP": "off"} | service_commands.environment() | {"PYTHONPATH": path},
        "stderr": subprocess.PIPE,
        "text": True,
    }


def said(done: "subprocess.CompletedProcess[str]") -> list[str]:
    """The lines of an ended command, without the one that a slow start gets."""
    return [line for line in done.stderr.splitlines() if not line.startswith("still ")]


class Serve:
    """A running `pagewire serve`, and what it says."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            self._lines.put(line)
        self._lines.put("")

    def wait_for(self, words: str) -> str:
        """The next line with `words` in it."""
        while words not in (line := self._lines.get(timeout=60)):
            assert line, f"ended without saying {words!r}:\n{''.join(self.said)}"
        return line

    def services(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "_service" in " ".join(child.cmdline())]


@contextmanager
def serving(
    *arguments: str, env: dict[str, str] | None = None, model: str | None = None
) -> Iterator[Serve]:
    """A deployment, by default of simulated workers, which start in half of the time."""
    flags = SIMULATED if model is None else ["--model", model, *FLAGS]
    settings = command("serve", *flags, *arguments)
    settings["env"] |= env or {}  # type: ignore[operator]
    with subprocess.Popen(**settings) as process:  # type: ignore[call-overload]
        serve = Serve(process)
        try:
            yield serve
            process.terminate()
            process.wait(60)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "numbers", [[signal.SIGTERM] * 2, [signal.SIGHUP] * 2], ids=["timeout", "terminal"]
)
def test_serve_runs_until_a_signal_and_then_lets_requests_finish(
    tmp_path: Path, numbers: list[signal.Signals]
) -> None:
    address = f"unix:{tmp_path}/f.sock"
    with serving("--listen", address) as serve, Client(address) as client:
        assert address in serve.wait_for("serving")
        assert any(line.startswith("worker-0   | ") for line in serve.said)
        services = serve.services()
        assert len(services) == 3
        stream = client.stream(PROMPT, LONG)
        next(stream)
        serve.process.send_signal(numbers[0])
        serve.wait_for(f"{numbers[0].name}: stopping when running requests are finished")
        for number in numbers[1:]:
            serve.process.send_signal(number)
        assert len(list(stream)) > 0
        assert stream.output.finished
        assert serve.process.wait(30) == 0
        assert not any(service.is_running() for service in services)
    # Usual ends and starts are no reason to warn.
    assert [line for line in serve.said if "WARNING" in line or "ERROR" in line] == []


def test_serve_goes_on_after_its_terminals_end_under_nohup() -> None:
    program = (
        "import signal, pagewire_cli.serve as serve\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "reader, _ = serve._signal_pipe()\n"
        "signal.raise_signal(signal.SIGHUP)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "print(signal.Signals(__import__('os').read(reader, 9)[0]).name)"
    )
    settings = command() | {"args": [sys.executable, "-c", program], "stdout": subprocess.PIPE}
    done = subprocess.run(**settings, check=True)  # type: ignore[call-overload]
    assert done.stdout == "SIGTERM\n"


def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/f.sock"
    endless = SamplingParams(temperature=0, max_tokens=5000, n=64, ignore_eos=True)
    with serving("--listen", address) as serve, Client(address) as client:
        serve.wait_for("serving")
        services = serve.services()
        stream = client.stream(PROMPT, endless)
        next(stream)
        serve.process.send_signal(signal.SIGINT)
        serve.wait_for("SIGINT: stopping when running requests are finished")
        with pytest.raises(subprocess.TimeoutExpired):
            serve.process.wait(SAME_REQUEST_S)
        serve.process.send_signal(signal.SIGINT)
        assert serve.process.wait(60) == 0
        assert not any(service.is_running() for service in services)
        stream.close()


def test_signals_that_come_together_end_everything_without_a_traceback(tmp_path: Path) -> None:
    with serving("--listen", f"unix:{tmp_path}/f.sock") as serve:
        wait_until(serve.services, "the first service")
        services = serve.services()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            serve.process.send_signal(number)
        assert serve.process.wait(60) == 0
        assert not any(service.is_running() for service in services)
    assert "Traceback" not in "".join(serve.said)


def test_two_frontends_with_one_http_port_and_two_workers_serve_one_model(tmp_path: Path) -> None:
    address, http = f"unix:{tmp_path}/f.sock", f"127.0.0.1:{free_port()}"
    arguments = ["--listen", address, "--frontends", "2", "--workers", "2", "--http", http]
    with serving(*arguments, model=str(checkpoint("llama"))) as serve:
        serve.wait_for("serving")
        assert f"http://{http}/v1" in serve.wait_for("HTTP for OpenAI clients")
        core = serve.wait_for("for `pagewire drain`: ").split()[-1]
        assert len(serve.services()) == 5
        assert not any("cores divided" in line for line in serve.said), "threads are given"
        for listening in (address, f"{address}.1"):
            with Client(listening) as client:
                assert client.generate(PROMPT, LONG).finished
                assert client.get_status().num_frontends == 2
        for _ in range(8):  # each on a connection of its own, so likely on both frontends
            with urllib.request.urlopen(f"http://{http}/health", timeout=20) as answer:
                assert answer.status == 200
        another = command("serve", "--listen", f"unix:{tmp_path}/g.sock", "--http", http)
        done = subprocess.run(**another, timeout=60)  # type: ignore[call-overload]
        assert done.returncode == 1
        taken = f"error: cannot listen on {http} for HTTP: address already in"
        assert done.stderr.startswith(taken)
        with Client(address) as client:  # one worker is enough to serve
            wait_until(lambda: len(client.get_status().groups) == 2, "both workers")
        status = command("status", "--core", core, "--json")
        done = subprocess.run(**status, timeout=60, stdout=subprocess.PIPE)  # type: ignore[call-overload]
        assert len(json.loads(done.stdout)["groups"]) == 2
        drain = command("drain", "worker-1", "--core", core, "--wait")
        assert subprocess.run(**drain, timeout=60).returncode == 0  # type: ignore[call-overload]


def test_a_model_that_cannot_be_loaded_ends_serve_with_the_workers_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    serve = command("serve", "--model", str(tmp_path), *ELSEWHERE)
    done = subprocess.run(**serve, timeout=90)  # type: ignore[call-overload]
    assert done.returncode == 1
    [line] = said(done)
    assert line.startswith(f"error: {tmp_path}/config.json cannot be read as JSON")


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--max-model-len", "8x", "--max-model-len: expected a whole number"),
        ("--api-key", "token-abc123", "--api-key: expected at least 16 characters, got 12"),
        ("--api-key", "ключ" * 5, "--api-key: expected visible ASCII characters"),
        ("--model", "/no/such/model", "--model: /no/such/model: no such directory or file"),
        ("--max-num-seqs", "0", "--max-num-seqs: expected 1 to 2147483647, got 0"),
        ("--api-keys", "/no/such/file", "--api-keys: cannot read /no/such/file"),
    ],
)
def test_a_wrong_flag_is_the_only_line_of_serve(flag: str, value: str, words: str) -> None:
    done = subprocess.run(**command("serve", flag, value, *ELSEWHERE), timeout=90)  # type: ignore[call-overload]
    assert done.returncode == (1 if flag == "--model" else 2)
    [line] = said(done)
    assert line.startswith(f"error: {words}")


def test_the_output_of_a_service_that_ends_without_a_reason_is_shown(tmp_path: Path) -> None:
    (tmp_path / "scheduler_service").mkdir()
    (tmp_path / "scheduler_service/__init__.py").write_text("raise SystemError('broken install')")
    how = command("serve", "--listen", "127.0.0.1:0", "--http", "off", *SIMULATED)
    done = subprocess.run(**how, cwd=tmp_path, timeout=90)  # type: ignore[call-overload]
    assert done.returncode == 1
    assert "SystemError: broken install" in done.stderr
    assert said(done)[-1].endswith("ended with exit code 1")


@pytest.mark.parametrize(
    ("flags", "variables", "words"),
    [
        (["--api-key", ""], {}, "expected a key, got"),
        ([], {"PAGEWIRE_API_KEY": "  "}, "expected a key, got"),
        ([], {"VLLM_API_KEY": "a" * 16}, "VLLM_API_KEY is PAGEWIRE_API_KEY here"),
    ],
)
def test_a_key_that_is_not_used_does_not_leave_out_authentication(
    flags: list[str], variables: dict[str, str], words: str
) -> None:
    how = command("serve", *flags, "--listen", "127.0.0.1:0", "--http", "off")
    how["env"] |= variables  # type: ignore[operator]
    done = subprocess.run(**how, timeout=90)  # type: ignore[call-overload]
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("embedded", "still checking the flags and the model embedded"),
        (".", "still checking the flags and the model ."),
        ("owner/name", "still looking for owner/name on the Hugging Face hub"),
    ],
)
def test_a_slow_start_says_what_is_being_done(model: str, words: str) -> None:
    assert still_checking(model) == words


def test_an_address_at_which_another_deployment_serves_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    address = f"unix:{tmp_path}/f.sock"
    with FakeFrontend(address):
        done = subprocess.run(**command("serve", "--listen", address), timeout=60)  # type: ignore[call-overload]
    assert done.returncode == 1
    assert done.stderr == (
        f"error: cannot listen on {address}: address already in use; --listen chooses another"
        " address\n"
    )


def test_an_address_of_another_machine_is_not_said_to_be_in_use() -> None:
    """Whether or not something answers there."""
    address = "198.51.100.1:7600"
    done = subprocess.run(
        **command("serve", "--listen", address, "--http", "off"),  # type: ignore[call-overload]
        timeout=60,
    )
    assert done.returncode == 1
    assert f"error: cannot listen on {address}: cannot assign requested address" in done.stderr


@pytest.mark.parametrize(
    ("listen", "metrics_port", "both"),
    [
        ("127.0.0.1:7600", "7601", "127.0.0.1:7601"),
        ("0.0.0.0:7600", "7598", "127.0.0.1:7600"),
        ("127.0.0.1:7600", "8000", "127.0.0.1:8000"),
    ],
)
def test_addresses_of_two_flags_that_meet_are_refused_with_both_flags(
    listen: str, metrics_port: str, both: str
) -> None:
    services = LocalServices(
        "m",
        num_frontends=2,
        listen=listen,
        http="127.0.0.1:8000",
        metrics_port=metrics_port,
    )
    with pytest.raises(LocalServiceError, match=r"--\w+ and --metrics-port both use") as raised:
        services.start()
    assert both in str(raised.value)


def test_a_taken_port_for_metrics_names_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        services = LocalServices("m", metrics_port=address)
        with pytest.raises(LocalServiceError) as raised:
            services.start()
    assert str(raised.value) == (
        f"cannot listen on {address} for metrics: address already in use; --metrics-port chooses"
        " another address, --metrics-port off needs none"
    )


def test_with_json_every_line_of_serve_is_an_object_with_its_service(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/f.sock"
    with serving("--listen", address, "--log-format", "json") as serve, Client(address) as client:
        serve.wait_for("for `pagewire drain`")
        [worker] = [
            service for service in serve.services() if "worker_service" in service.cmdline()
        ]
        worker.kill()
        restart = json.loads(serve.wait_for("restarting"))
        assert client.generate(PROMPT, LONG).finished
    lines = [json.loads(line) for line in serve.said]
    assert {line["service"] for line in lines} == {"core", "frontend-0", "worker-0", "pagewire"}
    assert all({"time", "level", "event"} <= line.keys() for line in lines)
    assert (restart["level"], restart["service"], restart["exit_code"]) == (
        "warning",
        "worker-0",
        -signal.SIGKILL,
    )
    assert any(line["event"].startswith("SIGTERM: stopping when") for line in lines)


def test_with_json_a_failed_start_is_an_object(tmp_path: Path) -> None:
    arguments = ["serve", "/nowhere", "--listen", f"unix:{tmp_path}/f.sock", "--log-format=json"]
    done = subprocess.run(**command(*arguments), timeout=90)  # type: ignore[call-overload]
    last = json.loads(done.stderr.splitlines()[-1])
    assert (last["level"], last["service"]) == ("error", "pagewire")
    assert last["event"].startswith("--model: /nowhere: no such directory or file")


@pytest.fixture
def shallow_folder() -> Iterator[Path]:
    """A folder for temporary files that is not too deep for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="pw-", dir="/tmp") as folder:
        yield Path(folder)


def test_drain_finds_the_core_of_the_only_serve_of_this_user(shallow_folder: Path) -> None:
    elsewhere = {"TMPDIR": str(shallow_folder)}
    with serving("--listen", f"unix:{shallow_folder}/f.sock", env=elsewhere) as serve:
        serve.wait_for("for `pagewire drain`")
        settings = command("drain", "worker-0", "--wait")
        settings["env"] |= elsewhere  # type: ignore[operator]
        done = subprocess.run(**settings, timeout=60)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[-1] == "worker-0 is drained"
        assert "INFO restarting service=worker-0 exit_code=0 delay_s=0.0" in serve.wait_for(
            "restarting"
        )


def test_drain_asks_which_of_several_cores_is_meant(shallow_folder: Path) -> None:
    folders = [RuntimeDirectory(shallow_folder), RuntimeDirectory(shallow_folder)]
    for folder in folders:
        (folder.path / "core.sock").touch()
    settings = command("drain", "worker-0")
    settings["env"] |= {"TMPDIR": str(shallow_folder)}  # type: ignore[operator]
    done = subprocess.run(**settings, timeout=60)  # type: ignore[call-overload]
    assert done.returncode != 0
    assert done.stderr.startswith("error: --core: expected one of ")
    assert all(f"unix:{folder.path}/core.sock" in done.stderr for folder in folders)
    for folder in folders:
        folder.remove()


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:65535"])
def test_an_address_that_cannot_be_is_refused_before_anything_starts(listen: str) -> None:
    arguments = ["serve", "--listen", listen, "--frontends", "2"]
    done = subprocess.run(**command(*arguments), timeout=60)  # type: ignore[call-overload]
    assert done.returncode == 1
    assert done.stderr.startswith("error: --listen: expected")


@pytest.mark.parametrize(
    ("variables", "names"),
    [({}, ["simulated"]), ({"PAGEWIRE_SERVED_MODEL_NAME": "small tiny"}, ["small", "tiny"])],
)
def test_the_names_that_serve_prints_are_those_of_requests(
    tmp_path: Path, variables: dict[str, str], names: list[str]
) -> None:
    variables = {"PAGEWIRE_SIMULATE": "1", **variables}
    address = f"unix:{tmp_path}/f.sock"
    with (
        serving("--listen", address, env=variables, model="embedded") as serve,
        Client(address) as client,
    ):
        line = serve.wait_for("serving ")
        assert f"serving {', '.join(names)} on" in line
        model = client.get_model()
        assert [model.name, *model.aliases] == names


def test_serve_takes_the_options_of_other_servers(tmp_path: Path) -> None:
    model, port = "embedded", free_port()
    keys = ["a-key-of-some-length", "a-second-key-of-some-length"]
    arguments = [model, *FLAGS, "--listen", f"unix:{tmp_path}/f.sock", "--host", "localhost"]
    arguments += ["--port", str(port), "--api-key", *keys, "--enable-auto-tool-choice"]
    arguments += ["--served-model-name", "large", "gpt-4o", "--dtype", "float", "-tp", "1"]
    arguments += ["--load-format", "auto"]
    arguments += ["--max_model_len=0.2k", "--max-num-batched-tokens", "1.5k"]
    settings = command("serve", *arguments)
    settings["env"].pop("PAGEWIRE_HTTP")  # type: ignore[attr-defined]
    with subprocess.Popen(**settings) as process:  # type: ignore[call-overload]
        try:
            serve = Serve(process)
            assert "serving large, gpt-4o on" in serve.wait_for("serving")
            url = f"http://localhost:{port}/v1"
            assert url in serve.wait_for("HTTP for OpenAI clients")
            client = openai.OpenAI(base_url=url, api_key=keys[0])
            assert [model.id for model in client.models.list()] == ["large", "gpt-4o"]
            [large, _] = client.with_options(api_key=keys[1]).models.list()
            assert large.model_dump()["max_model_len"] == 200
            answer = client.completions.create(model="gpt-4o", prompt="Hello", max_tokens=2)
            assert answer.model == "large"
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="another-of-that-length").models.list()
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_demo_streams_answers_from_the_embedded_model_and_leaves_nothing_behind() -> None:
    demo = command("demo") | {"stdout": subprocess.PIPE}
    done = subprocess.run(**demo, timeout=120)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert "27 + 45 = 72" in done.stdout
    assert done.stderr.count("first token after") == 3
    assert "\x1b" not in done.stdout + done.stderr, "plain text where there is no terminal"

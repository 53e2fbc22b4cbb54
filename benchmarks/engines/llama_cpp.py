"""llama.cpp's `llama-server`, driven over HTTP with one open request per slot."""

import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from benchmarks.engines.engine import About, Outputs, Settings
from benchmarks.engines.workloads import Job
from benchmarks.measuring.processes import send_signal
from benchmarks.models.checkpoints import gguf
from tools.launch import free_port

NAME = "llama.cpp"
NUM_SLOTS = 32
HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
KV_TYPES = {"float32": "f32", "bfloat16": "f16"}
"""It also supports bfloat16 caches; float16 is its default, and faster."""


class LlamaCpp:
    """A server of its own; all slots share one KV memory of the size that all engines have."""

    name = NAME

    def __init__(self, server: Path, settings: Settings, model: Path | None = None) -> None:
        """model: the GGUF file; None: that of the settings' shape."""
        self._server = server
        self._settings = settings
        self._flags = flags(settings)
        self._model = model or gguf(settings.shape, settings.dtype, settings.checkpoints)
        self.about = About(version=version(server), settings={"flags": " ".join(self._flags)})

    @property
    def pids(self) -> list[int]:
        """The server."""
        return [self._process.pid]

    def run(self, jobs: list[Job]) -> Outputs:
        """Run all jobs together; the slots take them in order."""
        began = time.perf_counter()
        with ThreadPoolExecutor(min(NUM_SLOTS, len(jobs))) as clients:
            token_ids = list(clients.map(self._complete, jobs))
        return Outputs(token_ids=token_ids, seconds=time.perf_counter() - began)

    def _complete(self, job: Job) -> list[int]:
        request = {
            "prompt": job.prompt,
            "n_predict": job.num_output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "cache_prompt": True,
            "return_tokens": True,
            "lora": [
                {"id": number, "scale": float(name == job.adapter)}
                for number, name in enumerate(self._settings.lora_modules)
            ],
        }
        tokens: list[int] = self._ask("POST", "/completion", request)["tokens"]
        return tokens

    def _ask(self, method: str, path: str, request: object = None) -> Any:
        connection = http.client.HTTPConnection(HOST, self._port)
        try:
            body = None if request is None else json.dumps(request)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama-server: {response.status} {answer}")
        return answer

    def pause(self) -> None:
        """Suspend its process."""
        send_signal(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it."""
        send_signal(self._process.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        self._port = free_port()
        command = [self._server, "-m", self._model, "--host", HOST, "--port", str(self._port)]
        with open(self._settings.log("llama_cpp") or os.devnull, "w") as log:
            self._process = subprocess.Popen(
                [*command, *self._flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        with self._ended_on_error():
            self._wait_ready()
        return self

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"llama-server ended with {code}")
            try:
                self._ask("GET", "/health")
            except (OSError, RuntimeError):
                time.sleep(0.1)
            else:
                return
        raise RuntimeError("llama-server is not ready in time")

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        self._end()


def flags(settings: Settings) -> list[str]:
    """The server's command line without model and address."""
    threads, kind = str(settings.threads), KV_TYPES[settings.dtype]
    slots = min(NUM_SLOTS, settings.max_num_seqs)
    kv_tokens = min(settings.kv_tokens, slots * settings.max_model_len)
    return [
        *("-t", threads, "-tb", threads, "-np", str(slots)),
        *("-b", str(settings.max_num_batched_tokens), "-ub", "512"),
        *("-c", str(kv_tokens), "--kv-unified"),
        *("-ctk", kind, "-ctv", kind, "-fa", "on"),
        # No cache of old prompts in addition to the slots, and no chat features.
        *("--cache-ram", "0", "--no-webui", "--no-jinja"),
        *(flag for path in settings.lora_modules.values() for flag in ("--lora", path)),
    ]


def version(server: Path) -> str:
    """The version that the program reports."""
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version: (.+)", said.stderr + said.stdout)
    return found[1] if found else "unknown"

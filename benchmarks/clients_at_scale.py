"""Thousands of requests at once from one client process: failures, memory and a frontend's cost.

    python -m benchmarks.clients_at_scale

The Python client, the Node client, and an HTTP client with one connection per request, which honors
`Retry-After`, each send all requests to one frontend of a simulated worker. `open` is the maximum
number of open requests, which the clients' own limit (1,000 per connection) and that of the server
allow. Memory is the peak growth of the client process and of the frontend; the CPU time of the
frontend includes the few tokens of each response.
"""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.machine import ForeignLoad, save
from benchmarks.processes import Processes
from benchmarks.tables import print_table, script_parser
from pagewire_client import AsyncClient, PagewireError, SamplingParams
from pagewire_client.connection import MAX_OPEN_REQUESTS
from tests.support.simulated_services import simulated_services

NODE_CLIENT = Path(__file__).parents[1] / "client" / "node"
DEFAULT_OPEN = 4096
"""A frontend's `--max-concurrent-requests`."""
STEP_US = 20_000
POLL_S = 0.05
HTTP_STATUS_FULL = 429

COLUMNS = {
    "way": "client",
    "requests": "requests at once",
    "open": "open at a time",
    "failed": "failed",
    "seconds": "seconds",
    "frontend_cpu_ms": "frontend's CPU a request, ms",
    "frontend_kb": "frontend's memory per open request, kB",
    "client_kb": "client's per request, kB",
}


async def python_requests(address: str, requests: int, tokens: int, connections: int) -> int:
    """Send all requests through the Python client. Returns the number that failed."""

    async def fails(client: AsyncClient, index: int) -> bool:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=index)
        try:
            output = await client.generate(prompt(index), params)
        except PagewireError:
            return True
        return len(output.outputs[0].token_ids) != tokens

    async with AsyncClient(address, max_connections=connections) as client:
        return sum(await asyncio.gather(*(fails(client, index) for index in range(requests))))


async def http_requests(address: str, requests: int, tokens: int, connections: int) -> int:
    """Send all requests over HTTP; refused ones again after `Retry-After`. Returns the number that
    failed."""

    async def fails(session: aiohttp.ClientSession, index: int) -> bool:
        wish = {
            "model": "simulated",
            "prompt": prompt(index),
            "max_tokens": tokens,
            "ignore_eos": True,
            "seed": index,
        }
        while True:
            async with session.post(f"http://{address}/v1/completions", json=wish) as answer:
                body = await answer.json()
                if answer.status != HTTP_STATUS_FULL:
                    return answer.status != 200 or body["usage"]["completion_tokens"] != tokens
            await asyncio.sleep(float(answer.headers["Retry-After"]))

    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return sum(await asyncio.gather(*(fails(session, index) for index in range(requests))))


def prompt(index: int) -> list[int]:
    """A prompt that no other request shares."""
    return [3 + index % 1000, 4 + index // 1000, 5, 6]


CLIENTS = {"python": python_requests, "http": http_requests}


async def run_client(pipe: Connection, way: str, *arguments: Any) -> None:
    """Send the requests of `way` when there is a message on `pipe`; send the number of failures."""
    pipe.send(os.getpid())
    await asyncio.to_thread(pipe.recv)
    pipe.send(await CLIENTS[way](*arguments))


class Peak:
    """The growth of a process's memory so far."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._before = self._process.memory_info().rss
        self.grown_bytes = 0

    def sample(self) -> None:
        grown = self._process.memory_info().rss - self._before
        self.grown_bytes = max(self.grown_bytes, grown)


def measure(way: str, requests: int, tokens: int, most_open: int) -> dict[str, object]:
    """Run once, with new services."""
    connections = -(-most_open // MAX_OPEN_REQUESTS)
    room = max(DEFAULT_OPEN, most_open)
    with simulated_services(
        http=True,
        simulate_step_us=STEP_US,
        max_num_seqs=1024,
        max_num_batched_tokens=16384,
        max_concurrent_requests=room,
        max_queue_requests=room,
    ) as services:
        (pid,) = (each.pid for each in services.processes if each.name.startswith("frontend"))
        assert pid is not None
        address = services.http_address if way == "http" else services.addresses[0]
        assert address is not None
        frontend, cpu = Peak(pid), psutil.Process(pid).cpu_times
        began, cpu_before = time.monotonic(), sum(cpu()[:2])
        if way == "node":
            failed, client_bytes = _run_node(address, requests, tokens, connections, frontend)
        else:
            failed, client_bytes = _run_python(
                (way, address, requests, tokens, connections), frontend
            )
        seconds = time.monotonic() - began
        cpu_ms = 1e3 * (sum(cpu()[:2]) - cpu_before) / requests
    at_once = min(requests, room if way == "http" else connections * MAX_OPEN_REQUESTS)
    return {
        "way": way,
        "requests": requests,
        "open": at_once,
        "failed": failed,
        "seconds": round(seconds, 1),
        "frontend_cpu_ms": round(cpu_ms, 2),
        "frontend_kb": round(frontend.grown_bytes / at_once / 1e3, 1),
        "client_kb": round(client_bytes / requests / 1e3, 1),
    }


def _run_python(arguments: Sequence[object], frontend: Peak) -> tuple[int, int]:
    """Failures and the client's memory."""
    processes = Processes()
    pipe = processes.start(run_client, *arguments)
    client = Peak(processes.receive(pipe))
    pipe.send("begin")
    while not pipe.poll(POLL_S):
        client.sample()
        frontend.sample()
    failed: int = processes.receive(pipe)
    processes.join()
    return failed, client.grown_bytes


def _run_node(
    address: str, requests: int, tokens: int, connections: int, frontend: Peak
) -> tuple[int, int]:
    command = ["node", "examples/many.js", "--address", address, "--requests", str(requests)]
    command += ["--max-tokens", str(tokens), "--max-connections", str(connections)]
    with subprocess.Popen(command, cwd=NODE_CLIENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.poll() is None:
            frontend.sample()
            time.sleep(POLL_S)
        result = json.loads(process.stdout.read())
    return result["failed"], result["bytesPerRequest"] * requests


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--ways", nargs="+", default=["python", "node", "http"])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--open", type=int, nargs="+", default=[1000, 10_000], help="at a time")
    args = parser.parse_args(arguments)
    load = ForeignLoad()
    rows = [
        measure(way, args.requests, args.tokens, most_open)
        for most_open in args.open
        for way in args.ways
    ]
    results = {"tokens": args.tokens, "rows": rows}
    print_table(rows, "clients at scale", COLUMNS)
    save("clients_at_scale", results, load.cores, args.results)


if __name__ == "__main__":
    main()

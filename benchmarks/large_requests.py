"""How long the largest requests of one client delay the tokens of another's stream.

    python -m benchmarks.large_requests

A core that sends one token every 10 ms and the client that reads them share one process, so that
one clock times each token on its way through the frontend, which has a process of its own. From a
third process every body is sent in turn: each is as large as the frontend allows, and built to cost
as much as it can. Exits with 1 if a body delayed a token by more than `--limit-ms`.

`idle` is the greatest delay without such requests: of a machine that has other work, too.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.frontend import Processes
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import inference_service_pb2_grpc as pb_grpc
from scheduler_service.columns import to_column
from scheduler_service.frontend.config import MAX_PUBLIC_MESSAGE_BYTES
from tests.support.fake_core import FakeCore, model_info
from tests.support.frontends import generate_request, model_ready, running_frontend

TOKEN_INTERVAL_S = 0.01
MAX_MODEL_LEN = 131_072
SIZE = MAX_PUBLIC_MESSAGE_BYTES - 1024
TIMEOUT_S = 120


async def run_stream(pipe: Connection) -> None:
    """Send a token every 10 ms to a stream through the frontend, and time each."""
    async with FakeCore([model_info(max_model_len=MAX_MODEL_LEN)]) as core:
        pipe.send(core.address)
        address = await asyncio.to_thread(pipe.recv)
        async with grpc.aio.insecure_channel(address) as channel:
            call = pb_grpc.InferenceServiceStub(channel).Generate(generate_request([5]))
            request = await core.next_request()
            await request.accept()
            sent: list[float] = []
            received: list[float] = []
            tasks = [
                asyncio.create_task(_send_tokens(request, sent)),
                asyncio.create_task(_receive_tokens(call, received)),
            ]
            pipe.send("streaming")
            while await asyncio.to_thread(pipe.recv) == "mark":
                first = len(received)
                await asyncio.to_thread(pipe.recv)
                last = len(sent)
                while len(received) < last:  # noqa: ASYNC110 - nobody announces it
                    await asyncio.sleep(TOKEN_INTERVAL_S)
                delays = zip(sent[first:last], received[first:last], strict=True)
                pipe.send(max(came - left for left, came in delays))
            for task in tasks:
                task.cancel()
            call.cancel()


async def _send_tokens(request: Any, sent: list[float]) -> None:
    while True:
        sent.append(time.perf_counter())
        await request.attachment.send(
            token_handles=to_column([request.handle]), token_ids=to_column([70])
        )
        await asyncio.sleep(TOKEN_INTERVAL_S)


async def _receive_tokens(call: Any, received: list[float]) -> None:
    async for response in call:
        now = time.perf_counter()
        received.extend(now for delta in response.choices for _ in delta.token_ids)


async def run_frontend(pipe: Connection, core_address: str) -> None:
    """Serve until a message on the pipe."""
    async with running_frontend(core_address) as frontend:
        await model_ready(frontend)
        pipe.send(frontend.runner.address)
        await asyncio.to_thread(pipe.recv)


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Name, method and serialized request of each body."""
    words = " ".join(random.Random(1).choices(["hello", "world", "fox", "q", "brown"], k=SIZE // 3))
    ids = SIZE // 3
    yield "text", "Generate", _message(text=words[:SIZE])
    yield (
        "text, truncated",
        "Generate",
        _message(text=words[:SIZE], sampling_params={"truncate_prompt_tokens": 1000}),
    )
    yield "text of one letter", "Generate", _message(text="a" * SIZE)
    yield "token ids", "Generate", _message(token_ids={"ids": [70] * (4 << 20)})
    yield (
        "token ids, truncated",
        "Generate",
        _message(
            token_ids={"ids": [70] * (4 << 20)}, sampling_params={"truncate_prompt_tokens": 9}
        ),
    )
    yield "token ids, too many", "Generate", b"\x22" + _length(SIZE) + _packed(b"\x05" * SIZE)
    yield "token ids, unpacked", "Generate", b"\x22" + _length(ids * 2) + b"\x08\x05" * ids
    turn = {"role": "user", "content": "hello"}
    yield "chat, most turns", "Generate", _message(chat={"messages": [turn] * 8192})
    yield (
        "chat, one long turn",
        "Generate",
        _message(chat={"messages": [turn | {"content": words[:SIZE]}]}),
    )
    yield "chat, empty turns", "Generate", b"\x2a" + _length(ids * 2) + b"\x0a\x00" * ids
    call = {"arguments_json": '{"a":[' + "[]," * 300_000 + "0]}"}
    yield (
        "chat, JSON",
        "Generate",
        _message(chat={"messages": [turn | {"tool_calls": [call] * 15}]}),
    )
    call = {"arguments_json": '{"a":[' + "[]," * 17_000 + "0]}"}
    yield (
        "chat, most JSON",
        "Generate",
        _message(chat={"messages": [turn | {"tool_calls": [call] * 15}]}),
    )
    yield "stop strings", "Generate", b"\x32" + _length(ids * 3) + b"\x6a\x01a" * ids
    yield (
        "resumed tokens",
        "Generate",
        _message(
            text="a",
            request_id="r",
            sampling_params={"seed": 1},
            resume=[{"token_ids": [70] * (4 << 20)}],
        ),
    )
    yield "structured output", "Generate", _message(text="a", sampling_params={"regex": "a" * SIZE})
    yield "Tokenize, text", "Tokenize", pb.TokenizeRequest(text=words[:SIZE]).SerializeToString()
    yield (
        "Detokenize",
        "Detokenize",
        pb.DetokenizeRequest(token_ids=[70] * (4 << 20)).SerializeToString(),
    )


def _message(**fields: Any) -> bytes:
    return pb.GenerateRequest(**fields).SerializeToString()


def _packed(data: bytes) -> bytes:
    """Field 1 of a message, packed; cut to fit where its own header takes bytes."""
    header = b"\x0a" + _length(len(data) - 5)
    return header + data[: len(data) - len(header)]


def _length(number: int) -> bytes:
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes(data) + bytes([number])


async def _send(address: str, method: str, body: bytes) -> str:
    """Send one body and read the responses; returns how the call ended."""
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        path = f"/pagewire.v1.InferenceService/{method}"
        make: Callable[..., Any] = channel.unary_stream
        if method != "Generate":
            make = channel.unary_unary
        call = make(path)(body, timeout=TIMEOUT_S)
        try:
            if method == "Generate":
                await asyncio.wait_for(call.read(), 3)  # one that is accepted waits for ever
                call.cancel()
            else:
                await call
        except TimeoutError:
            call.cancel()
            return "accepted"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"[:70]
        return "OK"


def measure(repeats: int) -> list[tuple[str, int, float, str]]:
    """Name, bytes, greatest delay in milliseconds, and outcome of each body."""
    processes = Processes()
    try:
        stream = processes.start(run_stream)
        frontend = processes.start(run_frontend, processes.receive(stream))
        address = processes.receive(frontend)
        stream.send(address)
        processes.receive(stream)
        rows = []

        def timed(work: Callable[[], str]) -> tuple[float, str]:
            stream.send("mark")
            time.sleep(0.2)
            outcome = work()
            time.sleep(0.2)
            stream.send("end")
            return 1000 * processes.receive(stream), outcome

        runner = asyncio.Runner()
        delay_ms, _ = timed(lambda: str(time.sleep(3)))
        rows.append(("idle", 0, delay_ms, ""))
        for name, method, body in bodies():
            assert len(body) <= MAX_PUBLIC_MESSAGE_BYTES
            figures = [
                timed(lambda method=method, body=body: runner.run(_send(address, method, body)))
                for _ in range(repeats)
            ]
            rows.append((name, len(body), min(figures)[0], figures[0][1]))
        runner.close()
        return rows
    finally:
        processes.kill()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="the least delay of these counts")
    parser.add_argument("--limit-ms", type=float, default=100.0)
    arguments = parser.parse_args()
    table = Table("body", "MiB", "delay, ms", "outcome")
    rows = measure(arguments.repeats)
    for name, size, delay_ms, outcome in rows:
        table.add_row(name, f"{size / 2**20:.1f}", f"{delay_ms:.0f}", outcome)
    Console().print(table)
    sys.exit(any(delay_ms > arguments.limit_ms for _, _, delay_ms, _ in rows))


if __name__ == "__main__":
    main()

"""Delay of a stream's tokens by the largest requests of another client.

    python -m benchmarks.large_requests [--http]

A core that sends one token every 10 ms and the client that reads them share one process, so that
one clock times each token on its way through the frontend, which has a process of its own. A third
process sends every body in turn: gRPC messages or, with `--http`, HTTP bodies, each as large as the
frontend allows and as expensive as possible. Exits with 1 if one of them delayed a token by more
than `--limit-ms`.

`idle` is the largest delay without such requests, which includes that of other load on the machine.
"""

import argparse
import asyncio
import http.client
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc

from benchmarks.processes import Processes
from benchmarks.tables import print_table
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
ACCEPTED_S = 5.0
"""Time without an answer after which a request counts as accepted: there is no worker to run it."""
HTTP_SIZE = 16 << 20
MESSAGE = '{"role":"user","content":"a"}'

Body = tuple[str, str, bytes]
"""Name, method or path, and content."""


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
                while len(received) < last:  # noqa: ASYNC110 - nothing signals it
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
    async with running_frontend(core_address, http="127.0.0.1:0") as frontend:
        await model_ready(frontend)
        assert frontend.http is not None
        pipe.send((frontend.runner.address, frontend.http.address))
        await asyncio.to_thread(pipe.recv)


def grpc_bodies() -> Iterator[Body]:
    """Serialized requests, by method."""
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


def _joined(head: str, part: str, tail: str, count: int | None = None) -> bytes:
    """Parts with commas between; as many as the size allows, or `count`."""
    count = count or (HTTP_SIZE - len(head) - len(tail)) // (len(part) + 1) - 1
    return f"{head}{','.join([part] * count)}{tail}".encode()


def http_bodies() -> Iterator[Body]:
    """Bodies at a limit and beyond it, by path."""
    complete, chat = "/v1/completions", "/v1/chat/completions"
    prompt, messages = '{"max_tokens":1,"prompt":[', '{"max_tokens":1,"messages":['
    template = f'{{"messages":[{MESSAGE}],"chat_template_kwargs":{{"a":['
    text = '{"max_tokens":1,"prompt":"'
    pairs = HTTP_SIZE // 2 - 20
    cases = {
        "8 million token ids": (complete, _joined(prompt, "7", "]}")),
        "1 million token ids": (complete, _joined(prompt, "123456", "]}", 1_000_000)),
        "4,000 prompts of 250 ids": (
            complete,
            _joined(prompt, "[" + ",".join(["7"] * 250) + "]", "]}", 4000),
        ),
        "4 million prompts": (complete, _joined(prompt, '"a"', "]}")),
        "550,000 messages": (chat, _joined(messages, MESSAGE, "]}")),
        "8,192 messages": (chat, _joined(messages, MESSAGE, "]}", 8192)),
        "4 million values": (chat, _joined(template, "1.5", "]}}")),
        "1 million values": (chat, _joined(template, "1.5", "]}}", 1_000_000)),
        "65,000 values": (chat, _joined(template, "1.5", "]}}", 65_000)),
        "a text": (complete, f'{text}{"a " * pairs}"}}'.encode()),
        "a text of escapes": (complete, (text + "\\n" * pairs + '"}').encode()),
        "a text of structure": (complete, (text + "[{,," * (HTTP_SIZE // 4 - 20) + '"}').encode()),
        "text to tokenize": (
            "/tokenize",
            f'{{"prompt":"{"a " * pairs}"}}'.encode(),
        ),
        "tokens to text": ("/detokenize", _joined('{"tokens":[', "7", "]}", 1_000_000)),
    }
    for name, (path, body) in cases.items():
        yield name, path, body


def _send_http(address: str, path: str, body: bytes) -> str:
    """Send one body and read the response; returns its status."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        connection.sock.settimeout(ACCEPTED_S)
        response = connection.getresponse()
        response.read()
    except TimeoutError:
        return "accepted"
    finally:
        connection.close()
    return str(response.status)


async def _send_grpc(address: str, method: str, body: bytes) -> str:
    """Send one body and read the responses. Returns the status of the call."""
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        path = f"/pagewire.v1.InferenceService/{method}"
        make: Callable[..., Any] = channel.unary_stream
        if method != "Generate":
            make = channel.unary_unary
        call = make(path)(body, timeout=TIMEOUT_S)
        try:
            if method == "Generate":
                await asyncio.wait_for(call.read(), ACCEPTED_S)
                call.cancel()
            else:
                await call
        except TimeoutError:
            call.cancel()
            return "accepted"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"[:70]
        return "OK"


def measure(repeats: int, only: str, *, uses_http: bool) -> list[dict[str, Any]]:
    """A line for each body whose name contains `only`."""
    processes = Processes()
    # One event loop: gRPC keeps the first that it was used in.
    runner = asyncio.Runner()
    try:
        stream = processes.start(run_stream)
        frontend = processes.start(run_frontend, processes.receive(stream))
        grpc_address, http_address = processes.receive(frontend)
        stream.send(grpc_address)
        processes.receive(stream)

        def timed(work: Callable[[], str]) -> tuple[float, str]:
            stream.send("mark")
            time.sleep(0.2)
            outcome = work()
            time.sleep(0.2)
            stream.send("end")
            return 1000 * processes.receive(stream), outcome

        def send(method: str, body: bytes) -> str:
            if uses_http:
                return _send_http(http_address, method, body)
            return runner.run(_send_grpc(grpc_address, method, body))

        def row(name: str, body: bytes, delay_ms: float, outcome: str) -> dict[str, Any]:
            size = f"{len(body) / 2**20:.1f}"
            return {"body": name, "MiB": size, "delay, ms": round(delay_ms, 1), "outcome": outcome}

        def idle() -> str:
            time.sleep(3)
            return ""

        rows = [row("idle", b"", *timed(idle))]
        for name, method, body in http_bodies() if uses_http else grpc_bodies():
            if only not in name:
                continue
            assert len(body) <= (HTTP_SIZE if uses_http else MAX_PUBLIC_MESSAGE_BYTES)
            work = partial(send, method, body)
            figures = [timed(work) for _ in range(repeats)]
            rows.append(row(name, body, min(figures)[0], figures[0][1]))
        return rows
    finally:
        runner.close()
        processes.kill()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="of which the smallest delay counts")
    parser.add_argument("--limit-ms", type=float, default=100.0)
    parser.add_argument("--http", action="store_true", help="send HTTP bodies, not gRPC messages")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    rows = measure(arguments.repeats, arguments.only, uses_http=arguments.http)
    print_table(rows, "the longest delay of another stream's token")
    sys.exit(any(row["delay, ms"] > arguments.limit_ms for row in rows))


if __name__ == "__main__":
    main()

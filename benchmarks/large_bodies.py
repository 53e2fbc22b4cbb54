"""How long large HTTP bodies occupy a frontend's event loop, on which all streams of tokens run.

    python -m benchmarks.large_bodies

A frontend in a process of its own sleeps for 1 ms again and again; a gap is how much longer than
that a turn took. Every body has up to 16 MiB and is built to cost as much as it can. `idle` is the
longest gap without a body: of a machine that has other work, too. Exits with 1 if a body's gap is
more than `--limit-ms` longer than that.
"""

import argparse
import asyncio
import http.client
import sys
import time
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection

from tests.support.fake_core import FakeCore, model_info
from tests.support.http_frontends import http_frontend, model_ready

SIZE = 16 << 20
TURN_S = 0.001
IDLE_S = 2.0
MESSAGE = '{"role":"user","content":"a"}'


def serve(pipe: Connection) -> None:
    """Run a frontend; answer each message with the longest gap since the one before."""
    asyncio.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    async with (
        FakeCore([model_info(max_model_len=131_072)]) as core,
        http_frontend(core.address, default_timeout_s=5) as frontend,
    ):
        await model_ready(frontend)
        assert frontend.http is not None
        pipe.send(frontend.http.address)
        longest, last = 0.0, time.perf_counter()
        while True:
            await asyncio.sleep(TURN_S)
            now = time.perf_counter()
            longest, last = max(longest, now - last - TURN_S), now
            if pipe.poll():
                if pipe.recv() == "end":
                    return
                pipe.send(longest)
                longest, last = 0.0, time.perf_counter()


def _joined(head: str, part: str, tail: str, count: int | None = None) -> bytes:
    """Parts with commas between; as many as the size allows, or `count`."""
    count = count or (SIZE - len(head) - len(tail)) // (len(part) + 1) - 1
    return f"{head}{','.join([part] * count)}{tail}".encode()


def bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body of each case, those at a limit and those beyond it."""
    complete, chat = "/v1/completions", "/v1/chat/completions"
    prompt, messages = '{"max_tokens":1,"prompt":[', '{"max_tokens":1,"messages":['
    template = f'{{"messages":[{MESSAGE}],"chat_template_kwargs":{{"a":['
    text = '{"max_tokens":1,"prompt":"'
    return {
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
        "a text": (complete, f'{text}{"a " * (SIZE // 2 - 20)}"}}'.encode()),
        "a text of escapes": (complete, (text + "\\n" * (SIZE // 2 - 20) + '"}').encode()),
        "a text of structure": (complete, (text + "[{,," * (SIZE // 4 - 20) + '"}').encode()),
        "text to tokenize": ("/tokenize", f'{{"prompt":"{"a " * (SIZE // 2 - 20)}"}}'.encode()),
        "tokens to text": ("/detokenize", _joined('{"tokens":[', "7", "]}", 1_000_000)),
    }


def main() -> int:
    """Send each body in turn; 1 if one took the loop for too long."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit-ms", type=float, default=100.0)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    arguments = parser.parse_args()
    pipe, end = Pipe()
    server = get_context("spawn").Process(target=serve, args=(end,), daemon=True)
    server.start()
    address = pipe.recv()
    time.sleep(IDLE_S)
    pipe.send("idle")
    pipe.recv()  # of the start
    time.sleep(IDLE_S)
    pipe.send("idle")
    idle_ms = pipe.recv() * 1000
    print(f"{'body':26} {'MiB':>5} {'code':>4} {'answered in s':>13} {'longest gap in ms':>17}")
    print(f"{'idle':26} {'':>5} {'':>4} {'':>13} {idle_ms:17.1f}", flush=True)
    worst_ms = 0.0
    for name, (path, body) in bodies().items():
        if arguments.only not in name:
            continue
        began = time.perf_counter()
        connection = http.client.HTTPConnection(address, timeout=120)
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        elapsed = time.perf_counter() - began
        pipe.send(name)
        gap_ms = pipe.recv() * 1000
        worst_ms = max(worst_ms, gap_ms)
        size = len(body) / 2**20
        print(f"{name:26} {size:5.1f} {answer.status:4} {elapsed:13.2f} {gap_ms:17.1f}", flush=True)
    pipe.send("end")
    server.join(20)
    return int(worst_ms - idle_ms > arguments.limit_ms)


if __name__ == "__main__":
    sys.exit(main())

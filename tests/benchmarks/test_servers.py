"""The servers that the online benchmark loads: started, stopped in between, and gone after."""

import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.engines.engine import Settings
from benchmarks.model_shapes import Shape
from benchmarks.online import measure_rates
from benchmarks.processes import tree
from benchmarks.servers import ServedPagewire, ServedVllm
from pagewire_cli.load import Arrival, Lengths, Limits, Workload
from tests.support.waiting import until

TINY = Shape(
    name="tiny",
    model_type="llama",
    vocab_size=400,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    tied=False,
)
ARRIVAL = Arrival(0.0, [11, 12, 13], 4)

# It understands as much of the command line and of HTTP as is asked of it, and answers a token per
# message; its child must be stopped with it.
FAKE_VLLM = """#!{python}
import asyncio, json, subprocess, sys
from aiohttp import web

assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"], sys.argv
flags = dict(zip(sys.argv[3::2], sys.argv[4::2]))
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)

async def health(_):
    return web.Response()

async def complete(request):
    body = await request.json()
    assert body["model"] == flags["--model"]
    response = web.StreamResponse()
    await response.prepare(request)
    for number in range(body["max_tokens"]):
        usage = {{"usage": {{"completion_tokens": number + 1}}}}
        await response.write(f"data: {{json.dumps(usage)}}\\n\\n".encode())
    return response

app = web.Application()
app.router.add_get("/health", health)
app.router.add_post("/v1/completions", complete)
web.run_app(app, host=flags["--host"], port=int(flags["--port"]), print=None)
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("served")
    return Settings(
        shape=TINY,
        dtype="float32",
        checkpoints=folder,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_gib=1,
        logs=folder,
    )


def fake_python(folder: Path, text: str) -> Path:
    (folder / "bin").mkdir()
    path = folder / "bin" / "python"
    path.write_text(text)
    path.chmod(0o755)
    return path


def are_stopped(pid: int) -> bool:
    return {process.status() for process in tree(pid)} == {psutil.STATUS_STOPPED}


@pytest.mark.parametrize(("interface", "name"), [("HTTP", "pagewire"), ("gRPC", "pagewire gRPC")])
async def test_pagewire_is_loaded_through_its_services(
    settings: Settings, interface: str, name: str
) -> None:
    workload = Workload(
        num_requests=1,
        rate=1.0,
        input_tokens=Lengths(3, 20),
        output_tokens=Lengths(2, 4),
        vocab_size=TINY.vocab_size,
    )
    [line], _ = await measure_rates(
        [ServedPagewire(settings, interface)],
        workload,
        [100.0],
        seconds=0.05,
        limits=Limits(),
        repeats=1,
    )
    assert (line["engine"], line["interface"]) == (name, interface)
    assert (line["num_complete"], line["num_failed"], line["good_share"]) == (5, 0, 1.0)
    assert line["total_ms_p99"] >= line["first_token_ms_p50"] > 0


async def test_vllm_is_stopped_between_its_turns_and_gone_at_the_end(
    settings: Settings, tmp_path: Path
) -> None:
    python = fake_python(tmp_path, FAKE_VLLM.format(python=sys.executable))
    server = ServedVllm(python, settings)
    async with server:
        pid = int(server.pid)
        assert len(tree(pid)) == 2
        server.pause()
        await until(lambda: are_stopped(pid), "both processes are stopped", timeout_s=60)
        server.resume()
        received = [each.num_tokens async for each in server.target.stream(ARRIVAL)]
        assert received == [1, 1, 1, 1]
        server.pause()
    assert not psutil.pid_exists(pid)


async def test_a_server_that_ends_at_once_is_told_of(settings: Settings, tmp_path: Path) -> None:
    python = fake_python(tmp_path, "#!/bin/sh\necho no such model >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match="the server ended with 3"):
        async with ServedVllm(python, settings):
            pass
    assert settings.logs is not None
    assert (settings.logs / "vllm.log").read_text() == "no such model\n"

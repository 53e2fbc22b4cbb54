"""Adapters are loaded on all workers or on none, and requests keep the content with which they
began, whatever is killed meanwhile."""

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from typer.testing import CliRunner

from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from pagewire_cli.app import app
from pagewire_client import Client, RequestOutput, SamplingParams
from pagewire_client.errors import AlreadyExists, NotFound, PagewireError, Unavailable
from tests.end_to_end.conftest import EMBEDDED
from tests.support.cluster import Cluster
from tests.support.lora import make_adapter, make_prompt
from tests.support.waiting import wait_until
from tests.support.worker_flags import FLOAT32
from worker_service.simulated.adapters import SimulatedAdapter

PROMPT = list(range(5, 25))
SLOW = ["--simulate-step-us", "8000"]
SHORT = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)
LONG = replace(SHORT, max_tokens=200)
"""Of streams that outlast the loss of a process."""


def adapter(folder: Path, name: str, content: bytes) -> str:
    """A folder that a simulated worker loads as an adapter."""
    path = folder / name
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (path / "adapter_model.safetensors").write_bytes(content)
    return str(path)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return [adapter(tmp_path, f"adapter-{n}", bytes([n]) * 3_000_000) for n in range(4)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    flags = {
        "worker_flags": ["--simulate", "--enable-lora", "--max-loras", "2", *SLOW],
        "frontend_flags": ["--allow-runtime-lora-updating", "--http", "127.0.0.1:0"],
    }
    with Cluster(tmp_path, **flags) as cluster:
        yield cluster


def client_of(cluster: Cluster) -> Client:
    return Client([cluster.frontend_address(i) for i in range(len(cluster.frontends))], timeout=120)


def tokens(client: Client, params: SamplingParams = SHORT, **options: object) -> list[int]:
    return client.generate(PROMPT, params, **options).outputs[0].token_ids  # type: ignore[arg-type]


def wait_begun(cluster: Cluster, path: str) -> None:
    """Return once a load has reached the first worker, which has the content then. The second one
    is stopped, so that the load does not end."""
    request = worker_pb.GetAdapterRequest(digest=SimulatedAdapter.read(Path(path)).info.digest)

    def has_content() -> bool:
        try:
            return any(True for _ in stub.GetAdapter(request, timeout=30))
        except grpc.RpcError:  # NOT_FOUND, until it has read the path
            return False

    with grpc.insecure_channel(f"unix:{cluster.folder}/worker-0.sock") as channel:
        stub = WorkerServiceStub(channel)
        wait_until(has_content, "the first worker has the content")


class Streams:
    """Streams with adapters that run in the background."""

    def __init__(self, cluster: Cluster, names: list[str]) -> None:
        self._pool = ThreadPoolExecutor(len(names))
        self._begun = [threading.Event() for _ in names]
        self._answers = [
            self._pool.submit(self._read, cluster, name, begun)
            for name, begun in zip(names, self._begun, strict=True)
        ]

    @staticmethod
    def _read(cluster: Cluster, name: str, begun: threading.Event) -> RequestOutput:
        with client_of(cluster) as client, client.stream(PROMPT, LONG, model=name) as stream:
            for _ in stream:
                if len(stream.output.outputs[0].token_ids) > 10:
                    begun.set()
            return stream.output

    def wait_begun(self) -> None:
        for begun, answer in zip(self._begun, self._answers, strict=True):
            while not begun.wait(0.1):
                assert not answer.done(), answer.result()

    def answers(self) -> list[list[int]]:
        return [answer.result(120).outputs[0].token_ids for answer in self._answers]


def test_an_adapter_is_used_by_either_name_replaced_and_unloaded(
    cluster: Cluster, paths: list[str]
) -> None:
    cluster.start(num_workers=2, num_frontends=2)
    with client_of(cluster) as client:
        base = tokens(client)
        assert client.list_adapters() == {"simulated": []}
        loaded = client.load_adapter("a", paths[0])
        assert (loaded.name, loaded.rank, len(loaded.digest)) == ("a", 8, 32)
        first = tokens(client, model="a")
        assert first != base
        assert tokens(client, lora="a", model="simulated") == tokens(client, lora="a") == first
        assert client.load_adapter("a", paths[0]) == loaded  # a repeated call changes nothing
        with pytest.raises(AlreadyExists, match="another content"):
            client.load_adapter("a", paths[1])
        client.load_adapter("a", paths[1], replace=True)
        second = tokens(client, model="a")
        assert second not in (base, first)
        client.load_adapter("same", paths[0])
        assert tokens(client, model="same") == first
        with pytest.raises(NotFound, match="unknown adapter 'none'"):
            tokens(client, lora="none")
        with pytest.raises(NotFound, match="unknown model 'none'"):
            tokens(client, model="none")
        with pytest.raises(PagewireError, match="no/such/folder"):
            client.load_adapter("b", "no/such/folder")
        assert [a.name for a in client.list_adapters()["simulated"]] == ["a", "same"]
        assert client.unload_adapter("a") == 0
        with pytest.raises(NotFound):
            tokens(client, model="a")
        with pytest.raises(NotFound):
            client.unload_adapter("a")
        assert tokens(client) == base


def test_http_loads_lists_and_unloads_as_vllm_does(cluster: Cluster, paths: list[str]) -> None:
    cluster.start()
    with httpx.Client(base_url=cluster.http_url(), timeout=60) as http:
        body = {"lora_name": "sql", "lora_path": paths[0]}
        answer = http.post("/v1/load_lora_adapter", json=body)
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'sql' added successfully.",
        )
        again = http.post("/v1/load_lora_adapter", json=body)
        assert again.status_code == 400
        assert "has already been loaded" in again.text
        in_place = {"lora_name": "sql", "lora_path": paths[1], "load_inplace": True}
        assert http.post("/v1/load_lora_adapter", json=in_place).status_code == 200
        base, sql = http.get("/v1/models").json()["data"]
        assert (base["id"], base["parent"]) == ("simulated", None)
        assert (sql["id"], sql["parent"], sql["root"]) == ("sql", "simulated", paths[1])
        request = {"model": "sql", "prompt": PROMPT, "max_tokens": 4}
        assert http.post("/v1/completions", json=request).json()["model"] == "sql"
        named_badly = http.post("/v1/load_lora_adapter", json={**in_place, "lora_name": "a b"})
        assert named_badly.json()["error"]["param"] == "lora_name"
        unknown = http.post("/v1/completions", json={**request, "model": "none"})
        assert "available models: simulated; adapters: sql" in unknown.text
        missing = {"lora_name": "none", "lora_path": "no/such/folder"}
        assert http.post("/v1/load_lora_adapter", json=missing).status_code == 404
        answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert answer.text == "Success: LoRA adapter 'sql' removed successfully."
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 404
        assert http.post("/v1/completions", json=request).status_code == 404


def test_the_command_line_loads_lists_and_unloads(cluster: Cluster, paths: list[str]) -> None:
    cluster.start()

    def adapter_command(*arguments: str) -> Any:
        return CliRunner().invoke(
            app, ["adapter", *arguments, "--address", cluster.frontend_address()]
        )

    loaded = adapter_command("load", "sql", paths[0])
    assert (loaded.exit_code, "sql is loaded: rank 8, 2.9 MiB" in loaded.output) == (0, True)
    listed = json.loads(adapter_command("list", "--json").output)
    assert [entry["name"] for entry in listed["simulated"]] == ["sql"]
    assert "sql" in adapter_command("list").output
    assert isinstance(adapter_command("load", "sql", paths[1]).exception, AlreadyExists)
    assert adapter_command("load", "sql", paths[1], "--replace").exit_code == 0
    unloaded = adapter_command("unload", "sql")
    assert "sql is unloaded; 0 requests still use it" in unloaded.output


def test_streams_keep_their_content_when_anything_is_killed(
    cluster: Cluster, paths: list[str]
) -> None:
    cluster.start(num_workers=2, num_frontends=2)
    with client_of(cluster) as client:
        for name, path in zip("ab", paths, strict=False):
            client.load_adapter(name, path)
        expected = [tokens(client, LONG, model=name) for name in "ab"]
    for victim in (cluster.workers[0], cluster.core, cluster.frontends[0]):
        streams = Streams(cluster, ["a", "b"] * 2)
        streams.wait_begun()
        with client_of(cluster) as client:  # the names get other contents meanwhile
            client.load_adapter("a", paths[2], replace=True)
            client.unload_adapter("b")
        assert victim is not None
        victim.kill()
        if victim is cluster.core:
            cluster.start_core()
        elif victim is cluster.frontends[0]:
            cluster.restart_frontend(0)
        else:
            cluster.start_worker()
        assert streams.answers() == expected * 2, f"after the death of {victim.name}"
        cluster.wait_serving()
        with client_of(cluster) as client:
            names = [entry.name for entry in client.list_adapters()["simulated"]]
            assert names == ["a"]
            client.load_adapter("a", paths[0], replace=True)
            client.load_adapter("b", paths[1])


def test_a_worker_that_dies_during_a_load_leaves_everything_as_it_was(
    cluster: Cluster, paths: list[str]
) -> None:
    cluster.start(num_workers=2)
    cluster.wait_num_ready(2)
    with client_of(cluster) as client:
        before = tokens(client)
        victim = cluster.workers[1]
        victim.process.send_signal(signal.SIGSTOP)  # it has not answered when it dies
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(client.with_options().load_adapter, "a", paths[0], timeout=60)
            wait_begun(cluster, paths[0])
            assert not load.done()
            with pytest.raises(NotFound):
                tokens(client, model="a")
            victim.kill()
            with suppress(Unavailable):  # else the client has repeated the call
                load.result(60)
        loaded = client.load_adapter("a", paths[0])
        cluster.start_worker()
        cluster.wait_num_ready(2)
        assert list(client.list_adapters()["simulated"]) == [loaded]
        cluster.workers[0].kill()  # so that only the one that joined later can answer
        assert tokens(client, model="a") != before


def test_a_core_that_dies_during_a_load_forgets_it_or_completes_it_everywhere(
    cluster: Cluster, paths: list[str]
) -> None:
    cluster.start(num_workers=2)
    cluster.wait_num_ready(2)
    with client_of(cluster) as client:
        client.load_adapter("kept", paths[0])
        kept = tokens(client, model="kept")
        cluster.workers[1].process.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(client.load_adapter, "new", paths[1], timeout=60)
            wait_begun(cluster, paths[1])
            assert cluster.core is not None
            cluster.core.kill()
            cluster.workers[1].process.send_signal(signal.SIGCONT)
            cluster.start_core()
            try:
                load.result(60)
            except PagewireError:
                client.load_adapter("new", paths[1], timeout=60)
        cluster.wait_num_ready(2)
        names = [entry.name for entry in client.list_adapters()["simulated"]]
        assert names == ["kept", "new"]
        assert tokens(client, model="kept") == kept
        assert tokens(client, model="new") != kept


def test_a_frontend_that_dies_during_a_load_is_replaced_by_another_for_the_call(
    cluster: Cluster, paths: list[str]
) -> None:
    cluster.start(num_workers=2, num_frontends=2)
    cluster.wait_num_ready(2)
    with client_of(cluster) as client:
        cluster.workers[1].process.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(client.load_adapter, "a", paths[0], timeout=60)
            wait_begun(cluster, paths[0])
            cluster.frontends[0].kill()
            cluster.workers[1].process.send_signal(signal.SIGCONT)
            loaded = load.result(60)
        assert client.list_adapters() == {"simulated": [loaded]}
        assert len(tokens(client, model="a")) == SHORT.max_tokens


def test_workers_get_missing_contents_from_others_and_modules_from_their_flags(
    cluster: Cluster, paths: list[str]
) -> None:
    cluster.start_core()
    cluster.start_frontend()
    cluster.start_worker("--lora-modules", f"flag={paths[0]}")
    cluster.wait_serving()
    with client_of(cluster) as client:
        expected = tokens(client, model="flag")
        for file in Path(paths[0]).iterdir():
            file.unlink()
        cluster.start_worker()
        cluster.wait_num_ready(2)
        cluster.workers[0].kill()
        assert tokens(client, model="flag") == expected
        assert client.unload_adapter("flag") == 0
        with pytest.raises(NotFound):
            tokens(client, model="flag")


def test_vectors_of_a_call_that_names_an_adapter_are_not_those_of_the_model(
    tmp_path: Path, paths: list[str]
) -> None:
    simulated = ["--simulate", "--simulate-cache-groups", "none", "--enable-lora"]
    flags = {
        "worker_flags": simulated,
        "frontend_flags": ["--allow-runtime-lora-updating", "--http", "127.0.0.1:0"],
    }
    with Cluster(tmp_path, **flags) as cluster:
        cluster.start()
        with client_of(cluster) as client:
            for name, path in zip("abc", [*paths[:2], paths[0]], strict=True):
                client.load_adapter(name, path)
            of_model, of_a, of_b, of_c = (
                client.embed([PROMPT], model=name).tolist() for name in ("simulated", "a", "b", "c")
            )
            assert of_a not in (of_model, of_b)
            assert of_c == of_a  # the same content
            with pytest.raises(NotFound):
                client.embed([PROMPT], model="d")
        with httpx.Client(base_url=cluster.http_url(), timeout=60) as http:
            body = {"model": "a", "input": PROMPT}
            answer = http.post("/v1/embeddings", json=body).json()
    assert answer["model"] == "a"
    assert answer["data"][0]["embedding"] == pytest.approx(of_a[0])


def test_answers_with_an_adapter_are_those_of_peft(tmp_path: Path) -> None:
    prompt, num_tokens = [5, 17, 42, 8], 16
    peft = make_adapter(EMBEDDED, tmp_path / "peft")
    expected, _ = peft.generate(prompt, num_tokens)
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    flags = {
        "worker_flags": [*FLOAT32, "--enable-lora"],
        "frontend_flags": ["--allow-runtime-lora-updating"],
    }
    with Cluster(tmp_path, **flags) as cluster:
        cluster.start()
        with client_of(cluster) as client:
            client.load_adapter("a", str(peft.folder))
            with_adapter, without = (
                client.generate(prompt, greedy, lora=lora).outputs[0].token_ids
                for lora in ("a", None)
            )
    assert with_adapter == expected
    assert without != expected


def test_answers_with_prompts_are_those_of_peft_and_share_no_kv(tmp_path: Path) -> None:
    prompt, num_tokens = [5, 17, 42, 8] * 16, 8
    made = {
        name: make_prompt(EMBEDDED, tmp_path / name, num_tokens=20, seed=seed)
        for seed, name in enumerate("ab")
    }
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    flags = {
        "worker_flags": [*FLOAT32, "--enable-lora", "--max-loras", "2"],
        "frontend_flags": ["--allow-runtime-lora-updating"],
    }
    with Cluster(tmp_path, **flags) as cluster:
        cluster.start()
        with client_of(cluster) as client:
            for name, peft in made.items():
                loaded = client.load_adapter(name, str(peft.folder))
                assert (loaded.num_virtual_tokens, loaded.rank) == (20, 0)
            plain = client.generate(prompt, greedy)
            for name, peft in made.items():
                expected, _ = peft.generate(prompt, num_tokens)
                assert expected != plain.outputs[0].token_ids
                for num_cached in (0, 80):
                    found = client.generate(prompt, greedy, lora=name)
                    assert found.outputs[0].token_ids == expected
                    assert found.prompt_token_ids == prompt
                    assert found.usage.prompt_tokens == len(prompt) + 20
                    assert found.usage.cached_tokens == num_cached
            peft, params = made["a"], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            found = client.generate(prompt, params, lora="a")
    logits = peft.logits(prompt)
    expected = logits.log_softmax(-1)[20:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert found.prompt_logprobs is not None
    first, *entries = found.prompt_logprobs
    assert first is None
    logprobs = [
        entry[token].logprob for entry, token in zip(entries, prompt[1:], strict=True) if entry
    ]
    assert logprobs == pytest.approx(expected.tolist(), abs=2e-5)

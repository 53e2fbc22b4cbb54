"""The adapters of a worker on the host, and sequences of a simulated worker that name them."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.plans import new_sequence
from worker_service.adapters.store import CHUNK_BYTES, AdapterInfo
from worker_service.config import AdapterConfig, AdapterModule
from worker_service.errors import (
    AdapterNotFound,
    AdaptersFull,
    BadAdapter,
    InvalidOption,
    InvalidPlan,
)
from worker_service.plan import ContextKind, ContextPart, PoolingParams, PoolingType
from worker_service.simulated.adapters import SimulatedAdapters


def write(folder: Path, content: str, rank: int = 4) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_text(content)
    return str(folder)


def adapters(**settings: int) -> SimulatedAdapters:
    return SimulatedAdapters(AdapterConfig(enable_lora=True, **settings))


def test_an_adapter_is_its_content_wherever_it_was_read(tmp_path: Path) -> None:
    here, there = adapters(), adapters()
    first = here.load(write(tmp_path / "a", "x"))
    assert (first.rank, len(first.digest)) == (4, 32)
    assert here.load(write(tmp_path / "b", "x")) == first
    assert here.load(write(tmp_path / "c", "y")).digest != first.digest
    assert there.add(bytearray().join(here.require_store().chunks(first.digest))) == first


def test_what_is_in_use_is_dropped_when_its_last_sequence_ends(tmp_path: Path) -> None:
    here = adapters()
    store, digest = here.require_store(), here.load(write(tmp_path / "a", "x")).digest
    store.acquire(digest)
    store.acquire(digest)
    store.retain(set())
    store.release(digest)
    assert store.get(digest).info.digest == digest
    store.release(digest)
    with pytest.raises(AdapterNotFound, match=digest.hex()):
        store.get(digest)


def test_adapters_beyond_the_limits_are_refused_by_value(tmp_path: Path) -> None:
    here = adapters(max_cpu_loras=1)
    here.load(write(tmp_path / "a", "x"))
    with pytest.raises(AdaptersFull, match="max_cpu_loras: expected at most 1 adapters"):
        here.load(write(tmp_path / "b", "y"))
    with pytest.raises(BadAdapter, match="r: expected 1 to 16, --max-lora-rank, got 32"):
        here.load(write(tmp_path / "c", "z", rank=32))
    with pytest.raises(AdapterNotFound, match="nowhere"):
        here.load("nowhere")
    with pytest.raises(BadAdapter, match="chunks: expected"):
        here.add(bytearray(b"{}\n"))
    with pytest.raises(InvalidOption, match="enable_lora"):
        SimulatedAdapters(AdapterConfig()).load(str(tmp_path / "a"))


def test_folders_in_the_folder_of_a_simulated_adapter_are_not_read(tmp_path: Path) -> None:
    """As those that downloads from the hub leave there."""
    path = write(tmp_path / "a", "x")
    digest = adapters().load(path).digest
    (tmp_path / "a" / ".cache").mkdir()
    assert adapters().load(path).digest == digest


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"r": 1e999}', "adapter_config.json: expected an object"),
        ('{"num_virtual_tokens": Infinity}', "adapter_config.json: expected an object"),
        ("[" * 100_000, "adapter_config.json: expected an object"),
        ('{"num_virtual_tokens": -3}', r"num_virtual_tokens: expected 0 to 2\^31 - 1, got -3"),
    ],
)
def test_impossible_settings_of_a_simulated_adapter_are_refused(
    tmp_path: Path, config: str, message: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(BadAdapter, match=message):
        adapters().load(str(tmp_path))


def test_impossible_content_of_a_simulated_adapter_is_refused() -> None:
    for header in (b'{"rank": Infinity, "sizes": {}}', b"[" * 100_000):
        with pytest.raises(BadAdapter, match="chunks: expected an adapter's content"):
            adapters().add(bytearray(header + b"\n"))


async def test_what_another_worker_sends_is_read_up_to_the_limit() -> None:
    num_read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_read
        while True:
            num_read += CHUNK_BYTES
            yield bytes(CHUNK_BYTES)

    here = adapters()
    here._max_bytes = 2 * CHUNK_BYTES
    with pytest.raises(BadAdapter, match=r"chunks: expected at most 2097152 bytes, got more"):
        await here.receive(endless())
    assert num_read == 3 * CHUNK_BYTES
    with pytest.raises(InvalidOption, match="enable_lora"):
        await SimulatedAdapters(AdapterConfig()).receive(endless())


def part(info: AdapterInfo | None, start: int = 0) -> ContextPart:
    digest = bytes(32) if info is None else info.digest
    return ContextPart(kind=ContextKind.ADAPTER, digest=digest, start=start, length=0)


def test_a_sequence_has_one_adapter_that_is_loaded(tmp_path: Path) -> None:
    here = adapters()
    info, store = here.load(write(tmp_path / "a", "x")), here.require_store()
    assert store.adapter_of(new_sequence(context=(part(info),)), "new") == info.digest
    assert store.adapter_of(new_sequence(), "new") == b""
    for context, path in (
        ((part(None),), r"new.context\[0\].digest"),
        ((part(info), part(info)), r"new.context\[1\]"),
        ((part(info, start=3),), r"new.context\[0\]"),
    ):
        with pytest.raises(InvalidPlan, match=path):
            store.adapter_of(new_sequence(context=context), "new")


def test_prompts_are_refused_for_vectors(tmp_path: Path) -> None:
    folder = tmp_path / "prompt"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"num_virtual_tokens": 3}))
    here = adapters()
    info, store = here.load(str(folder)), here.require_store()
    sequence = new_sequence(token_ids=[1] * 5, context=(part(info),))
    assert store.adapter_of(sequence, "new") == info.digest
    params = PoolingParams(type=PoolingType.LAST, normalize=True)
    with pytest.raises(InvalidPlan, match="becomes a vector, got one with 3 virtual tokens"):
        store.adapter_of(replace(sequence, pooling=params), "new")
    only_vectors = SimulatedAdapters(AdapterConfig(enable_lora=True), generates=False)
    with pytest.raises(BadAdapter, match="peft_type: expected LORA for a model that makes vectors"):
        only_vectors.load(str(folder))
    assert only_vectors.load(write(tmp_path / "a", "x")).rank == 4


def test_modules_are_named_as_users_of_vllm_name_them() -> None:
    config = AdapterConfig(
        enable_lora=True, lora_modules=["sql=/a=b", '{"name": "x", "path": "y"}']
    )
    assert config.modules == [
        AdapterModule(name="sql", path="/a=b"),
        AdapterModule(name="x", path="y"),
    ]
    for text in ("sql", "=x", "x=", '{"name": "x"}', '{"name": "x", "path": "y", "rank": 1}', "{"):
        with pytest.raises(InvalidOption, match="lora_modules: expected NAME=PATH"):
            AdapterConfig(enable_lora=True, lora_modules=[text])
    for name in ("a b", "ä", "x" * 129, "a\n"):
        with pytest.raises(InvalidOption, match="lora_modules: expected names of 1 to 128"):
            AdapterConfig(enable_lora=True, lora_modules=[f"{name}=/a"])
    with pytest.raises(InvalidOption, match="each name once"):
        AdapterConfig(enable_lora=True, lora_modules=["x=y", "x=z"])
    with pytest.raises(InvalidOption, match="none without --enable-lora"):
        AdapterConfig(lora_modules=["x=y"])
    with pytest.raises(InvalidOption, match="max_cpu_loras: expected at least 4"):
        AdapterConfig(max_loras=4, max_cpu_loras=2)

"""Which models a frontend knows, and how it comes by their files."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from pagewire.v1 import adapter_pb2, model_pb2
from pagewire.v1.status_pb2 import WorkerLoading
from scheduler_service.errors import (
    InvalidArgument,
    PermissionDenied,
    Unavailable,
    UnknownModel,
    UnsupportedByModel,
)
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.models import model_loader, served_models
from scheduler_service.frontend.models.served_models import ModelDirectory
from tests.support.fake_core import model_info
from tests.support.tokenizers import byte_level, model_files

FILES = model_files(byte_level())
ANYBODY = Principal()


class Fetch:
    """Returns files, counts its calls, and fails `num_failures` times."""

    def __init__(self, num_failures: int = 0) -> None:
        self.names: list[str] = []
        self.fingerprints: list[str] = []
        self.num_failures = num_failures
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, name: str, fingerprint: str) -> Mapping[str, bytes]:
        self.names.append(name)
        self.fingerprints.append(fingerprint)
        await self.gate.wait()
        if self.num_failures:
            self.num_failures -= 1
            raise Unavailable("not now")
        return FILES


async def test_files_are_fetched_once_per_fingerprint() -> None:
    fetch = Fetch()
    directory = ModelDirectory(fetch)
    for _ in range(3):
        directory.update([model_info()])
        await directory.resolve("tiny", ANYBODY)
        directory.update([])
    assert fetch.names == ["tiny"]
    directory.update([model_info(fingerprint="other")])
    assert (await directory.resolve(None, ANYBODY)).info.fingerprint == "other"
    assert fetch.names == ["tiny", "tiny"]


async def test_other_parsers_change_the_format_without_new_files(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fetch = Fetch()
    directory = ModelDirectory(fetch)
    formats = []
    for parser in ("", "mistral", "none", "from another version"):
        directory.update([model_info(tool_call_parser=parser)])
        formats.append((await directory.resolve(None, ANYBODY)).chat_format.calls)
    names = [calls.names[0] if calls is not None else None for calls in formats]
    assert names == ["hermes", "mistral", None, None]
    assert fetch.names == ["tiny"]
    assert "from another version" in caplog.text


async def test_a_fetch_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "RETRY_DELAY_S", 0)
    fetch = Fetch(num_failures=2)
    directory = ModelDirectory(fetch)
    directory.update([model_info()])
    assert not directory.is_serving
    assert (await directory.resolve("tiny", ANYBODY)).tokenizer is not None
    assert directory.is_serving
    assert len(fetch.names) == 3


async def test_a_model_that_goes_while_its_files_come_is_not_ready() -> None:
    fetch = Fetch()
    fetch.gate.clear()
    directory = ModelDirectory(fetch)
    directory.update([model_info()])
    waiting = asyncio.create_task(directory.resolve("tiny", ANYBODY))
    await asyncio.sleep(0)
    directory.update([])
    fetch.gate.set()
    await asyncio.sleep(0)
    assert not waiting.done()
    directory.update([model_info()])
    assert (await waiting).info == model_info()
    await directory.close()


async def test_a_model_that_comes_back_while_files_of_another_of_its_name_come_is_ready() -> None:
    fetch = Fetch()
    directory = ModelDirectory(fetch)
    directory.update([model_info()])
    await directory.resolve("tiny", ANYBODY)
    fetch.gate.clear()
    directory.update([model_info(fingerprint="tiny-2")])
    (loading,) = directory._loader._loading.values()
    await asyncio.sleep(0)
    directory.update([model_info()])
    fetch.gate.set()
    await asyncio.wait([loading])
    assert directory.current("tiny", ANYBODY).info == model_info()


async def test_the_name_may_be_left_out_only_where_one_model_is_served() -> None:
    directory = ModelDirectory(Fetch())
    directory.update([model_info("a"), model_info("b")])
    with pytest.raises(InvalidArgument) as caught:
        await directory.resolve(None, ANYBODY)
    assert (caught.value.field, caught.value.expected) == (
        "model",
        "required, since several are served: a, b",
    )
    assert (await directory.resolve("b", ANYBODY)).info.name == "b"


async def test_without_a_name_what_every_model_does_is_done_by_the_only_generator() -> None:
    directory = ModelDirectory(Fetch())
    embedder = model_info("a", work_kinds=[model_pb2.WORK_KIND_POOLING])
    directory.update([embedder, model_info("b")])
    for work in (model_pb2.WORK_KIND_POOLING, model_pb2.WORK_KIND_GENERATION):
        await directory.resolve(None, ANYBODY, work)
    assert directory.current(None, ANYBODY).info.name == "b"


async def test_a_continued_request_waits_for_a_model_that_does_its_work() -> None:
    directory = ModelDirectory(Fetch())
    directory.update([model_info("a", work_kinds=[model_pb2.WORK_KIND_POOLING])])
    with pytest.raises(UnsupportedByModel):
        await directory.resolve(None, ANYBODY)
    waiting = asyncio.create_task(directory.resolve(None, ANYBODY, is_continued=True))
    await asyncio.sleep(0)
    assert not waiting.done()
    directory.update([model_info("b")])
    assert (await waiting).info.name == "b"


@pytest.mark.parametrize(
    "others",
    [{"known": ["a", "b"]}, {"loading": [WorkerLoading(phase="reading weights", model="b")]}],
    ids=["that is away", "that is being loaded"],
)
async def test_a_request_without_a_name_waits_for_a_model(
    others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedder's workers may be the first that find a new core."""
    directory = ModelDirectory(Fetch())
    embedder = model_info("a", work_kinds=[model_pb2.WORK_KIND_POOLING])
    directory.update([embedder], **others)
    waiting = asyncio.create_task(directory.resolve(None, ANYBODY))
    await asyncio.sleep(0)
    assert not waiting.done()
    directory.update([embedder, model_info("b")], **others)
    assert (await waiting).info.name == "b"
    directory.update([embedder], **others)
    monkeypatch.setattr(served_models, "MAX_UNKNOWN_WAIT_S", 0.01)  # else the test waits as long
    with pytest.raises(Unavailable, match="no model for generation that"):
        await directory.resolve(None, ANYBODY)


async def test_a_model_is_found_under_each_of_its_names() -> None:
    directory = ModelDirectory(Fetch())
    directory.update([model_info("a", aliases=["small"]), model_info("b")])
    assert (await directory.resolve("small", ANYBODY)).info.name == "a"
    for allowed in ("a", "small"):  # a key may name either
        tenant = Principal(name="t", models=frozenset([allowed]))
        for name in ("a", "small", None):
            assert (await directory.resolve(name, tenant)).info.name == "a"
        with pytest.raises(PermissionDenied):
            await directory.resolve("b", tenant)
    directory.update([model_info("b")])
    waiting = asyncio.create_task(directory.resolve("small", ANYBODY))
    await asyncio.sleep(0)
    assert not waiting.done(), "it may come back"
    directory.update([model_info("a", aliases=["small"]), model_info("b")])
    assert (await waiting).info.name == "a"


async def test_a_model_never_heard_of_is_unknown_and_one_that_went_is_waited_for() -> None:
    directory = ModelDirectory(Fetch())
    directory.update([model_info("a"), model_info("b")])
    await directory.resolve("a", ANYBODY)
    directory.update([model_info("b")])
    with pytest.raises(UnknownModel):
        await directory.resolve("c", ANYBODY)
    waiting = asyncio.create_task(directory.resolve("a", ANYBODY))
    await asyncio.sleep(0)
    assert not waiting.done()
    with pytest.raises(Unavailable):
        directory.current("a", ANYBODY)
    directory.update([model_info("a"), model_info("b")])
    assert (await waiting).info.name == "a"


async def test_a_model_that_only_the_core_has_seen_is_waited_for() -> None:
    directory = ModelDirectory(Fetch())
    directory.update([model_info("b")], known=["a", "b"])
    waiting = asyncio.create_task(directory.resolve("a", ANYBODY))
    await asyncio.sleep(0)
    assert not waiting.done()
    with pytest.raises(Unavailable):
        directory.current("a", ANYBODY)
    directory.update([model_info("a"), model_info("b")], known=["a", "b"])
    assert (await waiting).info.name == "a"


async def test_reports_of_loads_wake_nobody_until_other_models_are_served() -> None:
    directory = ModelDirectory(Fetch())
    directory.update([model_info("b")], known=["a", "b"])
    await directory.resolve("b", ANYBODY)
    changed = directory.changed
    for done_bytes in range(3):
        load = WorkerLoading(phase="reading weights", done_bytes=done_bytes, total_bytes=4)
        directory.update([model_info("b")], known=["a", "b"], loading=[load])
    assert directory.changed is changed
    assert not changed.is_set()
    with pytest.raises(Unavailable, match="reading weights 50 %"):
        directory.current("a", ANYBODY)
    for models, known in (
        ([model_info("b", aliases=["c"])], ["a", "b"]),
        ([model_info("b", aliases=["c"])], ["a", "b", "d"]),
        ([], []),
    ):
        changed = directory.changed
        directory.update(models, known=known)
        assert changed.is_set()


async def test_a_request_that_is_continued_waits_even_for_a_model_that_nobody_knows() -> None:
    directory = ModelDirectory(Fetch())
    directory.update([model_info("b")])
    waiting = asyncio.create_task(directory.resolve("a", ANYBODY, is_continued=True))
    await asyncio.sleep(0)
    assert not waiting.done()
    directory.update([model_info("a"), model_info("b")])
    assert (await waiting).info.name == "a"


async def test_a_continued_request_waits_a_bounded_time_for_a_model_that_nobody_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_models, "MAX_UNKNOWN_WAIT_S", 0.01)
    directory = ModelDirectory(Fetch())
    directory.update([model_info("b")])
    with pytest.raises(Unavailable, match="model 'a' is not being served now"):
        await directory.resolve("a", ANYBODY, is_continued=True)


async def test_the_time_without_a_core_is_not_part_of_a_bounded_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An adapter comes with a worker that registers later than the first one."""
    loop = asyncio.get_running_loop()
    directory = ModelDirectory(Fetch())
    table = adapter_pb2.ModelAdapters(model="a", settling=True)
    with_adapter = asyncio.create_task(directory.resolve_with_adapter(None, ANYBODY, lora="x"))
    continued = asyncio.create_task(directory.resolve("b", ANYBODY, is_continued=True))
    await asyncio.sleep(0)
    now = loop.time()  # without a core; a short bound would have to be raced
    monkeypatch.setattr(loop, "time", lambda: now + 2 * served_models.MAX_UNKNOWN_WAIT_S)
    directory.update([model_info("a")], adapters=[table])
    for _ in range(3):
        await asyncio.sleep(0)
    table.adapters.adapters.add(name="x", digest=bytes(32))
    directory.update([model_info("a"), model_info("b")], adapters=[table])
    assert (await with_adapter)[0].info.name == "a"
    assert (await continued).info.name == "b"


async def test_a_key_whose_models_are_not_served_waits_a_bounded_time_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_models, "MAX_UNKNOWN_WAIT_S", 0.01)
    directory = ModelDirectory(Fetch())
    directory.update([model_info("b")])
    tenant = Principal(name="t", models=frozenset(["a"]))
    with pytest.raises(Unavailable, match="no model for generation that this API key may use is"):
        await directory.resolve(None, tenant)


async def test_announcements_do_not_restart_the_load_of_the_same_files() -> None:
    fetch = Fetch()
    fetch.gate.clear()
    directory = ModelDirectory(fetch)
    for _ in range(20):  # worker b crashes whenever it has started; a's leaves once in a while
        directory.update([model_info("a"), model_info("b")])
        await asyncio.sleep(0)
        directory.update([model_info("a", max_model_len=99)])
        await asyncio.sleep(0)
        directory.update([])
    directory.update([model_info("a", max_model_len=99)])
    assert sorted(fetch.names) == ["a", "b"]
    fetch.gate.set()
    assert (await directory.resolve("a", ANYBODY)).info.max_model_len == 99


async def test_a_load_ends_when_nobody_serves_the_model_any_more() -> None:
    fetch = Fetch(num_failures=1)
    fetch.gate.clear()
    directory = ModelDirectory(fetch)
    directory.update([model_info()])
    (loading,) = directory._loader._loading.values()
    await asyncio.sleep(0)
    directory.update([])
    fetch.gate.set()
    await loading
    assert fetch.names == ["tiny"]
    directory.update([model_info()])
    assert (await directory.resolve("tiny", ANYBODY)).tokenizer is not None


def loading(fingerprint: str, name: str = "tiny") -> WorkerLoading:
    """The report of a worker that has read its model's files."""
    return WorkerLoading(model=name, fingerprint=fingerprint, address="unix:worker")


async def test_files_are_read_while_a_worker_still_loads_its_model() -> None:
    fetch = Fetch()
    directory = ModelDirectory(fetch)
    directory.update([], loading=[WorkerLoading(model="tiny")])
    assert not directory._loader._loading  # it has not read them yet
    info = model_info()
    directory.update([], loading=[loading(info.fingerprint)])
    (reading,) = directory._loader._loading.values()
    await reading
    directory.update([], loading=[loading(info.fingerprint)])
    assert not directory.is_serving
    directory.update([])  # it has registered, and allocates its caches
    directory.update([info])
    assert directory.current("tiny", ANYBODY).info == info
    assert (fetch.names, fetch.fingerprints) == (["tiny"], [info.fingerprint])


async def test_a_model_that_is_served_before_its_files_are_read_waits_for_the_same_read() -> None:
    fetch = Fetch()
    fetch.gate.clear()
    directory = ModelDirectory(fetch)
    info = model_info()
    directory.update([], loading=[loading(info.fingerprint)])
    await asyncio.sleep(0)
    directory.update([])
    directory.update([info])
    fetch.gate.set()
    assert (await directory.resolve("tiny", ANYBODY)).info == info
    assert fetch.names == ["tiny"]


async def test_files_of_a_worker_that_loads_do_not_replace_those_of_the_same_name_in_use() -> None:
    fetch = Fetch()
    directory = ModelDirectory(fetch)
    old, new = model_info(), model_info(fingerprint="new")
    directory.update([old])
    await directory.resolve("tiny", ANYBODY)
    for _ in range(2):
        directory.update([old], loading=[loading("new")])
        await asyncio.gather(*directory._loader._loading.values())
        assert directory.current("tiny", ANYBODY).info == old
    assert fetch.fingerprints == [old.fingerprint, "new"]
    directory.update([new])
    assert directory.current("tiny", ANYBODY).info == new
    assert fetch.fingerprints == [old.fingerprint, "new"]


async def test_files_of_a_worker_that_dies_while_it_loads_are_not_asked_for_again() -> None:
    fetch = Fetch(num_failures=1)
    fetch.gate.clear()
    directory = ModelDirectory(fetch)
    directory.update([], loading=[loading("any")])
    (reading,) = directory._loader._loading.values()
    await asyncio.sleep(0)
    directory.update([])
    fetch.gate.set()
    await reading
    assert fetch.names == ["tiny"]
    assert not directory._loader._loading

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric as Family

from service_common.errors import CannotListen
from service_common.metrics_server import metrics_address
from service_common.prometheus import Kind, LoopCollector, Metric, make_registry, published
from tests.support.scrapes import Scrape, scrape_at

LEVEL = Metric(Kind.GAUGE, "level", "How high.")


async def test_numbers_are_read_on_the_loops_thread_whoever_asks() -> None:
    threads = []

    def collect() -> Iterator[Family]:
        threads.append(threading.get_ident())
        yield LEVEL.family(len(threads))

    async with published(make_registry(LoopCollector(collect)), "127.0.0.1:0") as server:
        assert server is not None
        told: Scrape = await asyncio.to_thread(scrape_at, server.address)
        assert told.sum("level") == 1
        told = await asyncio.to_thread(scrape_at, server.address)
        assert told.sum("level") == 2
    assert set(threads) == {threading.get_ident()}
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(scrape_at, server.address)


async def test_numbers_that_cannot_be_read_are_an_error_not_an_empty_page() -> None:
    def collect() -> Iterator[Family]:
        raise ValueError("what a bug")

    registry = make_registry(LoopCollector(collect))
    with pytest.raises(ValueError, match="what a bug"):
        await asyncio.to_thread(lambda: list(registry.collect()))
    with pytest.raises(ValueError, match="what a bug"):
        list(registry.collect())


async def test_nothing_listens_without_an_address() -> None:
    async with published(make_registry(LoopCollector(lambda: ())), None) as server:
        assert server is None


async def test_a_taken_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CannotListen, match="already in use"):
            async with published(make_registry(LoopCollector(lambda: ())), address):
                raise AssertionError("it listens")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9100", "127.0.0.1:9100"),
        ("0.0.0.0:9100", "0.0.0.0:9100"),
        ("[::1]:9100", "[::1]:9100"),
        ("off", None),
        (None, None),
    ],
)
def test_a_port_alone_is_on_loopback(text: str | None, address: str | None) -> None:
    assert metrics_address(text) == address


@pytest.mark.parametrize("text", ["", "port", "1.2.3.4", "host:", "70000", "unix:/tmp/x"])
def test_what_is_no_port_is_refused_by_the_flags_name(text: str) -> None:
    with pytest.raises(ValueError, match="metrics_port"):
        metrics_address(text)

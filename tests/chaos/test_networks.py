"""A cut loses what is sent in its direction, and healing it lets it through again."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.namespaces import NamespaceNetwork, namespaces_permitted
from tests.chaos.network import CLIENT, Link, Network
from tests.chaos.relays import RelayNetwork

ECHO = """
import socket, sys
host, port = sys.argv[1].split(":")
listener = socket.create_server((host, int(port)))
print("listening", flush=True)
while True:
    end, _ = listener.accept()
    while data := end.recv(100):
        end.sendall(data)
"""
NETWORKS = [
    RelayNetwork,
    pytest.param(
        NamespaceNetwork,
        marks=pytest.mark.skipif(not namespaces_permitted(), reason="needs namespaces"),
    ),
]
SILENCE_S = 0.3
"""Too short to prove a loss; most faults are still found."""


@asynccontextmanager
async def echo_on(network: Network, host: str) -> AsyncIterator[None]:
    command = [*network.program(host), sys.executable, "-c", ECHO, network.listen_address(host)]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert await server.stdout.readline() == b"listening\n"
        yield
    finally:
        server.kill()
        await server.wait()


async def is_silent(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(SILENCE_S):
            await reader.readexactly(1)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("direction", [(CLIENT, "core"), ("core", CLIENT)])
async def test_a_cut_link_is_silent_until_it_is_healed(
    kind: type[Network], direction: tuple[str, str]
) -> None:
    async with kind([Link(CLIENT, "core")]) as network, echo_on(network, "core"):
        host, port = network.address(CLIENT, "core").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        network.cut(*direction)
        network.cut(*direction)
        writer.write(b"b")
        assert await is_silent(reader)
        network.heal(*direction)
        assert await is_silent(reader)
        network.heal(*direction)
        assert await reader.readexactly(1) == b"b"
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("kind", NETWORKS)
async def test_hosts_reach_each_other_only_over_their_links(kind: type[Network]) -> None:
    links = [Link(CLIENT, "core"), Link("worker-0", "core")]
    async with kind(links) as network:
        assert network.hosts == ["core", "worker-0"]
        assert network.address("worker-0", "core") != network.address(CLIENT, "core")
        with pytest.raises(StopIteration):
            network.link(CLIENT, "worker-0")

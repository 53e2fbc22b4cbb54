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
import socketserver, sys

class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(100):
            self.request.sendall(data)

host, port = sys.argv[1].split(":")
server = socketserver.ThreadingTCPServer((host, int(port)), Echo)
print("listening", flush=True)
server.serve_forever()
"""
needs_namespaces = pytest.mark.skipif(
    not namespaces_permitted(), reason="needs network namespaces and TUN devices (Linux, root)"
)
NETWORKS = [RelayNetwork, pytest.param(NamespaceNetwork, marks=needs_namespaces)]
SILENCE_S = 0.3
"""Too short to prove a loss; most faults are still found."""


@asynccontextmanager
async def running(program: str, network: Network, host: str) -> AsyncIterator[None]:
    command = [*network.program(host), sys.executable, "-c", program, network.listen_address(host)]
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
    async with kind([Link(CLIENT, "core")]) as network, running(ECHO, network, "core"):
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

"""Move packets between the ends of links, and lose, delay and reorder them as `tc netem` does.

A process of its own, since few kernels of virtual machines have netem. Its arguments are the file
descriptors of TUN devices, two for each link; each line of its standard input is a change in JSON.
It ends with its standard input.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from random import Random
from typing import Any

from tests.chaos.network import Quality

MAX_PACKET_BYTES = 65536
IPV4, TCP, SYN = 4, 6, 0x02


class Link:
    """Knows its connections, as a firewall does: packets of no known one are dropped."""

    def __init__(self) -> None:
        self._connections: set[frozenset[bytes]] = set()

    def forget(self) -> None:
        """Drop all that follows on the present connections; both ends keep them, half open."""
        self._connections.clear()

    def passes(self, packet: bytes) -> bool:
        """Whether it belongs to no connection or to a known one; a first packet makes it known."""
        if packet[0] >> 4 != IPV4:
            return False  # an interface that looks for routers
        if packet[9] != TCP:
            return True
        start = 4 * (packet[0] & 15)
        ends = (packet[12:16] + packet[start : start + 2], packet[16:20] + packet[start + 2 :][:2])
        connection = frozenset(ends)
        if packet[start + 13] & SYN:
            self._connections.add(connection)
        return connection in self._connections


class Direction:
    """What one end of a link sends to the other."""

    def __init__(self, link: Link, sender: int, receiver: int) -> None:
        self.quality = Quality()
        self._link, self._sender, self._receiver = link, sender, receiver
        self._draw = Random(sender)

    def forward(self) -> None:
        """Take the packets that have been sent."""
        with suppress(BlockingIOError):
            while True:
                packet = os.read(self._sender, MAX_PACKET_BYTES)
                if self._link.passes(packet) and self._draw.random() >= self.quality.loss:
                    self._deliver(packet)

    def _deliver(self, packet: bytes) -> None:
        if self.quality.delay_s == 0 or self._draw.random() < self.quality.reordered:
            self._write(packet)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(self.quality.delay_s, self._write, packet)

    def _write(self, packet: bytes) -> None:
        with suppress(OSError):  # a full queue loses it, as everywhere
            os.write(self._receiver, packet)


class Wires:
    """All links."""

    def __init__(self, ends: Iterable[int]) -> None:
        each = list(ends)
        self.links = [Link() for _ in each[::2]]
        self.directions = [
            Direction(self.links[at // 2], end, each[at ^ 1]) for at, end in enumerate(each)
        ]
        for direction, end in zip(self.directions, each, strict=True):
            os.set_blocking(end, False)
            asyncio.get_running_loop().add_reader(end, direction.forward)

    def change(self, order: dict[str, Any]) -> None:
        """Forget a link's connections, or set the quality of a direction."""
        if "forget" in order:
            self.links[order["forget"]].forget()
        else:
            self.directions[order["direction"]].quality = Quality(**order["quality"])


async def main() -> None:
    """Run until standard input ends."""
    wires = Wires(map(int, sys.argv[1:]))
    orders = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(orders)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    async for line in orders:
        wires.change(json.loads(line))
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main())

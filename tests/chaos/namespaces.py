"""Hosts as network namespaces, each link a pair of virtual interfaces. Linux, as root."""

import fcntl
import json
import os
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any, Self

from tests.chaos.network import CLIENT, Link, Network, Quality, role_of
from tools.launch import ROOT

PORT = 7600
"""Of every host's service: each has its own addresses."""

LOST = Quality(loss=1.0)
BAD = Quality(loss=0.02, delay_s=0.05, reordered=0.1)
"""A slow and lossy link, on which a tenth of the packets overtake those before them."""

_IP = "ip"
_TUN_DEVICES = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_ADDRESSES_PER_LINK = 8


def namespaces_permitted() -> bool:
    """Whether this process may make namespaces and links between them."""
    name = f"pw{os.getpid()}-probe"
    try:
        _run(_IP, "netns", "add", name)
        try:
            device = _make_tun(f"pw{os.getpid()}p")
            try:
                _run(_IP, "link", "set", f"pw{os.getpid()}p", "netns", name)
            finally:
                os.close(device)
        finally:
            _run(_IP, "netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class NamespaceNetwork(Network):
    """A cut end drops what it should send: the kernels of both sides see no more than silence.

    A process (`wires.py`) carries the packets, so links can also be slow, lose single packets and
    forget connections, as a firewall does when it restarts.
    """

    def __init__(self, links: list[Link], bad_links: bool = False) -> None:
        """`bad_links`: whether all are `BAD`, but those between ranks and the harness's."""
        super().__init__(links)
        self._num_degraded: Counter[Link] = Counter(
            link
            for link in links
            if bad_links and not (link.is_for_harness or link.is_between_ranks)
        )
        self._num_moves: Counter[tuple[Link, str]] = Counter()
        self._wires: subprocess.Popen[bytes] | None = None
        self._tag = f"pw{os.getpid()}"
        # Of 10.200.0.0/13; another harness on this machine takes another part of it.
        self._prefix = f"10.{200 + os.getpid() % 8}.{os.getpid() // 8 % 256}"

    def program(self, host: str) -> list[str]:
        return [_IP, "netns", "exec", self._namespace(host)]

    def listen_address(self, host: str) -> str:
        return f"0.0.0.0:{PORT}"

    def address(self, caller: str, callee: str) -> str:
        return f"{self.ip(caller, callee)}:{PORT}"

    def ip(self, caller: str, callee: str) -> str:
        """The address at which a host reaches another."""
        return self._ip(self.link(caller, callee), callee)

    def degrade(self, link: Link) -> None:
        """Make a link `BAD`, in both directions. May be done by several at a time."""
        self._num_degraded[link] += 1
        self._update_both_ways(link)

    def restore(self, link: Link) -> None:
        """Undo `degrade`, once all who have done it have undone it."""
        self._num_degraded[link] -= 1
        self._update_both_ways(link)

    def forget(self, link: Link) -> None:
        """Lose all that follows on a link's present connections; new ones can be made."""
        self._change(forget=self.links.index(link))

    def move(self, host: str, peer: str) -> None:
        """Give a host another address on its link to a peer, and take the present one away."""
        link = self.link(host, peer)
        self._address("del", link, host)
        self._num_moves[link, host] += 1
        self._address("add", link, host)

    def _cut(self, sender: str, receiver: str) -> None:
        self._update(sender, receiver)

    def _heal(self, sender: str, receiver: str) -> None:
        self._update(sender, receiver)

    async def __aenter__(self) -> Self:
        for host in self.hosts:
            _run(_IP, "netns", "add", self._namespace(host))
            _run(_IP, "-n", self._namespace(host), "link", "set", "lo", "up")
        self._wires = self._start_wires()
        for link in self.links:
            if link.is_between_groups:
                self._route(link, link.one)
                self._route(link, link.other)
        for link in self.links:
            self._update_both_ways(link)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._wires is not None
        self._wires.communicate()  # whose interfaces end with it
        for host in self.hosts:
            _run(_IP, "netns", "del", self._namespace(host))

    def _start_wires(self) -> "subprocess.Popen[bytes]":
        """Make both ends of every link, and the process that carries packets between them."""
        ends = [
            self._make_end(link, host) for link in self.links for host in (link.one, link.other)
        ]
        wires = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.wires", *map(str, ends)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=ends,
            cwd=ROOT,
        )
        for end in ends:
            os.close(end)
        return wires

    def _make_end(self, link: Link, host: str) -> int:
        """The file descriptor of an interface, which is moved to its host."""
        interface = self._interface(link, host)
        device = _make_tun(interface)
        if host != CLIENT:
            _run(_IP, "link", "set", interface, "netns", self._namespace(host))
        self._address("add", link, host)
        _run(*self._on(host), "link", "set", interface, "up")
        return device

    def _route(self, link: Link, host: str) -> None:
        """Let a worker reach another one at the address at which the core does."""
        peer = link.end_opposite(host)
        first = _ADDRESSES_PER_LINK * self.links.index(self._core_link(peer))
        interface = self._interface(link, host)
        _run(*self._on(host), "route", "add", f"{self._prefix}.{first}/29", "dev", interface)

    def _core_link(self, worker: str) -> Link:
        links = (link for link in self.links if worker in link)
        return next(link for link in links if role_of(link.end_opposite(worker)) == "core")

    def _address(self, action: str, link: Link, host: str) -> None:
        """Give an interface its address, or take it away."""
        interface, address = self._interface(link, host), f"{self._ip(link, host)}/29"
        _run(*self._on(host), "addr", action, address, "dev", interface)

    def _update_both_ways(self, link: Link) -> None:
        self._update(link.one, link.other)
        self._update(link.other, link.one)

    def _update(self, sender: str, receiver: str) -> None:
        """Let the packets of a direction be carried as its cuts and its link say."""
        link = self.link(sender, receiver)
        quality = Quality()
        if self._num_cuts[sender, receiver]:
            quality = LOST
        elif self._num_degraded[link]:
            quality = BAD
        at = 2 * self.links.index(link) + (sender == link.other)
        self._change(direction=at, quality=asdict(quality))

    def _change(self, **order: Any) -> None:
        """Let the wires do something; it is done afterwards."""
        assert self._wires is not None
        assert self._wires.stdin is not None
        assert self._wires.stdout is not None
        self._wires.stdin.write(json.dumps(order).encode() + b"\n")
        self._wires.stdin.flush()
        if self._wires.stdout.readline() != b"done\n":
            raise RuntimeError("the process that carries packets has ended")

    def _on(self, host: str) -> list[str]:
        return [_IP] if host == CLIENT else [_IP, "-n", self._namespace(host)]

    def _namespace(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def _interface(self, link: Link, host: str) -> str:
        """At most 15 characters, of which the number of the process takes up to seven."""
        return f"{self._tag}l{self.links.index(link)}{'a' if host == link.one else 'b'}"

    def _ip(self, link: Link, host: str) -> str:
        """Of eight addresses for each link; each end has three, which follow one another."""
        own = (1 if host == link.one else 2) + 2 * (self._num_moves[link, host] % 3)
        return f"{self._prefix}.{_ADDRESSES_PER_LINK * self.links.index(link) + own}"


def _make_tun(name: str) -> int:
    """The file descriptor of a new interface, which ends with it."""
    device = os.open(_TUN_DEVICES, os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)

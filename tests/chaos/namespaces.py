"""Hosts as network namespaces, each link a pair of virtual interfaces. Linux, as root."""

import os
import subprocess
from typing import Self

from tests.chaos.network import CLIENT, Link, Network

PORT = 7600
"""Of every host's service: each has its own addresses."""

_IP, _TC = "ip", "tc"


def namespaces_permitted() -> bool:
    """Whether this process may make namespaces and lose packets."""
    name = f"pw{os.getpid()}-probe"
    try:
        _run(_IP, "netns", "add", name)
        try:
            _run(_IP, "-n", name, "link", "set", "lo", "up")
            _run(_TC, "-n", name, "qdisc", "add", "dev", "lo", "root", "pfifo", "limit", "0")
        finally:
            _run(_IP, "netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class NamespaceNetwork(Network):
    """A cut end drops what it should send: the kernels of both sides see no more than silence."""

    def __init__(self, links: list[Link]) -> None:
        super().__init__(links)
        self._tag = f"pw{os.getpid()}"
        # Of 10.200.0.0/13; another harness on this machine takes another part of it.
        self._prefix = f"10.{200 + os.getpid() % 8}.{os.getpid() // 8 % 256}"

    def program(self, host: str) -> list[str]:
        return [_IP, "netns", "exec", self._namespace(host)]

    def listen_address(self, host: str) -> str:
        return f"0.0.0.0:{PORT}"

    def address(self, caller: str, callee: str) -> str:
        return f"{self._ip(self.link(caller, callee), callee)}:{PORT}"

    def _cut(self, sender: str, receiver: str) -> None:
        # A queue of length 0: packets are dropped without an error at the sender.
        self._queue("replace", sender, receiver, "pfifo", "limit", "0")

    def _heal(self, sender: str, receiver: str) -> None:
        self._queue("del", sender, receiver)

    async def __aenter__(self) -> Self:
        for host in self.hosts:
            _run(_IP, "netns", "add", self._namespace(host))
            _run(_IP, "-n", self._namespace(host), "link", "set", "lo", "up")
        for link in self.links:
            self._join(link)
        return self

    async def __aexit__(self, *_: object) -> None:
        for link in self.links:  # at once, where deleting a namespace takes its time
            _run(*self._on(link.other), "link", "del", self._interface(link, link.other))
        for host in self.hosts:
            _run(_IP, "netns", "del", self._namespace(host))

    def _join(self, link: Link) -> None:
        one, other = self._interface(link, link.one), self._interface(link, link.other)
        # Made in the namespace of its second end, which is never the harness's own.
        peer = ["peer", "name", one]
        if link.one != CLIENT:
            peer += ["netns", self._namespace(link.one)]
        else:
            peer += ["netns", str(os.getpid())]
        _run(*self._on(link.other), "link", "add", other, "type", "veth", *peer)
        for host in (link.one, link.other):
            interface = self._interface(link, host)
            _run(*self._on(host), "addr", "add", f"{self._ip(link, host)}/30", "dev", interface)
            _run(*self._on(host), "link", "set", interface, "up")

    def _queue(self, action: str, sender: str, receiver: str, *kind: str) -> None:
        link = self.link(sender, receiver)
        interface = self._interface(link, sender)
        namespace = [] if sender == CLIENT else ["-n", self._namespace(sender)]
        _run(_TC, *namespace, "qdisc", action, "dev", interface, "root", *kind)

    def _on(self, host: str) -> list[str]:
        return [_IP] if host == CLIENT else [_IP, "-n", self._namespace(host)]

    def _namespace(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def _interface(self, link: Link, host: str) -> str:
        """At most 15 characters, of which the number of the process takes up to seven."""
        return f"{self._tag}l{self.links.index(link)}{'a' if host == link.one else 'b'}"

    def _ip(self, link: Link, host: str) -> str:
        """Four addresses for each link; the first and the last are not for hosts."""
        return f"{self._prefix}.{4 * self.links.index(link) + (1 if host == link.one else 2)}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)

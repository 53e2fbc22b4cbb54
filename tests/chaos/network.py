"""Hosts and the links between them, each of which can be cut in either direction.

Real ones are network namespaces joined by pairs of virtual interfaces, where the machine permits
that; else all processes share loopback, and relays stand for the links.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

CLIENT = "client"
"""The host of the harness itself, which is linked to all others."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How a direction of a link carries packets."""

    loss: float = 0.0
    """Share of the packets that are lost."""
    delay_s: float = 0.0
    reordered: float = 0.0
    """Share of the packets that are not delayed, and so overtake others."""


@dataclass(frozen=True, slots=True)
class Link:
    """Two hosts that can reach each other."""

    one: str
    other: str

    def __contains__(self, host: str) -> bool:
        return host in (self.one, self.other)

    def end_opposite(self, host: str) -> str:
        """The end that is not `host`."""
        return self.other if host == self.one else self.one

    @property
    def is_for_harness(self) -> bool:
        """Whether only the harness uses it, to see whether a process is ready."""
        return CLIENT in self and role_of(self.end_opposite(CLIENT)) != "frontend"

    @property
    def is_between_ranks(self) -> bool:
        """Whether two hosts of one worker group use it in every layer."""
        return self._is_between_workers and group_of(self.one) == group_of(self.other)

    @property
    def is_between_groups(self) -> bool:
        """Whether workers of two groups read each other's KV over it."""
        return self._is_between_workers and not self.is_between_ranks

    @property
    def _is_between_workers(self) -> bool:
        return role_of(self.one) == role_of(self.other) == "worker"


class Network(ABC):
    """Links between hosts; an asynchronous context manager that makes and removes them.

    Directions are named by who sends: `cut(a, b)` loses what a sends to b, on connections that
    either of them has made.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = list(links)
        self._num_cuts: Counter[tuple[str, str]] = Counter()

    @property
    def hosts(self) -> list[str]:
        """All but the harness's own, in the order in which links name them."""
        ends = [end for link in self.links for end in (link.one, link.other)]
        return [host for host in dict.fromkeys(ends) if host != CLIENT]

    def link(self, one: str, other: str) -> Link:
        """The link between two hosts, whichever was named first."""
        return next(link for link in self.links if one in link and other in link)

    @abstractmethod
    def program(self, host: str) -> list[str]:
        """What goes before a command that is to run on a host."""

    @abstractmethod
    def listen_address(self, host: str) -> str:
        """Where the service of a host listens."""

    @abstractmethod
    def address(self, caller: str, callee: str) -> str:
        """Where one host reaches the service of another."""

    def cut(self, sender: str, receiver: str) -> None:
        """Lose from now on what `sender` sends to `receiver`. May be cut by several at a time."""
        self._num_cuts[sender, receiver] += 1
        if self._num_cuts[sender, receiver] == 1:
            self._cut(sender, receiver)

    def heal(self, sender: str, receiver: str) -> None:
        """Let it through again, once all who have cut it have healed it."""
        self._num_cuts[sender, receiver] -= 1
        if self._num_cuts[sender, receiver] == 0:
            self._heal(sender, receiver)

    @abstractmethod
    def _cut(self, sender: str, receiver: str) -> None: ...

    @abstractmethod
    def _heal(self, sender: str, receiver: str) -> None: ...

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...


def role_of(host: str) -> str:
    """What runs on a host: core, frontend or worker."""
    return host.partition("-")[0]


def group_of(host: str) -> str:
    """What the hosts of a worker group have in common: worker-1 of worker-1-0, or worker-1."""
    return "-".join(host.split("-")[:2])


def star(core: str, frontends: Sequence[str], workers: Sequence[str]) -> list[Link]:
    """The links of a deployment: clients to frontends, these and workers to the core. The harness
    looks after all."""
    spokes = [Link(host, core) for host in (*frontends, *workers)]
    return [*(Link(CLIENT, host) for host in (core, *frontends, *workers)), *spokes]

"""Disturbances of the members of a cluster, and how each of them is undone.

Each disturbance has one victim, ends when the victim is ready again, and restores everything.
Times are in seconds.
"""

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from tests.chaos.cluster import CORE, ChaosCluster
from tests.chaos.namespaces import NamespaceNetwork
from tests.chaos.network import Link


class DisturbanceFailed(Exception):
    """A member did not behave as required under a disturbance."""


@dataclass(frozen=True, kw_only=True)
class Disturbance(ABC):
    """A disturbance of one member."""

    victim: str
    """Its host."""

    @property
    def kind(self) -> str:
        """Name in the report."""
        return type(self).__name__.lower()

    @abstractmethod
    async def happen(self, cluster: ChaosCluster) -> None:
        """Apply and undo it, and wait until the victim is ready again."""


@dataclass(frozen=True, kw_only=True)
class Kill(Disturbance):
    """The process is killed; its kernel resets its connections."""

    absence_s: float
    youth_s: float | None = None
    """Age at which the next process is killed as well, mostly before it is ready; None: never."""

    async def happen(self, cluster: ChaosCluster) -> None:
        """See the class."""
        await _end(cluster, self.victim, signal.SIGKILL, self.absence_s)
        if self.youth_s is not None:
            cluster.timeline.note(self.victim, f"starts for {self.youth_s:.2f} s")
            cluster.members[self.victim].start()
            await asyncio.sleep(self.youth_s)
            await _end(cluster, self.victim, signal.SIGKILL, self.absence_s)
        await _start(cluster, self.victim)


@dataclass(frozen=True, kw_only=True)
class PowerCut(Disturbance):
    """The host is down: peers are not notified, and data sent to it is lost, until it restarts."""

    absence_s: float

    async def happen(self, cluster: ChaosCluster) -> None:
        """See the class."""
        links = [link for link in cluster.network.links if self.victim in link]
        async with AsyncExitStack() as unplugged:
            for link in links:
                await unplugged.enter_async_context(_cut(cluster, _both_ways(link)))
            await _end(cluster, self.victim, signal.SIGKILL, self.absence_s)
        await _start(cluster, self.victim)


@dataclass(frozen=True, kw_only=True)
class Pause(Disturbance):
    """The process is stopped (SIGSTOP), and later continued."""

    duration_s: float

    async def happen(self, cluster: ChaosCluster) -> None:
        """See the class."""
        member = cluster.members[self.victim]
        cluster.timeline.note(self.victim, f"stops for {self.duration_s:.2f} s")
        member.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(self.duration_s)
        finally:
            member.send(signal.SIGCONT)
            cluster.timeline.note(self.victim, "goes on")
        await member.wait_ready()


@dataclass(frozen=True, kw_only=True)
class Cut(Disturbance):
    """Data sent over a link in some directions is lost for a while."""

    directions: Sequence[tuple[str, str]]
    """Senders and receivers."""
    duration_s: float

    async def happen(self, cluster: ChaosCluster) -> None:
        """See the class."""
        async with _cut(cluster, self.directions):
            await asyncio.sleep(self.duration_s)
        await cluster.members[self.victim].wait_ready()


@dataclass(frozen=True, kw_only=True)
class Weather(Disturbance):
    """A link loses, delays and reorders packets for a while."""

    link: Link
    duration_s: float

    async def happen(self, cluster: ChaosCluster) -> None:
        """See the class."""
        network, ends = _packets(cluster), f"{self.link.one} and {self.link.other}"
        cluster.timeline.note(ends, f"have a bad link for {self.duration_s:.2f} s")
        network.degrade(self.link)
        try:
            await asyncio.sleep(self.duration_s)
        finally:
            network.restore(self.link)
            cluster.timeline.note(ends, "have a good link")
        await cluster.members[self.victim].wait_ready()


@dataclass(frozen=True, kw_only=True)
class Forget(Disturbance):
    """The connections of a link stay open at both ends, and carry nothing any more."""

    link: Link

    async def happen(self, cluster: ChaosCluster) -> None:
        """See the class."""
        _packets(cluster).forget(self.link)
        cluster.timeline.note(
            f"{self.link.one} and {self.link.other}", "have half-open connections"
        )
        await cluster.members[self.victim].wait_ready()


@dataclass(frozen=True, kw_only=True)
class Move(Disturbance):
    """The host has another address towards the core, while its process runs."""

    async def happen(self, cluster: ChaosCluster) -> None:
        """See the class."""
        network = _packets(cluster)
        network.move(self.victim, CORE)
        cluster.timeline.note(self.victim, f"has the address {network.ip(CORE, self.victim)}")
        await cluster.members[self.victim].wait_ready()


@dataclass(frozen=True, kw_only=True)
class Drain(Disturbance):
    """The process gets SIGTERM, and must end by itself without an error."""

    absence_s: float

    async def happen(self, cluster: ChaosCluster) -> None:
        """See the class."""
        code = await _end(cluster, self.victim, signal.SIGTERM, self.absence_s)
        if code != 0:
            raise DisturbanceFailed(f"{self.victim} ended with code {code} on SIGTERM")
        await _start(cluster, self.victim)


async def _end(cluster: ChaosCluster, victim: str, number: signal.Signals, absence_s: float) -> int:
    """Its exit code, after the time for which it stays away."""
    member = cluster.members[victim]
    cluster.timeline.note(victim, number.name)
    member.send(number)
    try:
        code = await member.wait_ended()
    except TimeoutError:
        raise DisturbanceFailed(f"{victim} did not end after {number.name}") from None
    cluster.timeline.note(victim, f"ended with code {code}; starts in {absence_s:.2f} s")
    await asyncio.sleep(absence_s)
    return code


async def _start(cluster: ChaosCluster, victim: str) -> None:
    member = cluster.members[victim]
    member.start()
    cluster.timeline.note(victim, "starts")
    try:
        await member.wait_ready()
    except TimeoutError:
        raise DisturbanceFailed(f"{victim} was not ready in time") from None
    cluster.timeline.note(victim, "is ready")


def _packets(cluster: ChaosCluster) -> NamespaceNetwork:
    assert isinstance(cluster.network, NamespaceNetwork)
    return cluster.network


def _both_ways(link: Link) -> list[tuple[str, str]]:
    return [(link.one, link.other), (link.other, link.one)]


@asynccontextmanager
async def _cut(cluster: ChaosCluster, directions: Sequence[tuple[str, str]]) -> AsyncIterator[None]:
    names = ", ".join(f"{sender} to {receiver}" for sender, receiver in directions)
    for direction in directions:
        cluster.network.cut(*direction)
    cluster.timeline.note(names, "is cut")
    try:
        yield
    finally:
        for direction in directions:
            cluster.network.heal(*direction)
        cluster.timeline.note(names, "is whole")

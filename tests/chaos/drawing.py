"""Which disturbance comes next: drawn at random, but such that the cluster can continue."""

from collections.abc import Collection, Mapping
from random import Random

from tests.chaos.disturbances import (
    Cut,
    Disturbance,
    Drain,
    Forget,
    Kill,
    Move,
    Pause,
    PowerCut,
    Weather,
)
from tests.chaos.network import CLIENT, Link, role_of

KINDS: Mapping[type[Disturbance], int] = {Kill: 11, PowerCut: 2, Pause: 3, Cut: 3, Drain: 2}
"""Relative frequency of each disturbance."""

KINDS_WITH_PACKETS = {**KINDS, Weather: 2, Forget: 2, Move: 2}
"""The same where links carry packets, not connections."""

ROLES = {"worker": 5, "embedder": 3, "frontend": 3, "core": 2}
"""Relative frequency of each role as the victim."""

MEAN_REST_S = {"worker": 2.0, "embedder": 2.0, "frontend": 2.0, "core": 8.0}
"""How long a victim is not disturbed after it is ready again: a cluster whose core dies every other
second makes no progress."""

MAX_ABSENCE_S = 3.0

DIES_YOUNG, MAX_YOUTH_S = 0.25, 3.0
"""Share of killed processes whose next one is killed while it starts, and how old that gets."""


class Drawing:
    """Draws one disturbance after another.

    One of several workers, embedders or frontends is always undisturbed; the core may be killed at
    any time.
    """

    def __init__(
        self,
        draw: Random,
        links: Collection[Link],
        lease_s: float,
        kinds: Mapping[type[Disturbance], int] = KINDS,
    ) -> None:
        self._draw = draw
        self._kinds = kinds
        self._links = [link for link in links if not link.is_for_harness]
        self._lease_s = lease_s
        ends = {end for link in links for end in (link.one, link.other)} - {CLIENT}
        self._hosts = sorted(ends)

    def next(
        self,
        disturbed: Collection[str],
        resting: Collection[str] = (),
        roles: Collection[str] = (),
    ) -> Disturbance | None:
        """The next disturbance, of a host that is neither disturbed nor resting; None if no host
        can be disturbed. `roles`: only of hosts of these roles, if any are given."""
        victims = [
            host
            for host in self._hosts
            if host not in resting
            and self._can_be_spared(host, disturbed)
            and (not roles or role_of(host) in roles)
        ]
        if not victims:
            return None
        weights = [ROLES[role_of(host)] / len(self._peers(host)) for host in victims]
        [victim] = self._draw.choices(victims, weights)
        [kind] = self._draw.choices(list(self._kinds), list(self._kinds.values()))
        absence_s = self._draw.uniform(0, MAX_ABSENCE_S)
        if kind is Move and role_of(victim) != "core":
            return Move(victim=victim)
        if kind in (Cut, Weather, Forget, Move):
            return self._draw_on_link(kind, victim)
        if kind is Pause:
            return Pause(victim=victim, duration_s=self._draw_duration_s())
        if kind is Kill and self._draw.random() < DIES_YOUNG:
            youth_s = self._draw.uniform(0, MAX_YOUTH_S)
            return Kill(victim=victim, absence_s=absence_s, youth_s=youth_s)
        return kind(victim=victim, absence_s=absence_s)

    def rest_s(self, host: str) -> float:
        """For how long a host rests, now that it is ready again."""
        return self._draw.expovariate(1 / MEAN_REST_S[role_of(host)])

    def _can_be_spared(self, host: str, disturbed: Collection[str]) -> bool:
        if host in disturbed:
            return False
        others = [peer for peer in self._peers(host) if peer != host]
        return not others or any(peer not in disturbed for peer in others)

    def _peers(self, host: str) -> list[str]:
        return [peer for peer in self._hosts if role_of(peer) == role_of(host)]

    def _draw_on_link(self, kind: type[Disturbance], victim: str) -> Disturbance:
        link = self._draw.choice([link for link in self._links if victim in link])
        if kind is Weather:
            return Weather(victim=victim, link=link, duration_s=self._draw_duration_s())
        if kind is not Cut:  # the core's address is all that the others know of it
            return Forget(victim=victim, link=link)
        there, back = (link.one, link.other), (link.other, link.one)
        directions = self._draw.choice(([there], [back], [there, back]))
        return Cut(victim=victim, directions=directions, duration_s=self._draw_duration_s())

    def _draw_duration_s(self) -> float:
        """Half of them shorter than a lease; a few longer than connections are kept alive."""
        least, most = self._draw.choices(((0.05, 0.8), (1.2, 2.5), (4.0, 5.0)), weights=(5, 4, 1))[
            0
        ]
        return self._draw.uniform(least, most) * self._lease_s

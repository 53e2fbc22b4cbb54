"""Disturb a cluster, with several disturbances at a time."""

import asyncio
from collections import Counter
from random import Random

from tests.chaos.cluster import ChaosCluster
from tests.chaos.disturbances import Disturbance, Kill, PowerCut
from tests.chaos.drawing import Drawing


class Monkeys:
    """Several loops, each of which applies one disturbance after another.

    It ends after a number of kills, or after a time.
    """

    def __init__(
        self,
        cluster: ChaosCluster,
        drawing: Drawing,
        draw: Random,
        *,
        num_kills: int,
        time_limit_s: float,
        num_monkeys: int,
        mean_pause_s: float,
    ) -> None:
        """`time_limit_s`: since the timeline began; `mean_pause_s`: between one disturbance's end
        and the next one's begin."""
        self.kills: Counter[str] = Counter()
        """Processes killed, by role; those that were killed while they started do not count."""
        self.disturbances: Counter[str] = Counter()
        """By kind and role."""
        self.running: dict[str, Disturbance] = {}
        """What is being done, by victim."""
        self._rests_until_s: dict[str, float] = {}
        self._cluster = cluster
        self._drawing = drawing
        self._draw = draw
        self._num_kills = num_kills
        self._end_s = time_limit_s
        self._num_monkeys = num_monkeys
        self._mean_pause_s = mean_pause_s

    @property
    def is_enough(self) -> bool:
        """Whether nothing more is to be done."""
        return self.is_late or (self.kills.total() >= self._num_kills and not self._spared_roles)

    @property
    def _spared_roles(self) -> set[str]:
        """Roles of which no process was killed yet, if there are kills for all."""
        roles = {member.role for member in self._cluster.members.values()}
        return roles - self.kills.keys() if len(roles) <= self._num_kills else set()

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return self._cluster.timeline.now_s >= self._end_s

    async def run(self) -> None:
        """Return when it was enough, and all is undone. Raises DisturbanceFailed."""
        try:
            async with asyncio.TaskGroup() as monkeys:
                for _ in range(self._num_monkeys):
                    monkeys.create_task(self._run_one())
        except* Exception as errors:
            raise errors.exceptions[0] from None

    async def _run_one(self) -> None:
        while True:
            await asyncio.sleep(self._draw.expovariate(1 / self._mean_pause_s))
            if self.is_enough:
                return
            roles = self._spared_roles
            if self.kills.total() + len(roles) < self._num_kills:
                roles = set()  # there are kills to spare for any role
            disturbance = self._drawing.next(self.running, self._resting(), roles)
            if disturbance is not None:
                await self._do(disturbance)

    async def _do(self, disturbance: Disturbance) -> None:
        victim = disturbance.victim
        role = self._cluster.members[victim].role
        self.running[victim] = disturbance
        self.disturbances[f"{disturbance.kind} {role}"] += 1
        if isinstance(disturbance, Kill | PowerCut):
            self.kills[role] += 1
        if isinstance(disturbance, Kill) and disturbance.youth_s is not None:
            self.disturbances[f"young {role}"] += 1
        try:
            await disturbance.happen(self._cluster)
        finally:
            del self.running[victim]
        self._rests_until_s[victim] = self._cluster.timeline.now_s + self._drawing.rest_s(victim)

    def _resting(self) -> list[str]:
        now_s = self._cluster.timeline.now_s
        return [host for host, until_s in self._rests_until_s.items() if now_s < until_s]

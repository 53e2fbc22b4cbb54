"""How often in a row a group's steps did not come back, and when that is too often.

After a hang the workers are asked what they do before they are given anything: what is still busy
with the lost step would only queue up what comes, and a rank that is hung can so be told from those
that waited for it and have given up.
"""

from collections.abc import Sequence

from pagewire.v1 import worker_service_pb2 as worker_pb
from scheduler_service.core_service.step_stream import LinkFailed, StepOverdue

MAX_HANGS = 3
"""In a row. Being busy with one step for so many of its limits counts as much."""

NUM_SOUND_STEPS = 100
"""After so many steps of one stream, hangs before it are forgotten."""


class GroupHung(Exception):
    """The group is of no use until `ranks` of it have registered anew."""

    def __init__(self, reason: str, ranks: Sequence[int]) -> None:
        super().__init__(reason)
        self.ranks = ranks


class Hangs:
    """The hangs in a row of one group's workers, since they registered."""

    def __init__(self) -> None:
        self._num_hangs = 0
        self._limit_s = 0.0

    def note_stream(self, num_steps: int) -> None:
        """A stream has ended after so many steps, for whatever reason."""
        if num_steps >= NUM_SOUND_STEPS:
            self._num_hangs = 0

    def note(self, overdue: StepOverdue) -> None:
        """A stream has ended because a step did not come back."""
        self._num_hangs += 1
        self._limit_s = overdue.limit_s

    def check(self, infos: Sequence[worker_pb.GetInfoResponse]) -> None:
        """Look at what the ranks say before another stream is opened to them.

        Raises GroupHung when they have hung too often or for too long, and LinkFailed while one is
        still busy.
        """
        if self._num_hangs == 0:
            return
        busy = {rank: info.busy_us / 1e6 for rank, info in enumerate(infos) if info.busy_us}
        longest_s = max(busy.values(), default=0.0)
        if self._num_hangs >= MAX_HANGS or longest_s >= MAX_HANGS * self._limit_s:
            reason = f"its steps hung {self._num_hangs} times in a row"
            if busy:
                reason += f"; busy for {longest_s:.3g} s"
            raise GroupHung(reason, list(busy) or range(len(infos)))
        if busy:
            names = ", ".join(map(str, busy))
            raise LinkFailed(f"rank {names} is busy for {longest_s:.3g} s with a step that hung")

"""How far the plans for one worker group go ahead of its results.

As a rule just so far that the worker never waits. A step's messages, however, take processor time
of the core and of the worker whatever is in them, and on a CPU the model computes on the same
cores. So where nobody waits for the tokens of each step, more steps are planned, and the plans and
results of several travel together.
"""

from scheduler_service.core.config import GroupCapacity, SchedulerConfig
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.sequence import SequenceStatus
from scheduler_service.core.stats.throughput import StepRates

MAX_LEAD_US = 100_000
"""The most that steps which travel together may take, as a request that comes now has to wait for
all that are planned."""


class Lead:
    """The lead over one worker group."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: GroupCapacity,
        running: RunningSet,
        rates: StepRates,
    ) -> None:
        self._depth = config.pipeline_depth
        self._max_together = config.max_steps_together if capacity.takes_several_plans else 1
        self._running = running
        self._rates = rates
        self._patience_us = 0
        self._num_changes = -1
        """Of the batch when its patience was looked up."""

    def num_together(self) -> int:
        """How many steps of the batch as it is may travel together, if nobody else waits."""
        step_us, running = self._rates.us_per_decode_step, self._running
        if self._max_together == 1 or not step_us or running.prefilling or running.arriving:
            return 1
        most_us = min(self._patience(), MAX_LEAD_US)
        return max(1, min(self._max_together, int(most_us / step_us)))

    def depth(self, num_together: int) -> int:
        """Steps that may be open: those that come back together, and one to go on with."""
        return self._depth if num_together == 1 else max(self._depth, num_together + 1)

    def _patience(self) -> int:
        """How long all that decodes may wait for its tokens, in microseconds."""
        running = self._running
        if running.num_changes != self._num_changes:
            # What has ended is in the list until the next plan, and would be remembered.
            present = (seq for seq in running.decoding if seq.status is SequenceStatus.RUNNING)
            groups = {seq.group for seq in present}
            self._patience_us = min((group.patience_us for group in groups), default=0)
            self._num_changes = running.num_changes
        return self._patience_us

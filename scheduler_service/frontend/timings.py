"""Where a request's wall time went: the core's account completed with the frontend's own."""

import time
from dataclasses import dataclass, field

from pagewire.v1 import inference_service_pb2 as inference_pb

_CORE_PARTS = (
    "queue_us",
    "plan_us",
    "forward_us",
    "sample_us",
    "preempted_us",
    "recovery_us",
)


@dataclass(slots=True)
class Stopwatch:
    """One request's times at the frontend, in seconds of the monotonic clock."""

    arrived: float = field(default_factory=time.monotonic)
    text_s: float = 0.0
    """Spent on tokenizing and detokenizing."""
    recovery_s: float = 0.0
    """Spent without a core that knows the request, after it was lost."""
    _lost_at: float | None = None

    def lost(self) -> None:
        """The core is gone."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()

    def found(self) -> None:
        """A core has the request (again)."""
        if self._lost_at is not None:
            self.recovery_s += time.monotonic() - self._lost_at
            self._lost_at = None

    def total(self, core: inference_pb.Timings) -> inference_pb.Timings:
        """The whole account as of now; its parts add up to its total.

        `wire_us` is what nobody else accounts for: the way between the processes and waiting
        there, and all that a lost core would have told. Text work that overlaps with the next
        step counts only as far as there is time left for it.
        """
        total_us = round((time.monotonic() - self.arrived) * 1e6)
        parts = {name: getattr(core, name) for name in _CORE_PARTS}
        parts["recovery_us"] += round(self.recovery_s * 1e6)
        left = total_us - sum(parts.values())
        if left < 0:  # two processes' clocks do not tick alike
            total_us, left = total_us - left, 0
        detokenize_us = min(round(self.text_s * 1e6), left)
        return inference_pb.Timings(
            total_us=total_us,
            detokenize_us=detokenize_us,
            wire_us=left - detokenize_us,
            **parts,
        )

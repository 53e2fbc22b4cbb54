"""Where a request's wall time went: the core's account completed with the frontend's own."""

import time
from dataclasses import dataclass, field

from pagewire.v1 import inference_service_pb2 as inference_pb

PARTS = (
    "queue",
    "plan",
    "wire",
    "forward",
    "sample",
    "detokenize",
    "preempted",
    "recovery",
    "unaccounted",
)
"""As `Timings` has them, in microseconds under `…_us`."""


@dataclass(slots=True)
class Stopwatch:
    """One request's times at the frontend, in seconds of the monotonic clock."""

    arrived: float = field(default_factory=time.monotonic)
    model_wait_s: float = 0.0
    """Waited for its model to be served."""
    tokenize_s: float = 0.0
    """Spent on tokenizing, and on settling what the request leaves open."""
    last_text_s: float = 0.0
    """Spent on the text of the tokens that came last. That of those before was made while the
    worker computed the next ones, and delayed nobody."""
    first_token_at: float | None = None
    last_token_at: float = 0.0
    recovery_s: float = 0.0
    """Spent without a core that knows the request, after it was lost."""
    unaccounted_s: float = 0.0
    """Spent under a core that was lost, and its account of the time with it."""
    core_losses: list[float] = field(default_factory=list)
    """When a core was lost, or said that it does not take the request yet."""
    _submitted_at: float | None = None
    """When the present core was sent the request."""
    _accepted: bool = False
    """Whether the present core has it."""
    _lost_at: float | None = None

    def submitted(self) -> None:
        """A core is sent the request (again); from its arrival there the core accounts for it."""
        now = time.monotonic()
        if self._lost_at is not None:
            self.recovery_s += now - self._lost_at
            self._lost_at = None
        self._submitted_at, self._accepted = now, False

    def accepted(self) -> None:
        """The core has taken the request in."""
        self._accepted = True

    def lost(self) -> None:
        """The core that was sent the request is gone, or does not take it yet."""
        if self._submitted_at is None:
            return
        self._lost_at = time.monotonic()
        self.core_losses.append(self._lost_at)
        under_core_s = self._lost_at - self._submitted_at
        if self._accepted:
            self.unaccounted_s += under_core_s
        else:
            self.recovery_s += under_core_s
        self._submitted_at = None

    def note_tokens(self) -> float | None:
        """Tokens have come. How long after the ones before; None for the first."""
        now = time.monotonic()
        before, self.last_token_at = self.last_token_at, now
        if self.first_token_at is None:
            self.first_token_at = now
            return None
        return now - before

    @property
    def first_token_s(self) -> float:
        """From arrival to the first token; without one, to now."""
        at = time.monotonic() if self.first_token_at is None else self.first_token_at
        return at - self.arrived

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return 0.0 if self.first_token_at is None else self.last_token_at - self.first_token_at

    def total(self, core: inference_pb.Timings) -> inference_pb.Timings:
        """The whole account as of now; its parts add up to its total.

        `wire_us` has what nobody else accounts for: the way between the processes, and waiting
        there, for a client that reads slowly, too.
        """
        timings = inference_pb.Timings()
        timings.CopyFrom(core)
        timings.queue_us += _us(self.model_wait_s)
        timings.recovery_us += _us(self.recovery_s)
        timings.unaccounted_us = _us(self.unaccounted_s)
        timings.detokenize_us = _us(self.tokenize_s + self.last_text_s)
        timings.total_us = _us(time.monotonic() - self.arrived)
        left = timings.total_us - sum(getattr(timings, f"{part}_us") for part in PARTS)
        if left < 0:  # two machines' clocks do not tick alike
            timings.total_us -= left
        else:
            timings.wire_us += left
        return timings


def _us(seconds: float) -> int:
    return round(seconds * 1e6)

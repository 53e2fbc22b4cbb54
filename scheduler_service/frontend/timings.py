"""A request's wall time by part: the core's timings completed with the frontend's own."""

import time
from dataclasses import dataclass, field

from pagewire.v1 import inference_service_pb2 as inference_pb

PARTS = tuple(
    field.name.removesuffix("_us")
    for field in inference_pb.Timings.DESCRIPTOR.fields
    if field.name.endswith("_us") and field.name != "total_us"
)
"""The fields of `Timings`, in microseconds under `…_us`."""


@dataclass(slots=True)
class Stopwatch:
    """One request's times at the frontend, in seconds of the monotonic clock."""

    arrived: float = field(default_factory=time.monotonic)
    model_wait_s: float = 0.0
    """Time waiting for its model to be served."""
    tokenize_s: float = 0.0
    """Time for tokenizing and for resolving defaults."""
    last_text_s: float = 0.0
    """Time for detokenizing the last tokens. Earlier tokens were detokenized while the worker
    computed the next ones, without any delay."""
    first_token_at: float | None = None
    last_token_at: float = 0.0
    recovery_s: float = 0.0
    """Time without a core that knows the request, after a loss."""
    unaccounted_s: float = 0.0
    """Time at a core that was lost together with its timings."""
    core_losses: list[float] = field(default_factory=list)
    """Times at which a core was lost, or did not accept the request yet."""
    _submitted_at: float | None = None
    """When the request was sent to the current core."""
    _accepted: bool = False
    """Whether the current core has accepted it."""
    _lost_at: float | None = None

    def submitted(self) -> None:
        """Record that the request was sent to a core, which measures its time from the arrival
        there."""
        now = time.monotonic()
        if self._lost_at is not None:
            self.recovery_s += now - self._lost_at
            self._lost_at = None
        self._submitted_at, self._accepted = now, False

    def accepted(self) -> None:
        """Record that the core has accepted the request."""
        self._accepted = True

    def lost(self) -> None:
        """Record that the core to which the request was sent is lost, or does not accept it yet."""
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

    def record_tokens(self) -> float | None:
        """Record the arrival of tokens; seconds since the previous ones, or None for the first."""
        now = time.monotonic()
        before, self.last_token_at = self.last_token_at, now
        if self.first_token_at is None:
            self.first_token_at = now
            return None
        return now - before

    @property
    def first_token_s(self) -> float:
        """Seconds from arrival to the first token; without one, to now."""
        at = time.monotonic() if self.first_token_at is None else self.first_token_at
        return at - self.arrived

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return 0.0 if self.first_token_at is None else self.last_token_at - self.first_token_at

    def total(self, core: inference_pb.Timings) -> inference_pb.Timings:
        """All timings as of now; the parts add up to the total.

        `wire_us` gets the time that no other part covers: transfers between the processes and
        waiting there, including for a client that reads slowly.
        """
        timings = inference_pb.Timings()
        timings.CopyFrom(core)
        timings.queue_us += _us(self.model_wait_s)
        timings.recovery_us += _us(self.recovery_s)
        timings.unaccounted_us = _us(self.unaccounted_s)
        timings.detokenize_us = _us(self.tokenize_s + self.last_text_s)
        timings.total_us = _us(time.monotonic() - self.arrived)
        left = timings.total_us - sum(getattr(timings, f"{part}_us") for part in PARTS)
        if left < 0:  # the clocks of two machines may differ
            timings.total_us -= left
        else:
            timings.wire_us += left
        return timings


def _us(seconds: float) -> int:
    return round(seconds * 1e6)

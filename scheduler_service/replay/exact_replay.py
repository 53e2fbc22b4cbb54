"""Runs a recording again, without workers or models, and compares the results."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from scheduler_service.core import SchedulerCore, StepPlan
from scheduler_service.replay.recording import Entry, Header, Outcomes

Observer = Callable[[Entry, Any], None]
"""Called with each input and what the core returned for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first place where the replay differs from the recording."""

    entry: Entry
    number: int
    """Number of the input, from 1."""
    seconds: float
    """Since the recording's first input."""
    plan: StepPlan | None
    """The replayed plan."""
    chain: str | None
    raised: list[str] | None


@dataclass(kw_only=True, slots=True)
class Summary:
    """Summary of a replay and its differences."""

    num_inputs: int = 0
    num_requests: int = 0
    """Accepted ones."""
    num_plans: int = 0
    """Equal plans; the replay ends at the first that differs."""
    num_outputs: int = 0
    """Sets of outputs that are equal."""
    seconds: float = 0.0
    """Time from the first input to the last, on the recording's clock."""
    difference: Difference | None = None
    """The first difference of a plan or of a raised error; nothing after it can be compared."""
    output_difference: Difference | None = None
    """The first difference of outputs for frontends; later plans may be equal."""

    @property
    def is_exact(self) -> bool:
        """Whether everything was equal."""
        return self.difference is None and self.output_difference is None


class ExactReplay:
    """A core that receives the recorded inputs."""

    def __init__(self, header: Header) -> None:
        self.summary = Summary()
        self._core = SchedulerCore(header.config)
        self._outcomes = Outcomes()
        self._started_at: float | None = None

    def run(self, entries: Iterable[Entry], observe: Observer | None = None) -> Summary:
        """Apply entries up to the first plan that differs."""
        for entry in entries:
            returned = self._apply(entry)
            if self.summary.difference is not None:
                break
            if observe is not None:
                observe(entry, returned)
        return self.summary

    def _apply(self, entry: Entry) -> Any:
        summary = self.summary
        summary.num_inputs += 1
        self._advance(entry)
        returned, raised = None, None
        try:
            returned = getattr(self._core, entry.do)(**entry.arguments)
        except Exception as error:  # whatever it is, it must be the one that was recorded
            raised = self._outcomes.of_error(error)
        plan = returned if isinstance(returned, StepPlan) else None
        chain = self._outcomes.chain_with(returned)
        if entry.do == "pop_outboxes":
            self._compare_outputs(entry, chain)
        elif chain != entry.chain or _class_of(raised) != _class_of(entry.raised):
            summary.difference = self._difference(entry, plan, chain, raised)
        summary.num_plans += plan is not None and summary.difference is None
        summary.num_requests += entry.do == "submit" and raised is None
        return returned

    def _advance(self, entry: Entry) -> None:
        if entry.now is not None:
            if self._started_at is None:
                self._started_at = entry.now
            self.summary.seconds = entry.now - self._started_at

    def _compare_outputs(self, entry: Entry, chain: str | None) -> None:
        if chain == entry.chain:
            self.summary.num_outputs += 1
        elif self.summary.output_difference is None:
            self.summary.output_difference = self._difference(entry, None, chain, None)

    def _difference(
        self, entry: Entry, plan: StepPlan | None, chain: str | None, raised: list[str] | None
    ) -> Difference:
        return Difference(
            entry=entry,
            number=self.summary.num_inputs,
            seconds=self.summary.seconds,
            plan=plan,
            chain=chain,
            raised=raised,
        )


def _class_of(raised: list[str] | None) -> str | None:
    return None if raised is None else raised[0]

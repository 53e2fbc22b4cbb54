"""Faults of workers, and what the kit says of workers that have them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from conformance import cases
from conformance.case import Case
from conformance.runner import Outcome, Verdict, run
from conformance.worker import Worker
from pagewire.v1 import plan_pb2
from tests.support.mutant import Fault, mutant
from tests.support.processes import running

FaultTable = dict[str, tuple[Callable[[], Fault], list[str]]]
"""By what the worker does: its fault, and the names of cases that find it."""


def on_plan(change: Callable[[plan_pb2.StepPlan], object]) -> Callable[[], Fault]:
    return lambda: Fault(plan=change)


def on_result(change: Callable[[plan_pb2.StepResult], object]) -> Callable[[], Fault]:
    return lambda: Fault(result=change)


def on_new(change: Callable[[plan_pb2.NewSequence], object]) -> Callable[[], Fault]:
    """A fault in how new sequences are read."""
    return on_plan(lambda plan: [change(new) for new in plan.new_sequences])


@contextmanager
def serving(command: Sequence[str], folder: Path) -> Iterator[str]:
    """The address of a worker that this command starts."""
    address = f"unix:{folder}/worker.sock"
    with running([*command, "--listen", address], folder):
        Worker(address)  # waits until it listens
        yield address


def named(names: Sequence[str], among: Sequence[Case] = cases.ALL) -> list[Case]:
    """The cases with one of these names, each of which is the name of some."""
    for name in names:
        assert any(name in case.full_name for case in among), f"no case is called {name}"
    return [case for case in among if any(name in case.full_name for name in names)]


def outcomes(address: str, chosen: Sequence[Case], timeout_s: float) -> list[Outcome]:
    """The outcomes of these cases at a worker."""
    return list(run(list(chosen), Worker(address, timeout_s=timeout_s)))


def assert_found(address: str, fault: Callable[[], Fault], chosen: Sequence[Case]) -> None:
    """Every one of these cases fails for a worker with a fault, and explains it."""
    with mutant(address, fault) as mutated:
        for outcome in outcomes(mutated, chosen, timeout_s=5.0):
            assert outcome.verdict is Verdict.FAIL, outcome.case.full_name
            assert outcome.explanation


def assert_passed(address: str, chosen: Sequence[Case], fault: Callable[[], Fault] = Fault) -> None:
    """Every one of these cases passes, by way of a proxy that by default has no fault."""
    with mutant(address, fault) as proxy:
        found = outcomes(proxy, chosen, timeout_s=60.0)
    assert {o.case.full_name: o.explanation for o in found if o.verdict is not Verdict.PASS} == {}

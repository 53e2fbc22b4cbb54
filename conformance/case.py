"""A case: a sentence, the promise that it proves, and a function that checks it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from conformance.sequence import Sequence
from conformance.step_stream import StepStream
from conformance.worker import Worker

CaseFunction = Callable[[Worker], None]
Alone = Mapping[str, Sequence]
"""Sequences, by description, that must have sampled the same tokens as without other sequences."""

StreamFunction = Callable[[Worker, StepStream], Alone | None]
PlanFunction = Callable[[Worker, StepStream], None]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One case."""

    name: str
    """A sentence about workers, unique within its group."""

    group: str
    """The topic: the name of the module it is in."""

    file: str
    """The .proto file that contains the promise."""

    promise: str
    """Words of a comment in that file."""

    run: CaseFunction
    """Raises Failed, Skipped, or the error of a call."""

    @property
    def full_name(self) -> str:
        """The name of the case in reports and for `--only`."""
        return f"{self.group}: {self.name}"


_cases: list[Case] = []


def case(
    file: str, promise: str, *, name: str | None = None, run: CaseFunction | None = None
) -> Callable[[Function], Function]:
    """Make a case of a function whose name is its sentence, unless `name` is.

    `file`: without `.proto`. `run`: calls the function with more than the worker.
    """

    def register(function: Function) -> Function:
        _cases.append(
            Case(
                name=name or function.__name__.replace("_", " "),
                group=_group(function.__module__),
                file=f"{file}.proto",
                promise=promise,
                run=run or function,
            )
        )
        return function

    return register


def stream_case(file: str, promise: str) -> Callable[[StreamFunction], StreamFunction]:
    """Make a case of a function that is given a new epoch's stream."""

    def register(function: StreamFunction) -> StreamFunction:
        def run(worker: Worker) -> None:
            with worker.open() as stream:
                alone = function(worker, stream) or {}
            for what, sequence in alone.items():
                worker.expect_as_alone(what, sequence)

        return case(file, promise, run=run)(function)

    return register


def refusal_case(
    file: str,
    promise: str,
    *fields: str,
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
    name: str | None = None,
) -> Callable[[PlanFunction], PlanFunction]:
    """Make a case of a function that sends a wrong plan on a new epoch's stream.

    The stream must end with this code and, if `fields` are given, name one of them.
    """

    def register(function: PlanFunction) -> PlanFunction:
        def run(worker: Worker) -> None:
            with worker.open() as stream:
                function(worker, stream)
                stream.call.refusal().expect(code, *fields)

        return case(file, promise, name=name, run=run)(function)

    return register


def registered(module: str) -> list[Case]:
    """The cases of a module that was imported, in their order."""
    group = _group(module)
    return [case for case in _cases if case.group == group]


def _group(module: str) -> str:
    return module.rpartition(".")[2].replace("_", " ")

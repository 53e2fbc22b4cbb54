"""A case: a sentence, the promise that it proves, and a function that checks it."""

from collections.abc import Callable
from dataclasses import dataclass

from conformance.worker import Worker

CaseFunction = Callable[[Worker], None]


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


def case(file: str, promise: str) -> Callable[[CaseFunction], CaseFunction]:
    """Make a case of a function whose name is its sentence. `file`: without `.proto`."""

    def register(function: CaseFunction) -> CaseFunction:
        _cases.append(
            Case(
                name=function.__name__.replace("_", " "),
                group=_group(function.__module__),
                file=f"{file}.proto",
                promise=promise,
                run=function,
            )
        )
        return function

    return register


def registered(module: str) -> list[Case]:
    """The cases of a module that was imported, in their order."""
    group = _group(module)
    return [case for case in _cases if case.group == group]


def _group(module: str) -> str:
    return module.rpartition(".")[2].replace("_", " ")

"""What a case is: a sentence, the promise that it proves, and a function that tries it."""

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
    """The .proto file that makes the promise."""

    promise: str
    """Words of a comment in that file."""

    run: CaseFunction
    """Raises Failed, Skipped, or whatever a call raises."""

    @property
    def full_name(self) -> str:
        """How the case is called in reports and by `--only`."""
        return f"{self.group}: {self.name}"


_cases: list[Case] = []


def case(file: str, promise: str) -> Callable[[CaseFunction], CaseFunction]:
    """Makes a case of a function whose name is its sentence. `file`: without `.proto`."""

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

"""One case after another."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import grpc

from conformance.case import Case, Failed, Skipped
from conformance.worker import Worker


class Verdict(Enum):
    """How a case ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One case and how it ended."""

    case: Case
    verdict: Verdict
    explanation: str
    """What was expected and what came, or why it was skipped; empty for one that passed."""

    duration_s: float


def run(cases: Iterable[Case], worker: Worker) -> Iterator[Outcome]:
    """Each case's outcome, as soon as it is there."""
    for case in cases:
        started_at = time.monotonic()
        verdict, explanation = _judge(case, worker)
        yield Outcome(
            case=case,
            verdict=verdict,
            explanation=explanation,
            duration_s=time.monotonic() - started_at,
        )


def _judge(case: Case, worker: Worker) -> tuple[Verdict, str]:
    try:
        case.run(worker)
    except Skipped as reason:
        return Verdict.SKIP, str(reason)
    except Failed as failure:
        return Verdict.FAIL, str(failure)
    except grpc.RpcError as error:
        return (
            Verdict.FAIL,
            f"a call that must succeed ended with {error.code().name}: {error.details()}",
        )
    except (ValueError, LookupError, ArithmeticError) as error:
        # Answers are taken apart as the contract lays them out; this one could not be.
        return Verdict.FAIL, f"an answer is not made as expected: {type(error).__name__}: {error}"
    return Verdict.PASS, ""

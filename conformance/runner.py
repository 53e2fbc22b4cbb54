"""Runs the cases; reports a line per case, and a JUnit file for continuous integration."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from xml.etree import ElementTree

import grpc

from conformance.assertions import Failed, Skipped
from conformance.case import Case
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
    """Expected and actual value, or why the case was skipped; empty if it passed."""

    duration_s: float


def run(cases: Iterable[Case], worker: Worker) -> Iterator[Outcome]:
    """Yield each case's outcome."""
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
        # Responses are decoded as the contract defines them, which failed here.
        return Verdict.FAIL, f"a response is malformed: {type(error).__name__}: {error}"
    return Verdict.PASS, ""


def format_outcome(outcome: Outcome) -> str:
    """One line; two more for a failed case, with the promise and what happened instead."""
    case = outcome.case
    first = f"{outcome.verdict.value}  {case.full_name}"
    if outcome.verdict is Verdict.PASS:
        return first
    if outcome.verdict is Verdict.SKIP:
        return f"{first} ({outcome.explanation})"
    return f"{first}\n      promised in {case.file}: {case.promise}\n      {outcome.explanation}"


def format_summary(outcomes: Sequence[Outcome]) -> str:
    """The last line."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    duration_s = sum(outcome.duration_s for outcome in outcomes)
    return (
        f"{counts[Verdict.PASS]} passed, {counts[Verdict.FAIL]} failed,"
        f" {counts[Verdict.SKIP]} skipped in {duration_s:.1f} s"
    )


def write_junit(outcomes: Sequence[Outcome], file: Path) -> None:
    """The outcomes in the format that continuous integration servers read."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    suite = ElementTree.Element(
        "testsuite",
        name="pagewire conformance",
        tests=str(len(outcomes)),
        failures=str(counts[Verdict.FAIL]),
        skipped=str(counts[Verdict.SKIP]),
    )
    for outcome in outcomes:
        entry = ElementTree.SubElement(
            suite,
            "testcase",
            classname=outcome.case.group,
            name=outcome.case.name,
            time=f"{outcome.duration_s:.3f}",
        )
        if outcome.verdict is Verdict.FAIL:
            failure = ElementTree.SubElement(entry, "failure", message=outcome.explanation)
            failure.text = f"promised in {outcome.case.file}: {outcome.case.promise}"
        elif outcome.verdict is Verdict.SKIP:
            ElementTree.SubElement(entry, "skipped", message=outcome.explanation)
    ElementTree.ElementTree(suite).write(file, encoding="utf-8", xml_declaration=True)

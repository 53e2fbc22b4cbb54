"""What a run tells: a line per case, and a JUnit file for continuous integration."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from conformance.runner import Outcome, Verdict


def lines(outcome: Outcome) -> str:
    """One line; for a case that failed two more, with the promise and what came instead."""
    case = outcome.case
    first = f"{outcome.verdict.value}  {case.full_name}"
    if outcome.verdict is Verdict.PASS:
        return first
    if outcome.verdict is Verdict.SKIP:
        return f"{first} ({outcome.explanation})"
    return f"{first}\n      promised in {case.file}: {case.promise}\n      {outcome.explanation}"


def summary(outcomes: Sequence[Outcome]) -> str:
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

"""The kit finds workers that do not keep the contract of adapters."""

from collections.abc import Iterator

import grpc
import pytest

from conformance import cases
from tests.conformance.faults import assert_found, assert_passed, serving
from tests.support.mutant import Fault
from tests.support.processes import python_worker

CASES = [case for case in cases.ALL if case.group == "adapters"]
TABLE = [case for case in CASES if "missing content" in case.name]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A worker that was started for adapters."""
    command = python_worker("--simulate", "--simulate-vocab-size", "997", "--enable-lora")
    with serving(command, tmp_path_factory.mktemp("adapters")) as address:
        yield address


def test_every_case_passes_without_a_fault_and_fails_with_one(worker: str) -> None:
    assert_passed(worker, CASES)
    assert_found(worker, lambda: Fault(keeps_any_table=True), TABLE)
    hides = Fault(status=lambda _, details: (grpc.StatusCode.OK, details))
    assert_found(worker, lambda: hides, [case for case in CASES if case not in TABLE])

"""The kit finds workers that do not keep the contract of leases and fetches."""

from collections.abc import Callable, Iterator

import grpc
import pytest

from conformance import cases
from pagewire import columns
from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as pb
from tests.conformance.faults import (
    FaultTable,
    assert_found,
    assert_passed,
    named,
    on_plan,
    on_result,
    serving,
)
from tests.support.mutant import Fault
from tests.support.processes import python_worker

CASES = [case for case in cases.ALL if case.group == "moves"]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A worker with a model, whose blocks are bytes."""
    flags = ("--model", "embedded", "--dtype", "float32", "--swap-space", "16MiB")
    with serving(python_worker(*flags), tmp_path_factory.mktemp("moves")) as address:
        yield address


def _ignores(name: str) -> Callable[[], Fault]:
    return on_plan(lambda plan: plan.ClearField(name))  # type: ignore[arg-type]


def _swaps_targets(plan: plan_pb2.StepPlan) -> None:
    for fetch in plan.fetches:
        blocks = columns.unpack(fetch.blocks)
        blocks[1::2] = blocks[1::2][::-1]
        fetch.blocks = columns.pack(blocks)


def _reports_no_failure(result: plan_pb2.StepResult) -> None:
    for fetch in result.fetches:
        fetch.ClearField("failure")


def _flips_a_digest(part: pb.ReadBlocksResponse) -> None:
    part.digests = bytes(byte ^ 1 for byte in part.digests)


def _ends_early() -> Fault:
    """Reports fetches as late while they are under way."""
    open_ids: list[int] = []

    def start(plan: plan_pb2.StepPlan) -> None:
        for fetch in plan.fetches:
            open_ids.append(fetch.fetch_id)
            fetch.timeout_ms = 60_000

    def end(result: plan_pb2.StepResult) -> None:
        late = plan_pb2.FETCH_FAILURE_TIMED_OUT
        result.fetches.extend(
            plan_pb2.FetchResult(fetch_id=number, failure=late) for number in open_ids
        )
        open_ids.clear()

    return Fault(plan=start, result=end)


FAULTS: FaultTable = {
    "grants no lease": (
        _ignores("leases"),
        [
            "a leased block is sent with its digest",
            "blocks without a lease are refused",
            "a lease that has ended or expired is refused",
            "fetched blocks serve as a prefix",
            "a lease whose number is in use is refused",
            "a lease of a block that does not exist is refused",
        ],
    ),
    "lets no reader wait": (
        lambda: Fault(read_timeout_s=0.05),
        [
            "a reader waits for its lease to begin",
            "a lease of what its plan swaps out is read after that",
        ],
    ),
    "ends no lease": (
        _ignores("ended_lease_ids"),
        [
            "a lease that has ended or expired is refused",
            "a plan that ends an unknown lease is refused",
        ],
    ),
    "ends every call well": (
        lambda: Fault(status=lambda _, details: (grpc.StatusCode.OK, details)),
        [
            "blocks without a lease are refused",
            "another epoch or rank is refused",
            "a lease that has ended or expired is refused",
            "a fetch without a lease is denied",
        ],
    ),
    "sends other digests": (
        lambda: Fault(part=_flips_a_digest),
        ["a leased block is sent with its digest", "fetched blocks serve as a prefix"],
    ),
    "begins no fetch": (
        _ignores("fetches"),
        [
            "fetched blocks serve as a prefix",
            "a fetch to a block that does not exist is refused",
            "a fetch without a key for each block is refused",
            "a plan that uses the targets of an open fetch is refused",
        ],
    ),
    "puts blocks in each others place": (
        on_plan(_swaps_targets),
        ["fetched blocks serve as a prefix"],
    ),
    "believes what arrives": (
        on_result(_reports_no_failure),
        [
            "a fetch with other keys than the lease fails",
            "a fetch without a lease is denied",
            "a flipped bit is found",
            "a truncated answer is found",
            "a silent source makes a fetch fail in time",
        ],
    ),
    "writes after the end": (_ends_early, ["nothing is written after the end of a fetch"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(worker: str, name: str) -> None:
    make_fault, expected = FAULTS[name]
    assert_found(worker, make_fault, named(expected, CASES))


def test_every_case_finds_a_fault_and_a_proxy_without_one_passes(worker: str) -> None:
    found = {case.name for _, names in FAULTS.values() for case in named(names, CASES)}
    assert found == {case.name for case in CASES}
    assert_passed(worker, CASES)

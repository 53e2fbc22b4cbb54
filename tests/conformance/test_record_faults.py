"""The kit finds workers that keep the wrong things for the next core."""

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
    on_new,
    on_plan,
    serving,
)
from tests.support.mutant import Fault
from tests.support.processes import python_worker

CASES = [case for case in cases.ALL if case.group == "records"]
GROUPS = "growing:16,window:16:24,state:3"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A worker with a model, whose blocks are bytes."""
    flags = ("--model", "embedded", "--dtype", "float32", "--swap-space", "16MiB")
    with serving(python_worker(*flags), tmp_path_factory.mktemp("records")) as address:
        yield address


@pytest.fixture(scope="module")
def grouped_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One with several cache groups, whose sequences have several tables."""
    flags = ("--simulate", "--simulate-vocab-size", "97", "--simulate-cache-groups", GROUPS)
    with serving(python_worker(*flags), tmp_path_factory.mktemp("groups")) as address:
        yield address


def _ignores(*names: str, after: int = 0) -> Callable[[], Fault]:
    """Ignores these fields of plans after the first `after`."""

    def clear(plan: plan_pb2.StepPlan) -> None:
        for name in names if plan.step_id > after else ():
            plan.ClearField(name)  # type: ignore[arg-type]

    return on_plan(clear)


def _believes_a_withdrawal(plan: plan_pb2.StepPlan) -> None:
    plan.withdrawn_step_id = 2**64 - 1


def _on_kept(change: Callable[[pb.GetCachedBlocksResponse], object]) -> Callable[[], Fault]:
    return lambda: Fault(kept=change)  # type: ignore[arg-type]


def _on_sequence(change: Callable[[pb.KeptSequence], object]) -> Callable[[], Fault]:
    return _on_kept(lambda kept: [change(sequence) for sequence in kept.sequences])


def _reverses_keys(kept: pb.GetCachedBlocksResponse) -> None:
    keys = kept.blocks.keys
    kept.blocks.keys = b"".join(keys[at : at + 16] for at in range(len(keys) - 16, -1, -16))


def _reverses_tables(sequence: pb.KeptSequence) -> None:
    for table in sequence.tables:
        table.block_ids = columns.pack(columns.unpack(table.block_ids)[::-1])


def _adds_a_token(sequence: pb.KeptSequence) -> None:
    sequence.token_ids += columns.pack([1])


def _other_prefix(new: plan_pb2.NewSequence) -> None:
    """Reads the computed blocks of a new sequence in another order."""
    if new.num_computed_tokens and new.tables:
        new.tables[0].block_ids = columns.pack(columns.unpack(new.tables[0].block_ids)[::-1])


def _forgets_nothing() -> Callable[[], Fault]:
    """Returns sequences again that it has returned before."""
    returned: list[pb.KeptSequence] = []

    def add(kept: pb.GetCachedBlocksResponse) -> None:
        new = [*kept.sequences]
        kept.sequences.extend(returned)
        returned.extend(new)

    return lambda: Fault(kept=add)


FAULTS: FaultTable = {
    "records nothing": (
        _ignores("cached_blocks"),
        [
            "the next core gets the records",
            "records end and are replaced",
            "a seed removes all records",
            "records are refused to all but the next core",
            "records are not returned before a failure is withdrawn",
            "a record of a block that does not exist is refused",
            "a record without a key for each unit is refused",
        ],
    ),
    "ends no record": (_ignores("uncached_blocks"), ["records end and are replaced"]),
    "keeps records of another seed": (_ignores("key_seed", after=1), ["a seed removes all"]),
    "takes keys for each other": (
        _on_kept(_reverses_keys),
        ["the next core gets the records", "records end and are replaced"],
    ),
    "answers a core of another epoch": (
        lambda: Fault(status=lambda _, details: (grpc.StatusCode.OK, details)),
        ["records are refused to all but the next core"],
    ),
    "waits for no withdrawal": (
        on_plan(_believes_a_withdrawal),
        ["records are not returned before a failure is withdrawn"],
    ),
    "waits for a withdrawal for ever": (
        _ignores("withdrawn_step_id"),
        ["records are not returned before a failure is withdrawn"],
    ),
    "reports no sequence": (
        _on_kept(lambda kept: kept.ClearField("sequences")),
        ["sequences are kept until a plan arrives"],
    ),
    "reports tables in another order": (
        _on_sequence(_reverses_tables),
        ["sequences are kept until a plan arrives"],
    ),
    "reports a token that is not computed": (
        _on_sequence(_adds_a_token),
        ["sequences are kept until a plan arrives"],
    ),
    "leaves out a group": (
        _on_sequence(lambda sequence: sequence.tables.pop()),
        ["sequences are kept until a plan arrives"],
    ),
    "leaves out the context": (
        _on_sequence(lambda sequence: sequence.ClearField("context")),
        ["sequences are kept until a plan arrives"],
    ),
    "reports sequences of an older stream": (
        _forgets_nothing(),
        ["sequences are kept until a plan arrives"],
    ),
    "has other contents in kept blocks": (
        on_new(_other_prefix),
        ["recorded blocks keep their contents"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(worker: str, name: str) -> None:
    make_fault, expected = FAULTS[name]
    assert_found(worker, make_fault, named(expected, CASES))


def test_every_case_finds_a_fault_and_a_proxy_without_one_passes(worker: str) -> None:
    found = {case.name for _, names in FAULTS.values() for case in named(names, CASES)}
    assert found == {case.name for case in CASES}
    assert_passed(worker, CASES)


@pytest.mark.parametrize("name", ["reports tables in another order", "leaves out a group"])
def test_a_fault_in_one_of_several_tables_is_found(grouped_worker: str, name: str) -> None:
    [case] = named(["sequences are kept until a plan arrives"], CASES)
    assert_passed(grouped_worker, [case])
    assert_found(grouped_worker, FAULTS[name][0], [case])

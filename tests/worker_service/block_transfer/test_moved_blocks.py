"""Workers read each other's blocks: the tokens of a sequence do not depend on where its prefix was
computed."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.columns import pack
from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as pb
from service_common.cluster import NO_CLUSTER, ClusterConfig
from tests.support.certificates import Authority
from tests.support.counting_model import next_token
from tests.support.peers import TOKEN, fetch, keys_of, lease
from tests.support.running_worker import RunningWorker, Steps, running_worker
from tests.support.worker_driver import PlanBuilder, Row, block_table, values
from worker_service.block_transfer import transfers
from worker_service.block_transfer.transport import FetchFailed, Parts, ReadRequest
from worker_service.engine.executor import Step
from worker_service.plan import FetchFailure, StepPlan

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
EPOCH = 3
"""Of the source; the target's is 8."""


class End:
    """One worker with its stream of plans."""

    def __init__(self, worker: RunningWorker, epoch: int) -> None:
        self.worker = worker
        self.plans = PlanBuilder(epoch=epoch)
        self.steps = Steps(worker.stub)

    @property
    def address(self) -> str:
        return str(self.worker.worker.address)

    async def step(self, rows: list[Row] | None = None, **fields: Any) -> plan_pb2.StepResult:
        """The result of a plan, which is sent at once."""
        await self.steps.send(self.plans.plan(rows or [], **fields))
        return await self.steps.result()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    """A source and a target without credentials."""
    async with running_ends(NO_CLUSTER, NO_CLUSTER) as both:
        yield both


@asynccontextmanager
async def running_ends(*members: ClusterConfig) -> AsyncIterator[tuple[End, End]]:
    """A source, which has computed the prompt in blocks 0 to 2, and a target."""
    async with AsyncExitStack() as stack:
        source, target = [
            await stack.enter_async_context(running_worker(cluster=member)) for member in members
        ]
        await source.initialize(EPOCH)
        await target.initialize(8)
        first = End(source, EPOCH)
        first.plans.add(1, PROMPT)
        await first.step([Row(1, len(PROMPT))])
        second = End(target, 8)
        yield first, second
        first.steps.cancel()
        second.steps.cancel()


async def fetched(target: End, fetch: plan_pb2.BlockFetch) -> plan_pb2.FetchResult:
    """The end of a fetch, with plans that do nothing else."""
    result = await target.step(fetches=[fetch])
    while not result.fetches:
        result = await target.step()
    (ended,) = result.fetches
    return ended


async def continued(target: End) -> int:
    """The token after the prompt, of which the target computes the last token."""
    target.plans.next_block = 9
    target.plans.add(1, PROMPT, num_computed_tokens=8, tables=block_table([5, 6]))
    target.plans.tables[1], target.plans.lengths[1] = [5, 6], 8
    result = await target.step([Row(1, 1)])
    (token,) = values(result.token_ids)
    return token


@contextmanager
def silent_address() -> Iterator[str]:
    """Where connections are accepted by the system and by nobody else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both ends seem to be on different machines, of which a test has only one."""
    monkeypatch.setattr(transfers, "machine_name", str)


@pytest.mark.parametrize("transport", ["grpc", "process_memory"])
async def test_a_sequence_continues_on_fetched_blocks(
    ends: tuple[End, End], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport == "grpc":
        without_memory(monkeypatch)
    source, target = ends
    await source.step(leases=[lease([0, 1])])
    end = await fetched(target, fetch(source.address, [(0, 5), (1, 6)], source_epoch=EPOCH))
    assert (end.failure, end.message, end.transport) == (0, "", transport)
    assert end.num_bytes == 256
    assert await continued(target) == next_token(PROMPT)


async def test_blocks_of_the_host_are_fetched(ends: tuple[End, End]) -> None:
    source, target = ends
    await source.step(swap_out=pack([0, 3, 1, 2]))
    await source.step(leases=[lease([~3, ~2])])
    end = await fetched(target, fetch(source.address, [(~3, 5), (~2, 6)], source_epoch=EPOCH))
    assert end.failure == 0
    assert await continued(target) == next_token(PROMPT)


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"lease_id": 2}, "DENIED"),
        ({"token": bytes(16)}, "DENIED"),
        ({"source_epoch": EPOCH - 1}, "DENIED"),
        ({"source_epoch": EPOCH + 1}, "DENIED"),
        ({"blocks": pack([0, 5, 2, 6])}, "DENIED"),
        ({"keys": keys_of(2, first=2)}, "DIGEST_MISMATCH"),
        ({"blocks": pack([1, 5, 0, 6])}, "DIGEST_MISMATCH"),
        ({"addresses": ["127.0.0.1:1"]}, "UNREACHABLE"),
    ],
)
@pytest.mark.parametrize("transport", ["grpc", "process_memory"])
async def test_a_fetch_of_anything_else_than_what_is_leased_fails(
    ends: tuple[End, End],
    changes: dict[str, Any],
    failure: str,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if transport == "grpc":
        without_memory(monkeypatch)
    source, target = ends
    await source.step(leases=[lease([0, 1])])
    wrong = fetch(source.address, [(0, 5), (1, 6)], **{"source_epoch": EPOCH} | changes)
    end = await fetched(target, wrong)
    assert plan_pb2.FetchFailure.Name(end.failure) == f"FETCH_FAILURE_{failure}"
    assert end.message


async def test_only_members_of_the_cluster_fetch(tmp_path: Path) -> None:
    token, other = tmp_path / "token", tmp_path / "other"
    token.write_text("a-token-of-the-cluster")
    other.write_text("a-token-of-another-one")
    authority = Authority(tmp_path, "authority")
    issued = authority.issue("member")
    tls = {"ca": authority.cert, "cert": issued.cert, "key": issued.key}
    member = ClusterConfig(token_file=token, **tls)
    for stranger, failure in {
        member: "UNSPECIFIED",
        ClusterConfig(token_file=other, **tls): "DENIED",
        ClusterConfig(token_file=token): "UNREACHABLE",
    }.items():
        async with running_ends(member, stranger) as (source, target):
            await source.step(leases=[lease([0, 1])])
            wanted = fetch(source.address, [(0, 5), (1, 6)], source_epoch=EPOCH)
            end = await fetched(target, wanted)
            assert plan_pb2.FetchFailure.Name(end.failure) == f"FETCH_FAILURE_{failure}"


async def test_a_new_epoch_ends_fetches_before_its_plans_run(ends: tuple[End, End]) -> None:
    """The source's bytes, which come after that, are not written."""
    source, target = ends
    await source.step(leases=[lease([0, 1])])
    engine = target.worker.worker._engine
    released = threading.Event()
    connect = engine._peers.connect

    def late(address: str, request: ReadRequest, timeout_s: float) -> Parts:
        released.wait(60)
        return connect(address, request, timeout_s)

    engine._peers = replace(engine._peers, connect=late)
    wanted = fetch(source.address, [(0, 5), (1, 6)], source_epoch=EPOCH)
    await target.steps.send(target.plans.plan([], fetches=[wanted]))
    await target.steps.result()
    stream = engine._stream
    assert stream is not None
    (under_way,) = stream.transfers._fetches.values()
    await target.worker.initialize(9)
    again = End(target.worker, 9)
    again.plans.next_block = 5
    again.plans.add(1, [7] * 8)
    await again.step([Row(1, 8)])
    released.set()
    assert await asyncio.to_thread(under_way._ended.wait, 60)
    tokens = [7] * 8
    tokens.append(next_token(tokens))
    assert values((await again.step([Row(1)])).token_ids) == [next_token(tokens)]
    again.steps.cancel()


async def test_a_rank_reads_from_the_rank_of_its_own_number(ends: tuple[End, End]) -> None:
    _, target = ends
    engine = target.worker.worker._engine
    called: list[tuple[str, int]] = []

    def connect(address: str, request: ReadRequest, timeout_s: float) -> Parts:
        called.append((address, request.rank))
        raise FetchFailed(FetchFailure.UNREACHABLE, "made up")

    engine._peers = replace(engine._peers, connect=connect, rank=1, world_size=2)
    wanted = fetch("", [(0, 5)], addresses=["first:1", "second:1"])
    assert (await fetched(target, wanted)).failure == plan_pb2.FETCH_FAILURE_UNREACHABLE
    assert called == [("second:1", 1)]


async def read(source: End, **changes: Any) -> grpc.StatusCode:
    """The status of a call that reads block 0."""
    fields = {"epoch": EPOCH, "lease_id": 1, "token": TOKEN, "block_ids": pack([0])} | changes
    call = source.worker.stub.ReadBlocks(pb.ReadBlocksRequest(**fields))
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_a_lease_is_served_from_its_plan_to_its_end(ends: tuple[End, End]) -> None:
    source, _ = ends
    assert await read(source) is grpc.StatusCode.PERMISSION_DENIED
    await source.step(leases=[lease([0, 1])])
    assert await read(source) is grpc.StatusCode.OK
    assert await read(source, rank=1) is grpc.StatusCode.FAILED_PRECONDITION
    await source.step(ended_lease_ids=pack([1]))
    assert await read(source) is grpc.StatusCode.PERMISSION_DENIED
    await source.step(leases=[lease([0], timeout_ms=1)])
    await asyncio.sleep(0.002)
    assert await read(source) is grpc.StatusCode.PERMISSION_DENIED
    await source.step(ended_lease_ids=pack([1]))


@pytest.fixture
async def patient_source() -> AsyncIterator[End]:
    """A source whose readers wait longer than a test for their leases."""
    async with running_worker() as worker:
        engine = worker.worker._engine
        engine._peers = replace(engine._peers, lease_wait_s=600.0)
        await worker.initialize(EPOCH)
        source = End(worker, EPOCH)
        source.plans.add(1, PROMPT)
        await source.step([Row(1, len(PROMPT))])
        yield source
        source.steps.cancel()


async def waiting(source: End, **changes: Any) -> asyncio.Task[grpc.StatusCode]:
    """A call that does not return as long as its lease has not begun."""
    call = asyncio.create_task(read(source, **changes))
    done, _ = await asyncio.wait([call], timeout=0.05)
    assert not done
    return call


async def test_a_reader_waits_for_its_lease_to_begin(patient_source: End) -> None:
    source = patient_source
    first = await waiting(source)
    foreign = await waiting(source, token=bytes(16))
    second = await waiting(source, lease_id=2)
    await source.step(leases=[lease([0, 1])])
    assert await first is grpc.StatusCode.OK
    assert await foreign is grpc.StatusCode.PERMISSION_DENIED
    assert await read(source, token=bytes(16)) is grpc.StatusCode.PERMISSION_DENIED
    assert not second.done()
    await source.step(leases=[lease([2], lease_id=2)])
    assert await second is grpc.StatusCode.PERMISSION_DENIED, "it does not name block 0"


async def test_a_lease_of_what_its_plan_moves_is_served_after_that(
    patient_source: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that came before would get what another sequence has left there, with its digest."""
    source, served = patient_source, []
    engine = source.worker.worker._engine
    first = await waiting(source, block_ids=pack([~3]))
    assert engine._stream is not None
    assert engine._runner is not None
    leases, launch = engine._stream.transfers.leases, engine._runner.launch
    assert leases is not None

    def observed(plan: StepPlan) -> Step:
        served.append([leases.serves(1), leases.serves(2)])
        return launch(plan)

    # The launch does the cache operations; nothing announces the moment before it.
    monkeypatch.setattr(engine._runner, "launch", observed)
    moved, others = lease([~3, ~2]), lease([2], lease_id=2)
    await source.step(swap_out=pack([0, 3, 1, 2]), leases=[moved, others])
    assert served == [[False, True]]
    assert await first is grpc.StatusCode.OK
    copied, again = lease([9], lease_id=3), lease([10], lease_id=4)
    await source.step(copy=pack([0, 9]), swap_in=pack([3, 10]), leases=[copied, again])
    assert await read(source, lease_id=3, block_ids=pack([9])) is grpc.StatusCode.OK
    assert await read(source, lease_id=4, block_ids=pack([10])) is grpc.StatusCode.OK
    await source.step(ended_lease_ids=pack([1, 2, 3, 4]))


@pytest.mark.parametrize("ending", ["by its core", "by another core", "by a wrong plan"])
async def test_a_reader_waits_no_longer_than_its_stream_lasts(
    patient_source: End, ending: str
) -> None:
    source = patient_source
    call = await waiting(source)
    if ending == "by its core":
        assert await source.steps.finish() is grpc.StatusCode.OK
    elif ending == "by another core":
        await source.worker.initialize(EPOCH + 1)
    else:
        await source.steps.send(source.plans.plan([], ended_lease_ids=pack([7])))
        assert (await source.steps.error()).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await call is grpc.StatusCode.PERMISSION_DENIED


async def test_a_fetch_may_come_before_its_lease(ends: tuple[End, End]) -> None:
    source, target = ends
    wanted = fetch(source.address, [(0, 5), (1, 6)], source_epoch=EPOCH)
    end = asyncio.create_task(fetched(target, wanted))
    await asyncio.wait([end], timeout=0.05)
    await source.step(leases=[lease([0, 1])])
    assert (await end).failure == 0
    assert await continued(target) == next_token(PROMPT)


async def test_the_end_of_the_stream_ends_its_leases(ends: tuple[End, End]) -> None:
    source, _ = ends
    await source.step(leases=[lease([0, 1])])
    assert await source.steps.finish() is grpc.StatusCode.OK
    assert await read(source) is grpc.StatusCode.FAILED_PRECONDITION
    await source.worker.initialize(EPOCH + 1)
    assert await read(source) is grpc.StatusCode.FAILED_PRECONDITION
    steps, plans = Steps(source.worker.stub), PlanBuilder(epoch=EPOCH + 1)
    await steps.send(plans.plan([]))
    await steps.result()
    assert await read(source, epoch=EPOCH + 1) is grpc.StatusCode.PERMISSION_DENIED
    steps.cancel()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"leases": [lease([64])]}, "leases[0].block_ids"),
        ({"leases": [lease([~4])]}, "leases[0].block_ids"),
        ({"leases": [lease([0]), lease([1])]}, "leases[1].lease_id"),
        ({"ended_lease_ids": pack([1])}, "ended_lease_ids"),
        ({"fetches": [fetch("a:1", [(0, 64)])]}, "fetches[0].blocks"),
        ({"fetches": [fetch("a:1", [(0, 5)])] * 2}, "fetches[1].fetch_id"),
        ({"fetches": [fetch("a:1", [(0, 5)], addresses=["a:1", "a:2"])]}, "fetches[0].addresses"),
    ],
)
async def test_what_contradicts_the_leases_and_fetches_ends_the_stream(
    ends: tuple[End, End], fields: dict[str, Any], field: str
) -> None:
    source, _ = ends
    await source.steps.send(source.plans.plan([], **fields))
    error = await source.steps.error()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("field", "column"), [("copy", pack([1, 5])), ("saved_states", pack([1, 0, 1, 5]))]
)
async def test_no_plan_may_touch_the_targets_of_an_open_fetch(
    ends: tuple[End, End], field: str, column: bytes
) -> None:
    _, target = ends
    with silent_address() as address:
        await target.step(fetches=[fetch(address, [(0, 5)])])
        await target.steps.send(target.plans.plan([], **{field: column}))
        error = await target.steps.error()
    assert str(error.details()) == f"{field}: device block 5 is the target of a fetch"


async def test_a_source_that_says_nothing_stalls_or_times_out(ends: tuple[End, End]) -> None:
    _, target = ends
    engine = target.worker.worker._engine
    engine._peers = replace(engine._peers, stall_s=0.4)
    with silent_address() as address:
        stalled = await fetched(target, fetch(address, [(0, 5)]))
        late = await fetched(target, fetch(address, [(0, 5)], timeout_ms=200))
    assert stalled.failure == plan_pb2.FETCH_FAILURE_STALLED
    assert late.failure == plan_pb2.FETCH_FAILURE_TIMED_OUT


async def test_a_result_without_rows_waits_until_another_plan_arrives(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the test may take: the result comes because of the plan, not after a time.
    monkeypatch.setattr(transfers, "MAX_RESULT_DELAY_S", 60.0)
    _, target = ends
    with silent_address() as address:
        plans = target.plans
        await target.steps.send(plans.plan([], fetches=[fetch(address, [(0, 5)])]))
        await target.steps.send(plans.plan([]))
        assert (await target.steps.result()).step_id == 1
        target.steps.cancel()

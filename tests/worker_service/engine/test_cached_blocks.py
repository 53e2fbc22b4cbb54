"""A worker keeps its core's records for the next core, and never longer than they are right."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pagewire.columns import pack, unpack
from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as pb
from tests.support.counting_model import VOCAB_SIZE
from tests.support.peers import keys_of
from tests.support.running_worker import RunningWorker, Steps, running_worker
from tests.support.worker_driver import PlanBuilder, Row, sampler_params

SEED = 2**63 + 5


def cached(*blocks: int) -> plan_pb2.CachedBlocks:
    """Blocks that one unit fills."""
    rows = [number for block in blocks for number in (block, 0, 1, 1, 0)]
    keys = b"".join(keys_of(1, first=block % 100) for block in blocks)
    return plan_pb2.CachedBlocks(blocks=pack(rows), keys=keys)


class Core:
    """One of several that a worker has, one after the other."""

    def __init__(self, worker: RunningWorker, epoch: int) -> None:
        self._worker, self.epoch = worker, epoch
        self.plans = PlanBuilder(epoch=epoch)

    async def begin(self, num_blocks: int = 64) -> "Core":
        """Make the caches."""
        await self._worker.initialize(self.epoch, num_blocks)
        return self

    async def records(self) -> tuple[int, list[int]]:
        """The seed, and the columns' blocks."""
        seed, blocks = 0, b""
        request = pb.GetCachedBlocksRequest(epoch=self.epoch)
        async for message in self._worker.stub.GetCachedBlocks(request):
            seed, blocks = message.key_seed, blocks + message.blocks.blocks
        column = memoryview(blocks).cast("i")
        return seed, column[::5].tolist()

    async def sequences(self) -> list[pb.KeptSequence]:
        """What it reports of sequences."""
        request = pb.GetCachedBlocksRequest(epoch=self.epoch)
        messages = self._worker.stub.GetCachedBlocks(request)
        return [kept async for message in messages for kept in message.sequences]

    async def step(self, *plans: dict[str, Any]) -> None:
        """Execute plans of one row, and die."""
        steps = Steps(self._worker.stub)
        self.plans.add(1, [3, 1, 4])
        for index, fields in enumerate(plans):
            row = Row(1, 1 if index else 3)
            await steps.send(self.plans.plan([row], **fields))
            await steps.result()
        steps.cancel()


@pytest.fixture
async def worker() -> AsyncIterator[RunningWorker]:
    async with running_worker() as worker:
        yield worker


async def test_the_next_core_gets_what_the_last_plan_has_left(worker: RunningWorker) -> None:
    first = await Core(worker, 1).begin()
    assert await first.records() == (0, [])
    await first.step(
        {"key_seed": SEED, "cached_blocks": cached(5, 6, ~2)},
        {"uncached_blocks": pack([5]), "cached_blocks": cached(7)},
        {"cached_blocks": cached(6)},
    )
    second = await Core(worker, 2).begin()
    assert await second.records() == (SEED, [~2, 7, 6])
    await second.step({"uncached_blocks": pack([~2, 9])})
    third = await Core(worker, 3).begin()
    assert await third.records() == (SEED, [7, 6])
    await third.step({"key_seed": 1, "cached_blocks": cached(8)})
    assert await (await Core(worker, 4).begin()).records() == (1, [8])


async def test_sequences_are_kept_until_the_next_plan(worker: RunningWorker) -> None:
    first = await Core(worker, 1).begin()
    first.plans.add(1, [3, 1, 4])
    first.plans.add(2, [3, 1, 4, 1, 5])
    first.plans.add(3, [9, 2])
    steps = Steps(worker.stub)
    rows = [Row(1, 3), Row(2, 4, sample=False), Row(3, 2)]
    await steps.send(first.plans.plan(rows, key_seed=SEED))
    token = unpack((await steps.result()).token_ids)[0]
    await steps.send(first.plans.plan([Row(1)], forget_seq_ids=pack([3])))
    await steps.result()
    steps.cancel()
    for epoch in (2, 3):  # the second core dies before its first plan
        core = await Core(worker, epoch).begin()
        one, other = await core.sequences()
        assert [one.seq_id, other.seq_id] == [1, 2]
        assert unpack(other.token_ids) == [3, 1, 4, 1]
        assert unpack(one.token_ids) == [3, 1, 4, token], "the last token is not computed"
        assert [unpack(table.block_ids) for table in one.tables] == [first.plans.tables[1]]
    await core.step({})
    assert [one.seq_id for one in await (await Core(worker, 4).begin()).sequences()] == [1]
    assert await (await Core(worker, 5).begin(32)).sequences() == []


async def test_nothing_is_returned_while_a_failed_row_is_not_withdrawn(
    worker: RunningWorker,
) -> None:
    nothing = sampler_params(min_tokens=9, suppressed_token_ids=pack(range(VOCAB_SIZE)))
    for epoch, withdrawn, expected in ((1, 1, [5]), (20, 0, [])):
        core = await Core(worker, epoch).begin()
        core.plans.add(1, [3, 1, 4], sampling=nothing)
        steps = Steps(worker.stub)
        await steps.send(core.plans.plan([Row(1, 3)], key_seed=SEED, cached_blocks=cached(5)))
        assert (await steps.result()).errors
        await steps.send(core.plans.plan([], withdrawn_step_id=withdrawn))
        await steps.result()
        steps.cancel()
        after = await Core(worker, epoch + 10).begin()
        assert (await after.records())[1] == expected


async def test_no_sequence_is_kept_after_a_plan_that_failed(worker: RunningWorker) -> None:
    core = await Core(worker, 1).begin()
    await core.step({"key_seed": SEED})
    core = await Core(worker, 2).begin()
    assert await core.sequences()
    core.plans.add(1, [3, 1, 4])
    steps = Steps(worker.stub)
    await steps.send(core.plans.plan([Row(1, 3)], forget_seq_ids=pack([7])))
    assert (await steps.error()).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await (await Core(worker, 3).begin()).sequences() == []


async def test_caches_of_another_size_have_no_records(worker: RunningWorker) -> None:
    first = await Core(worker, 1).begin()
    await first.step({"key_seed": SEED, "cached_blocks": cached(5)})
    assert await (await Core(worker, 2).begin(32)).records() == (0, [])


@pytest.mark.parametrize("dies_first", [True, False])
async def test_another_measurement_of_memory_ends_the_records(
    worker: RunningWorker, dies_first: bool
) -> None:
    """Whether or not the worker knows of the core's death before it measures."""
    first = await Core(worker, 1).begin()
    first.plans.add(1, [3, 1, 4])
    steps = Steps(worker.stub)
    await steps.send(first.plans.plan([Row(1, 3)], key_seed=SEED, cached_blocks=cached(5)))
    await steps.result()
    if dies_first:
        steps.cancel()
        await worker.worker.wait_idle()
    await worker.stub.ProfileBlocks(
        pb.ProfileBlocksRequest(max_num_seqs=3, max_num_batched_tokens=7)
    )
    steps.cancel()
    assert await (await Core(worker, 2).begin()).records() == (0, [])


async def test_only_the_core_of_the_last_epoch_gets_them(worker: RunningWorker) -> None:
    first = await Core(worker, 1).begin()
    await first.step({"key_seed": SEED, "cached_blocks": cached(5)})
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await first.records()
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await Core(worker, 2).begin()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await first.records()
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cached_blocks": cached(1)}, "cached_blocks"),
        ({"key_seed": 1, "cached_blocks": cached(64)}, "cached_blocks.blocks"),
        ({"key_seed": 1, "cached_blocks": cached(~4)}, "cached_blocks.blocks"),
    ],
)
async def test_records_of_no_block_are_refused(
    worker: RunningWorker, fields: dict[str, Any], field: str
) -> None:
    core = await Core(worker, 1).begin()
    core.plans.add(1, [3, 1, 4])
    steps = Steps(worker.stub)
    await steps.send(core.plans.plan([Row(1, 3)], **fields))
    error = await steps.error()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith(f"{field}: ")

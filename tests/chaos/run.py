"""One run: the same requests undisturbed and disturbed, and the differences."""

import asyncio
from pathlib import Path
from random import Random

import grpc

from pagewire.v1.status_pb2 import WORKER_STATE_READY
from tests.chaos.cluster import CORE, ChaosCluster
from tests.chaos.config import ChaosConfig
from tests.chaos.drawing import KINDS, KINDS_WITH_PACKETS, Drawing
from tests.chaos.monkeys import Monkeys
from tests.chaos.namespaces import NamespaceNetwork
from tests.chaos.report import Report
from tests.chaos.setting import draw_flags, embedder_flags, make_network, model_flags
from tests.chaos.streams import Streams, Tally, watch
from tests.chaos.ticks import ticks
from tests.chaos.timeline import Timeline
from tests.chaos.undisturbed import run_undisturbed
from tests.chaos.workload import draw_asks, draw_texts

REST_TIMEOUT_S = 60.0
"""Time for the last blocks to be freed after the last stream has ended."""

TELL_S = 3.0
"""Time for processes to log their stacks before they are killed."""


async def run_chaos(config: ChaosConfig, folder: Path, timeline: Timeline) -> Report:
    """Run it all; logs go to the folder."""
    asks = draw_asks(config.seed, config.num_asks, config.num_adapters)
    texts = draw_texts(config.seed, config.num_texts) if config.num_embedders else []
    expected, vectors = await run_undisturbed(
        asks, model_flags(config), folder, texts, embedder_flags(config)
    )
    timeline.note("streams", f"{len(asks)} answers of an undisturbed run are known")
    network = make_network(config)
    kinds = KINDS_WITH_PACKETS if isinstance(network, NamespaceNetwork) else KINDS
    draw = Random(config.seed)
    async with (
        network,
        ChaosCluster(network, folder, draw_flags(config, draw), timeline) as cluster,
    ):
        began_at_s = timeline.now_s
        streams = Streams(asks, expected, timeline, max_open=config.max_open_streams)
        streams.embed(texts, vectors)
        monkeys = Monkeys(
            cluster,
            Drawing(draw, network.links, config.lease_s, kinds),
            draw,
            num_kills=config.num_kills,
            time_limit_s=config.time_limit_s,
            num_monkeys=config.num_monkeys,
            mean_pause_s=config.mean_pause_s,
        )
        faults = await _Run(config, cluster, streams, monkeys).run()
        return Report(
            config=config,
            network=type(network).__name__,
            duration_s=round(timeline.now_s - began_at_s, 1),
            kills=dict(monkeys.kills),
            disturbances=dict(sorted(monkeys.disturbances.items())),
            num_streams=streams.tally.num_ended,
            num_left=streams.tally.num_left,
            num_tokens=streams.tally.num_tokens,
            num_vectors=streams.tally.num_vectors,
            kinds=dict(sorted(streams.tally.kinds.items())),
            faults=faults,
        )


class _Run:
    """The disturbed half of a run."""

    def __init__(
        self, config: ChaosConfig, cluster: ChaosCluster, streams: Streams, monkeys: Monkeys
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._streams = streams
        self._monkeys = monkeys

    async def run(self) -> list[str]:
        """All faults found."""
        reading = asyncio.create_task(self._streams.run(self._cluster.frontend_addresses))
        others = {
            asyncio.create_task(self._disturb()),
            asyncio.create_task(self._watch_members()),
            asyncio.create_task(
                watch(self._streams, self._cluster.timeline, self._config.patience_s)
            ),
        }
        try:
            faults = await self._wait(reading, others)
        finally:
            for task in (reading, *others):
                task.cancel()
            await asyncio.gather(reading, *others, return_exceptions=True)
        return faults + _faults_of(self._streams.tally) or await self._faults_at_rest()

    async def _wait(
        self, reading: asyncio.Task[None], others: set[asyncio.Task[None]]
    ) -> list[str]:
        """Wait until all streams have ended, or until a fault that may prevent that."""
        faults: list[str] = []
        while not (reading.done() or faults or self._streams.tally.hung):
            done, _ = await asyncio.wait({reading, *others}, return_when=asyncio.FIRST_COMPLETED)
            others -= done
            faults += [fault for task in done for fault in _faults_in(task)]
        if faults or self._streams.tally.hung:
            await self._tell_all()
        return faults

    async def _disturb(self) -> None:
        await self._monkeys.run()
        self._cluster.timeline.note("monkeys", "have done enough")
        self._streams.is_disturbed = False
        async for _ in ticks(0.2):
            if self._streams.num_begun >= self._config.num_streams or self._monkeys.is_late:
                break
        self._streams.finish()

    async def _watch_members(self) -> None:
        """Raises RuntimeError if a process ended by itself."""
        async for _ in ticks(0.5):
            for member in self._cluster.members.values():
                if member.has_drained:
                    self._cluster.timeline.note(member.host, "drained with its group; starts")
                    member.start()
                elif member.has_crashed:
                    raise RuntimeError(f"{member.host} has ended by itself")

    async def _tell_all(self) -> None:
        """Make every process log what it is doing."""
        self._cluster.tell_stacks()
        timeline = self._cluster.timeline
        timeline.note("monkeys", f"are at {list(self._monkeys.running.values())}")
        try:
            timeline.note(CORE, f"says {await self._cluster.status()}")
        except grpc.RpcError as error:
            timeline.note(CORE, f"says nothing: {error}")
        await asyncio.sleep(TELL_S)

    async def _faults_at_rest(self) -> list[str]:
        """Check that nothing is left of the streams after their end."""
        left = "the core does not answer"
        try:
            async with asyncio.timeout(REST_TIMEOUT_S):
                async for _ in ticks(0.2):
                    left = await self._what_is_left()
                    if not left:
                        break
        except TimeoutError:
            return [f"not at rest: {left}"]
        return []

    async def _what_is_left(self) -> str:
        try:
            status = await self._cluster.status()
        except grpc.RpcError as error:
            return f"the core does not answer: {error}"
        num_ready = sum(group.state == WORKER_STATE_READY for group in status.groups)
        num_groups = self._config.num_workers + self._config.num_embedders
        is_ready = num_ready == len(status.groups) == num_groups
        is_free = all(group.num_free_gpu_blocks == group.num_gpu_blocks for group in status.groups)
        num_open = status.num_waiting + status.num_running + status.num_swapped
        return "" if is_ready and is_free and not num_open else str(status)


def _faults_in(task: asyncio.Task[None]) -> list[str]:
    error = task.exception()
    return [] if error is None else [f"{type(error).__name__}: {error}"]


def _faults_of(tally: Tally) -> list[str]:
    lists = {"lost": tally.lost, "different": tally.different, "hung": tally.hung}
    return [f"{kind}: {what}" for kind, found in lists.items() for what in found]

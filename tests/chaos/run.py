"""One run: the same requests undisturbed and disturbed, and what was different."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import grpc

from tests.chaos.cluster import CORE, ChaosCluster, Flags
from tests.chaos.comparison import Answer
from tests.chaos.drawing import Drawing
from tests.chaos.monkeys import Monkeys
from tests.chaos.namespaces import NamespaceNetwork, namespaces_permitted
from tests.chaos.network import Network, star
from tests.chaos.relays import RelayNetwork
from tests.chaos.streams import Streams, Tally, run_undisturbed, watch
from tests.chaos.ticks import ticks
from tests.chaos.timeline import Timeline
from tests.chaos.workload import Ask, draw_asks
from tests.support.cluster import Cluster

REST_TIMEOUT_S = 60.0
"""For the last blocks to be freed after the last stream has ended."""


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """How much is disturbed, and what."""

    seed: int = 0
    num_kills: int = 20
    """SIGKILLs after which it is enough; more may be under way."""
    num_streams: int = 40
    """Streams, at least."""
    time_limit_s: float = 3600.0
    """Time after which it is enough all the same; the report says what was reached."""
    num_asks: int = 36
    """Different requests, which streams make again and again."""
    dtype: str = "float32"
    num_workers: int = 3
    num_frontends: int = 2
    max_open_streams: int = 12
    num_monkeys: int = 3
    """Disturbances at a time, at most."""
    mean_pause_s: float = 1.0
    """Between one disturbance's end and the next one's begin."""
    lease_s: float = 5.0
    """Longer than a worker may starve on a busy machine, so that only some leases end."""
    patience_s: float = 180.0
    """Time without news after which a stream counts as hung."""
    network: str = "auto"
    """namespaces, relays, or auto: namespaces where they are permitted."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run has shown."""

    config: ChaosConfig
    network: str
    duration_s: float
    kills: dict[str, int]
    disturbances: dict[str, int]
    num_streams: int
    num_tokens: int
    kinds: dict[str, int]
    faults: list[str] = field(default_factory=list)
    """Everything that must not be; empty for a good run."""

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


async def run_chaos(config: ChaosConfig, folder: Path, timeline: Timeline) -> Report:
    """Run it all; logs go to the folder."""
    asks = draw_asks(config.seed, config.num_asks)
    expected = await _undisturbed(config, asks, folder)
    timeline.note("streams", f"{len(asks)} answers of an undisturbed run are known")
    network = _make_network(config)
    draw = Random(config.seed)
    async with (
        network,
        ChaosCluster(network, folder, _flags(config, draw), timeline) as cluster,
    ):
        began_at_s = timeline.now_s
        streams = Streams(asks, expected, timeline, max_open=config.max_open_streams)
        monkeys = Monkeys(
            cluster,
            Drawing(draw, network.links, config.lease_s),
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
            num_tokens=streams.tally.num_tokens,
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
        faults: list[str] = []
        try:
            while not reading.done() and not faults:
                done, _ = await asyncio.wait(
                    {reading, *others}, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    others.discard(task)
                    faults += _fault_of(task)
        finally:
            for task in (reading, *others):
                task.cancel()
            await asyncio.gather(reading, *others, return_exceptions=True)
        faults += _faults_of(self._streams.tally)
        if self._streams.tally.hung:
            await self._tell_all()
        elif not faults:
            faults += await self._faults_at_rest()
        return faults

    async def _disturb(self) -> None:
        await self._monkeys.run()
        self._cluster.timeline.note("monkeys", "have done enough")
        async for _ in ticks(0.2):
            if self._streams.num_begun >= self._config.num_streams or self._monkeys.is_late:
                break
        self._streams.finish()

    async def _watch_members(self) -> None:
        """Raises RuntimeError if a process ended by itself."""
        async for _ in ticks(0.5):
            for member in self._cluster.members.values():
                if member.has_crashed:
                    raise RuntimeError(f"{member.host} has ended by itself")

    async def _tell_all(self) -> None:
        """Have everybody say what they are doing."""
        self._cluster.tell_stacks()
        timeline = self._cluster.timeline
        timeline.note("monkeys", f"are at {list(self._monkeys.running.values())}")
        try:
            timeline.note(CORE, f"says {await self._cluster.status()}")
        except grpc.RpcError as error:
            timeline.note(CORE, f"says nothing: {error}")

    async def _faults_at_rest(self) -> list[str]:
        """Once all streams have ended, nothing may be left of them."""
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
        is_ready = len(status.groups) == self._config.num_workers
        is_free = all(group.num_free_gpu_blocks == group.num_gpu_blocks for group in status.groups)
        num_open = status.num_waiting + status.num_running + status.num_swapped
        return "" if is_ready and is_free and not num_open else str(status)


def _fault_of(task: asyncio.Task[None]) -> list[str]:
    error = task.exception()
    return [] if error is None else [f"{type(error).__name__}: {error}"]


def _faults_of(tally: Tally) -> list[str]:
    lists = {"lost": tally.lost, "different": tally.different, "hung": tally.hung}
    return [f"{kind}: {what}" for kind, found in lists.items() for what in found]


async def _undisturbed(config: ChaosConfig, asks: Sequence[Ask], folder: Path) -> list[Answer]:
    """On one worker with memory for all."""
    quiet = folder / "undisturbed"
    quiet.mkdir()
    cluster = Cluster(quiet, worker_flags=["--dtype", config.dtype])
    try:
        await asyncio.to_thread(cluster.start)
        return await run_undisturbed(cluster.frontend_address(), asks, max_open=16)
    finally:
        await asyncio.to_thread(cluster.stop)


def _make_network(config: ChaosConfig) -> Network:
    links = star(
        CORE,
        [f"frontend-{index}" for index in range(config.num_frontends)],
        [f"worker-{index}" for index in range(config.num_workers)],
    )
    kind = config.network
    if kind == "auto":
        kind = "namespaces" if namespaces_permitted() else "relays"
    return {"namespaces": NamespaceNetwork, "relays": RelayNetwork}[kind](links)


def _flags(config: ChaosConfig, draw: Random) -> Flags:
    """Little memory and small steps, so that streams are preempted, swapped and computed in
    chunks as well. Nothing is poisonous here: every death has its cause."""
    block_bytes = 32768 if config.dtype == "float32" else 16384
    core = {
        "--lease-ms": round(config.lease_s * 1000),
        "--grace-period": 3,
        "--max-num-seqs": draw.choice((8, 16)),
        "--max-num-batched-tokens": draw.choice((48, 128)),
        "--preemption-mode": draw.choice(("auto", "swap", "recompute")),
        "--pipeline-depth": draw.choice((1, 2, 2, 3)),
        "--max-worker-losses": 1_000_000,
    }
    worker = {
        "--dtype": config.dtype,
        "--threads": 1,
        "--grace-period": 20,
        "--kv-cache-memory": block_bytes * 150,
        "--swap-space": block_bytes * 50,
    }
    return Flags(
        core=[str(word) for flag in core.items() for word in flag],
        frontend=["--grace-period", "3"],
        worker=[str(word) for flag in worker.items() for word in flag],
    )

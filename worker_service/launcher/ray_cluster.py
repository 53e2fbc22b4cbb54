"""Ranks on the nodes of a Ray cluster.

A placement group has one bundle of resources per stage, for all of the stage's ranks: Ray never
splits a bundle between nodes, so tensor-parallel ranks are on one node, and it spreads the bundles
over as many nodes as possible. When a node dies, Ray places its bundles elsewhere.

The launcher's process is Ray's driver: actors and placement group end with it. An actor is the
parent of its rank's process, the same program as with any other launcher; Ray forwards its output
to the driver. A rank whose process is killed is restarted by its actor, and a lost actor is created
again in its bundle; the other ranks keep their weights. Only if rank 0, which has the group's
store, moves to another node, the others are restarted too, with the store's new address.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker_service.address import TcpAddress, parse
from worker_service.errors import InvalidOption
from worker_service.launcher.flags import RankFlags, RayFlags
from worker_service.launcher.launcher import (
    RankCommand,
    RankHost,
    address_of,
    free_port,
    unless,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RayNode:
    """The node that an actor runs on."""

    node_id: str
    host: str
    """The node's address in the cluster."""

    free_port: int
    gpus: str | None
    """CUDA_VISIBLE_DEVICES, as Ray set it."""


class RayRank:
    """A Ray actor, which runs a rank on one of its threads and handles calls on the others."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = False

    def node(self) -> RayNode:
        """The node that this actor runs on."""
        import ray

        host = ray.util.get_node_ip_address()
        return RayNode(
            node_id=ray.get_runtime_context().get_node_id(),
            host=host,
            free_port=free_port(host),
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )

    def run(self, command: RankCommand, environment: Mapping[str, str]) -> int:
        """Run the rank until it exits; returns its exit code, negative if a signal killed it.

        environment: variables that override those of the node.
        """
        # The process dies with the thread that started it, so this thread waits for it.
        self._process = subprocess.Popen(
            command.as_child_of_this(), env=os.environ | environment, process_group=0
        )
        if self._is_ending:  # since before the process was started
            self._process.terminate()
        return self._process.wait()

    def terminate(self) -> None:
        """End the rank gracefully; if called again, at once."""
        self._is_ending = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the rank, which the launcher then restarts."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


_FORWARDED = ("PAGEWIRE_", "HF_", "NCCL_", "GLOO_", "OMP_", "TORCH_")
"""Prefixes of the launcher's environment variables that are passed on to ranks."""

_THREADS_PER_ACTOR = 3
"""One runs the rank; the others handle calls meanwhile."""

_NOT_MADE = "error raised in its creation task"
"""Ray's message if our class could not be imported on the node."""

_REMINDER_S = 10.0
_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig:
    """A group of ranks to place on the cluster."""

    arguments: Sequence[str]
    """The launcher's own command line."""

    ranks: RankFlags
    ray: RayFlags
    group_id: str
    device: str
    """`auto` takes GPUs if the cluster has any."""

    listen: str | None
    """HOST:PORT, of which ranks use the port, counted up from rank 0, on their nodes' addresses.
    None: free ports."""

    advertise: str | None

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidOption(
                f"device: expected auto, cpu or cuda with --launcher ray, which chooses the GPUs,"
                f" got {self.device!r}"
            )
        if self.advertise is not None:
            raise InvalidOption(
                "advertise: expected none with --launcher ray; ranks advertise their nodes"
            )
        if self.listen is not None:
            if not isinstance(parse(self.listen, "listen"), TcpAddress):
                raise InvalidOption(f"listen: expected HOST:PORT with Ray, got {self.listen!r}")
            address_of(self.listen, self.ranks.layout_of(0).world_size - 1, "listen")

    def bundle(self, *, with_gpus: bool) -> dict[str, float]:
        """The resources of one stage's ranks, on one node."""
        size = float(self.ranks.tensor_parallel_size)
        return {"CPU": size * self.ray.ray_cpus_per_rank} | ({"GPU": size} if with_gpus else {})


def connect(address: str | None) -> Any:
    """The `ray` module, connected to a cluster until this process ends. Raises InvalidOption."""
    for name in ("RAY_DEDUP_LOGS", "RAY_COLOR_PREFIX"):
        os.environ.setdefault(name, "0")  # every line of every rank, as it is
    try:
        import ray
    except ImportError:
        raise InvalidOption(
            "launcher: Ray is not installed; in a checkout, pip install '.[ray]', on every node"
        ) from None
    if address is not None:
        _require_listener(address)
    try:
        ray.init(address=address or "auto", logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "on this machine" if address is None else f"at {address}"
        reason = str(error).strip().splitlines()[0]
        raise InvalidOption(f"ray_address: no Ray cluster {where}: {reason}") from None
    return ray


def _require_listener(address: str) -> None:
    """Raise InvalidOption if no server listens there; Ray itself would retry for minutes."""
    place = None if "://" in address else parse(address, "ray_address")
    if not isinstance(place, TcpAddress):
        raise InvalidOption(
            "ray_address: expected HOST:PORT of a cluster that this machine belongs to,"
            f" got {address!r}"
        )
    try:
        socket.create_connection((place.host, place.port), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidOption(f"ray_address: no Ray cluster at {address}: {reason}") from None


class RayHost(RankHost):
    """A Ray cluster, which this process is connected to as a driver."""

    def __init__(self, config: RayConfig, ray: Any) -> None:
        self._config = config
        self._ray = ray
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self._uses_gpus = config.device == "cuda" or (config.device == "auto" and has_gpus)
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._stores: dict[int, TcpAddress] = {}
        """The store's address that each rank was last started with."""
        self._store: TcpAddress | None = None
        self._store_known = asyncio.Event()
        self._ending = asyncio.Event()

    async def open(self) -> None:
        """Wait for the resources of all stages. Raises InvalidOption after the timeout."""
        from ray.util.placement_group import placement_group

        bundle = self._config.bundle(with_gpus=self._uses_gpus)
        bundles = [bundle] * self._config.ranks.pipeline_parallel_size
        self._group = placement_group(bundles, strategy="SPREAD")
        placed = self._group.ready()
        try:
            async with asyncio.timeout(self._config.ray.ray_timeout):
                await self._wait_and_log(placed, "room for the group")
        except TimeoutError:
            raise InvalidOption(
                f"launcher: no room for the group after {self._config.ray.ray_timeout:g} s:"
                f" {self._required()}; {self._available()}"
            ) from None

    async def run(self, rank: int) -> int:
        """Run a rank in its stage's bundle."""
        actor = self._actors.get(rank) or self._make_actor(rank)
        try:
            placed = self._wait_and_log(actor.node.remote(), f"a place for rank {rank}")
            node = await unless(self._ending, placed)
            store = None if node is None else await self._store_for(rank, node)
            if node is None or store is None:
                return 0
            self._stores[rank] = store
            command = self._command(rank, node, store)
            logger.info(
                "starting rank=%d node_id=%s host=%s gpus=%s",
                *(rank, node.node_id, node.host, node.gpus),
            )
            exit_code: int = await actor.run.remote(command, _environment())
            return exit_code
        except self._ray.exceptions.RayActorError as error:
            self._ray.kill(actor)
            del self._actors[rank]
            return _exit_code_of(rank, str(error))

    def terminate(self) -> None:
        """Send SIGTERM to all ranks' processes."""
        self._ending.set()
        for actor in self._actors.values():
            actor.terminate.remote()

    def _make_actor(self, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = rank // self._config.ranks.tensor_parallel_size
        options = {
            "num_cpus": self._config.ray.ray_cpus_per_rank,
            "num_gpus": 1 if self._uses_gpus else 0,
            "max_concurrency": _THREADS_PER_ACTOR,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group,
                placement_group_bundle_index=bundle,
            ),
        }
        actor = self._actors[rank] = self._ray.remote(**options)(RayRank).remote()
        return actor

    async def _store_for(self, rank: int, node: RayNode) -> TcpAddress | None:
        """The address of the group's store; None if the launcher ends before rank 0 is placed."""
        if rank == 0:
            if self._store is None or self._store.host != node.host:
                self._store = TcpAddress(node.host, node.free_port)
                self._restart_others(self._store)
            self._store_known.set()
        await unless(self._ending, self._store_known.wait())
        return None if self._ending.is_set() else self._store

    def _restart_others(self, store: TcpAddress) -> None:
        """Restart the ranks that were started with another store's address."""
        for rank, theirs in self._stores.items():
            if rank != 0 and theirs != store and rank in self._actors:
                logger.warning("rank 0 moved, starting rank=%d again", rank)
                self._actors[rank].kill.remote()

    def _command(self, rank: int, node: RayNode, store: TcpAddress) -> RankCommand:
        port = 0
        if self._config.listen is not None:
            listen = parse(address_of(self._config.listen, rank, "listen"), "listen")
            assert isinstance(listen, TcpAddress), "checked at the start"
            port = listen.port
        return RankCommand(
            arguments=self._config.arguments,
            rank=rank,
            local_rank=0,  # Ray lets an actor see its own GPU only
            store=str(store),
            group_id=self._config.group_id,
            listen=str(TcpAddress(node.host, port)),
        )

    async def _wait_and_log(self, reference: Any, what: str) -> Any:
        """Await Ray's reference, and log every few seconds what it waits for."""
        done = asyncio.ensure_future(reference)
        try:
            while not (await asyncio.wait((done,), timeout=_REMINDER_S))[0]:
                logger.info("waiting for %s: %s; %s", what, self._required(), self._available())
            return done.result()
        finally:
            done.cancel()

    def _required(self) -> str:
        bundle = _quantities(self._config.bundle(with_gpus=self._uses_gpus))
        num_stages = self._config.ranks.pipeline_parallel_size
        return f"{num_stages} times {bundle} on one node wanted"

    def _available(self) -> str:
        nodes = [
            f"{node['NodeManagerAddress']} has {_quantities(node['Resources'])}"
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        free = _quantities(self._ray.available_resources())
        return f"{', '.join(nodes) or 'no node is alive'}; free are {free}"


def _exit_code_of(rank: int, reason: str) -> int:
    """Exit code of a rank whose actor is lost: as if killed, or 1 if a restart would not help."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if _NOT_MADE not in reason:
        logger.warning("actor lost rank=%d reason=%s", rank, lines[0])
        return -signal.SIGKILL
    logger.error(
        "actor not made rank=%d reason=%s; is pagewire[worker,ray] of this version on every node?",
        *(rank, lines[-1]),
    )
    return 1


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name.startswith(_FORWARDED)}


def _quantities(resources: dict[str, float]) -> str:
    """`2 GPU and 4 CPU`."""
    return " and ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("GPU", "CPU"))

"""`python -m worker_service`: flags and environment to settings, then one worker."""

import asyncio
import logging
import os
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from service_common.errors import CannotListen
from service_common.logging_config import configure_logging
from service_common.tracing import CannotTrace
from worker_service.cli.model_flags import CacheFlags, ModelFlags, RunnerFlags, SimulationFlags
from worker_service.cli.options import takes_flags
from worker_service.cli.ranks import (
    LauncherName,
    RankAssignment,
    RankFlags,
    RanksToLaunch,
    RayFlags,
    assign_rank,
)
from worker_service.cli.service_flags import ClusterFlags, ServiceFlags
from worker_service.config import DEFAULT_LISTEN, WorkerConfig
from worker_service.cpu_cores import limit_spinning
from worker_service.errors import InvalidOption, WorkerError
from worker_service.launcher.launcher import (
    LocalHost,
    RankHost,
    die_with_parent,
    launch,
)

if TYPE_CHECKING:
    from worker_service.engine.executor import Executor

app = typer.Typer(add_completion=False)


@app.command()
@takes_flags
def serve(
    model: ModelFlags,
    service: ServiceFlags,
    cluster: ClusterFlags,
    cache: CacheFlags,
    runner: RunnerFlags,
    ranks: RankFlags,
    ray: RayFlags,
    simulation: SimulationFlags,
) -> None:
    """Serve a model's steps to a scheduler core."""
    configure_logging(service.log_level, service.log_format)
    limit_spinning(os.environ)
    try:
        if simulation.simulate:
            ranks.require_one_rank("simulate")
        assignment = assign_rank(ranks, os.environ)
        if not isinstance(assignment, RankAssignment):
            if model.cpu_affinity is not None:
                raise InvalidOption("cpu_affinity: expected --rank with it, since it is one rank's")
            host = _host_of(assignment, model.device, service, ranks, ray)
            raise typer.Exit(asyncio.run(launch(assignment.ranks, host)))
        if service.launcher_pid is not None:
            die_with_parent(service.launcher_pid)
        config = WorkerConfig(
            model=simulation.config(model.max_model_len)
            if simulation.simulate
            else model.config(assignment),
            cache=cache.config(),
            runner=runner.config(),
            network=service.network(assignment, cluster.config()),
            group=assignment.group,
            served_model_name=service.served_model_name,
            grace_period_s=service.grace_period,
            profile_dir=service.profile_dir,
        )
        asyncio.run(_run(config))
    except (InvalidOption, CannotTrace) as error:
        _exit(error, 2)
    except (WorkerError, CannotListen) as error:
        _exit(error, 1)


def _host_of(
    ranks_to_launch: RanksToLaunch,
    device: str,
    service: ServiceFlags,
    ranks: RankFlags,
    ray: RayFlags,
) -> RankHost:
    """The host of the ranks that this process launches."""
    group_id = ranks_to_launch.group_id or uuid.uuid4().hex
    if ranks_to_launch.launcher is LauncherName.local:
        return LocalHost(
            arguments=sys.argv[1:],
            ranks=ranks_to_launch.ranks,
            group_id=group_id,
            listen=service.listen or DEFAULT_LISTEN,
            advertise=service.advertise,
            distributed_init=ranks_to_launch.distributed_init,
            first_local_rank=ranks_to_launch.first_local_rank,
        )
    from worker_service.launcher.ray_cluster import RayConfig, RayHost, connect

    config = RayConfig(
        arguments=sys.argv[1:],
        tensor_parallel_size=ranks.tensor_parallel_size,
        pipeline_parallel_size=ranks.pipeline_parallel_size,
        group_id=group_id,
        device=device,
        listen=service.listen,
        advertise=service.advertise,
        cpus_per_rank=ray.ray_cpus_per_rank,
        timeout_s=ray.ray_timeout,
    )
    return RayHost(config, connect(ray.ray_address))


async def _run(config: WorkerConfig) -> None:
    from worker_service.service.lifecycle import Worker

    worker = Worker(config, _executor_of(config))
    worker.handle_signals()
    try:
        await worker.run()
    finally:
        if worker.is_stuck:
            logger = logging.getLogger(__name__)
            logger.error("the model thread is stuck, the process ends without it")
            logging.shutdown()
            os._exit(1)


def _executor_of(config: WorkerConfig) -> "Executor":
    """The plans' executor, imported here because a simulation needs no torch."""
    from worker_service.config import DEFAULT_BLOCK_SIZE, SimulationConfig

    model = config.model
    if isinstance(model, SimulationConfig):
        from worker_service.simulated.executor import SimulatedExecutor

        return SimulatedExecutor(model, config.cache.block_size or DEFAULT_BLOCK_SIZE)
    from worker_service.loader import load_model
    from worker_service.runner.model_executor import ModelExecutor, Profiler

    profiler = Profiler(Path(config.profile_dir))
    store, rendezvous = config.group.store_address, None
    if store is not None:
        from worker_service.distributed.rendezvous import Rendezvous

        rendezvous = Rendezvous(store, config.group.layout)
    return ModelExecutor(
        config.cache, profiler, lambda: load_model(model, config.cache), rendezvous, config.runner
    )


def _exit(error: Exception, code: int) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)


def main() -> None:
    """The worker's command line."""
    app(prog_name="python -m worker_service")


if __name__ == "__main__":
    main()

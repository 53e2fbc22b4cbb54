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
from worker_service.cli.model_flags import ModelFlags
from worker_service.cli.options import takes_flags
from worker_service.cli.ranks import Place, StartRanks, find_place
from worker_service.cli.service_flags import ServiceFlags
from worker_service.command_line.cache_flags import CacheFlags
from worker_service.command_line.cluster_flags import ClusterFlags
from worker_service.command_line.rank_flags import LauncherName, RankFlags
from worker_service.command_line.ray_flags import RayFlags
from worker_service.command_line.runner_flags import RunnerFlags
from worker_service.command_line.simulation_flags import SimulationFlags
from worker_service.config import DEFAULT_LISTEN, WorkerConfig
from worker_service.cpu_cores import limit_spinning
from worker_service.errors import InvalidOption, WorkerError
from worker_service.launcher.launcher import LocalConfig, LocalHost
from worker_service.launchers.launcher import RankHost, launch
from worker_service.launchers.rank_process import end_with

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
        place = find_place(ranks, os.environ)
        if not isinstance(place, Place):
            if model.cpu_affinity is not None:
                raise InvalidOption("cpu_affinity: expected --rank with it, since it is one rank's")
            host = _host_of(place, model.device, service, ranks, ray)
            raise typer.Exit(asyncio.run(launch(place.ranks, host)))
        if service.launcher_pid is not None:
            end_with(service.launcher_pid)
        config = WorkerConfig(
            model=simulation.config(model.max_model_len)
            if simulation.simulate
            else model.config(place),
            cache=cache.config(),
            runner=runner.config(),
            network=service.network(place, cluster.config()),
            group=place.group,
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
    place: StartRanks, device: str, service: ServiceFlags, ranks: RankFlags, ray: RayFlags
) -> RankHost:
    """Where the ranks are to run, which this process starts."""
    group_id = place.group_id or uuid.uuid4().hex
    if place.launcher is LauncherName.local:
        return LocalHost(
            LocalConfig(
                arguments=sys.argv[1:],
                ranks=place.ranks,
                group_id=group_id,
                listen=service.listen or DEFAULT_LISTEN,
                advertise=service.advertise,
                distributed_init=place.distributed_init,
                first_local_rank=place.first_local_rank,
            )
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
    """What is to execute the plans; a simulation needs no torch, so each is imported here."""
    from worker_service.simulation.config import DEFAULT_BLOCK_SIZE, SimulationConfig

    model = config.model
    if isinstance(model, SimulationConfig):
        from worker_service.simulation.executor import SimulatedExecutor

        return SimulatedExecutor(model, config.cache.block_size or DEFAULT_BLOCK_SIZE)
    from worker_service.loader import load_model
    from worker_service.profiler import Profiler
    from worker_service.runner.model_executor import ModelExecutor

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

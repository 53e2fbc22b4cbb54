"""`python -m worker_service`: flags and environment to settings, then one worker."""

import errno
import logging
import os
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from pagewire.usage_errors import OneLineCommand, spelled_as_options
from service_common.config_flags import (
    CLUSTER,
    CONTEXT,
    LOGGING,
    Flags,
    begin_log,
    run_service,
    run_to_exit,
    takes_flags,
)
from service_common.errors import CannotListen, TooFewThreads
from service_common.garbage import imports_exempted
from service_common.tracing import CannotTrace
from worker_service.config import DEFAULT_LISTEN, ModelConfig, WorkerConfig, local_model
from worker_service.cpu_cores import limit_spinning
from worker_service.errors import InvalidOption, OutOfMemory, WorkerError
from worker_service.gguf.header import is_gguf
from worker_service.gguf.tokenizer_process import TokenizerProcess
from worker_service.launcher.flags import (
    ADAPTERS,
    CACHE,
    COST,
    CPU_AFFINITY,
    CPU_SHARE,
    LAUNCHER_PID,
    LISTEN,
    MODEL,
    NETWORK,
    RANKS,
    RAY,
    RUNNER,
    SIMULATE,
    SIMULATION,
    WORKER,
    LauncherName,
    RankAssignment,
    RankFlags,
    RanksToLaunch,
    RayFlags,
    assign_rank,
    checked_config,
    cpu_share,
)
from worker_service.launcher.launcher import Launcher, LocalHost, RankHost, die_with_parent

if TYPE_CHECKING:
    from worker_service.engine.executor import Executor
    from worker_service.load_progress import LoadProgress

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=CONTEXT,
)


@app.command(cls=OneLineCommand)
@takes_flags(
    MODEL.parameters,
    [CPU_AFFINITY, CPU_SHARE],
    WORKER.parameters,
    LISTEN,
    NETWORK.parameters,
    LOGGING,
    [LAUNCHER_PID],
    CLUSTER.parameters,
    CACHE.parameters,
    RUNNER.parameters,
    ADAPTERS.parameters,
    RANKS.parameters,
    RAY.parameters,
    [SIMULATE],
    SIMULATION.parameters,
    COST.parameters,
)
def serve(flags: Flags) -> None:
    """Serve a model's steps to a scheduler core."""
    begin_log(flags)
    limit_spinning(os.environ)
    try:
        ranks, ray = RankFlags(**RANKS.fields_of(flags)), RayFlags(**RAY.fields_of(flags))
        if flags["simulate"]:
            ranks.require_one_rank("simulate")
        assignment = assign_rank(ranks, os.environ)
        config = checked_config(flags, assignment)
        if not isinstance(assignment, RankAssignment):
            if flags["cpu_affinity"] is not None:
                raise InvalidOption("cpu_affinity: expected --rank with it, since it is one rank's")
            host = _host_of(assignment, flags, ranks, ray)
            raise typer.Exit(run_service(Launcher(assignment.ranks, host).run()))
        if flags["launcher_pid"] is not None:
            die_with_parent(flags["launcher_pid"])
        run_service(_run(config))
    except (InvalidOption, CannotTrace) as error:
        _exit(spelled_as_options(str(error), flags), 2)
    except (WorkerError, CannotListen, TooFewThreads) as error:
        _exit(spelled_as_options(str(error), flags), 1)
    except OSError as error:
        if error.errno != errno.ENOMEM and error.filename is None:
            raise
        _exit(_explained(error), 1)
    except MemoryError as error:
        _exit(_explained(error), 1)


def _host_of(
    ranks_to_launch: RanksToLaunch, flags: Flags, ranks: RankFlags, ray: RayFlags
) -> RankHost:
    """The host of the ranks that this process launches."""
    group_id = ranks_to_launch.group_id or uuid.uuid4().hex
    if ranks_to_launch.launcher is LauncherName.local:
        return LocalHost(
            arguments=sys.argv[1:],
            ranks=ranks_to_launch.ranks,
            group_id=group_id,
            listen=flags["listen"] or DEFAULT_LISTEN,
            advertise=flags["advertise"],
            distributed_init=ranks_to_launch.distributed_init,
            first_local_rank=ranks_to_launch.first_local_rank,
            cpu_share=cpu_share(flags),
        )
    from worker_service.launcher.ray_cluster import RayConfig, RayHost, connect

    config = RayConfig(
        arguments=sys.argv[1:],
        ranks=ranks,
        ray=ray,
        group_id=group_id,
        device=flags["device"],
        listen=flags["listen"],
        advertise=flags["advertise"],
    )
    return RayHost(config, connect(ray.ray_address))


async def _run(config: WorkerConfig) -> None:
    with imports_exempted():
        from worker_service.load_progress import LoadProgress
        from worker_service.service.lifecycle import make_worker

    progress = LoadProgress()
    worker = make_worker(config, _executor_of(config, progress), progress)
    worker.handle_signals()
    try:
        await worker.run()
    finally:
        if worker.is_stuck:
            # gloo cannot abort what waits for another rank, which may have died.
            waits_for_rank = config.group.layout.world_size > 1 and not worker.has_failed
            level = logging.WARNING if waits_for_rank else logging.ERROR
            message = "the model thread is stuck, the process ends without it"
            logging.getLogger(__name__).log(level, message)
            logging.shutdown()
            os._exit(0 if waits_for_rank else 1)


def _executor_of(config: WorkerConfig, progress: "LoadProgress") -> "Executor":
    """The plans' executor, imported here because a simulation needs no torch. Raises WorkerError if
    the model cannot be loaded and that can be found before anything is listened on."""
    from worker_service.config import DEFAULT_BLOCK_SIZE, SimulationConfig

    model = config.model
    if isinstance(model, SimulationConfig):
        from worker_service.simulated.executor import SimulatedExecutor

        block_size = config.cache.block_size or DEFAULT_BLOCK_SIZE
        max_drafts = config.runner.max_drafts
        return SimulatedExecutor(model, block_size, max_drafts, config.adapters)
    tokenizer = _tokenizer_process(model)  # which is done by the time torch is imported
    with imports_exempted():
        from worker_service.loader import check_model, load_model
        from worker_service.runner.torch_executor import Profiler, TorchExecutor

    check_model(model, config.cache)
    profiler = Profiler(Path(config.profile_dir) if config.profile_dir else None)
    store, rendezvous = config.group.store_address, None
    if store is not None:
        from worker_service.distributed.communicator import Rendezvous

        rendezvous = Rendezvous(store, config.group.layout)
    return TorchExecutor(
        config.cache,
        profiler,
        lambda: load_model(model, config.cache, progress, tokenizer),
        rendezvous,
        config.runner,
        adapters=config.adapters,
    )


def _tokenizer_process(model: ModelConfig) -> TokenizerProcess | None:
    """Begin to make the tokenizer's files of a GGUF file."""
    path = local_model(model.model)
    return TokenizerProcess(path) if path is not None and is_gguf(path) else None


def _explained(error: OSError | MemoryError) -> WorkerError:
    """The error of memory, or of a file of the checkpoint or of a cache, in words."""
    if isinstance(error, MemoryError) or error.errno == errno.ENOMEM:
        return OutOfMemory(
            "the system does not give this process the memory for the model (ulimit -v, or the"
            " limit of committed memory): raise that, or choose a smaller or quantized model"
        )
    reason = (error.strerror or str(error)).lower()
    if isinstance(error, PermissionError):
        reason += f"; this process runs as user {os.geteuid()}"
    return WorkerError(f"{error.filename}: {reason}")


def _exit(error: object, code: int) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)


def main() -> None:
    """The worker's command line."""
    run_to_exit(lambda: app(prog_name="pagewire worker"))


if __name__ == "__main__":
    main()

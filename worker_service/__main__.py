"""`python -m worker_service`: flags and environment to settings, then one worker."""

import asyncio
import logging
import os
import re
import sys
import uuid
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer import Option

from worker_service.parallel.place import LauncherName

if TYPE_CHECKING:
    from worker_service.config import WorkerConfig
    from worker_service.executor import Executor
    from worker_service.launchers.launcher import RankHost
    from worker_service.loader import ModelConfig
    from worker_service.simulation.config import SimulationConfig

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class LogLevel(StrEnum):
    """How much is logged."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def parse_bytes(text: str) -> int:
    """`512MiB`, `4GiB`, `1.5GB` or a plain number, in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise typer.BadParameter(f"expected a size such as 512MiB or 4GiB, got {text!r}")
    return int(float(match[1]) * unit)


def _env(name: str) -> str:
    return f"PAGEWIRE_{name}"


app = typer.Typer(add_completion=False)


@app.command()
def serve(
    model: Annotated[
        str, Option(envvar=_env("MODEL"), help="Checkpoint directory, hub id, or `embedded`.")
    ] = "embedded",
    revision: Annotated[
        str | None, Option(envvar=_env("REVISION"), help="Branch, tag or commit on the hub.")
    ] = None,
    served_model_name: Annotated[
        str | None,
        Option(
            envvar=_env("SERVED_MODEL_NAME"), help="Name clients use.", show_default="the model's"
        ),
    ] = None,
    core: Annotated[
        str | None,
        Option(envvar=_env("CORE"), help="Scheduler core to register with; none: only serve."),
    ] = None,
    listen: Annotated[
        str | None,
        Option(
            envvar=_env("LISTEN"),
            help="HOST:PORT or unix:PATH; port 0 takes a free one.",
            show_default="127.0.0.1:7620; with Ray the node's address and a free port",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        Option(
            envvar=_env("ADVERTISE"),
            help="Address the core is to dial.",
            show_default="where it listens",
        ),
    ] = None,
    group_id: Annotated[
        str | None,
        Option(envvar=_env("GROUP_ID"), help="Worker group.", show_default="drawn at random"),
    ] = None,
    device: Annotated[
        str, Option(envvar=_env("DEVICE"), help="auto, cpu, cuda or cuda:N.")
    ] = "auto",
    dtype: Annotated[
        str, Option(envvar=_env("DTYPE"), help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        Option(
            envvar=_env("MAX_MODEL_LEN"),
            help="Most tokens of prompt and output together.",
            show_default="the model's own",
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        Option(
            envvar=_env("BLOCK_SIZE"),
            help="Tokens per KV block, a power of two.",
            show_default="by attention backend, mostly 16",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        Option(
            envvar=_env("KV_CACHE_DTYPE"),
            help="auto, or fp8 for keys and values in a byte each (GPUs).",
        ),
    ] = "auto",
    kv_cache_memory: Annotated[
        int | None,
        Option(
            envvar=_env("KV_CACHE_MEMORY"),
            parser=parse_bytes,
            metavar="SIZE",
            help="Memory for KV blocks, such as 4GiB.",
            show_default="on a CPU a quarter of what is free, at most 4GiB; on a GPU what is left",
        ),
    ] = None,
    swap_space: Annotated[
        int | None,
        Option(
            envvar=_env("SWAP_SPACE"),
            parser=parse_bytes,
            metavar="SIZE",
            help="Host memory for swapped blocks.",
            show_default="4GiB with a GPU, none with a CPU",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        Option(envvar=_env("GPU_MEMORY_UTILIZATION"), help="Share of a GPU's memory to fill."),
    ] = 0.9,
    load_format: Annotated[
        str,
        Option(envvar=_env("LOAD_FORMAT"), help="safetensors, or dummy for random weights."),
    ] = "safetensors",
    tensor_parallel_size: Annotated[
        int,
        Option(
            envvar=_env("TENSOR_PARALLEL_SIZE"), help="Ranks that share each layer of the model."
        ),
    ] = 1,
    pipeline_parallel_size: Annotated[
        int,
        Option(
            envvar=_env("PIPELINE_PARALLEL_SIZE"), help="Stages that the layers are spread over."
        ),
    ] = 1,
    rank: Annotated[
        int | None,
        Option(
            envvar=_env("RANK"),
            help="Be this one of the ranks, and start none.",
            show_default="start all ranks on this machine, unless torchrun has",
        ),
    ] = None,
    distributed_init: Annotated[
        str | None,
        Option(
            envvar=_env("DISTRIBUTED_INIT"),
            metavar="HOST:PORT",
            help="Where rank 0 is to be found by the others; with --rank.",
        ),
    ] = None,
    launcher: Annotated[
        LauncherName,
        Option(
            envvar=_env("LAUNCHER"),
            help="Who starts the ranks: this command on its machine, or a Ray cluster.",
        ),
    ] = LauncherName.local,
    num_nodes: Annotated[
        int,
        Option(
            envvar=_env("NUM_NODES"),
            help="Machines with equal parts of the ranks, each started with --node-rank.",
        ),
    ] = 1,
    node_rank: Annotated[
        int | None,
        Option(envvar=_env("NODE_RANK"), help="Start this machine's part of the ranks."),
    ] = None,
    ray_address: Annotated[
        str | None,
        Option(
            envvar=[_env("RAY_ADDRESS"), "RAY_ADDRESS"],
            metavar="HOST:PORT",
            help="The Ray cluster.",
            show_default="the one this machine belongs to",
        ),
    ] = None,
    ray_cpus_per_rank: Annotated[
        int, Option(envvar=_env("RAY_CPUS_PER_RANK"), help="CPUs that Ray keeps for a rank.")
    ] = 1,
    ray_timeout: Annotated[
        float,
        Option(
            envvar=_env("RAY_TIMEOUT"),
            metavar="SECONDS",
            help="How long to wait for nodes that have room for the group.",
        ),
    ] = 300.0,
    local_rank: Annotated[
        int, Option(envvar=_env("LOCAL_RANK"), help="Which of the machine's GPUs a rank takes.")
    ] = 0,
    launcher_pid: Annotated[
        int | None, Option(envvar=_env("LAUNCHER_PID"), hidden=True, help="End with this process.")
    ] = None,
    attention_backend: Annotated[
        str | None,
        Option(
            envvar=_env("ATTENTION_BACKEND"),
            help="flash, triton, cpu or reference.",
            show_default="by device and model",
        ),
    ] = None,
    cuda_graphs: Annotated[
        bool,
        Option(
            "--cuda-graphs/--no-cuda-graphs",
            envvar=_env("CUDA_GRAPHS"),
            help="On a GPU, record decode steps at start and replay them.",
        ),
    ] = True,
    max_graph_batch_size: Annotated[
        int,
        Option(envvar=_env("MAX_GRAPH_BATCH_SIZE"), help="Largest batch of decodes recorded."),
    ] = 512,
    compile: Annotated[
        bool,
        Option(
            "--compile",
            envvar=_env("COMPILE"),
            help="On a GPU, put layers through torch.compile.",
        ),
    ] = False,
    batch_invariant: Annotated[
        bool,
        Option(
            "--batch-invariant",
            envvar=_env("BATCH_INVARIANT"),
            help="On a GPU, too, tokens do not depend on what else is in the batch; slower.",
        ),
    ] = False,
    threads: Annotated[
        int | None,
        Option(
            envvar=_env("THREADS"),
            help="CPU threads for the model.",
            show_default="as many as it keeps busy of the physical cores there are",
        ),
    ] = None,
    cpu_affinity: Annotated[
        str | None,
        Option(
            envvar=_env("CPU_AFFINITY"),
            metavar="CPUS",
            help="Pin the model's threads, one each, to CPUs such as 0,2-5.",
            show_default="the system places them",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        Option(
            "--trust-remote-code",
            envvar=_env("TRUST_REMOTE_CODE"),
            help="Run Python code that comes with a checkpoint.",
        ),
    ] = False,
    simulate: Annotated[
        bool,
        Option(
            "--simulate",
            envvar=_env("SIMULATE"),
            help="Serve no model: check every plan and make tokens up. Of the flags above, those "
            "of the model's files, device, numbers and memory have no effect then.",
        ),
    ] = False,
    simulate_gpu_blocks: Annotated[
        int, Option(envvar=_env("SIMULATE_GPU_BLOCKS"), help="Simulated KV blocks on the device.")
    ] = 4096,
    simulate_cpu_blocks: Annotated[
        int, Option(envvar=_env("SIMULATE_CPU_BLOCKS"), help="Simulated KV blocks on the host.")
    ] = 4096,
    simulate_vocab_size: Annotated[
        int, Option(envvar=_env("SIMULATE_VOCAB_SIZE"), help="Simulated tokens are below this.")
    ] = 32000,
    simulate_eos_token_id: Annotated[
        int, Option(envvar=_env("SIMULATE_EOS_TOKEN_ID"), help="Simulated end of a sequence.")
    ] = 2,
    simulate_step_us: Annotated[
        float, Option(envvar=_env("SIMULATE_STEP_US"), help="Microseconds a simulated step takes,")
    ] = 0.0,
    simulate_token_us: Annotated[
        float,
        Option(envvar=_env("SIMULATE_TOKEN_US"), help="more per token of a row beyond its first,"),
    ] = 0.0,
    simulate_sequence_us: Annotated[
        float, Option(envvar=_env("SIMULATE_SEQUENCE_US"), help="more per row,")
    ] = 0.0,
    simulate_block_us: Annotated[
        float, Option(envvar=_env("SIMULATE_BLOCK_US"), help="and more per swapped block.")
    ] = 0.0,
    grace_period: Annotated[
        float,
        Option(
            envvar=_env("GRACE_PERIOD"),
            help="Seconds after SIGTERM in which what runs goes on at other workers, or else ends.",
        ),
    ] = 30.0,
    profile_dir: Annotated[
        str, Option(envvar=_env("PROFILE_DIR"), help="Directory for profiler traces.")
    ] = ".",
    log_level: Annotated[
        LogLevel, Option(envvar=_env("LOG_LEVEL"), help="How much to log.")
    ] = LogLevel.info,
) -> None:
    """Serve a model's steps to a scheduler core."""
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    from worker_service import config as settings
    from worker_service.errors import InvalidOption, WorkerError
    from worker_service.launchers.launcher import launch
    from worker_service.launchers.local import LocalConfig, LocalHost, address_of
    from worker_service.launchers.rank_process import end_with
    from worker_service.parallel.place import Place, RankFlags, StartRanks, find_place
    from worker_service.processor import limit_spinning, parse_cpus

    limit_spinning(os.environ)

    def model_config(place: Place) -> "ModelConfig":
        # Imports torch, which takes seconds: not for `--help`, nor for a simulation.
        from worker_service.loader import ModelConfig

        return ModelConfig(
            model=model,
            revision=revision,
            device=device,
            dtype=dtype,
            load_format=load_format,
            max_model_len=max_model_len,
            attention_backend=attention_backend,
            batch_invariant=batch_invariant,
            threads=threads,
            cpus=None if cpu_affinity is None else parse_cpus(cpu_affinity),
            trust_remote_code=trust_remote_code,
            layout=place.group.layout,
            local_rank=place.local_rank,
        )

    def simulation_config() -> "SimulationConfig":
        from worker_service.simulation.config import DEFAULT_MAX_MODEL_LEN, SimulationConfig
        from worker_service.simulation.cost import CostModel

        return SimulationConfig(
            vocab_size=simulate_vocab_size,
            eos_token_id=simulate_eos_token_id,
            num_gpu_blocks=simulate_gpu_blocks,
            num_cpu_blocks=simulate_cpu_blocks,
            cost=CostModel(
                step_us=simulate_step_us,
                token_us=simulate_token_us,
                sequence_us=simulate_sequence_us,
                block_us=simulate_block_us,
            ),
            max_model_len=DEFAULT_MAX_MODEL_LEN if max_model_len is None else max_model_len,
        )

    def host_of(place: StartRanks) -> "RankHost":
        common_group_id = place.group_id or uuid.uuid4().hex
        if place.launcher is LauncherName.local:
            return LocalHost(
                LocalConfig(
                    arguments=sys.argv[1:],
                    ranks=place.ranks,
                    group_id=common_group_id,
                    listen=listen or settings.DEFAULT_LISTEN,
                    advertise=advertise,
                    distributed_init=place.distributed_init,
                )
            )
        from worker_service.launchers.ray_cluster import RayConfig, RayHost, connect

        config = RayConfig(
            arguments=sys.argv[1:],
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            group_id=common_group_id,
            device=device,
            listen=listen,
            advertise=advertise,
            cpus_per_rank=ray_cpus_per_rank,
            timeout_s=ray_timeout,
        )
        return RayHost(config, connect(ray_address))

    try:
        flags = RankFlags(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            rank=rank,
            local_rank=local_rank,
            distributed_init=distributed_init,
            group_id=group_id,
            launcher=launcher,
            num_nodes=num_nodes,
            node_rank=node_rank,
        )
        if simulate:
            flags.require_one_rank("simulate")
        place = find_place(flags, os.environ)
        if not isinstance(place, Place):
            if cpu_affinity is not None:
                raise InvalidOption("cpu_affinity: expected --rank with it, since it is one rank's")
            raise typer.Exit(asyncio.run(launch(place.ranks, host_of(place))))
        if launcher_pid is not None:
            end_with(launcher_pid)
        network = settings.NetworkConfig(
            listen=address_of(listen or settings.DEFAULT_LISTEN, place.address_offset, "listen"),
            advertise=None
            if advertise is None
            else address_of(advertise, place.address_offset, "advertise"),
            core=core,
            **({} if place.group_id is None else {"group_id": place.group_id}),
        )
        config = settings.WorkerConfig(
            model=simulation_config() if simulate else model_config(place),
            cache=settings.CacheConfig(
                block_size=block_size,
                kv_cache_dtype=kv_cache_dtype,
                kv_cache_memory=kv_cache_memory,
                swap_space=swap_space,
                gpu_memory_utilization=gpu_memory_utilization,
            ),
            runner=settings.RunnerConfig(
                cuda_graphs=cuda_graphs,
                max_graph_batch_size=max_graph_batch_size,
                compile=compile,
            ),
            network=network,
            group=place.group,
            served_model_name=served_model_name,
            grace_period_s=grace_period,
            profile_dir=profile_dir,
        )
        asyncio.run(_run(config))
    except InvalidOption as error:
        _exit(error, 2)
    except WorkerError as error:
        _exit(error, 1)


async def _run(config: "WorkerConfig") -> None:
    from worker_service.lifecycle import Worker

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


def _executor_of(config: "WorkerConfig") -> "Executor":
    """What is to execute the plans; a simulation needs no torch, so each is imported here."""
    from worker_service.simulation.config import DEFAULT_BLOCK_SIZE, SimulationConfig

    model = config.model
    if isinstance(model, SimulationConfig):
        from worker_service.simulation.executor import SimulatedExecutor

        return SimulatedExecutor(model, config.cache.block_size or DEFAULT_BLOCK_SIZE)
    from worker_service.loader import load_model
    from worker_service.model_executor import ModelExecutor
    from worker_service.profiler import Profiler

    profiler = Profiler(Path(config.profile_dir))
    store, rendezvous = config.group.store_address, None
    if store is not None:
        from worker_service.parallel.rendezvous import Rendezvous

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

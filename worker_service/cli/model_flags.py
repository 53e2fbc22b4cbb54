"""Flags of the model, its KV cache, how a GPU runs it, and of the simulated worker."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from worker_service.cli.options import env, parse_bytes
from worker_service.cli.ranks import RankAssignment
from worker_service.config import (
    DEFAULT_MAX_MODEL_LEN,
    CacheConfig,
    CostModel,
    ModelConfig,
    RunnerConfig,
    SimulationConfig,
)
from worker_service.cpu_cores import parse_cpus


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlags:
    """Which model is served, and how it is computed."""

    model: Annotated[
        str, Option(envvar=env("MODEL"), help="Checkpoint directory, hub id, or `embedded`.")
    ] = "embedded"
    revision: Annotated[
        str | None, Option(envvar=env("REVISION"), help="Branch, tag or commit on the hub.")
    ] = None
    device: Annotated[str, Option(envvar=env("DEVICE"), help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[
        str, Option(envvar=env("DTYPE"), help="auto, float32, bfloat16 or float16.")
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Option(
            envvar=env("MAX_MODEL_LEN"),
            help="Most tokens of prompt and output together.",
            show_default="the model's own",
        ),
    ] = None
    load_format: Annotated[
        str,
        Option(envvar=env("LOAD_FORMAT"), help="safetensors, or dummy for random weights."),
    ] = "safetensors"
    attention_backend: Annotated[
        str | None,
        Option(
            envvar=env("ATTENTION_BACKEND"),
            help="flash, triton, cpu or reference.",
            show_default="by device and model",
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        Option(
            "--batch-invariant",
            envvar=env("BATCH_INVARIANT"),
            help="On a GPU, too, tokens do not depend on what else is in the batch; slower.",
        ),
    ] = False
    threads: Annotated[
        int | None,
        Option(
            envvar=env("THREADS"),
            help="CPU threads for the model.",
            show_default="as many as it keeps busy of the physical cores there are",
        ),
    ] = None
    cpu_affinity: Annotated[
        str | None,
        Option(
            envvar=env("CPU_AFFINITY"),
            metavar="CPUS",
            help="Pin the model's threads, one each, to CPUs such as 0,2-5.",
            show_default="the system places them",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Option(
            "--trust-remote-code",
            envvar=env("TRUST_REMOTE_CODE"),
            help="Run Python code that comes with a checkpoint.",
        ),
    ] = False

    def config(self, assignment: RankAssignment) -> ModelConfig:
        """The settings of one rank. Raises InvalidOption."""
        return ModelConfig(
            model=self.model,
            revision=self.revision,
            device=self.device,
            dtype=self.dtype,
            load_format=self.load_format,
            max_model_len=self.max_model_len,
            attention_backend=self.attention_backend,
            batch_invariant=self.batch_invariant,
            threads=self.threads,
            cpus=None if self.cpu_affinity is None else parse_cpus(self.cpu_affinity),
            trust_remote_code=self.trust_remote_code,
            layout=assignment.group.layout,
            local_rank=assignment.local_rank,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFlags:
    """Size and shape of the KV caches."""

    block_size: Annotated[
        int | None,
        Option(
            envvar=env("BLOCK_SIZE"),
            help="Tokens per KV block, a power of two.",
            show_default="by attention backend, 64 on a CPU and mostly 16 on a GPU",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Option(
            envvar=env("KV_CACHE_DTYPE"),
            help="auto, or fp8 for keys and values in a byte each (GPUs).",
        ),
    ] = "auto"
    kv_cache_memory: Annotated[
        int | None,
        Option(
            envvar=env("KV_CACHE_MEMORY"),
            parser=parse_bytes,
            metavar="SIZE",
            help="Memory for KV blocks, such as 4GiB.",
            show_default="on a CPU a quarter of what is free, at most 4GiB; on a GPU what is left",
        ),
    ] = None
    swap_space: Annotated[
        int | None,
        Option(
            envvar=env("SWAP_SPACE"),
            parser=parse_bytes,
            metavar="SIZE",
            help="Host memory for swapped blocks.",
            show_default="4GiB with a GPU, none with a CPU",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Option(envvar=env("GPU_MEMORY_UTILIZATION"), help="Share of a GPU's memory to fill."),
    ] = 0.9

    def config(self) -> CacheConfig:
        """The same as settings. Raises InvalidOption."""
        return CacheConfig(
            block_size=self.block_size,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_cache_memory=self.kv_cache_memory,
            swap_space=self.swap_space,
            gpu_memory_utilization=self.gpu_memory_utilization,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerFlags:
    """How a GPU's steps are computed."""

    cuda_graphs: Annotated[
        bool,
        Option(
            "--cuda-graphs/--no-cuda-graphs",
            envvar=env("CUDA_GRAPHS"),
            help="On a GPU, record decode steps at start and replay them.",
        ),
    ] = True
    max_graph_batch_size: Annotated[
        int,
        Option(envvar=env("MAX_GRAPH_BATCH_SIZE"), help="Largest batch of decodes recorded."),
    ] = 512
    compile: Annotated[
        bool,
        Option(
            "--compile",
            envvar=env("COMPILE"),
            help="On a GPU, put layers through torch.compile.",
        ),
    ] = False

    def config(self) -> RunnerConfig:
        """The same as settings. Raises InvalidOption."""
        return RunnerConfig(
            cuda_graphs=self.cuda_graphs,
            max_graph_batch_size=self.max_graph_batch_size,
            compile=self.compile,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationFlags:
    """A worker without a model."""

    simulate: Annotated[
        bool,
        Option(
            "--simulate",
            envvar=env("SIMULATE"),
            help="Serve no model: check every plan and make tokens up. Of the flags above, those "
            "of the model's files, device, numbers and memory have no effect then.",
        ),
    ] = False
    simulate_gpu_blocks: Annotated[
        int, Option(envvar=env("SIMULATE_GPU_BLOCKS"), help="Simulated KV blocks on the device.")
    ] = 4096
    simulate_cpu_blocks: Annotated[
        int, Option(envvar=env("SIMULATE_CPU_BLOCKS"), help="Simulated KV blocks on the host.")
    ] = 4096
    simulate_vocab_size: Annotated[
        int, Option(envvar=env("SIMULATE_VOCAB_SIZE"), help="Simulated tokens are below this.")
    ] = 32000
    simulate_eos_token_id: Annotated[
        int, Option(envvar=env("SIMULATE_EOS_TOKEN_ID"), help="Simulated end of a sequence.")
    ] = 2
    simulate_step_us: Annotated[
        float, Option(envvar=env("SIMULATE_STEP_US"), help="Microseconds a simulated step takes,")
    ] = 0.0
    simulate_token_us: Annotated[
        float,
        Option(envvar=env("SIMULATE_TOKEN_US"), help="more per token of a row beyond its first,"),
    ] = 0.0
    simulate_sequence_us: Annotated[
        float, Option(envvar=env("SIMULATE_SEQUENCE_US"), help="more per row,")
    ] = 0.0
    simulate_block_us: Annotated[
        float, Option(envvar=env("SIMULATE_BLOCK_US"), help="and more per swapped block.")
    ] = 0.0

    def config(self, max_model_len: int | None) -> SimulationConfig:
        """What the worker is to pretend to be. Raises InvalidOption."""
        return SimulationConfig(
            vocab_size=self.simulate_vocab_size,
            eos_token_id=self.simulate_eos_token_id,
            num_gpu_blocks=self.simulate_gpu_blocks,
            num_cpu_blocks=self.simulate_cpu_blocks,
            cost=CostModel(
                step_us=self.simulate_step_us,
                token_us=self.simulate_token_us,
                sequence_us=self.simulate_sequence_us,
                block_us=self.simulate_block_us,
            ),
            max_model_len=DEFAULT_MAX_MODEL_LEN if max_model_len is None else max_model_len,
        )

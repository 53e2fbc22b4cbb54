"""The flags of `python -m worker_service`, and the configuration that their values make.

Most are fields of the dataclasses in `config.py`; the rest is defined here. `assign_rank` decides
which rank a process is, if it is one and does not launch them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import typer

from service_common.cluster import ClusterConfig
from service_common.config_flags import CLUSTER, COUNT, ConfigFlags, Flags, flag
from service_common.durations import MAX_SECONDS
from service_common.metrics_server import metrics_address
from worker_service.config import (
    DEFAULT_LISTEN,
    DEFAULT_MAX_MODEL_LEN,
    DEFAULT_SPECULATIVE_TOKENS,
    EMBEDDED,
    AdapterConfig,
    CacheConfig,
    CostModel,
    GroupConfig,
    ModelConfig,
    NetworkConfig,
    RunnerConfig,
    SimulationConfig,
    WorkerConfig,
    local_model,
)
from worker_service.cpu_cores import ALL_CORES, CpuShare, parse_cpus
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption, ModelNotFound
from worker_service.launcher.launcher import address_of


class LauncherName(StrEnum):
    """The launcher of the ranks."""

    local = "local"
    """The command itself, as children."""

    ray = "ray"
    """A Ray cluster, on its nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFlags:
    """The number of ranks, and which of them this process runs."""

    group_id: str | None = None
    """Worker group."""
    tensor_parallel_size: int = 1
    """Number of ranks that share each layer of the model."""
    pipeline_parallel_size: int = 1
    """Number of stages that the layers are divided into."""
    rank: int | None = None
    """Run as this rank, and start no others."""
    local_rank: int = 0
    """Index of the GPU that a rank uses, or of the first of those started here."""
    distributed_init: str | None = None
    """Address at which the other ranks find rank 0; with --rank."""
    launcher: LauncherName = LauncherName.local
    """The launcher of the ranks: this command on its machine, or a Ray cluster."""
    num_nodes: int = 1
    """Machines with equal parts of the ranks, each started with --node-rank."""
    node_rank: int | None = None
    """Index of this machine among them; starts its part of the ranks."""

    def __post_init__(self) -> None:
        if self.local_rank < 0:
            raise InvalidOption(f"local_rank: expected at least 0, got {self.local_rank}")
        if self.node_rank is not None and self.num_nodes == 1:
            raise InvalidOption(f"node_rank: expected --num-nodes with it, got {self.node_rank}")

    def require_one_rank(self, option: str) -> None:
        """Raises InvalidOption where `option` is given for several ranks."""
        if self.layout_of(0).world_size > 1:
            raise InvalidOption(f"{option}: expected one rank, got {self.sizes}")

    def layout_of(self, rank: int) -> Layout:
        """A rank's place. Raises InvalidOption."""
        return Layout(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            rank=rank,
        )

    @property
    def sizes(self) -> str:
        """The parallel sizes, for error messages."""
        return (
            f"--tensor-parallel-size {self.tensor_parallel_size} and"
            f" --pipeline-parallel-size {self.pipeline_parallel_size}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAssignment:
    """A process that is one rank, usually the only one."""

    group: GroupConfig
    group_id: str | None
    local_rank: int = 0

    address_offset: int = 0
    """Offset of this rank's address from the configured one, which several ranks share."""

    metrics_offset: int = 0
    """Offset of the address that serves metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksToLaunch:
    """A process that launches ranks and is none itself."""

    ranks: range
    """All of the group, or one machine's."""

    launcher: LauncherName = LauncherName.local
    distributed_init: str | None = None
    """Address of the store of rank 0, if other machines start it."""

    group_id: str | None = None

    first_local_rank: int = 0
    """Index of the GPU that the first of them uses; the others use the following ones."""


def assign_rank(flags: RankFlags, variables: Mapping[str, str]) -> RankAssignment | RanksToLaunch:
    """The role of this process, by its flags and environment. Raises InvalidOption."""
    world_size = flags.layout_of(0).world_size
    if flags.rank is not None and world_size > 1:
        return _from_flags(flags, flags.rank)
    if flags.rank is None and flags.launcher is LauncherName.ray:
        return _on_all_nodes(flags, world_size)
    if flags.num_nodes != 1:
        return _on_one_node(flags, world_size)
    if world_size == 1:
        layout = flags.layout_of(flags.rank or 0)
        return RankAssignment(
            group=GroupConfig(layout=layout), group_id=flags.group_id, local_rank=flags.local_rank
        )
    if all(name in variables for name in _TORCHRUN_VARIABLES):
        return _from_torchrun(flags, variables)
    return RanksToLaunch(
        ranks=range(world_size), group_id=flags.group_id, first_local_rank=flags.local_rank
    )


def _on_all_nodes(flags: RankFlags, world_size: int) -> RanksToLaunch:
    """Ray chooses the nodes and the ports."""
    if flags.num_nodes != 1:
        raise InvalidOption("num_nodes: expected none with --launcher ray, which chooses the nodes")
    if flags.distributed_init is not None:
        raise InvalidOption("distributed_init: expected none with --launcher ray, which chooses it")
    return RanksToLaunch(
        ranks=range(world_size), launcher=LauncherName.ray, group_id=flags.group_id
    )


def _on_one_node(flags: RankFlags, world_size: int) -> RanksToLaunch:
    """This node's share of the ranks; all nodes have equally many, in the order of the nodes."""
    num_nodes, node = flags.num_nodes, flags.node_rank
    if num_nodes < 1 or world_size % num_nodes:
        raise InvalidOption(
            f"num_nodes: expected a divisor of {world_size}, the ranks that {flags.sizes} make,"
            f" got {num_nodes}"
        )
    if node is None or not 0 <= node < num_nodes:
        got = "none" if node is None else node
        raise InvalidOption(f"node_rank: expected 0 to {num_nodes - 1}, got {got}")
    if flags.distributed_init is None:
        raise InvalidOption("distributed_init: expected HOST:PORT of node 0, the same on all nodes")
    size = world_size // num_nodes
    return RanksToLaunch(
        ranks=range(node * size, (node + 1) * size),
        distributed_init=flags.distributed_init,
        group_id=flags.group_id or f"nodes-{flags.distributed_init}",
        first_local_rank=flags.local_rank,
    )


def _from_flags(flags: RankFlags, rank: int) -> RankAssignment:
    if flags.group_id is None:
        raise InvalidOption("group_id: expected the same name on every rank of the group")
    return RankAssignment(
        group=GroupConfig(layout=flags.layout_of(rank), distributed_init=flags.distributed_init),
        group_id=flags.group_id,
        local_rank=flags.local_rank,
        metrics_offset=_index_on_node(flags, rank),
    )


def _index_on_node(flags: RankFlags, rank: int) -> int:
    """A rank's index among the ranks that its machine starts. Ray's ranks, whose machines
    get no flags, count from the group's first."""
    world_size = flags.layout_of(rank).world_size
    return rank % max(1, world_size // max(1, flags.num_nodes))


_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _from_torchrun(flags: RankFlags, variables: Mapping[str, str]) -> RankAssignment:
    expected = flags.layout_of(0).world_size
    rank, world_size, local_rank = (
        _number(variables, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    if world_size != expected:
        raise InvalidOption(
            f"tensor_parallel_size: {flags.sizes} make {expected} ranks, but the"
            f" environment's WORLD_SIZE is {world_size}"
        )
    master = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    return RankAssignment(
        group=GroupConfig(
            layout=flags.layout_of(rank), distributed_init=flags.distributed_init or master
        ),
        group_id=flags.group_id or f"torchrun-{master}",
        local_rank=local_rank,
        address_offset=local_rank,
        metrics_offset=local_rank,
    )


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "0")
    if not text.isdecimal():
        raise InvalidOption(f"{name}: expected a number in the environment, got {text!r}")
    return int(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayFlags:
    """Ranks on a Ray cluster."""

    ray_address: str | None = None
    """The Ray cluster."""
    ray_cpus_per_rank: int = 1
    """CPUs that Ray keeps for a rank."""
    ray_timeout: float = 300.0
    """How long to wait for nodes that have room for the group."""

    def __post_init__(self) -> None:
        if self.ray_cpus_per_rank < 1:
            got = self.ray_cpus_per_rank
            raise InvalidOption(f"ray_cpus_per_rank: expected at least 1, got {got}")
        if not 0 <= self.ray_timeout <= MAX_SECONDS:
            expected = f"expected 0 to {MAX_SECONDS} seconds"
            raise InvalidOption(f"ray_timeout: {expected}, got {self.ray_timeout:g}")


RANKS = ConfigFlags(
    RankFlags,
    settings={
        "group_id": {"show_default": "drawn at random"},
        "tensor_parallel_size": {"short": "-tp"},
        "pipeline_parallel_size": {"short": "-pp"},
        "rank": {"show_default": "start all ranks on this machine, unless torchrun has"},
        "distributed_init": {"metavar": "HOST:PORT"},
    },
)
RAY = ConfigFlags(
    RayFlags,
    settings={
        "ray_address": {
            "envvar": ["PAGEWIRE_RAY_ADDRESS", "RAY_ADDRESS"],
            "metavar": "HOST:PORT",
            "show_default": "the one this machine belongs to",
        },
        "ray_timeout": {"metavar": "SECONDS"},
    },
)


_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str) -> int:
    """`512MiB`, `4GiB`, `1.5GB` or a plain number, in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise typer.BadParameter(f"expected a size such as 512MiB or 4GiB, got {text!r}")
    return int(float(match[1]) * unit)


_VLLM_DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of dtypes."""
_VLLM_FORMATS = {"auto": "safetensors"}
"""vLLM's other names of load formats."""
_VLLM_TASKS = dict.fromkeys(("embed", "embedding", "classify", "score", "reward"), "pooling")
"""vLLM's other names of runners."""
_VLLM_DEFAULTS = {"vllm": "none"}
"""vLLM's other names of the defaults of generations."""
_BYTES = {"parser": parse_bytes, "metavar": "SIZE"}

MODEL = ConfigFlags(
    ModelConfig,
    settings={
        "dtype": {"parser": lambda name: _VLLM_DTYPES.get(name, name), "metavar": "DTYPE"},
        "load_format": {"parser": lambda name: _VLLM_FORMATS.get(name, name), "metavar": "FORMAT"},
        "runner": {
            "short": "--task",
            "parser": lambda name: _VLLM_TASKS.get(name, name),
            "metavar": "RUNNER",
        },
        "pooler_config": {"metavar": "JSON", "show_default": "as the model's files say"},
        "classifier_tokens": {"metavar": "TOKENS", "show_default": "the model's own labels"},
        "pair_template": {"metavar": "TEMPLATE", "show_default": "the tokenizer joins the texts"},
        "chat_template": {"metavar": "TEMPLATE", "show_default": "the model's own"},
        "default_chat_template_kwargs": {"metavar": "JSON", "show_default": "none"},
        "hf_overrides": {"metavar": "JSON", "show_default": "none"},
        "generation_config": {
            "parser": lambda name: _VLLM_DEFAULTS.get(name, name),
            "metavar": "DEFAULTS",
        },
        "override_generation_config": {"metavar": "JSON", "show_default": "none"},
        "max_model_len": COUNT | {"show_default": "the model's own"},
        "quantization": {"short": "-q", "show_default": "as the checkpoint has them"},
        "quantization_cache": {"metavar": "DIR", "show_default": "rounded at every start"},
        "attention_backend": {"show_default": "by device and model"},
        "threads": {"show_default": "as many as it keeps busy of the physical cores there are"},
    },
    batch_invariant="batch_invariant!",
    symmetric_memory="symmetric_memory!",
    trust_remote_code="trust_remote_code!",
    cpus=None,
    cpu_share=None,
    local_rank=None,
    layout=None,
)
CPU_AFFINITY = flag(
    "cpu_affinity",
    str | None,
    None,
    "Pin the model's threads, one each, to CPUs such as 0,2-5.",
    metavar="CPUS",
    show_default="the system places them",
)
CPU_SHARE = flag(
    "cpu_share",
    str | None,
    None,
    "Use one of equal parts of the cores (on a CPU, without --threads), or of --cpu-affinity; 0/2"
    " is the first of two.",
    metavar="INDEX/COUNT",
    show_default="all",
)
CACHE = ConfigFlags(
    CacheConfig,
    settings={
        "block_size": {"show_default": "64 on a CPU, mostly 16 on a GPU; several groups: more"},
        "kv_cache_memory": _BYTES
        | {
            "show_default": "on a CPU a quarter of what is free, at most 4GiB; on a GPU what is "
            "left"
        },
        "swap_space": _BYTES | {"show_default": "4GiB with a GPU, none with a CPU"},
    },
)
RUNNER = ConfigFlags(
    RunnerConfig,
    settings={
        "speculative": {"show_default": "no speculation"},
        "speculative_model": {"show_default": "none"},
        "num_speculative_tokens": {
            "show_default": f"{DEFAULT_SPECULATIVE_TOKENS} with --speculative"
        },
    },
    compile="compile!",
)
ADAPTERS = ConfigFlags(AdapterConfig, enable_lora="enable_lora!")
NETWORK = ConfigFlags(
    NetworkConfig,
    settings={"advertise": {"show_default": "where it listens"}},
    listen=None,
    metrics=None,
    cluster=None,
    group_id=None,
    worker_id=None,
)
LISTEN = [
    flag(
        "listen",
        str | None,
        None,
        "HOST:PORT or unix:PATH; port 0 takes a free one.",
        show_default=f"{DEFAULT_LISTEN}; with Ray the node's address and a free port",
    ),
    flag(
        "metrics_port",
        str | None,
        None,
        "Address at which Prometheus scrapes /metrics; a port alone is on 127.0.0.1. Further ranks "
        "of the machine use the following ports.",
    ),
]
WORKER = ConfigFlags(
    WorkerConfig,
    settings={"served_model_name": {"show_default": "what --model names"}},
    grace_period_s="grace_period",
    model=None,
    cache=None,
    runner=None,
    adapters=None,
    network=None,
    group=None,
)
LAUNCHER_PID = flag("launcher_pid", int | None, None, "End with this process.", hidden=True)
SIMULATE = flag(
    "simulate!",
    bool,
    False,
    "Serve no model: check every plan and make tokens up. Of the flags above, those of the model's "
    "files, device, numbers and memory have no effect then.",
)
SIMULATION = ConfigFlags(
    SimulationConfig,
    prefix="simulate_",
    num_gpu_blocks="simulate_gpu_blocks",
    num_cpu_blocks="simulate_cpu_blocks",
    num_labels="simulate_labels",
    model=None,
    max_model_len=None,
    cost=None,
)
COST = ConfigFlags(CostModel, prefix="simulate_")


def worker_config(flags: Flags, assignment: RankAssignment) -> WorkerConfig:
    """The settings of one rank. Raises InvalidOption."""
    return WorkerConfig(
        **WORKER.fields_of(flags),
        model=_simulation(flags) if flags["simulate"] else _model(flags, assignment),
        cache=CacheConfig(**CACHE.fields_of(flags)),
        runner=RunnerConfig(**RUNNER.fields_of(flags)),
        adapters=AdapterConfig(**ADAPTERS.fields_of(flags)),
        network=_network(flags, assignment),
        group=assignment.group,
    )


def checked_config(flags: Flags, assignment: RankAssignment | RanksToLaunch) -> WorkerConfig:
    """The settings of one rank; if this process launches several, those of a group of one rank.

    Raises InvalidOption, and ModelNotFound if the model is a path at which there is none.
    """
    is_here = True
    if isinstance(assignment, RanksToLaunch):
        is_here = assignment.launcher is LauncherName.local
        assignment = RankAssignment(group=GroupConfig(), group_id=assignment.group_id)
    config = worker_config(flags, assignment)
    if is_here and isinstance(config.model, ModelConfig) and config.model.model != EMBEDDED:
        try:
            local_model(config.model.model)
        except ModelNotFound as error:
            raise ModelNotFound(f"model: {error}") from None
    return config


def _model(flags: Flags, assignment: RankAssignment) -> ModelConfig:
    for parameter in (*SIMULATION.parameters, *COST.parameters):
        if (got := flags[parameter.name]) != parameter.default:
            raise InvalidOption(f"{parameter.name}: expected none without --simulate, got {got!r}")
    affinity, share = flags["cpu_affinity"], cpu_share(flags)
    return ModelConfig(
        **MODEL.fields_of(flags),
        cpus=None if affinity is None else tuple(share.of(parse_cpus(affinity))),
        cpu_share=share,
        layout=assignment.group.layout,
        local_rank=assignment.local_rank,
    )


def cpu_share(flags: Flags) -> CpuShare:
    """The part of the machine's cores for this process, or for the ranks that it launches."""
    return ALL_CORES if flags["cpu_share"] is None else CpuShare.parse(flags["cpu_share"])


def _simulation(flags: Flags) -> SimulationConfig:
    length = flags["max_model_len"]
    return SimulationConfig(
        **SIMULATION.fields_of(flags),
        cost=CostModel(**COST.fields_of(flags)),
        max_model_len=DEFAULT_MAX_MODEL_LEN if length is None else length,
    )


def _network(flags: Flags, assignment: RankAssignment) -> NetworkConfig:
    """The addresses of one rank and of the core with which it registers."""
    addresses = NETWORK.fields_of(flags) | {"listen": flags["listen"] or DEFAULT_LISTEN}
    for name in ("listen", "advertise", "health_listen"):
        if addresses[name] is not None:
            addresses[name] = address_of(addresses[name], assignment.address_offset, name)
    return NetworkConfig(
        **addresses,
        cluster=cluster_config(flags),
        metrics=_metrics(flags["metrics_port"], assignment.metrics_offset),
        **({} if assignment.group_id is None else {"group_id": assignment.group_id}),
    )


def cluster_config(flags: Flags) -> ClusterConfig:
    """The credentials between services. Raises InvalidOption."""
    try:
        return ClusterConfig(**CLUSTER.fields_of(flags))
    except ValueError as error:
        raise InvalidOption(str(error)) from error


def _metrics(port: str | None, offset: int) -> str | None:
    try:
        first = metrics_address(port)
    except ValueError as error:
        raise InvalidOption(str(error)) from None
    return None if first is None else address_of(first, offset, "metrics_port")

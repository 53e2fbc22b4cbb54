"""The flags of `python -m worker_service`, and the configuration that their values make.

Most are fields of the dataclasses in `config.py`; the rest is defined here and in `ranks.py`.
"""

import re

import typer

from service_common.cluster import ClusterConfig
from service_common.config_flags import CLUSTER, ConfigFlags, Flags, flag
from service_common.metrics_server import metrics_address
from worker_service.config import (
    DEFAULT_LISTEN,
    DEFAULT_MAX_MODEL_LEN,
    DEFAULT_SPECULATIVE_TOKENS,
    CacheConfig,
    CostModel,
    ModelConfig,
    NetworkConfig,
    RunnerConfig,
    SimulationConfig,
    WorkerConfig,
)
from worker_service.cpu_cores import parse_cpus
from worker_service.errors import InvalidOption
from worker_service.launcher.launcher import address_of
from worker_service.launcher.ranks import RankAssignment

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str) -> int:
    """`512MiB`, `4GiB`, `1.5GB` or a plain number, in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise typer.BadParameter(f"expected a size such as 512MiB or 4GiB, got {text!r}")
    return int(float(match[1]) * unit)


_BYTES = {"parser": parse_bytes, "metavar": "SIZE"}

MODEL = ConfigFlags(
    ModelConfig,
    settings={
        "max_model_len": {"show_default": "the model's own"},
        "quantization": {"show_default": "as the checkpoint has them"},
        "quantization_cache": {"metavar": "DIR", "show_default": "rounded at every start"},
        "attention_backend": {"show_default": "by device and model"},
        "threads": {"show_default": "as many as it keeps busy of the physical cores there are"},
    },
    batch_invariant="batch_invariant!",
    trust_remote_code="trust_remote_code!",
    cpus=None,
    local_rank=None,
    layout=None,
    show_progress=None,
)
CPU_AFFINITY = flag(
    "cpu_affinity",
    str | None,
    None,
    "Pin the model's threads, one each, to CPUs such as 0,2-5.",
    metavar="CPUS",
    show_default="the system places them",
)
CACHE = ConfigFlags(
    CacheConfig,
    settings={
        "block_size": {"show_default": "by attention backend, 64 on a CPU and mostly 16 on a GPU"},
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
        network=_network(flags, assignment),
        group=assignment.group,
    )


def _model(flags: Flags, assignment: RankAssignment) -> ModelConfig:
    affinity = flags["cpu_affinity"]
    return ModelConfig(
        **MODEL.fields_of(flags),
        cpus=None if affinity is None else parse_cpus(affinity),
        layout=assignment.group.layout,
        local_rank=assignment.local_rank,
    )


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

"""The worker's settings: one frozen record per concern, made once by `__main__.py`."""

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service_common.cluster import NO_CLUSTER, ClusterConfig
from worker_service.address import TcpAddress, parse
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption

if TYPE_CHECKING:  # imports torch, which a simulation does without
    from worker_service.loader import ModelConfig
    from worker_service.simulation.config import SimulationConfig


DEFAULT_LISTEN = "127.0.0.1:7620"
KV_CACHE_DTYPES = ("auto", "fp8")


def _random_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """Size and shape of the paged KV cache."""

    block_size: int | None = None
    """Tokens per block, a power of two, so that kernels can shift instead of divide. None: what
    the attention backend prefers, 64 on a CPU and mostly 16 on a GPU."""

    kv_cache_dtype: str = "auto"
    """`auto`: keys and values as the model computes them; `fp8`: a byte each (e4m3), with a scale
    per layer from the checkpoint, or 1."""

    kv_cache_memory: int | None = None
    """Bytes for KV blocks in device memory. None: on a CPU a quarter of the memory available, at
    most 4 GiB and no more than the largest batch can use; on a GPU what `gpu_memory_utilization`
    leaves after a profiling run."""

    swap_space: int | None = None
    """Bytes for KV blocks in host memory, to swap to. None: 4 GiB with a GPU and none with a CPU,
    where device and host memory are the same."""

    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory this worker may fill in all."""

    def __post_init__(self) -> None:
        size = self.block_size
        if size is not None and (size < 1 or size & (size - 1)):
            raise InvalidOption(f"block_size: expected a power of two, got {size}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            expected = f"one of {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}"
            raise InvalidOption(f"kv_cache_dtype: expected {expected}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            got = self.gpu_memory_utilization
            raise InvalidOption(f"gpu_memory_utilization: expected above 0 to 1, got {got}")
        if self.kv_cache_memory is not None and self.kv_cache_memory < 1:
            got = self.kv_cache_memory
            raise InvalidOption(f"kv_cache_memory: expected at least 1 byte, got {got}")
        if self.swap_space is not None and self.swap_space < 0:
            raise InvalidOption(f"swap_space: expected 0 bytes or more, got {self.swap_space}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerConfig:
    """How steps are computed."""

    cuda_graphs: bool = True
    """Whether a GPU records decode steps and replays them. It does not with several ranks, whose
    steps wait for each other on the host, nor with attention that waits for the device."""

    max_graph_batch_size: int = 512
    """Largest batch of decodes that is recorded, if so many sequences are scheduled at all. A
    recording takes start-up time; their memory is shared."""

    compile: bool = False
    """Whether a GPU's layers go through `torch.compile`, which takes long at start and gives up
    batch invariance."""

    def __post_init__(self) -> None:
        if self.max_graph_batch_size < 1:
            got = self.max_graph_batch_size
            raise InvalidOption(f"max_graph_batch_size: expected at least 1, got {got}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """Where the worker listens and whom it registers with."""

    listen: str = DEFAULT_LISTEN
    """`HOST:PORT` or `unix:PATH`; port 0 takes a free one."""

    advertise: str | None = None
    """Address the core is told to dial. None: the one listened on, with the real port; where that
    is all interfaces, the one that the route to the core leaves by."""

    core: str | None = None
    """Address of the scheduler core to register with. None: only serve."""

    health_listen: str | None = None
    """Where to answer health checks besides, of anybody. None: only where it listens."""

    cluster: ClusterConfig = NO_CLUSTER
    """What members of the deployment show each other."""

    metrics: str | None = None
    """Where Prometheus asks, HOST:PORT. None: nowhere."""

    otlp_endpoint: str | None = None
    """Where spans are exported to. None: where OpenTelemetry's own variables say, if anywhere."""

    group_id: str = field(default_factory=_random_id)
    """The worker group this worker belongs to."""

    worker_id: str = field(default_factory=_random_id)
    """Unique per process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """The ranks that hold one copy of a model together, and where they meet."""

    layout: Layout = field(default_factory=Layout)

    distributed_init: str | None = None
    """`HOST:PORT` at which rank 0 keeps the ranks' store. Needed with several ranks."""

    def __post_init__(self) -> None:
        if self.layout.world_size == 1:
            return
        if self.distributed_init is None:
            raise InvalidOption(
                f"distributed_init: expected HOST:PORT of rank 0, since there are"
                f" {self.layout.world_size} ranks"
            )
        if not isinstance(parse(self.distributed_init, "distributed_init"), TcpAddress):
            got = self.distributed_init
            raise InvalidOption(f"distributed_init: expected HOST:PORT, got {got!r}")

    @property
    def store_address(self) -> TcpAddress | None:
        """Where the ranks' store is; None with one rank."""
        if self.layout.world_size == 1 or self.distributed_init is None:
            return None
        address = parse(self.distributed_init, "distributed_init")
        assert isinstance(address, TcpAddress), "checked above"
        return address


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """All settings of one worker process."""

    model: "ModelConfig | SimulationConfig"
    cache: CacheConfig = field(default_factory=CacheConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    group: GroupConfig = field(default_factory=GroupConfig)

    served_model_name: str | None = None
    """The name clients use. None: the last part of the model's path or id."""

    grace_period_s: float = 30.0
    """Seconds that the core is given after SIGTERM to move running sequences to other workers, or
    where there are none, to have them finish."""

    profile_dir: str = "."
    """Directory for the profiler's traces."""

    def __post_init__(self) -> None:
        if self.grace_period_s < 0:
            raise InvalidOption(
                f"grace_period: expected 0 seconds or more, got {self.grace_period_s}"
            )

    @property
    def model_name(self) -> str:
        """The name the model is served under."""
        return self.served_model_name or self.model.model.rstrip("/").rsplit("/", 1)[-1]

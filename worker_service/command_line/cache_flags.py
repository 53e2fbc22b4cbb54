"""Size and shape of the KV caches."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from worker_service.command_line.options import env, parse_bytes
from worker_service.config import CacheConfig


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

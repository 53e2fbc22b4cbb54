"""The number of KV blocks that fit, found by a profiling forward pass.

On a GPU the largest batch is computed once; the rest of the device's allowed share is for blocks.
On a CPU a batch is too small relative to the model to be worth measuring: the budget is a setting,
and the forward pass only compiles kernels before the first request needs them.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pagewire_kernels.batch import RowAdapters
from pagewire_kernels.slot_deltas import NO_SLOT
from worker_service.config import CacheConfig
from worker_service.engine.executor import BlockCounts
from worker_service.errors import OutOfMemory
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.sampling.draw import Filters, draw

logger = logging.getLogger(__name__)

CPU_SHARE = 4
"""By default KV blocks take one part in this many of the memory available on a CPU."""

MAX_DEFAULT_CPU_BYTES = 4 * 2**30
DEFAULT_GPU_SWAP_BYTES = 4 * 2**30
WARM_UP_TOKENS = 32
_WARM_UP_PROMPT = 512
"""Tokens of a prompt that is long enough for a GPU to split its attention."""

_WARM_UP_DECODES = (1, 2, 3, 4, 32, 64)
"""Numbers of decodes for which a GPU has kernels of their own: those of few rows, and tiles of 16,
32 and 64 rows. Graphs do not compile all of them: eager steps compute heads for any number."""

_BYTES_PER_GRAPH = 8 * 2**20
"""The driver's memory for one graph, which torch does not count. A generous estimate, not
measured."""


Sample = Callable[[Tensor], None]
"""Takes logits, float32 [n, vocab_size], which it may overwrite."""


_REMEDIES = (
    ("--kv-cache-memory", "int8"),
    ("--gpu-memory-utilization or --kv-cache-memory", "fp8"),
)
"""Flags for more memory, and a smaller dtype of the KV cache: on a CPU, on a GPU."""


def sample_on_host(logits: Tensor) -> None:
    """What a runner on the host does with a batch of logits."""
    device = logits.device
    filters = Filters.uniform(len(logits), device, top_p=0.9)
    draw(logits, filters, torch.full((len(logits),), 0.5, dtype=torch.float64, device=device))


@dataclass(frozen=True, slots=True)
class SyntheticBatches:
    """Batches of synthetic sequences, over a cache of a single block that all share."""

    model: Model
    block_size: int
    device: torch.device
    sample: Sample = sample_on_host
    """Does what a step's sampling may need most memory for."""
    generates: bool = True
    """Whether steps sample."""
    with_adapters: bool = False
    """Whether rows are computed as if they had adapters."""

    @torch.inference_mode()
    def run(self, num_seqs: int, num_tokens: int) -> None:
        """Compute one batch."""
        model, device, spec = self.model, self.device, self.model.kv_cache_spec
        pool_shape = 1, spec.block_bytes(self.block_size)
        pool = torch.zeros(pool_shape, dtype=torch.uint8, device=device)
        lengths = _spread(num_seqs, num_tokens, model.max_model_len)
        shapes = [
            (len(lengths), group.table_width(max(lengths)))
            for group in spec.groups(self.block_size)
        ]
        batch = spec.batch_of_ranges(
            torch.zeros(sum(lengths), dtype=torch.int64, device=device),
            [(0, length) for length in lengths],
            [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes],
            spec.views(pool, self.block_size),
            self.block_size,
        )
        adapters: RowAdapters = ()
        sampled: RowAdapters = ()
        if self.with_adapters:
            adapters = torch.full((sum(lengths),), NO_SLOT, dtype=torch.int32, device=device)
            sampled = adapters[: len(lengths)]
        hidden = model.forward(replace(batch, adapters=adapters))
        if self.generates:
            logits = model.compute_logits(hidden[: len(lengths)], sampled)
            # Equal logits are all candidates, which needs the most memory.
            self.sample(logits.zero_())

    def warm_up(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Compile the kernels of batches that are smaller than the largest one."""
        self.run(1, min(_WARM_UP_PROMPT, max_num_batched_tokens))
        for count in _WARM_UP_DECODES:
            if count <= min(max_num_seqs, max_num_batched_tokens):
                self.run(count, count)

    def pool_bytes(self, largest: tuple[int, int]) -> int:
        """Bytes of the pool that graphs share, as large as the largest batch's activations."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.run(*largest)
        return torch.cuda.max_memory_allocated(self.device) - before


def profile_blocks(
    batches: SyntheticBatches,
    config: CacheConfig,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    cache: CacheEngine | None = None,
    num_ranks: int = 1,
    num_graphs: int = 0,
    largest_graph: tuple[int, int] = (0, 0),
    later_bytes: int = 0,
) -> BlockCounts:
    """How many blocks fit together with the largest batch. Raises OutOfMemory if none does, or if
    there is less host memory than the settings require.

    cache: the present cache, which the new one will replace. num_ranks: ranks that share a CPU's
    memory. num_graphs: to be captured, of batches up to `largest_graph`, in sequences and tokens.
    later_bytes: memory of a GPU that will be allocated after the cache.
    """
    model, spec, device = batches.model, batches.model.kv_cache_spec, batches.device
    block_bytes = spec.block_bytes(batches.block_size)
    of_full_length = spec.num_blocks(
        model.max_model_len, max_num_batched_tokens, batches.block_size
    )
    held_bytes = 0 if cache is None else cache.device_bytes
    if device.type == "cuda":
        if num_graphs:
            later_bytes += num_graphs * _BYTES_PER_GRAPH + batches.pool_bytes(largest_graph)
        batches.warm_up(max_num_seqs, max_num_batched_tokens)
        torch.cuda.reset_peak_memory_stats(device)
        batches.run(max_num_seqs, max_num_batched_tokens)
        budget = _gpu_budget(config, device, held_bytes, later_bytes)
        swap_space = DEFAULT_GPU_SWAP_BYTES if config.swap_space is None else config.swap_space
    else:
        batches.run(2, WARM_UP_TOKENS)
        budget = config.kv_cache_memory or _default_cpu_budget(
            block_bytes * of_full_length * max_num_seqs,
            available_host_memory() + held_bytes,
            num_ranks,
        )
        swap_space = config.swap_space or 0
    if not spec.layers:  # what remains of the budget is not needed
        if budget < 0:
            raise OutOfMemory(
                f"gpu_memory_utilization: the largest batch exceeds the limit by {-budget} bytes;"
                " choose more, or a smaller --max-num-batched-tokens of the scheduler"
            )
        return BlockCounts(num_gpu_blocks=0, num_cpu_blocks=0)
    held_bytes = held_bytes if device.type == "cpu" else 0
    held_bytes += 0 if cache is None else cache.host_cache.nbytes
    require_host_memory(device, budget, swap_space, held_bytes)
    num_gpu_blocks = budget // block_bytes
    _require_blocks(block_bytes, budget, swap_space)
    if num_gpu_blocks < of_full_length:
        logger.warning(
            "kv cache holds less than one sequence of full length, so none can be that long:"
            " raise %s, lower --max-model-len, or set --kv-cache-dtype %s num_blocks=%d"
            " needed=%d max_model_len=%d",
            *_REMEDIES[device.type == "cuda"],
            num_gpu_blocks,
            of_full_length,
            model.max_model_len,
        )
    return BlockCounts(num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=swap_space // block_bytes)


def _require_blocks(block_bytes: int, budget: int, swap_space: int) -> None:
    """Raise OutOfMemory if the budget, or a swap space, has no room for one block."""
    if budget < block_bytes:
        raise OutOfMemory(
            f"kv_cache_memory: no room for one KV block of {block_bytes} bytes in"
            f" {max(budget, 0)} bytes; choose more, or a smaller block_size"
        )
    if 0 < swap_space < block_bytes:
        raise OutOfMemory(
            f"swap_space: no room for one KV block of {block_bytes} bytes in {swap_space} bytes;"
            " give a unit, such as 4GiB, or 0 for none"
        )


def require_host_memory(
    device: torch.device, budget: int, swap_space: int, held_bytes: int = 0
) -> None:
    """Raise OutOfMemory if the host has less memory than blocks would take.

    budget: bytes of a device's blocks, which are the host's on a CPU; swap_space: bytes of swapped
    blocks; held_bytes: of the host, in present caches, which the new ones will replace.
    """
    required = {"swap_space": swap_space}
    if device.type == "cpu":
        required = {"kv_cache_memory": budget, **required}
    available = available_host_memory() + held_bytes
    if sum(required.values()) > available:
        names = " and ".join(name for name, size in required.items() if size)
        raise OutOfMemory(
            f"{names}: {sum(required.values()) / 2**30:.1f} GiB are more than the"
            f" {available / 2**30:.1f} GiB of memory that are available here; choose less"
        )


def available_host_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process can still allocate, within a container's limit."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    return min(available, *_container_memory(root / "sys/fs/cgroup"))


def _container_memory(root: Path) -> list[int]:
    """Bytes left to the container, if control groups (version 2, then 1) limit it."""
    found = []
    for folder, limit_file, usage_file, prefix in (
        (root, "memory.max", "memory.current", ""),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit_path, usage_path = folder / limit_file, folder / usage_file
        if limit_path.exists() and usage_path.exists():
            limit = limit_path.read_text().strip()
            if limit != "max":
                used = int(usage_path.read_text()) - _file_pages(folder / "memory.stat", prefix)
                found.append(max(0, int(limit) - used))
    return found or [2**63]


def _file_pages(stat: Path, prefix: str) -> int:
    """Bytes of cached files, such as a checkpoint. A control group counts them as used, up to its
    limit, but frees them when memory is needed."""
    names = (f"{prefix}active_file", f"{prefix}inactive_file")
    lines = stat.read_text().splitlines() if stat.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))


def _default_cpu_budget(useful: int, available: int, num_ranks: int) -> int:
    """useful: bytes of as many sequences of full length as a batch can have."""
    return min(useful, MAX_DEFAULT_CPU_BYTES, available // (CPU_SHARE * num_ranks))


def _gpu_budget(
    config: CacheConfig, device: torch.device, held_bytes: int, later_bytes: int
) -> int:
    """Bytes left of the allowed share after weights, the peak of activations and other memory.

    Called right after the profiling run. Memory that other processes hold on the device counts as
    used; `held_bytes`, which a cache to be replaced holds, does not. later_bytes: of graphs and of
    the state of sequences, which are allocated after the cache.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - reserved
    torch.cuda.empty_cache()
    used = peak - held_bytes + outside_torch + later_bytes
    return int(config.gpu_memory_utilization * total) - used


def _spread(num_seqs: int, num_tokens: int, max_model_len: int) -> list[int]:
    """Lengths of sequences with `num_tokens` in all, none longer than the model allows."""
    num_seqs = min(num_seqs, num_tokens)
    lengths = [num_tokens // num_seqs + (i < num_tokens % num_seqs) for i in range(num_seqs)]
    return [min(length, max_model_len) for length in lengths]

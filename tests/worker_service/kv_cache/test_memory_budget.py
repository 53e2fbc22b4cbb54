"""How many blocks fit."""

from pathlib import Path

import pytest
import torch

from tests.support.counting_model import CountingModel
from worker_service.config import CacheConfig
from worker_service.engine.executor import BlockCounts
from worker_service.errors import OutOfMemory
from worker_service.kv_cache import memory_budget
from worker_service.kv_cache.memory_budget import (
    SyntheticBatches,
    available_host_memory,
    profile_blocks,
)
from worker_service.models.kv_cache_spec import KVCacheSpec

CPU = torch.device("cpu")
GIB = 2**30


def profile(config: CacheConfig, model: CountingModel | None = None, seqs: int = 8) -> BlockCounts:
    return profile_blocks(
        SyntheticBatches(model or CountingModel(), config.block_size or 16, CPU),
        config,
        max_num_seqs=seqs,
        max_num_batched_tokens=512,
    )


def test_budgets_are_filled_with_whole_blocks() -> None:
    # A block is 16 tokens of 8 bytes.
    config = CacheConfig(kv_cache_memory=10 * 128 + 127, swap_space=3 * 128 + 5)
    assert profile(config) == BlockCounts(num_gpu_blocks=10, num_cpu_blocks=3)


def test_a_budget_below_one_block_is_an_error_with_numbers() -> None:
    with pytest.raises(OutOfMemory, match="no room for one KV block of 128 bytes in 127 bytes"):
        profile(CacheConfig(kv_cache_memory=127))


@pytest.mark.parametrize("swap_space", [1, 4, 127])
def test_a_swap_space_below_one_block_is_an_error_with_the_unit(swap_space: int) -> None:
    words = f"swap_space: no room for one KV block of 128 bytes in {swap_space} bytes; give a unit,"
    with pytest.raises(OutOfMemory, match=words):
        profile(CacheConfig(kv_cache_memory=1280, swap_space=swap_space))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (CacheConfig(kv_cache_memory=2**50), "kv_cache_memory: 1048576.0 GiB"),
        (CacheConfig(kv_cache_memory=GIB, swap_space=2**50), "kv_cache_memory and swap_space: "),
    ],
)
def test_memory_that_the_machine_does_not_have_is_an_error(config: CacheConfig, names: str) -> None:
    with pytest.raises(OutOfMemory, match=f"{names}.* are more than the .* choose less"):
        profile(config)


def test_less_than_one_full_sequence_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    profile(CacheConfig(kv_cache_memory=16 * 128))
    assert not caplog.records
    profile(CacheConfig(kv_cache_memory=15 * 128))
    assert "num_blocks=15 needed=16 max_model_len=256" in caplog.text
    assert "raise --kv-cache-memory, lower --max-model-len, or set --kv-cache-dtype int8" in (
        caplog.text
    )


def test_by_default_the_cache_holds_no_more_than_the_largest_batch_can_use() -> None:
    assert profile(CacheConfig(), seqs=3).num_gpu_blocks == 3 * 256 // 16


def test_by_default_the_cache_is_bounded_by_what_is_free_and_a_constant() -> None:
    model = CountingModel()
    model.kv_cache_spec = KVCacheSpec.uniform(
        num_layers=1, num_kv_heads=1, head_dim=2**20, dtype=torch.float32
    )
    block_bytes = model.kv_cache_spec.block_bytes(1)
    blocks = profile(CacheConfig(block_size=1), model, seqs=10_000).num_gpu_blocks
    assert 0 < blocks * block_bytes <= memory_budget.MAX_DEFAULT_CPU_BYTES


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "batch"),
    [(3, 20, (3, 20)), (5, 2, (2, 2)), (1, 1000, (1, 256)), (2, 300, (2, 300))],
)
def test_the_largest_batch_is_shared_out_among_its_sequences(
    num_seqs: int, num_tokens: int, batch: tuple[int, int]
) -> None:
    model, sampled = CountingModel(), list[torch.Size]()
    batches = SyntheticBatches(model, 4, CPU, lambda logits: sampled.append(logits.shape))
    batches.run(num_seqs, num_tokens)
    assert model.batches == [batch]
    assert sampled == [(batch[0], model.vocab_size)]


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "batches"),
    [
        (256, 2048, [(1, 256), (1, 1), (2, 2), (3, 3), (4, 4), (32, 32), (64, 64)]),
        (3, 100, [(1, 100), (1, 1), (2, 2), (3, 3)]),
    ],
)
def test_kernels_for_few_decodes_are_compiled_before_the_first_request(
    num_seqs: int, num_tokens: int, batches: list[tuple[int, int]]
) -> None:
    model = CountingModel()
    SyntheticBatches(model, 4, CPU).warm_up(num_seqs, num_tokens)
    assert model.batches == batches


VERSIONS = {
    1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def machine(root: Path, version: int, limit: str, used: int, files: tuple[int, int]) -> Path:
    """One with 64 GiB available, whose control group has read so much of files."""
    limit_file, usage_file, prefix = VERSIONS[version]
    active, inactive = files
    stat = f"anon 5\n{prefix}inactive_file {inactive}\n{prefix}active_file {active}\nfile 7\n"
    contents = {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 * 2**20} kB\n",
        f"sys/fs/cgroup/{limit_file}": limit,
        f"sys/fs/cgroup/{usage_file}": str(used),
        f"sys/fs/cgroup/{Path(usage_file).parent}/memory.stat": stat,
    }
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize("version", VERSIONS)
def test_a_container_s_limit_counts_less_what_it_has_in_use(tmp_path: Path, version: int) -> None:
    root = machine(tmp_path, version, str(8 * GIB), 3 * GIB, (0, 0))
    assert available_host_memory(root) == 5 * GIB


@pytest.mark.parametrize("version", VERSIONS)
def test_files_that_were_read_leave_a_container_s_memory_to_others(
    tmp_path: Path, version: int
) -> None:
    """A checkpoint's pages fill a group up to its limit, and are let go of when it is reached."""
    root = machine(tmp_path, version, str(8 * GIB), 8 * GIB, (GIB, 4 * GIB))
    assert available_host_memory(root) == 5 * GIB


def test_a_container_without_a_limit_has_what_the_machine_has(tmp_path: Path) -> None:
    root = machine(tmp_path, 2, "max", 3 * GIB, (0, 0))
    assert available_host_memory(root) == 64 * GIB

"""Which sizes are recorded, and what happens where recording fails."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from pagewire_kernels.interface import Abilities
from pagewire_kernels.reference.backend import ReferenceBackend
from tests.support.counting_model import CountingModel, loaded_counting_model
from tests.support.rank_threads import AheadExecutor
from tests.support.runners import AllDrafts, EagerRecorder, HostEvent, make_cache
from tests.support.worker_driver import Row
from tests.worker_service.runner.device.test_head_drafts import CountingHead
from tests.worker_service.runner.test_model_runner import Bench, continuation
from worker_service.cache_groups import CacheGroup
from worker_service.config import CacheConfig, RunnerConfig
from worker_service.errors import CaptureFailed
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.runner.batch.inputs import lay_out
from worker_service.runner.device.cuda_graphs import (
    MAX_MIXED_CONTEXT,
    Replay,
    graph_sizes,
    mixed_sizes,
)
from worker_service.runner.device.drafts import DeviceHeadDrafter
from worker_service.runner.device.state import DeviceState, StateShape
from worker_service.runner.device.steps import DeviceSteps
from worker_service.runner.drafting.speculation import Speculation
from worker_service.runner.model_runner import ModelRunner
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.runner.torch_executor import Profiler


@pytest.mark.parametrize("max_size", [0, 1, 3, 4, 8, 100, 256, 300, 512])
def test_sizes_rise_to_the_largest_and_waste_little(max_size: int) -> None:
    sizes = graph_sizes(max_size)
    assert sizes == sorted(set(sizes))
    if max_size:
        assert sizes[-1] == max_size
    for below, size in zip([0, *sizes], sizes, strict=False):
        assert size - (below + 1) <= max(1, below // 2, 7)


@pytest.mark.parametrize("most", [0, 1, 32, 100, 1024, 1500])
def test_numbers_of_tokens_of_mixed_batches_rise_to_the_largest_and_waste_little(most: int) -> None:
    sizes = mixed_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1:] == ([most] if most else [])
    for below, size in zip([0, *sizes], sizes, strict=False):
        assert size - (below + 1) <= max(31, below // 4)


def test_long_and_large_batches_are_computed_eagerly() -> None:
    model = CountingModel()
    recorder = EagerRecorder()
    graphs = DeviceState(
        model, small_cache(model), 4, StateShape(sizes=[1, 8], mixed=[4, 32]), recorder
    ).graphs
    assert graphs is not None
    groups = [CacheGroup(block_tokens=4)]
    table = SequenceTable(vocab_size=9, max_model_len=10_000, groups=groups, num_gpu_blocks=1)

    def size_for(query_lens: list[int], context_lens: list[int]) -> int | None:
        row_ids, lengths = np.arange(len(query_lens)), np.array(query_lens, np.int32)
        firsts = np.array(context_lens) - lengths
        inputs = lay_out(row_ids, firsts, lengths, table)
        return graphs.mixed_size_for(inputs, len(query_lens))

    assert size_for([1, 3], [100, 3]) == 4
    assert size_for([1, 4], [100, 4]) == 32
    assert size_for([1, 32], [100, 32]) is None
    assert size_for([1, 3], [100, MAX_MIXED_CONTEXT + 1]) is None
    assert size_for([1, 3], [MAX_MIXED_CONTEXT + 1, 3]) == 4, "a decode's is split by length"
    assert size_for([1] * 9, [1] * 9) is None
    table.num_tokens[1], table.capacity[1] = 4000, MAX_MIXED_CONTEXT + 16
    assert size_for([1, 3], [100, 4002]) is None, "of a row with drafts, ranks agree on its blocks"
    assert size_for([1, 3], [100, 4000]) == 4
    assert size_for([3, 1], [4002, 4000]) is None


class Refusing:
    """A recorder for models that wait for the device."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def record(self, work: Callable[[], None]) -> Replay:
        raise self._error


WAITS = RuntimeError("operation not permitted when stream is capturing\nand more")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (WAITS, "not permitted when stream is capturing; .* with --no-cuda-graphs"),
        (torch.OutOfMemoryError("out of memory"), "lower --gpu-memory-utilization"),
        (TypeError(), "TypeError; .* with --no-cuda-graphs"),
    ],
    ids=repr,
)
def test_a_failed_capture_is_an_error_that_names_what_helps(error: Exception, says: str) -> None:
    model = CountingModel()
    with pytest.raises(CaptureFailed, match=says):
        DeviceState(model, small_cache(model), 4, StateShape(sizes=[1, 2]), Refusing(error))


def small_cache(model: CountingModel) -> CacheEngine:
    return make_cache(model, 4, num_gpu_blocks=16)


class CountingRecorder(EagerRecorder):
    """Counts what is recorded."""

    num_recorded = 0

    def record(self, work: Callable[[], None]) -> Replay:
        self.num_recorded += 1
        return super().record(work)


def test_recordings_outlive_an_epoch() -> None:
    model, recorder = CountingModel(), CountingRecorder()
    cache = small_cache(model)
    state = DeviceState(model, cache, 4, StateShape(sizes=[1, 2, 4], mixed=[4, 8]), recorder)
    assert recorder.num_recorded == 8
    for _ in range(2):
        device = DeviceSteps(model, cache, state, HostEvent)
        bench = Bench(
            make_runner=lambda *_, device=device: ModelRunner(model, cache, 4, device=device)
        )
        bench.plans.add(1, [5, 6, 7])
        results = [bench.step([Row(1, 3)]), *(bench.step([Row(1)]) for _ in range(3))]
        assert [int(result.token_ids[0]) for result in results] == continuation([5, 6, 7], 4)
    assert recorder.num_recorded == 8


@pytest.mark.parametrize(
    ("num_seqs", "draft_sizes"), [(1, [1]), (3, [1, 2, 4]), (4, [1, 2, 4]), (9, [1, 2, 4, 8])]
)
def test_passes_of_a_head_are_recorded_once_for_as_many_rows_as_may_draft(
    num_seqs: int, draft_sizes: list[int]
) -> None:
    recorder, model = CountingRecorder(), CountingModel()
    sizes: dict[str, Any] = {"sizes": [1, 2, 4, 8], "mixed": [16]}
    shape = StateShape(num_seqs=num_seqs, **sizes, max_drafts=2)
    assert shape.draft_sizes == draft_sizes
    cache, head = small_cache(model), cast(DraftHead, CountingHead())
    state = DeviceState(model, cache, 4, shape, recorder, head=head)
    assert recorder.num_recorded == shape.num_graphs == 9 + len(draft_sizes)
    for _ in range(2):
        drafter = DeviceHeadDrafter(head, ())
        DeviceSteps(model, cache, state, HostEvent, speculation=Speculation(drafter, AllDrafts()))
        assert drafter.graphs is state.draft_graphs is not None
    assert recorder.num_recorded == shape.num_graphs
    without = DeviceState(model, cache, 4, replace(shape, sizes=[], mixed=[]), head=head)
    assert without.draft_graphs is None


@pytest.mark.parametrize(
    ("abilities", "num_recorded"),
    [({}, 7), ({"cuda_graphs": False}, 0)],
    ids=str,
)
def test_what_is_recorded_is_what_the_attention_backend_can_have_captured(
    abilities: dict[str, bool], num_recorded: int, tmp_path: Path
) -> None:
    loaded = loaded_counting_model(model_dir=tmp_path)
    backend = ReferenceBackend()
    backend.abilities = Abilities(**abilities)
    kernels = replace(loaded.kernels, attention=backend)
    loaded = replace(loaded, kernels=kernels)
    runner = RunnerConfig(max_graph_batch_size=4, max_graph_tokens=32)
    executor = AheadExecutor(CacheConfig(), Profiler(tmp_path), lambda: loaded, runner=runner)
    assert executor.load().uses_cuda_graphs == (num_recorded > 0)
    executor.make_runner(num_gpu_blocks=8, num_cpu_blocks=0, epoch=1)
    assert executor.num_recorded == num_recorded, "two graphs of sizes 1, 2 and 4, one of 32 tokens"


def test_the_memory_of_rows_is_known_before_it_is_allocated() -> None:
    model = CountingModel(max_model_len=64)
    rows = StateShape(num_seqs=40)
    sizes = [rows.rows(model, 4, torch.device(device)).num_bytes for device in ("cpu", "meta")]
    assert sizes[0] == sizes[1] > 80 * 4 * model.vocab_size
    shape = StateShape(num_seqs=40, sizes=[1, 8], mixed=[64])
    state = DeviceState(model, small_cache(model), 4, shape, EagerRecorder())
    assert state.graphs is not None
    needed = shape.num_bytes(model, 4)
    assert needed == sizes[0] + state.graphs.num_bytes > sizes[0] + 4 * 8 * 16
    assert rows.num_bytes(model, 4) == sizes[0]
    drafting, head = replace(shape, max_drafts=3), cast(DraftHead, CountingHead(64))
    state = DeviceState(model, small_cache(model), 4, drafting, EagerRecorder(), head=head)
    graphs = state.draft_graphs
    assert state.graphs is not None
    assert graphs is not None
    read = (graphs._inputs, graphs._place, graphs._query_start, graphs._no_masks)
    of_drafts = drafting.num_bytes(model, 4) - state.rows.num_bytes - state.graphs.num_bytes
    assert of_drafts == sum(tensor.nbytes for tensor in read)
    few = replace(rows, max_count_bytes=7 * 4 * model.vocab_size)
    assert len(few.rows(model, 4, torch.device("cpu")).sampling.counts) == 7

"""What is recorded, and what happens where it cannot be."""

import logging
from collections.abc import Callable

import pytest
import torch

from tests.support.counting_model import CountingModel
from tests.support.runners import HostEvent
from tests.support.worker_driver import Row
from tests.worker_service.runner.test_model_runner import Bench, continuation
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.runner.cuda_graphs import Replay, graph_sizes
from worker_service.runner.device_rows import initial_rows
from worker_service.runner.device_state import DeviceState
from worker_service.runner.device_steps import DeviceSteps
from worker_service.runner.model_runner import ModelRunner


@pytest.mark.parametrize("max_size", [0, 1, 3, 4, 8, 100, 256, 300, 512])
def test_sizes_rise_to_the_largest_and_waste_little(max_size: int) -> None:
    sizes = graph_sizes(max_size)
    assert sizes == sorted(set(sizes))
    if max_size:
        assert sizes[-1] == max_size
    for below, size in zip([0, *sizes], sizes, strict=False):
        assert size - (below + 1) <= max(1, below // 2, 7)


class Refusing:
    """A recorder for models that wait for the device."""

    def __init__(self) -> None:
        self.num_asked = 0

    def record(self, work: Callable[[], None]) -> Replay:
        self.num_asked += 1
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


def test_a_model_that_cannot_be_recorded_is_served_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Refusing()

    def make_runner(model: CountingModel, cache: CacheEngine, block_size: int) -> ModelRunner:
        state = DeviceState(model, cache, block_size, recorder, [1, 2])
        return ModelRunner(
            model, cache, block_size, device=DeviceSteps(model, cache, state, HostEvent)
        )

    with caplog.at_level(logging.WARNING):
        bench = Bench(make_runner=make_runner)
    assert recorder.num_asked == 1
    assert "cannot be recorded" in caplog.text
    assert "not permitted when stream is capturing" in caplog.text
    bench.plans.add(1, [1, 2])
    tokens = [bench.step([Row(1, 2)]), bench.step([Row(1)])]
    assert [int(each.token_ids[0]) for each in tokens] == continuation([1, 2], 2)


def test_recordings_outlive_an_epoch() -> None:
    class Counting:
        def __init__(self) -> None:
            self.num_recorded = 0

        def record(self, work: Callable[[], None]) -> Replay:
            self.num_recorded += 1
            work()
            return work

    model, recorder = CountingModel(), Counting()
    cache = CacheEngine(
        model.kv_cache_spec,
        block_size=4,
        num_gpu_blocks=16,
        num_cpu_blocks=0,
        device=torch.device("cpu"),
    )
    state = DeviceState(model, cache, 4, recorder, [1, 2, 4])
    assert recorder.num_recorded == 6
    for _ in range(2):
        device = DeviceSteps(model, cache, state, HostEvent)
        bench = Bench(
            make_runner=lambda *_, device=device: ModelRunner(model, cache, 4, device=device)
        )
        bench.plans.add(1, [5, 6, 7])
        results = [bench.step([Row(1, 3)]), *(bench.step([Row(1)]) for _ in range(3))]
        assert [int(each.token_ids[0]) for each in results] == continuation([5, 6, 7], 4)
    assert recorder.num_recorded == 6


def test_there_is_room_for_all_sequences_that_there_may_be() -> None:
    """Growing the tables later records every graph again, in the middle of a step."""
    long, short = 65_536, 128  # blocks of a sequence
    assert initial_rows(short) == initial_rows(short, 256) == 1024
    assert initial_rows(short, 1025) == 2048  # as the host's table has then
    assert (initial_rows(long), initial_rows(long, 300)) == (256, 512)

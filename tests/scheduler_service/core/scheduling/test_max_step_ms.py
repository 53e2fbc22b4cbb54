"""The time limit of steps in which prompts are computed with running sequences, on CPUs."""

from collections.abc import Callable

import pytest

from scheduler_service.core import StepPlan
from tests.support.core_driver import make_capacity, make_driver

StepUs = Callable[[int, int], int]


class LimitedDriver:
    """A CPU worker, and the prompt tokens and durations of its steps since the last request.

    Its steps take 1 ms, and 0.1 ms for each token of a prompt, unless `step_us` says otherwise.
    """

    def __init__(
        self,
        max_step_ms: float,
        step_us: StepUs | None = None,
        *,
        arithmetic: str = "cpu/avx2/4",
        max_num_batched_tokens: int = 64,
    ) -> None:
        capacity = make_capacity(num_gpu_blocks=1024, max_model_len=2048, arithmetic=arithmetic)
        self.driver = make_driver(
            capacity, max_num_batched_tokens=max_num_batched_tokens, max_step_ms=max_step_ms
        )
        self.driver.on_plan = self._record
        worker = self.driver.links["g0"].worker
        self._step_us = worker.step_us = step_us or worker.step_us
        self.chunks: list[int] = []
        self.durations_us: list[int] = []
        worker.step_us = self._record_duration

    def _record(self, _: str, plan: StepPlan) -> None:
        self.chunks.append(sum(count for count in plan.num_tokens or [] if count > 1))

    def _record_duration(self, num_tokens: int, num_pairs: int) -> int:
        self.durations_us.append(self._step_us(num_tokens, num_pairs))
        return self.durations_us[-1]

    def submit(self, first_token: int, prompt_len: int, max_tokens: int) -> None:
        """Queue a request whose prompt no other one shares."""
        self.chunks.clear()
        self.durations_us.clear()
        prompt = [first_token, *(token % 31 for token in range(prompt_len - 1))]
        self.driver.submit(prompt=prompt, max_tokens=max_tokens)

    def advance(self, num_steps: int) -> None:
        self.driver.step("g0", num_steps)

    def beside_a_stream(self, prompt_len: int, warm_up: tuple[int, ...] = (20,)) -> list[int]:
        """Chunks of a prompt that arrives while another request decodes, after requests with the
        prompts of `warm_up`."""
        for number, length in enumerate(warm_up):
            self.submit(10 + number, length, 8)
            self.driver.run_until_idle()
        self.submit(2, 4, 400)
        self.advance(4)
        self.submit(3, prompt_len, 2)
        self.driver.run_until_idle()
        chunks = [chunk for chunk in self.chunks if chunk]
        assert sum(chunks) == prompt_len
        return chunks


def test_a_chunk_beside_decodes_takes_no_longer_than_the_limit_on_a_cpu() -> None:
    chunks = LimitedDriver(3.0).beside_a_stream(90)
    assert max(chunks) == 20, "(3 ms - 1 ms) / 0.1 ms"


def test_a_chunk_has_16_tokens_however_long_they_take() -> None:
    assert max(LimitedDriver(0.5).beside_a_stream(90)) == 16


@pytest.mark.parametrize(("arithmetic", "max_step_ms"), [("cuda/sm90/4", 3.0), ("cpu/avx2/4", 0)])
def test_chunks_are_as_large_as_the_batch_on_gpus_and_without_a_limit(
    arithmetic: str, max_step_ms: float
) -> None:
    assert max(LimitedDriver(max_step_ms, arithmetic=arithmetic).beside_a_stream(90)) == 63


def test_a_prompt_without_others_is_computed_in_full_steps() -> None:
    limited = LimitedDriver(3.0)
    limited.submit(1, 20, 8)
    limited.driver.run_until_idle()
    limited.submit(3, 90, 2)
    limited.driver.run_until_idle()
    assert limited.chunks[0] == 64


def attention_us(num_tokens: int, num_pairs: int) -> int:
    """A token costs 20 us, and after 1,000 others 170 us."""
    return 1000 + 20 * num_tokens + num_pairs * 15 // 100


@pytest.mark.parametrize("max_step_ms", [5.0, 10.0])
def test_chunks_shrink_as_their_context_grows_so_that_steps_take_the_same_time(
    max_step_ms: float,
) -> None:
    limited = LimitedDriver(max_step_ms, attention_us, max_num_batched_tokens=1024)
    chunks = limited.beside_a_stream(1500)
    durations_ms = [us / 1000 for us in limited.durations_us[: len(chunks)]]
    assert max(durations_ms) <= 1.02 * max_step_ms
    assert min(durations_ms[8:-3]) >= 0.95 * max_step_ms, "no capacity is wasted once it is known"
    assert max(chunks) > 2 * chunks[-4]


def test_a_prompt_that_continues_a_long_cached_prefix_has_small_chunks_from_the_first_on() -> None:
    limited = LimitedDriver(10.0, attention_us, max_num_batched_tokens=1024)
    limited.beside_a_stream(1500)
    prefix = [3, *(token % 31 for token in range(1499))]
    limited.driver.submit(prompt=[2] * 4, max_tokens=100)
    limited.advance(20)
    limited.chunks.clear()
    limited.durations_us.clear()
    limited.driver.submit(prompt=prefix + [1] * 200, max_tokens=2)
    limited.driver.run_until_idle()
    assert sum(limited.chunks) < 204, "the prefix was found"
    assert max(limited.durations_us) <= 10_200


def memory_bound_us(num_tokens: int, num_pairs: int) -> int:
    """Weights are read in 4 ms, and arithmetic takes 0.1 ms for each token at the same time."""
    return max(4000, 100 * num_tokens)


def test_short_prompts_that_cost_nothing_beside_the_weights_do_not_make_chunks_too_long() -> None:
    limited = LimitedDriver(10.0, memory_bound_us, max_num_batched_tokens=1024)
    chunks = limited.beside_a_stream(1000, warm_up=(10, 20, 8, 12, 17))
    assert max(limited.durations_us) <= 11_000
    assert chunks[:2] == [30, 60], "at most twice the tokens of the largest step before"
    assert max(chunks) >= 60, "nor do they stay small"


def test_prompts_have_16_tokens_beside_decodes_until_a_step_was_measured() -> None:
    limited = LimitedDriver(3.0)
    limited.submit(1, 4, 8)
    limited.driver.schedule("g0")
    limited.submit(3, 90, 2)
    limited.driver.schedule("g0")
    assert limited.chunks == [16]


def test_several_prompts_share_the_time_of_a_step() -> None:
    limited = LimitedDriver(3.0)
    limited.beside_a_stream(90)
    limited.submit(2, 4, 100)
    limited.advance(4)
    for number in range(3):
        limited.submit(20 + number, 8, 2)
    limited.driver.run_until_idle()
    assert limited.chunks[0] == 20, "two prompts and a half"

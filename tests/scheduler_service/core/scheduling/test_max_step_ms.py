"""The time limit of steps in which prompts are computed with running sequences, on CPUs."""

import pytest

from tests.support.core_driver import CoreDriver, make_capacity, make_driver


def largest_chunks(driver: CoreDriver) -> list[int]:
    """Tokens of the rows of a prompt of 90 tokens, after others were measured."""
    driver.submit(prompt=[1] * 20, max_tokens=8)  # measures prefills and decodes
    driver.run_until_idle()
    driver.submit(prompt=[2] * 4, max_tokens=40)
    for _ in range(4):
        driver.schedule("g0")
        driver.deliver("g0")
    chunks: list[int] = []
    driver.on_plan = lambda _, plan: chunks.append(max(plan.num_tokens or [0]))
    driver.submit(prompt=[3] * 90, max_tokens=2)
    driver.run_until_idle()
    return [chunk for chunk in chunks if chunk > 1]


def driver_of(arithmetic: str, max_step_ms: float) -> CoreDriver:
    """A worker whose steps take 1 ms, and 0.1 ms for each token of a prompt."""
    capacity = make_capacity(num_gpu_blocks=64, max_model_len=128, arithmetic=arithmetic)
    return make_driver(capacity, max_num_batched_tokens=64, max_step_ms=max_step_ms)


def test_a_chunk_beside_decodes_takes_no_longer_than_the_limit_on_a_cpu() -> None:
    chunks = largest_chunks(driver_of("cpu/avx2/4", 3.0))
    assert sum(chunks) == 90
    assert max(chunks) == 20, "(3 ms - 1 ms) / 0.1 ms"


def test_a_chunk_has_16_tokens_however_long_they_take() -> None:
    assert max(largest_chunks(driver_of("cpu/avx2/4", 0.5))) == 16


@pytest.mark.parametrize(("arithmetic", "max_step_ms"), [("cuda/sm90/4", 3.0), ("cpu/avx2/4", 0)])
def test_chunks_are_as_large_as_the_batch_on_gpus_and_without_a_limit(
    arithmetic: str, max_step_ms: float
) -> None:
    assert max(largest_chunks(driver_of(arithmetic, max_step_ms))) == 63


def test_a_prompt_without_others_is_computed_in_full_steps() -> None:
    driver = driver_of("cpu/avx2/4", 3.0)
    driver.submit(prompt=[1] * 20, max_tokens=8)
    driver.run_until_idle()
    chunks: list[int] = []
    driver.on_plan = lambda _, plan: chunks.append(max(plan.num_tokens or [0]))
    driver.submit(prompt=[3] * 90, max_tokens=2)
    driver.run_until_idle()
    assert chunks[0] == 64

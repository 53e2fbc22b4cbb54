"""The cost of a worker group's steps, measured from its results."""

from scheduler_service.core.step_plan import StepResult
from scheduler_service.core.throughput import StepRates
from tests.support.steps import make_work


def observe(
    rates: StepRates,
    busy_us: int,
    *,
    prefill: int = 0,
    moved: int = 0,
    swaps_in: bool = False,
    ops_us: int = 0,
    forward_us: int = 0,
    sample_us: int = 0,
) -> None:
    work = make_work(num_prefill_tokens=prefill, num_moves=moved, swaps_in=swaps_in)
    result = StepResult(
        step_id=1,
        token_ids=[1],
        busy_us=busy_us,
        cache_ops_us=ops_us,
        forward_us=forward_us,
        sample_us=sample_us,
    )
    rates.observe(work, result)


def test_nothing_is_known_before_the_first_step() -> None:
    rates = StepRates()
    assert rates.us_per_decode_step is rates.us_per_prefill_token is rates.us_per_move is None


def test_prefill_tokens_cost_what_a_step_takes_beyond_its_decodes() -> None:
    rates = StepRates()
    observe(rates, 1000)
    observe(rates, 5000, prefill=100)
    assert rates.us_per_decode_step == 1000
    assert rates.us_per_prefill_token == 40


def test_cache_operations_are_not_counted_as_computing() -> None:
    rates = StepRates()
    observe(rates, 1500, moved=5, ops_us=500)
    assert rates.us_per_decode_step == 1000
    assert rates.us_per_move == 100


def test_a_step_that_swaps_out_while_it_computes_takes_as_long_as_it_computes() -> None:
    rates = StepRates()
    observe(rates, 1500, moved=5, ops_us=500, forward_us=1200, sample_us=200)
    assert rates.us_per_decode_step == 1400
    assert rates.us_per_move == 100
    rates = StepRates()
    observe(rates, 1500, moved=5, ops_us=1600, forward_us=1500, sample_us=200)
    assert rates.us_per_decode_step == 1500, "the step before had not been collected yet"


def test_a_step_that_swaps_in_tells_nothing_of_what_ran_beside() -> None:
    rates = StepRates()
    observe(rates, 1500, moved=10, swaps_in=True, ops_us=1400)
    assert rates.us_per_decode_step is None
    assert rates.us_per_move == 140


def test_averages_follow_the_worker() -> None:
    rates = StepRates()
    for busy_us in [1000] + [2000] * 60:
        observe(rates, busy_us)
    assert rates.us_per_decode_step is not None
    assert 1990 < rates.us_per_decode_step < 2000

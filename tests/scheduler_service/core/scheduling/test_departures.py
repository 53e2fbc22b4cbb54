"""What the scenarios do not show of ends and moves."""

import pytest

from tests.support.core_driver import make_capacity, make_driver

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("max_model_len", [9, 10])
def test_choices_that_have_all_the_tokens_of_their_next_group_end_there_by_length(
    max_model_len: int,
) -> None:
    driver = make_driver()
    record = driver.submit(prompt=PROMPT, max_tokens=20, n=2)
    while len(record.choices[1].tokens) < 4:
        driver.step("g0")
    driver.lose_worker_group("g0")
    driver.add_worker_group(make_capacity("g1", max_model_len=max_model_len))
    driver.run_until_idle()
    assert [choice.finish_reason for choice in record.choices] == ["length", "length"]
    num_tokens = max_model_len - len(PROMPT)
    assert [len(choice.tokens) for choice in record.choices] == [num_tokens] * 2
    assert record.finished is not None
    driver.check_empty()


def test_a_request_cancelled_on_its_way_is_gone_with_its_last_step() -> None:
    driver = make_driver()
    record = driver.submit(prompt=PROMPT, max_tokens=6)
    driver.schedule("g0")
    driver.schedule("g0")
    driver.add_worker_group(make_capacity("g1"))
    driver.drain_worker_group("g0")
    driver.cancel(record)
    while driver.deliver("g0"):
        driver.core.check()
    assert driver.schedule("g1") is None
    assert driver.core.is_drained("g0")
    driver.check_empty()

"""Tables of adapters are values with versions; of several, the greatest version is valid."""

import pytest

from pagewire.v1.adapter_pb2 import Adapter, AdapterSet
from scheduler_service.core_service.adapters.tables import (
    check_name,
    contents,
    find,
    merged,
    with_adapter,
    without_contents,
    without_name,
    without_retained,
)
from scheduler_service.errors import InvalidArgument


def adapter(name: str, content: int) -> Adapter:
    return Adapter(name=name, digest=bytes([content]) * 32)


def names(table: AdapterSet) -> dict[str, int]:
    return {entry.name: entry.digest[0] for entry in table.adapters}


def retained(table: AdapterSet) -> list[int]:
    return [entry.digest[0] for entry in table.retained]


def test_a_name_that_gets_another_content_retains_the_previous_one() -> None:
    table = with_adapter(AdapterSet(), adapter("a", 1))
    assert (table.version, names(table), retained(table)) == (1, {"a": 1}, [])
    table = with_adapter(table, adapter("a", 2))
    assert (table.version, names(table), retained(table)) == (2, {"a": 2}, [1])
    table = with_adapter(table, adapter("a", 1))  # back again
    assert (names(table), retained(table)) == ({"a": 1}, [2])
    table = without_contents(table, {bytes([2]) * 32})
    assert (names(table), retained(table)) == ({"a": 1}, [])


def test_a_content_under_two_names_is_retained_for_each_of_them() -> None:
    table = with_adapter(with_adapter(AdapterSet(), adapter("a", 1)), adapter("b", 1))
    table = without_name(table, "a")
    assert (names(table), retained(table), table.unloaded) == ({"b": 1}, [1], ["a"])
    assert find(table, "a") is None
    assert names(without_retained(table, {bytes([1]) * 32})) == {"b": 1}
    table = without_name(table, "b")
    assert (names(table), retained(table), table.unloaded) == ({}, [1, 1], ["a", "b"])
    assert [entry.name for entry in table.retained] == ["a", "b"]
    assert contents(table).keys() == {bytes([1]) * 32}
    table = with_adapter(table, adapter("a", 1))
    assert [entry.name for entry in table.retained] == ["b"]
    assert retained(without_retained(table, {bytes([1]) * 32})) == []


def test_the_greatest_version_is_valid_and_keeps_what_requests_may_use() -> None:
    core = with_adapter(AdapterSet(), adapter("a", 1))
    worker = AdapterSet(version=7, adapters=[adapter("a", 2), adapter("b", 3)])
    table = merged(core, [worker])
    assert table.version > 7
    assert (names(table), retained(table)) == ({"a": 2, "b": 3}, [1])
    assert merged(table, [worker, AdapterSet()]) == table


def test_workers_add_the_adapters_they_were_started_with_unless_names_are_taken_or_unloaded() -> (
    None
):
    started = AdapterSet(adapters=[adapter("a", 1), adapter("b", 2)])
    table = merged(AdapterSet(), [started])
    assert names(table) == {"a": 1, "b": 2}
    assert merged(table, [started]) == table
    assert names(merged(AdapterSet(), [started], elsewhere={"b"})) == {"a": 1}
    table = without_name(with_adapter(table, adapter("a", 5)), "b")
    assert merged(table, [started]) == table
    assert merged(table, [AdapterSet(adapters=[adapter("no name", 3)])]) == table
    assert names(merged(with_adapter(table, adapter("b", 2)), [started])) == {"a": 5, "b": 2}


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 129])
def test_names_are_of_limited_length_and_characters(name: str) -> None:
    with pytest.raises(InvalidArgument, match="name: expected 1 to 128 characters"):
        check_name(name)
    check_name("org/sql-v2.1:latest_x")

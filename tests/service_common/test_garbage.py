"""What survives a full garbage collection is exempt from later ones, while that is wanted."""

import gc
from collections.abc import Iterator

import pytest

from service_common.garbage import imports_exempted, survivors_exempted


class Node:
    """An object that can be in a reference cycle."""

    next: object = None


@pytest.fixture
def nothing_exempt() -> Iterator[None]:
    """As at the start of a process; afterwards everything is exempt, as the tests' modules were."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_exempt")
def test_survivors_are_not_examined_again_and_other_cycles_are_still_freed() -> None:
    kept = Node()
    with survivors_exempted():
        kept.next = later = [Node()]
        gc.collect()
        assert not any(thing is later for thing in gc.get_objects())
        cycle = Node()
        cycle.next = cycle
        del cycle
        assert gc.collect() == 1
        assert not any(isinstance(thing, Node) for thing in gc.get_objects())
    assert any(thing is kept for thing in gc.get_objects())


@pytest.mark.usefixtures("nothing_exempt")
def test_the_collector_is_as_before_in_the_end() -> None:
    before = gc.get_threshold(), list(gc.callbacks)
    with survivors_exempted():
        assert (gc.get_threshold(), list(gc.callbacks)) != before
    assert (gc.get_threshold(), list(gc.callbacks)) == before
    assert gc.get_freeze_count() == 0


def test_what_was_exempt_before_stays_so() -> None:
    kept = Node()
    gc.freeze()
    with survivors_exempted():
        pass
    assert not any(thing is kept for thing in gc.get_objects())


@pytest.mark.usefixtures("nothing_exempt")
def test_what_is_made_while_importing_is_in_no_collection() -> None:
    with imports_exempted():
        assert not gc.isenabled()
        kept = Node()
        kept.next = kept
    assert gc.isenabled()
    assert not any(thing is kept for thing in gc.get_objects())
    gc.unfreeze()
    assert any(thing is kept for thing in gc.get_objects())

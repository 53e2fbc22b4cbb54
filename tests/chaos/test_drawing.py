"""Disturbances of every kind are drawn, and the cluster can continue."""

from random import Random

from tests.chaos.disturbances import Cut, Disturbance, Move, Pause
from tests.chaos.drawing import KINDS, KINDS_WITH_PACKETS, Drawing
from tests.chaos.network import CLIENT, star

LINKS = star("core", ["frontend-0", "frontend-1"], ["worker-0", "worker-1", "worker-2"])
LEASE_S = 4.0


def drawn(disturbed: list[str], count: int = 400) -> list[Disturbance]:
    drawing = Drawing(Random(0), LINKS, LEASE_S)
    found = [drawing.next(disturbed) for _ in range(count)]
    return [disturbance for disturbance in found if disturbance is not None]


def test_every_kind_and_every_host_comes() -> None:
    all_drawn = drawn([])
    assert {type(disturbance) for disturbance in all_drawn} == set(KINDS)
    assert len({disturbance.victim for disturbance in all_drawn}) == 6


def test_links_that_carry_packets_are_disturbed_in_more_ways_and_the_core_never_moves() -> None:
    drawing = Drawing(Random(0), LINKS, LEASE_S, KINDS_WITH_PACKETS)
    found = [drawn for drawn in (drawing.next([]) for _ in range(400)) if drawn is not None]
    assert {type(drawn) for drawn in found} == set(KINDS_WITH_PACKETS)
    moved = {drawn.victim for drawn in found if isinstance(drawn, Move)}
    assert {host.partition("-")[0] for host in moved} == {"frontend", "worker"}


def test_the_last_worker_and_the_last_frontend_are_left_in_peace() -> None:
    victims = {disturbance.victim for disturbance in drawn(["worker-0", "worker-2", "frontend-1"])}
    assert victims == {"core"}
    assert drawn(["worker-0", "worker-2", "frontend-1", "core"]) == []


def test_pauses_and_cuts_are_shorter_and_longer_than_the_lease() -> None:
    found = [event.duration_s for event in drawn([]) if isinstance(event, Pause | Cut)]
    assert min(found) < LEASE_S < max(found)


def test_links_are_cut_in_one_direction_and_in_both_but_never_the_harness_s_own() -> None:
    cuts = [tuple(event.directions) for event in drawn([]) if isinstance(event, Cut)]
    assert {len(directions) for directions in cuts} == {1, 2}
    ends = {end for directions in cuts for pair in directions if CLIENT in pair for end in pair}
    assert ends == {CLIENT, "frontend-0", "frontend-1"}

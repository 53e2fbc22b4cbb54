"""A plan passes through the worker's files in few visits, and returns to few of them.

A *stay* is a run of functions of one file that are entered one after the other; a *return* is a
stay in a file that was left before. Constructors of records, conversions (`upload`), properties and
clocks are left out, and so is what the model does, and what a captured graph replays.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.support.counting_model import CountingModel
from tests.support.runners import RUNNERS, make_cache
from tests.support.worker_driver import PlanBuilder, Row, sampler_params
from tools.launch import ROOT
from worker_service.service import wire

CONSTRUCTORS = {"__init__", "__new__", "__len__", "__contains__", "of", "of_failed"}
CONVERSIONS = {"upload", "monotonic_us", "_no_time"}
GRAPHS = {"_forward", "_forward_mixed", "_sample"}
"""Work of captured graphs, which a fake recorder does again."""
LEAVES = {"forward", "compute_logits"} | GRAPHS
MAX_STAYS, MAX_RETURNS = 25, 5
STREAM_STAYS, STREAM_RETURNS = 4, 1
"""Before decoding, `servicer.py`; after it, `step_stream.py`, `executor.py`, and `step_stream.py`
again."""


def files_entered(work: Callable[[], Any]) -> list[str]:
    """The worker's files whose functions are entered while `work` runs, in order."""
    entered: list[str] = []

    def observe(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        file = Path(code.co_filename)
        if event != "call" or not file.is_relative_to(ROOT / "worker_service"):
            return
        name = file.relative_to(ROOT / "worker_service").as_posix()
        if not name.startswith("models/") and counts(code) and not is_below_leaf(frame.f_back):
            entered.append(name)

    sys.setprofile(observe)
    try:
        work()
    finally:
        sys.setprofile(None)
    return entered


def counts(code: CodeType) -> bool:
    """Whether a function is more than a constructor, a conversion or a property."""
    name = code.co_name
    return not (
        name.startswith("<") or name in CONSTRUCTORS | CONVERSIONS | GRAPHS or code in properties()
    )


def properties() -> set[CodeType]:
    """The code of the worker's properties."""
    return {
        getter.__code__
        for name, module in list(sys.modules.items())
        if name.startswith("worker_service")
        for found in vars(module).values()
        if isinstance(found, type)
        for member in vars(found).values()
        if isinstance(member, property) and isinstance(getter := member.fget, type(properties))
    }


def is_below_leaf(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in LEAVES:
            return True
        frame = frame.f_back
    return False


def stays_and_returns(entered: Sequence[str]) -> tuple[int, int]:
    stays = [file for file, _ in groupby(entered)]
    return len(stays), len(stays) - len(set(stays))


def test_a_file_that_is_left_and_entered_again_is_a_return() -> None:
    assert stays_and_returns(["a", "a", "b", "a", "c", "b"]) == (5, 2)


@pytest.mark.parametrize("kind", ["host", "recorded"])
@pytest.mark.parametrize("has_prompt", [False, True], ids=["decodes", "a prompt and decodes"])
def test_a_plan_is_walked_to_its_token_in_few_stays(kind: str, has_prompt: bool) -> None:
    model = CountingModel()
    cache = make_cache(model, 4)
    runner = RUNNERS[kind](model, cache, 4)
    plans = PlanBuilder(block_size=4)

    def add(seq_id: int) -> Row:
        plans.add(seq_id, [seq_id] * 5, sampling=sampler_params(temperature=0.0))
        return Row(seq_id, 5)

    runner.launch(wire.decode_plan(plans.plan([add(1), add(2)]), 0)).collect()
    for _ in range(2):
        runner.launch(wire.decode_plan(plans.plan([Row(1), Row(2)]), 0)).collect()
    rows = [Row(1), Row(2), *([add(3)] if has_prompt else [])]
    message = plans.plan(rows)
    entered = files_entered(lambda: runner.launch(wire.decode_plan(message, 0)))
    # The tokens are there, or the graph that samples them is queued, before they are recorded.
    last = len(entered) - 1 - entered[::-1].index("runner/state/sequence_table.py")
    stays, returns = stays_and_returns(entered[: last + 1])
    assert stays - 1 <= MAX_STAYS - STREAM_STAYS
    assert returns - 1 <= MAX_RETURNS - STREAM_RETURNS

"""What there is to do in a step, where a test cares for some of it only."""

from typing import Any

from scheduler_service.core.throughput import StepWork


def make_work(**fields: Any) -> StepWork:
    """A step of the given fields; of a single decode otherwise."""
    work = {
        "num_tokens": 1,
        "num_prefill_tokens": 0,
        "num_moves": 0,
        "swaps_in": False,
        "num_attended_pairs": 1,
        "num_prefill_pairs": 0,
    }
    return StepWork(**(work | fields))

"""Short pauses for Python's garbage collector in a process that keeps many objects."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

NUM_MIDDLE_COLLECTIONS = 2
"""Collections of the middle generation before a full one, instead of 10: it finds little to examine
and is over in a few milliseconds."""


@contextmanager
def imports_exempted() -> Iterator[None]:
    """A context for a service's imports, in which there is no garbage collection. What was imported
    is in no later one either.

    Modules consist of hundreds of thousands of objects that are kept. Collections while they are
    made would take a fifth of the time of importing torch.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def survivors_exempted() -> Iterator[None]:
    """A context in which an object that has survived a full garbage collection is in no later one;
    nor is one afterwards, if others were exempt before, for Python exempts all or none.

    Full collections would examine all objects again, which takes a core that caches 250,000 blocks
    up to 0.3 s, without a token for anybody. Objects are still freed by their reference counts, so
    only reference cycles must not be made of objects that are kept for long.
    """
    thresholds, were_others_exempt = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.callbacks.append(_exempt_survivors)
    gc.set_threshold(*thresholds[:2], NUM_MIDDLE_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(_exempt_survivors)
        if not were_others_exempt:
            gc.unfreeze()


def _exempt_survivors(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()

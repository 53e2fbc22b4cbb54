"""The kinds of runners that must all do the same, on a CPU. Tokens have the texts of
`tests/support/vocabularies.py`, whatever the model."""

from collections.abc import Callable
from typing import Any

import torch

from tests.support.vocabularies import grammars
from worker_service.adapters.peft_format import ModelAdapter
from worker_service.adapters.store import AdapterStore
from worker_service.errors import CaptureFailed
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.adapters import AdapterSlots
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.models.interface import Model
from worker_service.models.native import NativeModel
from worker_service.models.transformers_backend.model import TransformersModel
from worker_service.plan import monotonic_us
from worker_service.runner.device.cuda_graphs import CudaGraphRecorder, Replay
from worker_service.runner.device.drafts import DeviceHeadDrafter
from worker_service.runner.device.in_flight_step import DeviceEvent
from worker_service.runner.device.state import DeviceState, StateShape
from worker_service.runner.device.steps import DeviceSteps
from worker_service.runner.drafting.draft_states import DraftStates
from worker_service.runner.drafting.drafter import Drafter
from worker_service.runner.drafting.speculation import DraftLengths, Proposal, Speculation
from worker_service.runner.model_runner import ModelRunner

SIZES = [1, 2, 4, 8]
MIXED_SIZES = [4, 16, 32]
MAX_DRAFTS = 8
"""Of a sequence, if a head drafts on the device."""


def make_cache(
    model: Model,
    block_size: int = 4,
    *,
    num_gpu_blocks: int = 64,
    num_cpu_blocks: int = 0,
    num_draft_blocks: int = 0,
    device: torch.device | None = None,
) -> CacheEngine:
    """A cache for a model, on the CPU by default."""
    return CacheEngine(
        model.kv_cache_spec,
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=num_cpu_blocks,
        num_draft_blocks=num_draft_blocks,
        device=device or torch.device("cpu"),
    )


class HostEvent:
    """On a CPU, work is done when it is queued."""

    is_reached = True

    def __init__(self) -> None:
        self._time_us = monotonic_us()

    def wait(self) -> None:
        """Return at once."""

    def us_since(self, earlier: DeviceEvent) -> int:
        """Microseconds between the two."""
        assert isinstance(earlier, HostEvent)
        return self._time_us - earlier._time_us


class LateEvent:
    """A device that gets nowhere unless somebody waits for it."""

    def __init__(self) -> None:
        self.is_reached = False
        self._time_us = monotonic_us()

    def wait(self) -> None:
        """Let the device get here."""
        self.is_reached = True

    def us_since(self, earlier: DeviceEvent) -> int:
        """Microseconds between the two."""
        assert isinstance(earlier, LateEvent)
        return self._time_us - earlier._time_us


class EagerRecorder:
    """Records nothing: replays do the work again. What padding does can be seen on any device."""

    def record(self, work: Callable[[], None]) -> Replay:
        """Do the work once."""
        work()
        return work


def host(
    model: Model,
    cache: CacheEngine,
    block_size: int,
    adapters: AdapterStore[ModelAdapter] | None = None,
    speculation: Speculation | None = None,
) -> ModelRunner:
    """What a worker on a CPU has. adapters: those that sequences may have; None: none."""
    known = grammars(model.vocab_size)
    return ModelRunner(model, cache, block_size, known, speculation=speculation, adapters=adapters)


class AllDrafts(DraftLengths):
    """Chooses all drafts, and counts them and those that were accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_drafts = self.num_accepted = 0

    def choose(self, proposals: list[Proposal], num_tokens: int, num_sampling: int) -> list[int]:
        """All drafts of each proposal."""
        return [proposal.num_drafts for proposal in proposals]

    def record_drafts(self, row_id: int, num_drafts: int, num_right: int) -> None:
        """Count a row's drafts."""
        self.num_drafts += num_drafts
        self.num_accepted += num_right


MakeDrafter = Callable[[CacheEngine], Drafter]
"""Takes the cache with the drafts' keys and values."""


def speculating(
    make_drafter: MakeDrafter,
    lengths: AllDrafts,
    model: Model,
    cache: CacheEngine,
    block_size: int,
    adapters: AdapterStore[ModelAdapter] | None = None,
    kind: Callable[..., ModelRunner] = host,
) -> ModelRunner:
    """A runner of this kind with drafts, whatever they cost."""
    drafter, on_host = make_drafter(cache), kind is host
    states = None
    if len(cache.draft_blocks):
        states = DraftStates(cache, model.kv_cache_spec.groups(block_size))
    speculation = Speculation(drafter, lengths, edits_see_drafts=on_host, states=states)
    return kind(model, cache, block_size, adapters=adapters, speculation=speculation)


def _launching(
    model: Model,
    cache: CacheEngine,
    block_size: int,
    state: DeviceState,
    make_event: Callable[[], DeviceEvent],
    adapters: AdapterStore[ModelAdapter] | None,
    speculation: Speculation | None,
) -> ModelRunner:
    """Launches ahead. adapters: those that sequences may have, whose slots the model has; None:
    none."""
    slots = None if adapters is None else _slots_of(model)
    drafts = {"speculation": speculation}
    device = DeviceSteps(model, cache, state, make_event, adapters=slots, **drafts)
    known = grammars(model.vocab_size)
    return ModelRunner(model, cache, block_size, known, device=device, adapters=adapters, **drafts)


def _slots_of(model: Model) -> AdapterSlots:
    assert isinstance(model, NativeModel)
    assert isinstance(model.adapters, AdapterSlots)
    return model.adapters


def head_of(speculation: Speculation | None) -> DraftHead | None:
    """The head that drafts on the device, if one does."""
    drafter = None if speculation is None else speculation.drafter
    return drafter.head if isinstance(drafter, DeviceHeadDrafter) else None


def eager(
    model: Model,
    cache: CacheEngine,
    block_size: int,
    adapters: AdapterStore[ModelAdapter] | None = None,
    speculation: Speculation | None = None,
) -> ModelRunner:
    """Launches ahead, replays nothing."""
    state = DeviceState(model, cache, block_size, StateShape(max_drafts=MAX_DRAFTS))
    return _launching(model, cache, block_size, state, HostEvent, adapters, speculation)


def recorded(
    model: Model,
    cache: CacheEngine,
    block_size: int,
    num_rows: int = 64,
    adapters: AdapterStore[ModelAdapter] | None = None,
    speculation: Speculation | None = None,
) -> ModelRunner:
    """Replays steps in padded batches, on a device that is as late as can be, and which has room
    for `num_rows` sequences."""
    sizes: dict[str, Any] = {"num_rows": num_rows, "sizes": SIZES, "mixed": MIXED_SIZES}
    shape = StateShape(**sizes, with_adapters=adapters is not None, max_drafts=MAX_DRAFTS)
    head = head_of(speculation)
    state = DeviceState(model, cache, block_size, shape, EagerRecorder(), head=head)
    return _launching(model, cache, block_size, state, LateEvent, adapters, speculation)


def recorded_on_gpu(
    model: Model,
    cache: CacheEngine,
    block_size: int,
    adapters: AdapterStore[ModelAdapter] | None = None,
    speculation: Speculation | None = None,
) -> ModelRunner:
    """What a worker with a GPU has, less constraints: replays decodes, if the model can be
    recorded."""
    recorder = CudaGraphRecorder(cache.device_cache.device)
    slots = None if adapters is None else _slots_of(model)
    try:
        sizes: dict[str, Any] = {"sizes": SIZES, "mixed": MIXED_SIZES, "max_drafts": MAX_DRAFTS}
        shape = StateShape(**sizes, with_adapters=slots is not None)
        head = head_of(speculation)
        state = DeviceState(model, cache, block_size, shape, recorder, head=head)
    except CaptureFailed:
        if not isinstance(model, TransformersModel):  # some of which wait for the device
            raise
        state = DeviceState(model, cache, block_size, StateShape())
    drafts = {"speculation": speculation}
    device = DeviceSteps(model, cache, state, adapters=slots, **drafts)
    return ModelRunner(model, cache, block_size, device=device, adapters=adapters, **drafts)


MakeRunner = Callable[[Any, CacheEngine, int], ModelRunner]

RUNNERS: dict[str, Callable[..., ModelRunner]] = {
    "host": host,
    "eager": eager,
    "recorded": recorded,
}

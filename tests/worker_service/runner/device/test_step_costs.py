"""What a step costs beside the model: launches, copies between host and device, waits.

The device is a CPU here, and its queue of work is whatever torch is asked to compute.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagewire.v1 import context_pb2
from pagewire_kernels import reference
from pagewire_kernels.batch import RowAdapters, StepBatch
from pagewire_kernels.interface import Computed
from tests.support.counting_model import CountingModel
from tests.support.runners import MAX_DRAFTS, MIXED_SIZES, SIZES, AllDrafts, HostEvent
from tests.support.vocabularies import grammars
from tests.support.worker_driver import Row, sampler_params
from tests.worker_service.runner.device.test_head_drafts import CountingHead
from tests.worker_service.runner.device.test_launching_ahead import PARAMS, Pipeline
from worker_service.adapters.peft_format import LoraModule, ModelAdapter
from worker_service.adapters.store import AdapterStore
from worker_service.array_types import Int32Array
from worker_service.engine.executor import FinishedStep
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.runner.device.cuda_graphs import Replay
from worker_service.runner.device.drafts import DeviceHeadDrafter
from worker_service.runner.device.state import DeviceState, StateShape
from worker_service.runner.device.steps import DeviceSteps
from worker_service.runner.drafting.drafter import Draft, Drafter, SequenceDrafter
from worker_service.runner.drafting.speculation import Speculation
from worker_service.runner.model_runner import ModelRunner

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
"""Operations whose results the host must see."""

BY_KERNELS = {"prepare", "edit", "sample", "accept", "gather_logprobs"}
OF_DRAFTS = {"draft", "draft logits", "fuse", "write kv"}
KNOWN = {*BY_KERNELS, *OF_DRAFTS, "replay", "forward", "head"}
ALLOCATIONS = {"empty", "empty_like", "empty_strided"}


class Queue(TorchDispatchMode):
    """What is launched, in order; `inside` a replay or a call of the model it is counted apart."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.replayed: list[str] = []
        self.copies_in: list[int] = []
        self.copies_out: list[int] = []
        self.waits: list[str] = []
        self._is_replaying = False
        self._is_hidden = False

    def __enter__(self) -> "Queue":
        """Count from here on."""
        for counted in (self.launches, self.replayed, self.copies_in, self.copies_out, self.waits):
            counted.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self._is_hidden:
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func.overloadpacket.__name__
        if name in WAITING:
            self.waits.append(name)
        elif name == "copy_" and len(args) == 3 and args[2]:  # asynchronous, so it crosses over
            is_input = args[1].dtype == torch.uint8
            (self.copies_in if is_input else self.copies_out).append(args[1].nbytes)
        elif name not in ALLOCATIONS and not func.is_view:
            self.launch(name)

    def launch(self, name: str) -> None:
        (self.replayed if self._is_replaying else self.launches).append(name)

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Count what is done inside as one launch."""
        if not self._is_hidden:
            self.launch(name)
        before, self._is_hidden = self._is_hidden, True
        try:
            yield
        finally:
            self._is_hidden = before

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Count what is done inside as one launch, and what it consists of apart."""
        self.launch("replay")
        self._is_replaying = True
        try:
            yield
        finally:
            self._is_replaying = False


class CountedModel(CountingModel):
    """Each call is one launch."""

    def __init__(self, queue: Queue, *, captures: bool = False) -> None:
        """captures: hidden states for a head."""
        super().__init__()
        self._queue = queue
        self._captures = captures
        self.adapters: list[list[int] | None] = []
        """The slots of the rows of each forward pass, then of its head; None: no row has one."""

    def forward(self, batch: StepBatch) -> Tensor:
        with self._queue.one("forward"):
            self._record(batch.adapters)
            return super().forward(batch)

    def forward_to_logits(self, batch: StepBatch) -> Computed:
        hidden = self.forward(batch)
        return Computed(hidden, captured=(hidden,) if self._captures else ())

    def compute_logits(self, hidden_states: Tensor, adapters: RowAdapters = ()) -> Tensor:
        with self._queue.one("head"):
            self._record(adapters)
            return super().compute_logits(hidden_states, adapters)

    def _record(self, adapters: RowAdapters) -> None:
        self.adapters.append(adapters.tolist() if isinstance(adapters, Tensor) else None)


class CountedKernels:
    """Each of the reference's functions is one launch."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Callable[..., Any]:
        assert name in BY_KERNELS

        def run(*args: Any) -> Any:
            with self._queue.one(name):
                return getattr(reference, name)(*args)

        return run


class CountedReplays:
    """Records nothing: replays do the work again."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def record(self, work: Callable[[], None]) -> Replay:
        def replay() -> None:
            with self._queue.replay():
                work()

        replay()
        return replay


FORWARD = ["prepare", "forward"]
SAMPLING = ["head", "edit", "sample"]
REPLAYS = ["replay", "replay"]


class Cost(NamedTuple):
    """Of one launch."""

    copies_in: int = 1
    copies_out: int = 1
    others: int = 0
    """Launches of torch's own operations, at most."""
    launches: list[str] = REPLAYS


DECODES = {
    name: Cost()
    for name in (
        *("greedy", "random", "filtered", "penalties", "a bias"),
        *("not to end yet", "one word", "edits and filters"),
    )
} | {
    # The tokens that would complete a word are sent with the inputs, and stored.
    "bad words": Cost(others=4),
    # What a constraint allows is computed while the device is busy, and sent afterwards.
    "a constraint": Cost(copies_in=2),
    "log probabilities": Cost(others=6, launches=["replay", *SAMPLING, "gather_logprobs"]),
    "candidates": Cost(others=21, launches=["replay", "head", "edit", "edit", "sample"]),
}
OTHER_PARAMS = {
    "not to end yet": sampler_params(
        temperature=0.0, min_tokens=50, suppressed_token_ids=bytes([2, 0, 0, 0, 7, 0, 0, 0])
    ),
    "one word": sampler_params(
        temperature=0.0, bad_words=[{"token_ids": bytes([7, 0, 0, 0])}], presence_penalty=0.5
    ),
    "edits and filters": sampler_params(
        temperature=1.2,
        seed=3,
        top_k=20,
        repetition_penalty=1.05,
        logit_bias=[{"token_id": 3, "bias": 2.0}],
    ),
    "candidates": sampler_params(num_candidates=3),
}


ADAPTER = ModelAdapter.of_modules({"layer": LoraModule(torch.ones(1, 2), torch.ones(2, 1), 1.0)})
OF_ADAPTER = [
    context_pb2.ContextPart(kind=context_pb2.CONTEXT_KIND_ADAPTER, digest=ADAPTER.info.digest)
]
SLOT = 3


class OneSlot:
    """The adapter's place. Implements `PlacesAdapters`."""

    def place(self, digests: Sequence[bytes]) -> list[int]:
        assert [*digests] == [ADAPTER.info.digest]
        return [SLOT]


def _pipeline(
    queue: Queue,
    name: str,
    mixed: Sequence[int] = MIXED_SIZES,
    *,
    with_adapters: bool = False,
    drafter: Drafter | None = None,
) -> Pipeline:
    """Two sequences that have just computed their prompts, and whose blocks have room; the first
    has these parameters. mixed: numbers of tokens of mixed batches that are recorded;
    with_adapters: whether sequences may have `ADAPTER`; drafter: None adds no drafts."""
    adapters: AdapterStore[ModelAdapter] | None = None
    if with_adapters:
        adapters = AdapterStore(1)
        adapters.add(ADAPTER)

    def make_runner(model: CountingModel, cache: CacheEngine, block_size: int) -> ModelRunner:
        has_head = isinstance(drafter, DeviceHeadDrafter)
        counted, recorder = CountedModel(queue, captures=has_head), CountedReplays(queue)
        sizes: dict[str, Any] = {"sizes": SIZES, "mixed": mixed}
        max_drafts = MAX_DRAFTS if has_head else 0
        shape = StateShape(**sizes, with_adapters=with_adapters, max_drafts=max_drafts)
        kernels = CountedKernels(queue)
        head = drafter.head if isinstance(drafter, DeviceHeadDrafter) else None
        parts: dict[str, Any] = {"kernels": kernels, "head": head}
        state = DeviceState(counted, cache, block_size, shape, recorder, **parts)
        drafts = None if drafter is None else Speculation(drafter, AllDrafts())
        parts = {"adapters": OneSlot(), "speculation": drafts}
        device = DeviceSteps(counted, cache, state, make_event=HostEvent, **parts)
        known = grammars(model.vocab_size)
        return ModelRunner(counted, cache, block_size, known, device=device, adapters=adapters)

    pipeline = Pipeline(0, make_runner=make_runner, block_size=16)
    pipeline.bench.plans.add(1, [1, 2, 3], sampling=(PARAMS | OTHER_PARAMS)[name])
    pipeline.bench.plans.add(2, [4, 5])
    pipeline.launch([Row(1, 3), Row(2, 2)])
    return pipeline


@pytest.mark.parametrize("name", DECODES)
def test_a_decode_costs(name: str) -> None:
    queue = Queue()
    pipeline = _pipeline(queue, name)
    more: dict[str, Any] = {}
    if name == "candidates":
        more["appended_tokens"] = bytes([1, 0, 0, 0, 9, 0, 0, 0])
    with queue:
        pipeline.launch([Row(1), Row(2)], **more)
    cost = DECODES[name]
    assert (len(queue.copies_in), len(queue.copies_out)) == (cost.copies_in, cost.copies_out)
    known = [launch for launch in queue.launches if launch in KNOWN]
    assert known == cost.launches
    assert len(queue.launches) - len(known) <= cost.others
    assert queue.waits == []
    # The last hidden states are copied to where the second replay finds them.
    assert queue.replayed == [*FORWARD, "copy_", *(SAMPLING if known == REPLAYS else ())]


@pytest.mark.parametrize("mixed", [MIXED_SIZES, ()], ids=["recorded", "eager"])
@pytest.mark.parametrize("name", ["greedy", "penalties", "a bias", "a constraint"])
def test_a_mixed_batch_costs(name: str, mixed: Sequence[int]) -> None:
    queue = Queue()
    pipeline = _pipeline(queue, name, mixed)
    pipeline.bench.plans.add(3, [6] * 20)
    with queue:
        pipeline.launch([Row(1), Row(2), Row(3, 20)])
    assert len(queue.copies_in) == (2 if name == "a constraint" else 1)
    assert len(queue.copies_out) == 1
    # The new sequence's blocks, parameters and token are stored first.
    stored = ["index_fill_", "index_fill_", "index_put_", "index_copy_"]
    step = [*FORWARD, "index_select", *SAMPLING]
    assert queue.launches == [*stored, *(REPLAYS if mixed else step)]
    assert queue.replayed == (step if mixed else [])
    assert queue.waits == []


def test_a_chunk_that_does_not_sample_costs_one_replay() -> None:
    queue = Queue()
    pipeline = _pipeline(queue, "greedy")
    pipeline.bench.plans.add(3, [6] * 40)
    pipeline.launch([Row(3, 20, sample=False)])
    with queue:
        pipeline.launch([Row(3, 10, sample=False)])
    assert queue.launches == ["replay"]
    assert (len(queue.copies_in), queue.waits) == (1, [])


def test_a_prompt_with_log_probabilities_costs() -> None:
    queue = Queue()
    pipeline = _pipeline(queue, "greedy")
    asks = sampler_params(temperature=0.0, prompt_logprobs=2)
    pipeline.bench.plans.add(3, [6] * 20, sampling=asks)
    with queue:
        pipeline.launch([Row(1), Row(2), Row(3, 20)])
    assert (len(queue.copies_in), len(queue.copies_out)) == (1, 1)
    reports = ["head", "gather_logprobs"]
    assert [launch for launch in queue.launches if launch in KNOWN] == [
        *FORWARD,
        *reports,
        *SAMPLING,
    ]
    assert queue.waits == []


def test_more_blocks_cost_one_launch() -> None:
    queue = Queue()
    pipeline = _pipeline(queue, "greedy")
    for _ in range(13):
        pipeline.launch([Row(1), Row(2)])
    with queue:
        pipeline.launch([Row(1), Row(2)])  # the first one's 17th token
    assert queue.launches == ["index_put_", "replay", "replay"]
    assert (len(queue.copies_in), len(queue.copies_out)) == (1, 1)
    assert queue.waits == []


def _slots_of_launch(pipeline: Pipeline, queue: Queue, rows: Sequence[Row]) -> list[Any]:
    """Launch a step; the slots of its rows that the model and its head were called with."""
    model = pipeline.bench.runner._model
    assert isinstance(model, CountedModel)
    model.adapters.clear()
    with queue:
        pipeline.launch(rows)
    return model.adapters


def test_a_step_without_adapters_costs_what_it_does_where_there_are_none() -> None:
    queue = Queue()
    pipeline = _pipeline(queue, "greedy", with_adapters=True)
    assert _slots_of_launch(pipeline, queue, [Row(1), Row(2)]) == [None, None]
    assert (queue.launches, len(queue.copies_in), queue.waits) == (REPLAYS, 1, [])
    assert queue.replayed == [*FORWARD, "copy_", *SAMPLING]


@pytest.mark.parametrize("mixed", [MIXED_SIZES, ()], ids=["recorded", "eager"])
def test_rows_with_adapters_are_replayed_with_their_slots_in_the_same_copy(
    mixed: Sequence[int],
) -> None:
    queue = Queue()
    pipeline = _pipeline(queue, "greedy", mixed, with_adapters=True)
    pipeline.bench.plans.add(3, [6] * 3, context=OF_ADAPTER)
    rows = [Row(1), Row(2), Row(3, 3)]
    slots, of_sampled = _slots_of_launch(pipeline, queue, rows)
    padding = [-1] * (11 if mixed else 0)  # of 16 tokens and 4 rows
    assert slots == [-1, -1, *[SLOT] * 3, *padding]
    assert of_sampled == [-1, -1, SLOT, *padding[:1]]
    assert (len(queue.copies_in), queue.waits) == (1, [])
    decodes = _slots_of_launch(pipeline, queue, [Row(3), Row(1)])
    assert decodes == [[SLOT, -1], [SLOT, -1]]
    assert (queue.launches, len(queue.copies_in), queue.waits) == (REPLAYS, 1, [])
    assert queue.replayed == [*FORWARD, "copy_", *SAMPLING]


class Repeating(SequenceDrafter):
    """Proposes the last token again."""

    def follow(self, tokens: Int32Array, num_drafts: int, salt: np.uint64) -> Draft:
        return Draft(np.repeat(tokens[-1:], num_drafts))


@pytest.mark.parametrize("name", ["greedy", "penalties", "log probabilities"])
def test_a_step_with_drafts_costs_one_replay_and_sampling_apart(name: str) -> None:
    queue = Queue()
    pipeline = _pipeline(queue, name, drafter=Repeating())
    pipeline.bench.plans.grow(1, 3)
    with queue:
        pipeline.launch([Row(1), Row(2)], lookahead=bytes([3, 0]))
    reports = ["gather_logprobs"] if name == "log probabilities" else []
    verifying = ["replay", *SAMPLING, *reports, "accept"]
    assert [name for name in queue.launches if name in KNOWN] == verifying
    # Each place that is sampled at has a copy of its sequence's state.
    copies = ["index_select"] * 5
    assert [name for name in queue.launches if name == "index_select"][:5] == copies
    assert len(queue.launches) <= 25
    assert (len(queue.copies_in), len(queue.copies_out), queue.waits) == (1, 1, [])
    assert queue.replayed == [*FORWARD, "index_select"]


class CountedHead(CountingHead):
    """Each call is one launch."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue

    def fuse(self, captured: Sequence[Tensor]) -> Tensor:
        with self._queue.one("fuse"):
            return super().fuse(captured)

    def __call__(self, batch: StepBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        with self._queue.one("draft"):
            return super().__call__(batch, hidden)

    def write_kv(self, batch: StepBatch, hidden: Tensor) -> None:
        with self._queue.one("write kv"):
            super().write_kv(batch, hidden)

    def compute_logits(self, rows: Tensor) -> Tensor:
        with self._queue.one("draft logits"):
            return super().compute_logits(rows)


@pytest.mark.parametrize("name", ["greedy", "penalties"])
def test_a_step_with_drafts_of_a_head_costs_no_further_copy(name: str) -> None:
    """The head reads what is on the device, and what is sent with the step's inputs. Each place is
    one replay, unless rows have penalties."""
    queue = Queue()
    head: Any = CountedHead(queue)
    pipeline = _pipeline(queue, name, drafter=DeviceHeadDrafter(head, ()))
    for counts in ([3, 1], [0, 2]):
        for seq_id, count in enumerate(counts, 1):
            pipeline.bench.plans.grow(seq_id, count)
        with queue:
            pipeline.launch([Row(1), Row(2)], lookahead=bytes(counts))
        passes = ["prepare", "draft", "draft logits", "edit", "sample"] * max(counts)
        is_replayed = name == "greedy" or not counts[0]
        drafting = ["replay"] * max(counts) if is_replayed else passes
        observing = ["accept", "fuse", "write kv"]
        known = [launch for launch in queue.launches if launch in KNOWN]
        assert known == [*drafting, "prepare", "replay", *SAMPLING, *observing]
        replayed = [launch for launch in queue.replayed if launch in KNOWN]
        assert replayed == [*(passes if is_replayed else ()), *FORWARD]
        num_others = len(queue.launches) - len(known)
        assert num_others <= 35 + (0 if is_replayed else 25 * max(counts))
        if is_replayed:  # the inputs of all places, the first place, and the hidden states
            first = queue.launches.index("replay")
            assert queue.launches[first - 3 : first] == ["copy_", "zero_", "index_select"]
        assert (len(queue.copies_in), len(queue.copies_out), queue.waits) == (1, 1, [])
    with queue:
        pipeline.launch([Row(1), Row(2)])
    assert [launch for launch in queue.launches if launch in KNOWN] == [
        "prepare",
        *REPLAYS,
        "fuse",
        "write kv",
    ]
    assert (len(queue.copies_in), len(queue.copies_out), queue.waits) == (1, 1, [])


def test_sequences_that_are_not_due_for_drafts_are_launched_ahead() -> None:
    """Searches become rare while they find nothing."""

    class Nothing(SequenceDrafter):
        def follow(self, tokens: Int32Array, num_drafts: int, salt: np.uint64) -> Draft:
            return Draft(tokens[:0])

    pipeline = _pipeline(Queue(), "greedy", drafter=Nothing())
    pipeline.bench.plans.grow(1, 3)
    steps = [pipeline.launch([Row(1), Row(2)], lookahead=bytes([3, 0])) for _ in range(30)]
    assert not any(isinstance(step, FinishedStep) for step in steps)

"""A head drafts on the device, behind steps whose tokens the host has yet to read."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.interface import Computed
from tests.support.counting_model import VOCAB_SIZE, CountingModel, next_token
from tests.support.runners import SIZES, AllDrafts, eager, host, recorded, speculating
from tests.support.worker_driver import Row, column
from tests.worker_service.runner.device.test_launching_ahead import (
    PARAMS,
    Pipeline,
    prompts,
    tokens_by_row,
)
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.plan import StepResult
from worker_service.runner.device.drafts import DeviceHeadDrafter
from worker_service.runner.model_runner import ModelRunner

NUM_STEPS = 14


class CapturingModel(CountingModel):
    """Captures its hidden states, the checksums."""

    def forward_to_logits(self, batch: StepBatch) -> Computed:
        """As native models with a head do."""
        hidden = self.forward(batch)
        return Computed(hidden, captured=(hidden,))


class CountingHead:
    """Continues the checksum of a `CountingModel` by the next token, and predicts a wrong token for
    every fifth checksum. It keeps nothing in a cache, but counts the rows that it writes."""

    def __init__(self, max_model_len: int = 256) -> None:
        self.max_model_len = max_model_len
        self.hidden_like = torch.empty(0, 1)
        self.written: list[tuple[int, int]] = []
        """Slot, and token after it, of each row that is written."""
        self.batch_sizes: list[int] = []
        """Rows of each forward pass."""

    def fuse(self, captured: Sequence[Tensor]) -> Tensor:
        """The hidden states of the model's rows."""
        return captured[0]

    def __call__(self, batch: StepBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Checksums that include the rows' tokens, twice."""
        [metadata] = batch.attention
        is_padding = metadata.context_lens == 0
        if not is_padding.all():  # else it is recorded
            self.batch_sizes.append(len(hidden))
        assert is_padding.equal(metadata.slot_mapping < 0)
        lengths = torch.where(is_padding, 0, batch.positions + 1)
        assert metadata.context_lens.equal(lengths.int())
        self._record(batch, ~is_padding)
        added = (batch.positions + 2) * (batch.token_ids + 1)
        summed = (hidden + added.unsqueeze(1)) % VOCAB_SIZE
        return summed, summed

    def write_kv(self, batch: StepBatch, hidden: Tensor) -> None:
        """Record the rows."""
        assert len(hidden) == len(batch.token_ids)
        assert int(batch.attention[0].slot_mapping.min()) >= 0
        self._record(batch, torch.ones_like(batch.token_ids, dtype=torch.bool))

    def _record(self, batch: StepBatch, is_written: Tensor) -> None:
        assert int(batch.token_ids.min()) >= 0
        assert int(batch.positions.max()) < self.max_model_len
        slots, tokens = batch.attention[0].slot_mapping[is_written], batch.token_ids[is_written]
        self.written += zip(slots.tolist(), tokens.tolist(), strict=True)

    def compute_logits(self, rows: Tensor) -> Tensor:
        """Those of the model, most of the time."""
        rows = torch.where(rows % 5 == 0, rows + 1, rows)
        return CountingModel().compute_logits(rows)


class Drafting:
    """A pipeline of steps with a head, and what its sequences output without drafts."""

    def __init__(
        self,
        names: Sequence[str],
        kind: Callable[..., ModelRunner],
        depth: int = 99,
        max_head_len: int = 256,
    ) -> None:
        """names: of `PARAMS`, of each sequence."""
        self.params, self.requests = [PARAMS[name] for name in names], prompts(len(names))
        plain = Pipeline(0, make_runner=host, block_size=16)
        self._add_all(plain)
        for _ in range(90):
            plain.launch([Row(seq_id) for seq_id in self.requests])
        self.expected = tokens_by_row(plain.finish(), len(names))
        self.head, self.lengths = CountingHead(max_head_len), AllDrafts()

        def make_runner(_: CountingModel, cache: CacheEngine, block_size: int) -> ModelRunner:
            return speculating(
                lambda _: DeviceHeadDrafter(self.head, ()),  # type: ignore[arg-type]
                self.lengths,
                CapturingModel(),
                cache,
                block_size,
                kind=kind,
            )

        self.pipeline = Pipeline(depth, make_runner=make_runner, block_size=16)
        self._add_all(self.pipeline)

    def _add_all(self, pipeline: Pipeline) -> None:
        for (seq_id, prompt), sampling in zip(self.requests.items(), self.params, strict=True):
            pipeline.bench.plans.add(seq_id, prompt, sampling=sampling)
        pipeline.launch([Row(seq_id, len(prompt)) for seq_id, prompt in self.requests.items()])

    def launch(self, lookahead: Sequence[int], **fields: Any) -> Any:
        """Launch a step of the first sequences, with at most these drafts."""
        for seq_id, count in enumerate(lookahead, 1):
            self.pipeline.bench.plans.grow(seq_id, count)
        rows = [Row(seq_id) for seq_id in range(1, len(lookahead) + 1)]
        return self.pipeline.launch(rows, lookahead=bytes(lookahead), **fields)

    def assert_tokens(self, num_steps: int) -> list[list[int]]:
        """The tokens of the prompts' step and the next ones, which are those without drafts."""
        results = self.pipeline.finish()[: 1 + num_steps]
        for row, prompt in enumerate(self.requests.values()):
            self._assert_drafts(results, row, list(prompt))
        found = tokens_by_row(results, len(self.requests))
        wanted = zip(self.expected, found, strict=True)
        assert found == [tokens[: len(some)] for tokens, some in wanted]
        return found

    def _assert_drafts(self, results: Sequence[StepResult], row: int, tokens: list[int]) -> None:
        """A draft is wrong only where the head predicts a wrong token. tokens: the row's prompt, to
        which its outputs are appended."""
        for result in results:
            count, num_drafts, start = 1, 0, row
            if result.num_sampled is not None and result.num_drafts is not None:
                count, num_drafts = int(result.num_sampled[row]), int(result.num_drafts[row])
                start = int(result.num_sampled[:row].sum())
            brought = result.token_ids[start : start + count].tolist()
            if count - 1 < num_drafts:
                assert next_token([*tokens, *brought[:-1]]) % 5 == 0
            tokens += brought


def ragged(step: int, num_rows: int) -> list[int]:
    """Numbers of drafts that differ by row, and from step to step."""
    return [(2 * step + 3 * row) % 6 for row in range(num_rows)]


@pytest.mark.parametrize("kind", [eager, recorded])
@pytest.mark.parametrize(
    "names", [["greedy"], ["greedy", "penalties", "random", "filtered", "log probabilities"]]
)
def test_no_step_with_drafts_of_a_head_is_waited_for(names: list[str], kind: Any) -> None:
    """A sequence that is forgotten with drafts in flight leaves nothing to that which gets its
    row."""
    drafting = Drafting(names, kind)
    lookahead = [ragged(step, len(names)) for step in range(NUM_STEPS)]
    steps = [drafting.launch(counts) for counts in lookahead]
    if kind is recorded:
        assert not any(step.is_available for step in steps), "nothing waits for any of them"
    pipeline, last = drafting.pipeline, len(names) + 1
    pipeline.bench.plans.add(last, drafting.requests[1], sampling=drafting.params[0])
    prompt = Row(last, len(drafting.requests[1]))
    steps += [pipeline.launch([prompt], forget_seq_ids=column([1]))]
    for _ in range(3):
        pipeline.bench.plans.grow(last, 2)
        steps += [pipeline.launch([Row(last)], lookahead=b"\x02")]
    if kind is recorded:
        assert not any(step.is_available for step in steps)
    found = drafting.assert_tokens(NUM_STEPS)
    assert all(len(tokens) > 1.5 * NUM_STEPS for tokens in found)
    results = pipeline.results
    num_drafts = [
        [0] * len(names) if result.num_drafts is None else result.num_drafts.tolist()
        for result in results[1 : 1 + NUM_STEPS]
    ]
    assert num_drafts == lookahead
    num_accepted = sum(map(len, found)) - (1 + NUM_STEPS) * len(names)
    assert num_accepted < np.sum(num_drafts), "some drafts are wrong"
    [again] = tokens_by_row(results[1 + NUM_STEPS :], 1)
    assert again == drafting.expected[0][: len(again)]
    assert len(again) > 4


@pytest.mark.parametrize("num_rows", [1, 3, 5, 9])
def test_replayed_passes_leave_what_eager_ones_do(num_rows: int) -> None:
    """Numbers of rows that fall from place to place, with padding; nine rows are beyond the
    largest graph."""
    kinds = ["random", "greedy", "filtered", "a bias"]
    names = [kinds[row % len(kinds)] for row in range(num_rows)]
    left = []
    for kind in (eager, recorded):
        drafting = Drafting(names, kind)
        for step in range(NUM_STEPS):
            drafting.launch(ragged(step, num_rows))
        drafting.assert_tokens(NUM_STEPS)
        head, speculation = drafting.head, drafting.pipeline.bench.runner._speculation
        assert speculation is not None
        drafter = speculation.drafter
        assert isinstance(drafter, DeviceHeadDrafter)
        assert (drafter.graphs is not None) == (kind is recorded)
        left.append((head.written, drafter.tables.drafts[:num_rows], drafter.hidden[:num_rows]))
        is_replayed = kind is recorded and num_rows <= max(SIZES)
        assert (set(head.batch_sizes) <= set(SIZES)) == (is_replayed or num_rows == 1)
    [written, drafts, hidden], [again, drafts_again, hidden_again] = left
    assert written == again
    assert drafts.any()
    assert drafts.equal(drafts_again)
    assert hidden.equal(hidden_again)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", [eager, recorded])
def test_rows_with_constraints_or_bad_words_have_no_drafts_and_the_others_do(
    kind: Any, depth: int
) -> None:
    names = ["a constraint", "greedy", "bad words", "penalties"]
    drafting = Drafting(names, kind, depth)
    for _ in range(NUM_STEPS):
        drafting.launch([3, 3, 3, 3])
    found = drafting.assert_tokens(NUM_STEPS)
    assert [len(tokens) for tokens in found[::2]] == [1 + NUM_STEPS] * 2
    assert all(len(tokens) > 1.5 * NUM_STEPS for tokens in found[1::2])


def test_a_step_that_the_host_computes_has_no_drafts_nor_has_the_next() -> None:
    """It is beyond the rows of the device, which does not learn its hidden states."""
    drafting = Drafting(["greedy"] * 3, partial(recorded, num_rows=2), 0)
    sizes = []
    for step in range(NUM_STEPS):
        drafting.launch([2, 2, 2] if step % 4 == 3 else [2, 2])
        sizes.append(len(drafting.head.batch_sizes))
    assert np.diff([0, *sizes]).tolist() == [0, 2, 2, 0] + [0, 2, 2, 0] * 2 + [0, 2]
    results = drafting.pipeline.finish()
    first: list[int] = []
    for result in results:
        counts = [1] if result.num_sampled is None else result.num_sampled
        first += result.token_ids[: counts[0]].tolist()
    assert first == drafting.expected[0][: len(first)]


def test_no_drafts_beyond_the_length_of_the_head() -> None:
    """Positions that the head would have if all drafts in flight were accepted count."""
    drafting = Drafting(["greedy", "random"], recorded, max_head_len=40)
    for _ in range(NUM_STEPS):
        drafting.launch([4, 4])
    assert 4 < len(drafting.head.batch_sizes) < 4 * NUM_STEPS
    found = drafting.assert_tokens(NUM_STEPS)
    assert all(len(tokens) > NUM_STEPS + 2 for tokens in found)


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("kind", [eager, recorded])
def test_a_fork_writes_its_last_row_again_in_its_own_block(kind: Any, num_drafts: int) -> None:
    """The row's token is the first that differs from its parent's, with which it shared a block."""
    head: Any = CountingHead()

    def make_runner(_: CountingModel, cache: CacheEngine, block_size: int) -> ModelRunner:
        drafter = DeviceHeadDrafter(head, ())
        model = CapturingModel()
        return speculating(lambda _: drafter, AllDrafts(), model, cache, block_size, kind=kind)

    pipeline, prompt, block = (
        Pipeline(0, make_runner=make_runner, block_size=16),
        [5, 6, 7, 8, 9],
        40,
    )
    plans = pipeline.bench.plans
    plans.add(1, prompt, sampling=PARAMS["random"])
    plans.grow(1, len(prompt))
    plans.lengths[1] = 0
    plans.fork(2, 1, sampling=PARAMS["random"], choice_index=1)
    pipeline.launch([Row(1, len(prompt)), Row(2, 0)])
    plans.tables[2] = [block]
    plans._updates += [2, 0, 0, block]
    head.written.clear()
    pipeline.launch([Row(1), Row(2)], lookahead=bytes([0, num_drafts]))
    of_parent, of_fork = pipeline.finish()[0].token_ids.tolist()
    assert of_parent != of_fork
    assert head.written[0] == (16 * block + 4, of_fork)
    pipeline.launch([Row(1), Row(2)])
    assert (16 * block + 4, of_fork) not in head.written[1:], "once"

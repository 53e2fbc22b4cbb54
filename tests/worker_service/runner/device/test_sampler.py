"""The sampler on a device, with the GPU's kernels, against the one on the host."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pagewire_kernels.batch import NOT_SAMPLED, SamplingRows
from tests.support.gpu_kernels import DEVICE, MARKS
from tests.support.plans import block_table, new_sequence, step_plan
from worker_service.cache_groups import CacheGroup
from worker_service.pinned_memory import Staging
from worker_service.plan import RowErrorReason, SamplerParams
from worker_service.runner.batch.sampling import sampling_batch
from worker_service.runner.device.buffers import StepBuffers
from worker_service.runner.device.reports import logprob_entries
from worker_service.runner.device.rows import DeviceRows
from worker_service.runner.device.sampler import DeviceSampler, sample_padding
from worker_service.runner.state.sequence_state import FAILURES
from worker_service.runner.state.sequence_table import PlanRows, SequenceTable
from worker_service.sampling.sampler import SamplingBatch, sample
from worker_service.structured.masks import MaskedRows

pytestmark = MARKS

VOCAB_SIZE = 300
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 2**63 + 5, "num_logprobs": 2},
    {"temperature": 1.5, "top_k": 7, "seed": 3},
    {"temperature": 1.5, "top_p": 0.6, "seed": 4, "num_logprobs": 0},
    {"temperature": 1.2, "min_p": 0.05, "top_k": 50, "top_p": 0.9, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 1.8, "presence_penalty": 0.5, "num_logprobs": 5},
    {"temperature": 1.0, "seed": 6, "bad_words": ((7,), (1, 9))},
    {"temperature": 1.0, "seed": 7},
]
GROUPS = [CacheGroup(block_tokens=4), CacheGroup(block_tokens=16)]
MASKED = [0, 4, 5, 7]
"""Rows of sequences with a constraint."""


class Sequences:
    """A table with a sequence for each of `PARAMS`, on the host and on the device."""

    def __init__(self) -> None:
        self.table = SequenceTable(
            vocab_size=VOCAB_SIZE, max_model_len=64, groups=GROUPS, num_gpu_blocks=128
        )
        self.on_device = DeviceRows(64, GROUPS, 64, VOCAB_SIZE, DEVICE)
        self.sampler = DeviceSampler(self.on_device, _kernels(), VOCAB_SIZE)
        for index, params in enumerate(PARAMS):
            self.add(index + 1, SamplerParams(**params))
        draw = torch.Generator().manual_seed(2)
        self.logits = torch.randn(len(PARAMS), VOCAB_SIZE, generator=draw) * 3

    def add(self, seq_id: int, params: SamplerParams) -> None:
        new = new_sequence(
            seq_id=seq_id,
            choice_index=seq_id % 3,
            token_ids=[1, 2, 1, 5],
            num_prompt_tokens=2,
            tables=(block_table([seq_id, seq_id + 1]), block_table([64 + seq_id], group=1)),
            sampling=params,
        )
        self.apply(new_sequences=(new,))

    def apply(self, **changes: Any) -> None:
        """Apply a plan of changes to the table, and record them for the device."""
        plan = step_plan(**changes)
        self.on_device.record(plan, self.table.apply(plan))

    def flush(self) -> None:
        self.on_device.apply(Staging(DEVICE).send(self.on_device.changes(self.table)))

    @property
    def batch(self) -> SamplingBatch:
        row_ids = np.array([self.table.rows[1 + i] for i in range(len(PARAMS))])
        return sampling_batch(row_ids, self.table, self.masked)

    @property
    def masked(self) -> MaskedRows:
        """Every other token, and a few."""
        draw = np.random.default_rng(1)
        bitmask = draw.integers(-(2**31), 2**31, (len(MASKED), 10)).astype(np.int32)
        bitmask[:, -1] &= (1 << VOCAB_SIZE % 32) - 1
        bitmask[1, 2:] = 0
        failed = np.zeros(len(MASKED), np.bool_)
        return MaskedRows(rows=np.array(MASKED), bitmask=bitmask, failed=failed)

    def rows(self, batch: SamplingBatch) -> SamplingRows:
        """The batch on the device."""
        mask_rows, bitmask = np.full(len(batch.row_ids), -1), self.sampler.no_masks
        if (masked := batch.masked) is not None:
            mask_rows[masked.rows] = np.arange(len(masked.rows))
            words = np.concatenate([masked.bitmask, masked.failed[:, None]], axis=1)
            bitmask = torch.from_numpy(words.astype(np.int32)).to(DEVICE)
        columns = (batch.row_ids, batch.positions, mask_rows)
        return SamplingRows(
            *(torch.from_numpy(column).int().to(DEVICE) for column in columns), bitmask
        )

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Outcomes of sampling a batch on the device."""
        outcome = torch.zeros(len(logits), dtype=torch.int64, device=DEVICE)
        self.sampler.sample(logits.clone(), self.rows(batch), outcome)
        return outcome


def _kernels() -> Any:
    from pagewire_kernels import triton as triton_kernels

    return triton_kernels


def test_both_samplers_pick_the_same_tokens_and_report_the_same() -> None:
    sequences = Sequences()
    sequences.flush()
    batch = sequences.batch
    expected = sample(sequences.logits.clone(), batch, sequences.table.sampling)
    logits = sequences.logits.to(DEVICE)
    outcome = sequences.sample(logits, batch)
    assert outcome.tolist() == expected.tokens.tolist()
    num_top = sequences.table.sampling.num_logprobs[batch.row_ids]
    wanted = np.flatnonzero(num_top >= 0)
    tensors = sequences.sampler.logprobs(logits[wanted], outcome[wanted], int(num_top.max()))
    columns = StepBuffers(DEVICE).fetch(tensors)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    entries = logprob_entries(wanted, num_top[wanted], columns)
    assert entries.keys() == expected.logprobs.keys()
    for row, entry in entries.items():
        other = expected.logprobs[row]
        assert (entry.token_ids.tolist(), entry.rank) == (other.token_ids.tolist(), other.rank)
        np.testing.assert_allclose(entry.logprobs, other.logprobs, atol=1e-5)


def test_a_row_whose_constraint_has_failed_tells_so() -> None:
    sequences = Sequences()
    sequences.flush()
    masked = sequences.masked
    masked.bitmask[2:] = 0
    masked.failed[3] = True
    batch = replace(sequences.batch, masked=masked)
    logits = sequences.logits.to(DEVICE)
    outcome = sequences.sample(logits, batch).tolist()
    reasons = {row: FAILURES.get(number) for row, number in enumerate(outcome) if number < 0}
    assert reasons == {5: RowErrorReason.NO_CANDIDATES, 7: RowErrorReason.CONSTRAINT}


def test_failures_keep_their_first_reason_until_the_row_is_used_again() -> None:
    sequences = Sequences()
    sequences.add(50, SamplerParams(temperature=0.0, bad_words=tuple((t,) for t in range(300))))
    sequences.flush()
    row_ids = np.array([sequences.table.rows[1], sequences.table.rows[50], sequences.table.rows[2]])
    batch = sampling_batch(row_ids, sequences.table)
    logits = sequences.logits[:3].to(DEVICE)
    logits[0, 3] = torch.nan
    reasons = [
        [FAILURES.get(int(number)) for number in sequences.sample(reason, batch)]
        for reason in (logits, logits.nan_to_num(0.0))
    ]
    non_finite, nothing = RowErrorReason.NON_FINITE_LOGITS, RowErrorReason.NO_CANDIDATES
    assert reasons == [[non_finite, nothing, None]] * 2
    none = np.empty(0, np.int64)
    renewed = PlanRows(none, row_ids[:1], none, none, none)
    sequences.on_device.record(step_plan(), renewed)
    sequences.flush()
    numbers = sequences.sample(logits.nan_to_num(0.0), batch).tolist()
    assert [number >= 0 for number in numbers] == [True, False, True]


def test_candidates_are_those_of_the_host() -> None:
    sequences = Sequences()
    params = SamplerParams(num_candidates=6, repetition_penalty=1.5, bad_words=((7,), (9,)))
    sequences.add(40, params)
    sequences.flush()
    batch = sampling_batch(np.array([sequences.table.rows[40]]), sequences.table)
    logits = sequences.logits[:1].clone()
    logits[0, [1, 7, 30, 200, 299]] = 9.0  # the first is penalised, the second excluded
    expected = sample(logits.clone(), batch, sequences.table.sampling).candidates[0]
    on_device, rows = logits.to(DEVICE), sequences.rows(batch)
    found = sequences.sampler.candidates(on_device, rows, 6)
    assert found.token_ids[0].tolist() == expected.token_ids.tolist()
    assert found.token_ids[0, :3].tolist() == [30, 200, 299]
    np.testing.assert_allclose(found.logprobs[0].cpu(), expected.logprobs, atol=1e-5)
    assert sequences.sample(on_device, batch).tolist() == [NOT_SAMPLED]


def test_all_that_sampling_may_do_can_be_done_for_rows_of_no_sequence() -> None:
    """So that memory is measured and kernels are compiled before the first request."""
    sample_padding(torch.zeros(3, VOCAB_SIZE, device=DEVICE), _kernels())


def test_the_device_has_the_tables_block_tables() -> None:
    sequences = Sequences()
    sequences.flush()
    table = sequences.table
    updates = np.array([[2, 0, 2, 40], [3, 0, 0, 41], [5, 1, 1, 100]], np.int32)
    sequences.apply(block_updates=updates)
    sequences.apply(forget_seq_ids=np.array([1, 4], np.int32))
    sequences.add(60, SamplerParams(temperature=0.0))
    sequences.flush()
    used = sorted(row_id for _, row_id in table.rows.items())
    for tables, on_device in zip(table.tables, sequences.on_device.block_tables, strict=True):
        np.testing.assert_array_equal(on_device[used].cpu().numpy(), tables.blocks[used])
    assert 100 in table.tables[1].blocks[used]
    assert sequences.on_device.changes(table) == []

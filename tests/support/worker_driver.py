"""What a core does with a worker, in small: builds plans and keeps block tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagewire.v1 import plan_pb2, sampling_pb2

GREEDY = sampling_pb2.SamplerParams(temperature=0.0, top_p=1.0, repetition_penalty=1.0)


def sampler_params(**fields: object) -> sampling_pb2.SamplerParams:
    """Parameters that filter and penalise nothing, with some fields changed."""
    defaults: dict[str, object] = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
    return sampling_pb2.SamplerParams(**(defaults | fields))  # type: ignore[arg-type]


def column(values: Iterable[int]) -> bytes:
    """An int32 column."""
    return np.array(list(values), "<i4").tobytes()


def values(data: bytes) -> list[int]:
    """What an int32 column holds."""
    return np.frombuffer(data, "<i4").tolist()


@dataclass
class Row:
    """One row of a plan to be."""

    seq_id: int
    num_tokens: int = 1
    sample: bool = True


def block_table(block_ids: Iterable[int]) -> list[plan_pb2.BlockTable]:
    """A sequence's block table in the first group, and in no other."""
    return [plan_pb2.BlockTable(block_ids=column(block_ids))]


@dataclass
class PlanBuilder:
    """Builds plans with consecutive step ids; hands out blocks in ascending order."""

    epoch: int = 1
    block_size: int = 4
    step_id: int = 0
    next_block: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    """Tokens computed once all plans built so far are done."""
    _updates: list[int] = field(default_factory=list)
    _new: list[plan_pb2.NewSequence] = field(default_factory=list)
    _with_candidates: set[int] = field(default_factory=set)
    """Sequences whose rows bring candidates."""

    def add(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        *,
        num_prompt_tokens: int | None = None,
        sampling: sampling_pb2.SamplerParams = GREEDY,
        **fields: object,
    ) -> None:
        """A new sequence in the next plan."""
        self.tables[seq_id] = []
        self.lengths[seq_id] = 0
        self._new.append(
            plan_pb2.NewSequence(
                seq_id=seq_id,
                token_ids=column(token_ids),
                num_prompt_tokens=len(token_ids)
                if num_prompt_tokens is None
                else num_prompt_tokens,
                sampling=sampling,
                **fields,  # type: ignore[arg-type]
            )
        )

    def fork(
        self, seq_id: int, parent: int, *, sampling: sampling_pb2.SamplerParams, choice_index: int
    ) -> None:
        """A new sequence that shares its parent's blocks and computes nothing in the next plan."""
        self.tables[seq_id] = self.tables[parent]
        self.lengths[seq_id] = self.lengths[parent]
        self._new.append(
            plan_pb2.NewSequence(
                seq_id=seq_id,
                choice_index=choice_index,
                sampling=sampling,
                parent_seq_id=parent,
                tables=block_table(self.tables[parent]),
            )
        )

    def _output(self, row: Row) -> int:
        """What a row brings."""
        return 1 + (row.seq_id in self._with_candidates) if row.sample else 0

    def grow(self, seq_id: int, num_tokens: int) -> None:
        """Give a sequence the blocks for some more tokens."""
        self.lengths[seq_id] += num_tokens
        table = self.tables[seq_id]
        while len(table) * self.block_size < self.lengths[seq_id]:
            self._updates += [seq_id, 0, len(table), self.next_block]
            table.append(self.next_block)
            self.next_block += 1

    def plan(self, rows: Sequence[Row], **fields: object) -> plan_pb2.StepPlan:
        """The next plan, with blocks for what its rows compute."""
        for new in self._new:
            if new.sampling.HasField("num_candidates"):
                self._with_candidates.add(new.seq_id)
        for row in rows:
            self.grow(row.seq_id, row.num_tokens)
        self.step_id += 1
        plan = plan_pb2.StepPlan(
            epoch=self.epoch,
            step_id=self.step_id,
            new_sequences=self._new,
            block_updates=column(self._updates),
            seq_ids=column(row.seq_id for row in rows),
            num_tokens=column(row.num_tokens for row in rows),
            output=bytes(self._output(row) for row in rows),
        )
        plan.MergeFrom(plan_pb2.StepPlan(**fields))  # type: ignore[arg-type]
        self._new, self._updates = [], []
        return plan

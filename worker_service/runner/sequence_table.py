"""What the worker remembers of the sequences it was told of.

The core sends a sequence's tokens, blocks and parameters once; from then on a step names it by id.
Everything lives in columns by *slot*, a row number given to a sequence when it comes and reused
when it is forgotten, so that a step's inputs are a few gathers, whatever the sequences' lengths.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from worker_service.array_types import Int32Array, Int64Array
from worker_service.errors import InvalidPlan
from worker_service.plan import NewSequence, RowErrorReason
from worker_service.sampling.logit_edits import EditedRow
from worker_service.sampling.sampling_table import SamplingTable

NO_BLOCK = -1
UNKNOWN_TOKEN = -1
"""Stands for a token that the device has sampled and the host has not heard of."""

_INITIAL_ROWS = 64


class PromptLogprobsRequest(NamedTuple):
    """Which prompt log probabilities a sequence asked for."""

    start: int
    """Position of the first token reported."""

    num_top: int
    """Most probable tokens reported beside each token."""


class SequenceTable:
    """Tokens, block tables, progress and sampling state by slot.

    Invariants, for a slot in use: num_computed_tokens <= num_tokens; the first num_blocks entries
    of its block table are blocks of the cache, the others NO_BLOCK. A slot is in use or free, never
    both.

    Sequences divide into `num_parts` parts by their slots. A new one gets a slot of the smallest
    part, so that parts stay even while sequences come and go.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        num_gpu_blocks: int,
        num_parts: int = 1,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_gpu_blocks = num_gpu_blocks
        max_blocks = -(-max_model_len // block_size)
        # One more than the model's length: the last position may still sample. Zeroed by the
        # operating system, so a page costs memory only once tokens are written to it.
        self.token_ids = np.zeros((_INITIAL_ROWS, max_model_len + 1), np.int32)
        self.block_tables = np.full((_INITIAL_ROWS, max_blocks), NO_BLOCK, np.int32)
        self.num_tokens = np.zeros(_INITIAL_ROWS, np.int64)
        self.num_prompt_tokens = np.zeros(_INITIAL_ROWS, np.int64)
        self.num_computed_tokens = np.zeros(_INITIAL_ROWS, np.int64)
        self.num_blocks = np.zeros(_INITIAL_ROWS, np.int64)
        self.prompt_logprobs: dict[int, PromptLogprobsRequest] = {}
        """By slot, for the few that asked."""
        self.failures: dict[int, RowErrorReason] = {}
        """Why no token could be sampled, by slot: such a sequence stands still until forgotten."""
        self.sampling = SamplingTable(_INITIAL_ROWS)
        self._slot_of: dict[int, int] = {}
        self._free_slots: list[list[int]] = [[] for _ in range(num_parts)]
        """Of each part, the next to be taken last."""
        self._part_sizes = [0] * num_parts
        self._add_slots(0, _INITIAL_ROWS)

    def __len__(self) -> int:
        """Number of sequences known."""
        return len(self._slot_of)

    def __contains__(self, seq_id: int) -> bool:
        """Whether a sequence is known."""
        return seq_id in self._slot_of

    def slots(self, seq_ids: Int32Array, field: str) -> Int64Array:
        """The slots of known sequences. Raises InvalidPlan, naming the plan's field."""
        slot_of = self._slot_of
        try:
            slots = [slot_of[seq_id] for seq_id in seq_ids.tolist()]
        except KeyError as error:
            raise InvalidPlan(field, f"sequence {error.args[0]} is not known here") from None
        return np.array(slots, np.int64)

    @property
    def num_parts(self) -> int:
        """Parts that the sequences divide into."""
        return len(self._free_slots)

    def parts(self, slots: Int64Array) -> Int64Array:
        """The part that each of some sequences belongs to, for as long as it is known."""
        return slots % self.num_parts

    def slot(self, seq_id: int) -> int:
        """The slot of a known sequence."""
        return self._slot_of[seq_id]

    def forget(self, seq_ids: Int32Array) -> None:
        """Drop all state of these sequences."""
        if len(seq_ids) == 0:
            return
        slots = self.slots(seq_ids, "forget_seq_ids")
        if len(np.unique(slots)) != len(slots):
            raise InvalidPlan("forget_seq_ids", "a sequence is named twice")
        for seq_id, slot in zip(seq_ids.tolist(), slots.tolist(), strict=True):
            del self._slot_of[seq_id]
            self.block_tables[slot, : self.num_blocks[slot]] = NO_BLOCK
            self.failures.pop(slot, None)
            self.prompt_logprobs.pop(slot, None)
            self.sampling.remove(slot)
            part = slot % self.num_parts
            self._free_slots[part].append(slot)
            self._part_sizes[part] -= 1

    def add(self, new: NewSequence, field: str) -> None:
        """Take in a sequence; a fork starts as its parent stands."""
        self._check_new(new, field)
        parent = None
        if new.parent_seq_id is not None:
            parent = self._slot_of.get(new.parent_seq_id)
            if parent is None:
                problem = f"sequence {new.parent_seq_id} is not known here"
                raise InvalidPlan(f"{field}.parent_seq_id", problem)
        slot = self._take_slot()
        self._slot_of[new.seq_id] = slot
        self._put_tokens(slot, new, parent, field)
        self.block_tables[slot, : len(new.block_ids)] = new.block_ids
        self.num_blocks[slot] = len(new.block_ids)
        if new.sampling.num_prompt_logprobs is not None:
            self.prompt_logprobs[slot] = PromptLogprobsRequest(
                new.prompt_logprobs_start, new.sampling.num_prompt_logprobs
            )
        if parent is not None and parent in self.failures:
            self.failures[slot] = self.failures[parent]
        prompt_end, end = self.num_prompt_tokens[slot], self.num_tokens[slot]
        tokens = self.token_ids[slot]
        self.sampling.put(
            slot, new.sampling, new.choice_index, tokens[:prompt_end], tokens[prompt_end:end]
        )

    def update_blocks(self, updates: Int32Array) -> None:
        """Set or append block table entries. updates: [n, 3] as in the plan."""
        if len(updates) == 0:
            return
        slots = self.slots(updates[:, 0], "block_updates")
        indices, blocks = updates[:, 1], updates[:, 2]
        self.check_blocks(blocks, "block_updates")
        if indices.min() < 0 or indices.max() >= self.block_tables.shape[1]:
            limit = self.block_tables.shape[1] - 1
            raise InvalidPlan("block_updates", f"expected table indices from 0 to {limit}")
        self.block_tables[slots, indices] = blocks
        np.maximum.at(self.num_blocks, slots, indices.astype(np.int64) + 1)
        if (self.block_tables[slots, np.maximum(indices - 1, 0)] == NO_BLOCK).any():
            raise InvalidPlan("block_updates", "an entry lies more than one past its table's end")

    def append_chosen(self, chosen: Int32Array) -> None:
        """Append the tokens that the core chose. chosen: [n, 2] as in the plan."""
        if len(chosen) == 0:
            return
        field = "appended_tokens"
        slots, tokens = self.slots(chosen[:, 0], field), chosen[:, 1]
        self._check_tokens(tokens, field)
        if len(np.unique(slots)) != len(slots):
            raise InvalidPlan(field, "a sequence is named twice")
        if (self.sampling.num_candidates[slots] == 0).any():
            raise InvalidPlan(field, "a sequence whose tokens the worker chooses is named")
        if self.num_tokens[slots].max() >= self.max_model_len:
            raise InvalidPlan(field, f"expected at most {self.max_model_len} tokens in all")
        self.append_tokens(slots, tokens.astype(np.int64))

    def append_tokens(self, slots: Int64Array, tokens: Int64Array) -> None:
        """Append one token to each of these sequences."""
        self.token_ids[slots, self.num_tokens[slots]] = tokens
        self.num_tokens[slots] += 1
        self.sampling.append(slots, tokens)

    def expect_tokens(self, slots: Int64Array) -> Int64Array:
        """Append an unknown token to each of these sequences. Returns the tokens' positions."""
        places = self.num_tokens[slots]
        self.token_ids[slots, places] = UNKNOWN_TOKEN
        self.num_tokens[slots] += 1
        return places

    def resolve_tokens(self, slots: Int64Array, places: Int64Array, tokens: Int64Array) -> None:
        """Take note of tokens that were unknown, at the positions that `expect_tokens` gave."""
        self.token_ids[slots, places] = tokens
        self.sampling.append(slots, tokens)

    def take_back(self, slot: int, reason: RowErrorReason) -> None:
        """There is no token where one was expected: the sequence has failed."""
        self.num_tokens[slot] -= 1
        self.failures[slot] = reason

    @property
    def num_slots(self) -> int:
        """Sequences there is room for before the columns grow."""
        return len(self.num_tokens)

    def used_slots(self) -> list[int]:
        """Slots that sequences have."""
        return list(self._slot_of.values())

    def output(self, slot: int) -> Int32Array:
        """A sequence's output tokens so far, unknown ones among them."""
        return self.token_ids[slot, self.num_prompt_tokens[slot] : self.num_tokens[slot]]

    def edited_rows(self, slots: Int64Array) -> list[EditedRow]:
        """Those of the batch's rows whose logits need edits."""
        edits = self.sampling.edits
        if not edits:
            return []
        return [
            EditedRow(row, edits[slot], self.output(slot))
            for row, slot in enumerate(slots.tolist())
            if slot in edits
        ]

    def check_blocks(self, blocks: Int32Array, field: str) -> None:
        """Raises InvalidPlan unless all are blocks of the device cache."""
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self.num_gpu_blocks):
            expected = f"expected blocks from 0 to {self.num_gpu_blocks - 1}"
            raise InvalidPlan(field, f"{expected}, got {blocks.min()} to {blocks.max()}")

    def _check_new(self, new: NewSequence, field: str) -> None:
        if not 0 < new.seq_id < 2**31:
            raise InvalidPlan(f"{field}.seq_id", f"expected 1 to 2^31 - 1, got {new.seq_id}")
        if new.seq_id in self._slot_of:
            raise InvalidPlan(f"{field}.seq_id", f"sequence {new.seq_id} is known already")
        self._check_tokens(new.token_ids, f"{field}.token_ids")
        self.check_blocks(new.block_ids, f"{field}.block_ids")
        if len(new.block_ids) > self.block_tables.shape[1]:
            limit = self.block_tables.shape[1]
            raise InvalidPlan(f"{field}.block_ids", f"expected at most {limit} blocks")
        for name in ("bias_token_ids", "suppressed_token_ids"):
            self._check_tokens(getattr(new.sampling, name), f"{field}.sampling.{name}")
        if (constraint := new.sampling.constraint) is not None:
            for name in ("end_token_ids", "last_token_ids"):
                path = f"{field}.sampling.constraint.{name}"
                self._check_tokens(getattr(constraint, name), path)
        for word in new.sampling.bad_words:
            self._check_tokens(np.array(word), f"{field}.sampling.bad_words")
        if new.parent_seq_id is not None:
            return
        num_tokens = len(new.token_ids)
        if not 1 <= new.num_prompt_tokens <= num_tokens:
            expected = f"expected 1 to {num_tokens}, the number of tokens"
            raise InvalidPlan(
                f"{field}.num_prompt_tokens", f"{expected}, got {new.num_prompt_tokens}"
            )
        capacity = min(num_tokens, len(new.block_ids) * self.block_size)
        if new.num_computed_tokens > capacity:
            expected = f"expected at most {capacity}, as many as tokens and blocks hold"
            got = new.num_computed_tokens
            raise InvalidPlan(f"{field}.num_computed_tokens", f"{expected}, got {got}")

    def _check_tokens(self, token_ids: npt.NDArray[np.integer], field: str) -> None:
        if len(token_ids) and (token_ids.min() < 0 or token_ids.max() >= self.vocab_size):
            raise InvalidPlan(field, f"expected token ids from 0 to {self.vocab_size - 1}")

    def _put_tokens(self, slot: int, new: NewSequence, parent: int | None, field: str) -> None:
        inherited = 0 if parent is None else int(self.num_tokens[parent])
        end = inherited + len(new.token_ids)
        if end > self.max_model_len:
            problem = f"expected at most {self.max_model_len} tokens in all, got {end}"
            raise InvalidPlan(f"{field}.token_ids", problem)
        if parent is None:
            self.num_prompt_tokens[slot] = new.num_prompt_tokens
            self.num_computed_tokens[slot] = new.num_computed_tokens
        else:
            self.token_ids[slot, :inherited] = self.token_ids[parent, :inherited]
            self.num_prompt_tokens[slot] = self.num_prompt_tokens[parent]
            self.num_computed_tokens[slot] = self.num_computed_tokens[parent]
        self.token_ids[slot, inherited:end] = new.token_ids
        self.num_tokens[slot] = end

    def _take_slot(self) -> int:
        if not any(self._free_slots):
            self._grow()
        parts = [part for part, free in enumerate(self._free_slots) if free]
        part = min(parts, key=self._part_sizes.__getitem__)
        self._part_sizes[part] += 1
        return self._free_slots[part].pop()

    def _add_slots(self, start: int, end: int) -> None:
        for slot in range(end - 1, start - 1, -1):
            self._free_slots[slot % self.num_parts].append(slot)

    def _grow(self) -> None:
        """Double the number of slots."""
        old = len(self.num_tokens)
        self.token_ids = _grown(self.token_ids, 0)
        self.block_tables = _grown(self.block_tables, NO_BLOCK)
        self.num_tokens = _grown(self.num_tokens, 0)
        self.num_prompt_tokens = _grown(self.num_prompt_tokens, 0)
        self.num_computed_tokens = _grown(self.num_computed_tokens, 0)
        self.num_blocks = _grown(self.num_blocks, 0)
        self.sampling.resize(2 * old)
        self._add_slots(old, 2 * old)


def _grown(column: Any, fill: int) -> Any:
    """The column with twice as many slots."""
    return np.concatenate([column, np.full_like(column, fill)])

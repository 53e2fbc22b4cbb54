"""Sampling parameters of all sequences the worker knows, as columns by slot."""

import numpy as np
import numpy.typing as npt

from worker_service.array_types import Int32Array
from worker_service.sampling.logit_edits import LogitEdits
from worker_service.sampling_params import SamplerParams

NO_LOGPROBS = -1


class SamplingTable:
    """One row per slot; the numbers in columns, so that a batch's are one gather each.

    Most sequences need no edits of single logits; those that do have a `LogitEdits` in `edits`.
    """

    def __init__(self, num_slots: int) -> None:
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float64)
        self.top_k = np.zeros(num_slots, np.int64)
        self.min_p = np.zeros(num_slots, np.float64)
        self.is_filtered = np.zeros(num_slots, np.bool_)
        """Whether top-p, top-k or min-p exclude anything."""
        self.seed = np.zeros(num_slots, np.uint64)
        self.choice_index = np.zeros(num_slots, np.uint32)
        self.num_logprobs = np.full(num_slots, NO_LOGPROBS, np.int32)
        self.num_candidates = np.zeros(num_slots, np.int32)
        """0: the worker chooses the token."""
        self.is_plain = np.zeros(num_slots, np.bool_)
        """Whether the largest logit's token is all that is wanted, but for edits."""
        self.edits: dict[int, LogitEdits] = {}

    def resize(self, num_slots: int) -> None:
        """Make room for more slots."""
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                grown = np.zeros(num_slots, column.dtype)
                grown[: len(column)] = column
                setattr(self, name, grown)

    def put(
        self,
        slot: int,
        params: SamplerParams,
        choice_index: int,
        prompt: Int32Array,
        output: Int32Array,
    ) -> None:
        """Take in a sequence with the tokens it has so far."""
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k
        self.min_p[slot] = params.min_p
        self.is_filtered[slot] = params.has_filters
        self.seed[slot] = params.seed
        self.choice_index[slot] = choice_index
        reports = params.num_candidates is not None
        self.num_candidates[slot] = params.num_candidates or 0
        self.temperature[slot] = 0.0 if reports else params.temperature
        self.num_logprobs[slot] = (
            NO_LOGPROBS if reports or params.num_logprobs is None else params.num_logprobs
        )
        self.is_plain[slot] = (
            not reports and params.temperature == 0.0 and params.num_logprobs is None
        )
        if params.has_penalties or params.has_constraints:
            self.edits[slot] = LogitEdits.of(params, prompt, output)

    def append(self, slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Take note of one more output token of each of these slots."""
        if not self.edits:
            return
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            edits = self.edits.get(slot)
            if edits is not None and edits.occurrences is not None:
                edits.occurrences.append(token)

    def remove(self, slot: int) -> None:
        """Forget the sequence in a slot."""
        self.edits.pop(slot, None)

"""How the tokens of all sequences are sampled."""

import numpy as np
import numpy.typing as npt

from worker_service.array_types import Int32Array
from worker_service.plan import FILTERS, SamplerParams
from worker_service.sampling.logit_edits import LogitEdits

NO_LOGPROBS = -1


class SamplingTable:
    """Sampling parameters, one row per sequence. Each is a column, gathered at once for a batch.

    Most sequences need no edits of single logits; those that do have a `LogitEdits` in `edits`, by
    row.
    """

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.zeros(num_rows, np.float32)
        self.filters = {name: np.full(num_rows, neutral) for name, neutral in FILTERS.items()}
        """Columns of float64 or int64, by parameter."""
        self.is_filtered = np.zeros(num_rows, np.bool_)
        """Whether any filter excludes anything."""
        self.seed = np.zeros(num_rows, np.uint64)
        self.choice_index = np.zeros(num_rows, np.uint32)
        self.num_logprobs = np.full(num_rows, NO_LOGPROBS, np.int32)
        self.num_candidates = np.zeros(num_rows, np.int32)
        """Candidates that are returned for the core to choose from; 0: the worker samples."""
        self.is_plain = np.zeros(num_rows, np.bool_)
        """Whether argmax suffices unless there are edits: greedy, without log probabilities."""
        self.edits: dict[int, LogitEdits] = {}

    def resize(self, num_rows: int) -> None:
        """Grow to `num_rows` rows."""
        for columns in (vars(self), self.filters):
            for name, column in columns.items():
                if isinstance(column, np.ndarray):
                    columns[name] = np.pad(column, (0, num_rows - len(column)))

    def put(
        self,
        row_id: int,
        params: SamplerParams,
        choice_index: int,
        prompt: Int32Array,
        output: Int32Array,
    ) -> None:
        """Add a sequence. prompt, output: its tokens so far."""
        for name, column in self.filters.items():
            column[row_id] = getattr(params, name)
        self.is_filtered[row_id] = params.has_filters
        self.seed[row_id] = params.seed
        self.choice_index[row_id] = choice_index
        reports = params.num_candidates is not None
        self.num_candidates[row_id] = params.num_candidates or 0
        self.temperature[row_id] = 0.0 if reports else params.temperature
        self.num_logprobs[row_id] = (
            NO_LOGPROBS if reports or params.num_logprobs is None else params.num_logprobs
        )
        self.is_plain[row_id] = (
            not reports and params.temperature == 0.0 and params.num_logprobs is None
        )
        if params.has_penalties or params.has_constraints:
            self.edits[row_id] = LogitEdits.of(params, prompt, output)

    def append(self, row_ids: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Record one more output token of each of these rows; a row may occur repeatedly."""
        if not self.edits:
            return
        for row_id, token in zip(row_ids.tolist(), tokens.tolist(), strict=True):
            edits = self.edits.get(row_id)
            if edits is not None and edits.occurrences is not None:
                edits.occurrences.append(token)

    def remove(self, row_id: int) -> None:
        """Remove the sequence in this row."""
        self.edits.pop(row_id, None)

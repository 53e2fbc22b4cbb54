"""Log probabilities and candidates as a step's result holds them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """One sampled token's log probability, and those of the most probable tokens."""

    token_ids: npt.NDArray[np.int32]
    """The sampled token, then the most probable ones, most probable first."""

    logprobs: npt.NDArray[np.float32]
    rank: int
    """Of the sampled token; 1 is the most probable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """The tokens that may follow a sequence, for the core to choose among."""

    token_ids: npt.NDArray[np.int32]
    """Most probable first, the lowest id first among equals."""

    logprobs: npt.NDArray[np.float32]
    """After biases and penalties, not normalised again; all finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLogprobs:
    """Log probabilities of some consecutive prompt tokens."""

    start: int
    """Position in the prompt of the first one, from 1."""

    token_ids: npt.NDArray[np.int32]
    """[num_tokens, 1 + number of most probable ones]; first the prompt's own."""

    logprobs: npt.NDArray[np.float32]
    """The same shape."""

    ranks: npt.NDArray[np.int32]
    """[num_tokens]: of the prompt's own tokens."""

    def followed_by(self, other: "PromptLogprobs") -> "PromptLogprobs":
        """These and the tokens right after them."""
        return PromptLogprobs(
            start=self.start,
            token_ids=np.concatenate([self.token_ids, other.token_ids]),
            logprobs=np.concatenate([self.logprobs, other.logprobs]),
            ranks=np.concatenate([self.ranks, other.ranks]),
        )

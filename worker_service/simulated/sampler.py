"""Selection of a simulated sequence's next token, by sampling.proto's rules, among few candidates.

Probabilities halve from rank to rank, so only the first few ranks, and tokens that the parameters
name, can be chosen.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from pagewire_kernels.philox import DRAW_BITS, draw_bits
from worker_service.plan import Candidates
from worker_service.sampling_params import SamplerParams
from worker_service.simulated.model import NUM_LIKELY, NextToken


class SimulatedSampler:
    """Applies one sequence's parameters to distributions."""

    def __init__(self, params: SamplerParams, choice_index: int) -> None:
        self._params = params
        self._choice_index = choice_index
        self._suppressed = frozenset(params.suppressed_token_ids.tolist())
        values = params.bias_values.tolist()
        self._biases = dict(zip(params.bias_token_ids.tolist(), values, strict=True))
        self._is_edited = params.has_penalties or params.has_constraints
        self._is_plain = (
            params.temperature == 1.0 and not params.has_filters and not self._is_edited
        )

    def choose(
        self, distribution: NextToken, tokens: Sequence[int], num_prompt_tokens: int
    ) -> int | None:
        """The token after `tokens`; None if all are excluded."""
        params, position = self._params, len(tokens) - num_prompt_tokens
        if params.temperature == 0.0 and not self._is_edited:
            return distribution.token(0)
        if self._is_plain and distribution.vocab_size >= NUM_LIKELY:
            return distribution.drawn(draw_bits(params.seed, self._choice_index, position))
        prompt, output = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
        logits = self._candidates(distribution, prompt, output)
        if not logits:
            return None
        if params.temperature == 0.0:
            return min(logits, key=lambda token: (-logits[token], token))
        bits = draw_bits(params.seed, self._choice_index, position)
        return self._drawn(logits, bits * 2.0**-DRAW_BITS)

    def offer(
        self, distribution: NextToken, tokens: Sequence[int], num_prompt_tokens: int
    ) -> Candidates:
        """The most probable tokens that may follow `tokens`, as many as the parameters request."""
        prompt, output = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
        logprobs = self._candidates(distribution, prompt, output)
        best = sorted(logprobs.items(), key=lambda pair: (-pair[1], pair[0]))
        best = best[: self._params.num_candidates]
        return Candidates(
            token_ids=np.array([token for token, _ in best], np.int32),
            logprobs=np.array([logprob for _, logprob in best], np.float32),
        )

    def _candidates(
        self, distribution: NextToken, prompt: Sequence[int], output: Sequence[int]
    ) -> dict[int, float]:
        """The edited logits of all tokens that may be chosen."""
        params = self._params
        banned = self._banned(output)
        counts = Counter(output)
        occurred = set(counts)
        if params.repetition_penalty != 1.0:
            occurred.update(prompt)
        named = occurred | self._biases.keys() if self._is_edited else set()
        # Biases and penalties may move any of the named tokens away from the top.
        spread = math.ceil(max(params.temperature, 1.0))
        num_ranks = NUM_LIKELY * spread + len(banned) + len(named)
        num_ranks = max(num_ranks + (params.num_candidates or 0), params.top_k)
        logits = {
            distribution.token(rank): distribution.logprob(rank)
            for rank in range(min(num_ranks, distribution.vocab_size))
        }
        for token in named:
            logits[token] = self._edited(token, distribution, token in occurred, counts[token])
        return {token: value for token, value in logits.items() if token not in banned}

    def _edited(self, token: int, distribution: NextToken, has_occurred: bool, count: int) -> float:
        """One token's logit with its bias and penalties; `count`: occurrences in the output."""
        params = self._params
        logit = distribution.logprob(distribution.rank(token)) + self._biases.get(token, 0.0)
        if has_occurred:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        return logit - params.frequency_penalty * count - params.presence_penalty * (count > 0)

    def _banned(self, output: Sequence[int]) -> set[int]:
        """Tokens excluded after this output."""
        banned = {
            word[-1]
            for word in self._params.bad_words
            if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]
        }
        if len(output) < self._params.min_tokens:
            banned |= self._suppressed
        return banned

    def _drawn(self, logits: dict[int, float], uniform: float) -> int:
        """The token at a uniform number, of those that min-p, top-k and top-p keep."""
        params = self._params
        top = max(logits.values())
        weights = {
            token: math.exp((logit - top) / params.temperature) for token, logit in logits.items()
        }
        falling = sorted(weights.values(), reverse=True)
        cut = params.min_p
        if params.top_k:
            cut = max(cut, falling[min(params.top_k, len(falling)) - 1])
        if params.top_p < 1.0:
            cut = max(cut, _nucleus_cut([weight for weight in falling if weight >= cut], params))
        kept = sorted((token, weight) for token, weight in weights.items() if weight >= cut)
        target = uniform * math.fsum(weight for _, weight in kept)
        cumulative = 0.0
        for token, weight in kept:
            cumulative += weight
            if cumulative > target:
                return token
        return kept[-1][0]


def _nucleus_cut(falling: list[float], params: SamplerParams) -> float:
    """The smallest weight that top-p keeps."""
    goal, mass = params.top_p * math.fsum(falling), 0.0
    for weight in falling:
        mass += weight
        if mass >= goal:
            return weight
    return falling[-1]

"""The simulated model: a distribution over next tokens, made of integer hashes.

The content of a real KV cache at a position depends on all tokens up to it; here it is a
`History`, a 64-bit hash chained over them. A history determines a permutation of the vocabulary
(an affine one), in which the token of rank r has the probability 2^-(r+1). Tokens, ranks and log
probabilities are therefore consistent, as with a real model, and any mistake in a sequence's
content changes the sampled tokens.

All of it is plain 64-bit integer arithmetic: the same on every machine, and a matter of
microseconds.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from pagewire_kernels.philox import DRAW_BITS, draw_bits
from worker_service.array_types import Float32Array
from worker_service.plan import (
    Candidates,
    ContextKind,
    ContextPart,
    PoolingHead,
    PoolingParams,
    PoolingType,
    PromptLogprobs,
    SamplerParams,
    TokenLogprobs,
)

History = int
"""Hash of all tokens up to and including one position."""

NO_BLOCK = -1
"""Stands for a block that was released: its tokens will not be read again."""

START: History = 0x243F6A8885A308D3
"""The history before the first token."""

LN2 = math.log(2.0)

NUM_LIKELY = 64
"""The total probability of all further ranks is below the resolution of a draw."""

_WORD = 2**64 - 1


def extend(history: History, token: int) -> History:
    """The history one token later."""
    mixed = ((history ^ token) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _WORD
    return mixed ^ (mixed >> 29)


def hash_of(part: ContextPart) -> int:
    """A word for a part of a context: all its fields."""
    fields = f"{part.kind.name} {part.start} {part.length} ".encode()
    return int.from_bytes(blake2b(fields + part.digest, digest_size=8).digest())


def scramble(word: int) -> int:
    """A bijection of 64-bit words that leaves no pattern (Steele et al. 2014, SplitMix64)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


class NextToken:
    """The distribution of the token after a history."""

    def __init__(self, history: History, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._word = scramble(history)
        self._first = self._word % vocab_size

    def token(self, rank: int) -> int:
        """The token of a rank; 0 is the most probable. Ranks repeat after the last."""
        if rank == 0:
            return self._first
        return (self._first + rank * self._step()) % self.vocab_size

    def rank(self, token: int) -> int:
        """The rank of a token."""
        inverse = pow(self._step(), -1, self.vocab_size)
        return (token - self._first) * inverse % self.vocab_size

    def logprob(self, rank: int) -> float:
        """Log probability of the token of a rank; all together have the probability 1."""
        return -(rank + 1) * LN2 - math.log1p(-(2.0**-self.vocab_size))

    def drawn(self, draw: int) -> int:
        """The token at a draw, of 53 bits, when cumulating in the order of token ids.

        For vocabularies of at least `NUM_LIKELY` tokens. Ranks are placed among the tokens one by
        one, until the remaining ranks, whatever their tokens, cannot change the result; that takes
        about four.
        """
        target, step = draw << 11, self._step()
        placed: list[tuple[int, int]] = []
        token, remaining = self._first, 1 << NUM_LIKELY
        for _ in range(NUM_LIKELY):
            remaining >>= 1
            insort(placed, (token, remaining))
            below = 0
            for candidate, weight in placed:
                if target < below + remaining:
                    break
                if target < below + weight:
                    return candidate
                below += weight
            token = (token + step) % self.vocab_size
        return placed[-1][0]

    def _step(self) -> int:
        """Distance between the tokens of neighbouring ranks, without a factor in common with the
        vocabulary's size, so that all tokens are reached."""
        step = 1 + (self._word >> 32) % self.vocab_size
        while math.gcd(step, self.vocab_size) != 1:
            step += 1
        return step


@dataclass(kw_only=True, slots=True, eq=False)
class SimulatedSequence:
    """Tokens, their histories, and the blocks of their KV.

    Invariants: one history per token; num_checked <= num_computed <= len(tokens).
    """

    seq_id: int
    num_prompt_tokens: int
    salt: int = 0
    """In the content of its slots, which only sequences with the same salt may read."""

    context: tuple[ContextPart, ...] = ()
    """The parts that its histories depend on."""

    tokens: list[int] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)
    """One per token; the next token depends on the last one."""

    tables: list[list[int]] = field(default_factory=list)
    """A block table for each cache group; NO_BLOCK where a block was released."""

    num_computed: int = 0
    """Tokens whose KV is in the blocks."""

    num_checked: int = 0
    """Tokens whose slots were checked to hold this sequence's own KV. A slot cannot change while a
    sequence holds its block without a check, so none is checked twice."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        history = self.histories[-1] if self.histories else START
        for token in tokens:
            for part in self.context:
                if part.start == len(self.tokens):
                    history = extend(history, hash_of(part))
            history = extend(history, token)
            self.tokens.append(token)
            self.histories.append(history)

    def content(self, position: int) -> History:
        """What the slot of a position must hold."""
        return self.histories[position] ^ self.salt

    @property
    def num_source_tokens(self) -> int:
        """Tokens of the encoder's output that the sequence attends to: those of its media."""
        return sum(part.length for part in self.context if part.kind is ContextKind.MEDIA)

    def source(self) -> list[History]:
        """What the slots of its source must hold: one entry per token."""
        media = [hash_of(part) for part in self.context if part.kind is ContextKind.MEDIA]
        content = list(accumulate(media, extend, initial=START))[-1]
        return [extend(content, index) ^ self.salt for index in range(self.num_source_tokens)]

    def truncate(self, num_tokens: int) -> None:
        """Remove the tokens after the first ones, which drafts have overwritten."""
        del self.tokens[num_tokens:], self.histories[num_tokens:]
        self.num_computed = self.num_checked = num_tokens


def is_misguessed(history: History) -> bool:
    """Whether the draft after a history is wrong: about every fourth."""
    return scramble(history ^ 0x5851F42D4C957F2D) % 4 == 0


def token_logprobs(distribution: NextToken, token: int, num_top: int) -> TokenLogprobs:
    """A token's log probability and those of the most probable ones."""
    own = distribution.rank(token)
    ranks = [own, *range(num_top)]
    return TokenLogprobs(
        token_ids=np.array([token, *map(distribution.token, range(num_top))], np.int32),
        logprobs=np.array([distribution.logprob(rank) for rank in ranks], np.float32),
        rank=own + 1,
    )


def prompt_logprobs(
    sequence: SimulatedSequence, start: int, end: int, vocab_size: int, num_top: int
) -> PromptLogprobs:
    """Log probabilities of the prompt tokens from position `start`, at least 1, to `end`."""
    num_top = min(num_top, vocab_size)
    entries = [
        token_logprobs(
            NextToken(sequence.histories[position - 1], vocab_size),
            sequence.tokens[position],
            num_top,
        )
        for position in range(start, end)
    ]
    return PromptLogprobs(
        start=start,
        token_ids=np.stack([entry.token_ids for entry in entries]),
        logprobs=np.stack([entry.logprobs for entry in entries]),
        ranks=np.array([entry.rank for entry in entries], np.int32),
    )


VECTOR_SIZE = 16
"""Numbers in a hidden state."""


def pooled(
    sequence: SimulatedSequence, params: PoolingParams, start: int, num_labels: int
) -> Float32Array:
    """What a row brings that computes the tokens from `start` on: each token's hidden state is a
    function of its history. float32 [number of vectors, their size]"""
    histories, end = sequence.histories, sequence.num_computed
    which = {
        PoolingType.LAST: slice(end - 1, end),
        PoolingType.MEAN: slice(end),
        PoolingType.CLS: slice(1),
        PoolingType.ALL: slice(start, end),
    }[params.type]
    vectors = np.stack([_hidden_state(history) for history in histories[which]])
    if params.type is PoolingType.MEAN:
        vectors = vectors.mean(axis=0, keepdims=True)
    if params.head is PoolingHead.CLASSIFIER:
        return (vectors @ _label_weights(num_labels)).astype(np.float32)
    vectors = vectors[:, : params.dimensions or VECTOR_SIZE]
    if params.normalize:
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32)


@cache
def _label_weights(num_labels: int) -> npt.NDArray[np.float64]:
    """One column for each label."""
    return np.stack([_hidden_state(label) for label in range(num_labels)], axis=1)


def _hidden_state(history: History) -> npt.NDArray[np.float64]:
    """Numbers from -1 to 1, not 0."""
    words = [scramble(history + place) | 1 for place in range(VECTOR_SIZE)]
    return np.array(words, np.float64) / 2.0**63 - 1.0


class SimulatedSampler:
    """Applies one sequence's parameters to distributions, by sampling.proto's rules.

    Probabilities halve from rank to rank, so only the first few ranks, and tokens that the
    parameters name, can be chosen.
    """

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

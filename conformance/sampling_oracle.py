"""The expected token for a distribution, parameters and a draw, as sampling.proto defines it.

Independent of the workers' samplers on purpose, because it judges them. Only the log probabilities
of the most probable tokens are known. This suffices if the parameters keep few tokens: log
probabilities are logits minus a constant, which affects neither biases nor additive penalties nor
temperature.
"""

import math
from collections.abc import Mapping

from pagewire.v1 import sampling_pb2

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 2**32 - 1

CLOSE = 1e-4
"""A draw this close to the edge between two tokens depends on rounding, float32 or float64."""


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Four random words (Philox4x32-10, Salmon et al., SC 2011)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (right >> 32) ^ c1 ^ k0,
            right & _WORD,
            (left >> 32) ^ c3 ^ k1,
            left & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def draw(seed: int, choice_index: int, position: int) -> float:
    """The uniform number of a choice at an output position."""
    words = philox4x32((choice_index, position, 0, 0), (seed & _WORD, seed >> 32))
    return ((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def expected_token(
    logprobs: Mapping[int, float], params: sampling_pb2.SamplerParams, uniform: float
) -> int | None:
    """The token drawn, given the log probabilities of at least the tokens that may be kept.

    None if the draw, or a filter, is too close to an edge to be predicted. Biases and penalties are
    not applied: pass log probabilities that include them.
    """
    scaled = {token: value / params.temperature for token, value in logprobs.items()}
    top = max(scaled.values())
    weights = {token: math.exp(value - top) for token, value in scaled.items()}
    kept = _filtered(weights, params)
    return None if kept is None else _inverted(kept, uniform)


def _filtered(
    weights: Mapping[int, float], params: sampling_pb2.SamplerParams
) -> dict[int, float] | None:
    """The tokens that min_p, top_k and top_p keep, most probable first; None if too close."""
    order = sorted(weights, key=lambda token: -weights[token])
    if params.min_p > 0:
        if any(abs(weights[token] - params.min_p) < CLOSE for token in order):
            return None
        order = [token for token in order if weights[token] >= params.min_p]
    if 0 < params.top_k < len(order):
        last, next_one = (weights[order[index]] for index in (params.top_k - 1, params.top_k))
        if last - next_one < CLOSE * last:
            return None
        order = order[: params.top_k]
    if params.top_p < 1:
        goal, mass, count = params.top_p * sum(map(weights.__getitem__, order)), 0.0, 0
        while mass < goal:
            mass += weights[order[count]]
            count += 1
            if abs(mass - goal) < CLOSE:
                return None
        order = order[:count]
    return {token: weights[token] for token in order}


def _inverted(weights: Mapping[int, float], uniform: float) -> int | None:
    """The first token, in order of ids, at which the cumulative weight exceeds the draw."""
    target, cumulative = uniform * sum(weights.values()), 0.0
    for token in sorted(weights):
        cumulative += weights[token]
        if abs(cumulative - target) < CLOSE:
            return None
        if cumulative > target:
            return token
    return None

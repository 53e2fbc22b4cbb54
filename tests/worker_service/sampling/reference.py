"""The sampler's rules written the slow and plain way: dense, one row, float64."""

import math
from collections.abc import Sequence

from worker_service.plan import SamplerParams


def edited_logits(
    logits: Sequence[float], params: SamplerParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Logits after exclusions, biases and penalties."""
    edited = list(logits)
    for word in params.bad_words:
        prefix = list(word[:-1])
        if len(prefix) <= len(output) and list(output[len(output) - len(prefix) :]) == prefix:
            edited[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in params.suppressed_token_ids.tolist():
            edited[token] = -math.inf
    for token, bias in zip(
        params.bias_token_ids.tolist(), params.bias_values.tolist(), strict=True
    ):
        edited[token] += bias
    for token in range(len(edited)):
        if token in prompt or token in output:
            if edited[token] > 0:
                edited[token] /= params.repetition_penalty
            else:
                edited[token] *= params.repetition_penalty
        count = list(output).count(token)
        edited[token] -= params.frequency_penalty * count
        edited[token] -= params.presence_penalty * (count > 0)
    return edited


def probabilities(logits: Sequence[float]) -> list[float]:
    """Softmax."""
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def filtered(logits: Sequence[float], params: SamplerParams) -> list[float]:
    """The distribution a token is drawn from: min-p and top-k, then top-p; ties stay together."""
    scaled = [logit / params.temperature for logit in logits]
    probs = probabilities(scaled)
    kept = {token for token, p in enumerate(probs) if p >= params.min_p * max(probs)}
    if 0 < params.top_k < len(scaled):
        kth = sorted(scaled, reverse=True)[params.top_k - 1]
        kept = {token for token in kept if scaled[token] >= kth}
    if params.top_p < 1.0:
        left = sum(probs[token] for token in kept)
        mass, cut = 0.0, math.inf
        for token in sorted(kept, key=lambda token: -scaled[token]):
            if mass >= params.top_p * left:
                break
            mass, cut = mass + probs[token], scaled[token]
        kept = {token for token in kept if scaled[token] >= cut}
    left = sum(probs[token] for token in kept)
    return [p / left if token in kept else 0.0 for token, p in enumerate(probs)]


def drawn(distribution: Sequence[float], uniform: float) -> int:
    """The first token at which the cumulative probability exceeds the uniform number."""
    cumulative = 0.0
    for token, p in enumerate(distribution):
        cumulative += p
        if cumulative > uniform and p > 0:
            return token
    return max(token for token, p in enumerate(distribution) if p > 0)

"""Probabilities of labels, and similarities of vectors.

Computed in float64 and rounded to float32, so that machines whose libraries add in different orders
agree.
"""

import numpy as np
import numpy.typing as npt

from pagewire.v1 import pooling_pb2

Float64Array = npt.NDArray[np.float64]


def _rows(values: bytes, size: int) -> Float64Array:
    """Vectors: [-1, size]."""
    return np.frombuffer(values, "<f4").astype(np.float64).reshape(-1, size)


def activated(activation: pooling_pb2.LabelActivation.ValueType, size: int, values: bytes) -> bytes:
    """Probabilities of `size` labels from their logits, one row or several. A single label has no
    alternative, so that its softmax is a sigmoid."""
    if activation == pooling_pb2.LABEL_ACTIVATION_UNSPECIFIED or not values:
        return values
    logits = _rows(values, size)
    if activation == pooling_pb2.LABEL_ACTIVATION_SOFTMAX and size > 1:
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return (powers / powers.sum(axis=1, keepdims=True)).astype("<f4").tobytes()
    # 1 / (1 + exp(-x)), which would overflow.
    return (0.5 + 0.5 * np.tanh(0.5 * logits)).astype("<f4").tobytes()


def similarity(
    kind: pooling_pb2.Similarity.ValueType, size: int, first: bytes, second: bytes
) -> float:
    """How similar two texts are by their vectors of `size` numbers, of which they have one, or with
    MAX_SIM one per token."""
    a, b = _rows(first, size), _rows(second, size)
    match kind:
        case pooling_pb2.SIMILARITY_MAX_SIM:
            return float((a @ b.T).max(axis=1).sum())
        case pooling_pb2.SIMILARITY_DOT:
            return float((a * b).sum())
        case pooling_pb2.SIMILARITY_EUCLIDEAN:
            return -float(np.sqrt(np.square(a - b).sum()))
        case pooling_pb2.SIMILARITY_MANHATTAN:
            return -float(np.abs(a - b).sum())
    norms = float(np.sqrt(np.square(a).sum() * np.square(b).sum()))
    return float((a * b).sum()) / norms if norms else 0.0

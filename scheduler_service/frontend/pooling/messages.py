"""Results of a call as messages of `InferenceService`."""

from collections.abc import Sequence
from typing import Any

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.frontend.multiplexer import request_error
from scheduler_service.frontend.pooling.call import PoolingResult


def add_vectors(response: inference_pb.EmbedResponse, results: Sequence[PoolingResult]) -> None:
    """Add the vectors or errors of texts."""
    _add_numbers(response.embeddings, results)


def add_labels(response: inference_pb.ClassifyResponse, results: Sequence[PoolingResult]) -> None:
    """Add the labels or errors of texts."""
    _add_numbers(response.classifications, results)


def add_scores(response: inference_pb.ScoreResponse, results: Sequence[PoolingResult]) -> None:
    """Add the scores or errors of pairs."""
    add_pair_scores(response.scores, results)


def _add_numbers(entries: Any, results: Sequence[PoolingResult]) -> None:
    for result in results:
        if result.error is not None:
            entries.add(index=result.index, error=request_error("", result.error))
        elif result.values:  # the last part of a text with one vector per token has none
            entries.add(
                index=result.index,
                values=result.values,
                num_tokens=result.num_tokens,
                first_token=result.first_token,
            )


def add_pair_scores(entries: Any, results: Sequence[PoolingResult]) -> None:
    """Add the scores or errors of pairs or documents."""
    for result in results:
        if result.error is not None:
            entries.add(index=result.index, error=request_error("", result.error))
        else:
            entries.add(index=result.index, score=result.score, num_tokens=result.num_tokens)

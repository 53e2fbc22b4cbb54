"""OpenAI's own client on `/v1/embeddings` of real services."""

import base64
from typing import Any

import numpy as np
import openai

from pagewire_client import Client
from tests.support.simulated_services import simulated_services

INPUTS = [[5 + index % 300, 6, 7 + index // 300] for index in range(1200)]


def bits(embedding: Any) -> bytes:
    """The float32 numbers of an embedding, which is a list or base64."""
    if isinstance(embedding, str):
        return base64.b64decode(embedding)
    return np.array(embedding, "<f4").tobytes()


def test_a_thousand_inputs_get_the_bits_that_grpc_returns() -> None:
    with simulated_services(http=True) as services:
        with Client(services.addresses[0]) as client:
            expected = [bits(vector) for vector in client.embed(INPUTS)]
        url = f"http://{services.http_address}/v1"
        with openai.OpenAI(base_url=url, api_key="none") as client:
            wish: dict[str, Any] = {"model": "simulated", "input": INPUTS}
            by_default = client.embeddings.create(**wish)
            assert [bits(entry.embedding) for entry in by_default.data] == expected
            for encoding in ("float", "base64"):
                answer = client.embeddings.create(**wish, encoding_format=encoding)
                assert [bits(entry.embedding) for entry in answer.data] == expected
            assert by_default.usage.total_tokens == 3 * len(INPUTS)

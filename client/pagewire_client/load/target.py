"""What is put under load."""

from collections.abc import AsyncGenerator
from typing import Protocol

from pagewire_client.async_client import AsyncClient
from pagewire_client.bench.workload import Arrival
from pagewire_client.sampling_params import SamplingParams


class Target(Protocol):
    """A server that continues prompts of token ids."""

    def stream(self, arrival: Arrival) -> AsyncGenerator[int, None]:
        """How many tokens came with each message, until the answer has all that were asked for.

        Greedy, past end-of-sequence tokens. Raises when the request fails.
        """
        ...


class PagewireTarget:
    """A Pagewire frontend, through the public gRPC client."""

    def __init__(self, client: AsyncClient, model: str | None = None) -> None:
        self._client = client
        self._model = model

    async def stream(self, arrival: Arrival) -> AsyncGenerator[int, None]:
        """See `Target`."""
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=arrival.num_output_tokens
        )
        async with self._client.stream(arrival.prompt, params, model=self._model) as stream:
            async for delta in stream:
                yield len(delta.token_ids)

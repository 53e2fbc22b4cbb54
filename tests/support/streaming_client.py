"""Streams requests, as a process of its own: `python -m tests.support.streaming_client ADDRESS`.

Writes the number of tokens received so far, a line each `EVERY` tokens, and then the answers.
"""

import asyncio
import sys

from pagewire_client import AsyncClient, SamplingParams

NUM_STREAMS = 12
EVERY = 200
TIMEOUT_S = 120.0


async def main(address: str) -> None:
    num_tokens = 0

    async def read(client: AsyncClient, seed: int) -> str:
        nonlocal num_tokens
        params = SamplingParams(temperature=0.8, seed=seed, max_tokens=400, ignore_eos=True)
        stream = client.stream(f"{seed} days ago", params, timeout=TIMEOUT_S)
        async for delta in stream:
            before, num_tokens = num_tokens, num_tokens + len(delta.token_ids)
            if before // EVERY < num_tokens // EVERY:
                print(num_tokens, flush=True)
        return stream.output.outputs[0].text

    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(read(client, seed) for seed in range(NUM_STREAMS)))
    print(repr(answers))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

"""Ask a question by OpenAI's agents, by both of its APIs, whole and streamed; print the answers."""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
    answers = []
    for model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="sums",
            model=model(model="embedded", openai_client=client),
            model_settings=ModelSettings(temperature=0),
        )
        answers.append((await Runner.run(agent, sys.argv[2])).final_output)
        streamed = Runner.run_streamed(agent, sys.argv[2])
        async for _ in streamed.stream_events():
            pass
        answers.append(streamed.final_output)
    print(json.dumps(answers))


asyncio.run(main())

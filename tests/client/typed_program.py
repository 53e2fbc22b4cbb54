"""A user's program, which `test_types` checks with mypy: a comment that ignores an error is itself
an error where there is none."""

from pagewire_client import LLM, AsyncClient, AsyncLLM, Client, InvalidArgument, SamplingParams
from pagewire_client.deployment import word


def blocking(client: Client) -> str:
    answer = client.generate("Hi", temperature=0, max_tokens=50, timeout=3.0)
    client.generate("Hi", temprature=0)  # type: ignore[call-arg]
    client.generate("Hi", temperature="hot")  # type: ignore[arg-type]
    client.generate_many(["Hi"], max_in_flight=3, n=2)
    client.generate_many(["Hi"], request_id="mine")  # type: ignore[call-arg]
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    client.chat(messages, SamplingParams(temperature=0), tools=tools, model="m")
    client.chat(messages, tool=tools)  # type: ignore[call-arg]
    for text in client.stream({"messages": messages, "tools": tools}).text_deltas():
        print(text.upper())
    group = client.get_status(include_requests=True).groups[0]
    print(group.sate)  # type: ignore[attr-defined]
    state = word(group, "state")
    client.get_status(include_request=True)  # type: ignore[call-arg]
    size: int = client.get_model().max_model_len
    return answer.text + state + str(size)


async def asynchronous(client: AsyncClient) -> str:
    try:
        return (await client.stream("Hi", top_p=0.5).final()).text
    except InvalidArgument as error:
        return error.field
    finally:
        async for status in client.with_options(timeout=1).watch_status(1.0, include_blocks=True):
            print(status.num_running)


async def offline() -> float:
    async with AsyncLLM(dtype="float32") as llm:
        await llm.generate("Hi", seed=3)
    with LLM(max_model_len=100) as model:
        model.generate("Hi", use_tqdm=False, temperature=0)
        return model.logprobs([[1, 2], [3]], context="b")[0].logprob

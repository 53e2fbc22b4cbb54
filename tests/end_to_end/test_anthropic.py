"""Anthropic's own client on `/v1/messages` of real services with the embedded model."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest

from tests.support.cluster import Cluster

if TYPE_CHECKING:
    import anthropic

ASK = [{"role": "user", "content": "What is 27 + 45?"}]
GREEDY = {"temperature": 0}
"""The client does not name it any more."""
WISH: dict[str, Any] = {"model": "embedded", "max_tokens": 200, "extra_body": GREEDY}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOL = {"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
CALL = {"type": "tool", "name": "get_weather"}


@pytest.fixture
def client(cluster: Cluster) -> "Iterator[anthropic.Anthropic]":
    import anthropic

    with anthropic.Anthropic(
        base_url=cluster.http_url(), api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "What is 27 + 45?"}]}],
        [*ASK, {"role": "assistant", "content": "27 + 45 = 72."}, *ASK],
    ],
)
@pytest.mark.parametrize(
    "system", ["Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": None}]]
)
def test_conversations_of_all_kinds(
    client: "anthropic.Anthropic", messages: list, system: Any
) -> None:
    answer = client.messages.create(**WISH, messages=messages, system=system)
    assert answer.content[0].text == "27 + 45 = 72."


def test_a_begun_answer_is_continued(client: "anthropic.Anthropic") -> None:
    begun = {"role": "assistant", "content": "27 + 45 ="}
    assert client.messages.create(**WISH, messages=[*ASK, begun]).content[0].text == " 72."


def test_a_stream_adds_up_to_the_whole(client: "anthropic.Anthropic") -> None:
    whole = client.messages.create(**WISH, messages=ASK)
    with client.messages.stream(**WISH, messages=ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )


def test_events_are_in_anthropics_order(client: "anthropic.Anthropic") -> None:
    events = [event.type for event in client.messages.create(**WISH, messages=ASK, stream=True)]
    assert events[:2] == ["message_start", "content_block_start"]
    assert set(events[2:-3]) == {"content_block_delta"}
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_ends_are_named(client: "anthropic.Anthropic") -> None:
    short = client.messages.create(**WISH | {"max_tokens": 2}, messages=ASK)
    assert short.stop_reason == "max_tokens"
    stopped = client.messages.create(**WISH, messages=ASK, stop_sequences=[" ="])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " =")
    assert stopped.content[0].text == "27 + 45"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [CALL, {"type": "any", "disable_parallel_tool_use": True}])
def test_a_tool_is_called(client: "anthropic.Anthropic", stream: bool, choice: Any) -> None:
    answer = ask_for_a_call(client, choice, stream=stream)
    (block,) = answer.content
    assert (block.type, block.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert set(block.input) == {"city", "days"}
    assert block.input["city"] in ("Paris", "Rome")


def test_a_call_that_is_cut_off_has_the_arguments_so_far(client: "anthropic.Anthropic") -> None:
    wish = WISH | {"max_tokens": 8}
    answer = client.messages.create(**wish, messages=WEATHER, tools=[TOOL], tool_choice=CALL)
    assert answer.stop_reason == "max_tokens"
    assert isinstance(answer.content[0].input, dict)


def test_the_result_of_a_call_is_taken(client: "anthropic.Anthropic") -> None:
    answer = ask_for_a_call(client, CALL, stream=False)
    result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "27 + 45 = ?"}
    turns = [
        *WEATHER,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    last = client.messages.create(**WISH, messages=turns, tools=[TOOL])
    assert last.content[0].text
    counted = client.messages.count_tokens(model="embedded", messages=turns, tools=[TOOL])
    usage = last.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def ask_for_a_call(client: "anthropic.Anthropic", choice: Any, *, stream: bool) -> Any:
    wish = WISH | {"messages": WEATHER, "tools": [TOOL], "tool_choice": choice}
    if not stream:
        return client.messages.create(**wish)
    with client.messages.stream(**wish) as events:
        return events.get_final_message()


def test_the_tool_runner_calls_and_sends_the_result_though_threads_are_refused(
    client: "anthropic.Anthropic",
) -> None:
    import anthropic

    cities: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Weather."""
        cities.append(city)
        return "It rains."

    answers = client.beta.messages.tool_runner(
        **WISH,
        messages=WEATHER,
        tools=[get_weather],
        tool_choice={**CALL, "disable_parallel_tool_use": True},
        max_iterations=2,
    )
    calls = [block for answer in answers for block in answer.content if block.type == "tool_use"]
    assert len(calls) == 2
    assert [call.input["city"] for call in calls] == cities


def test_an_answer_is_json_of_a_schema(client: "anthropic.Anthropic") -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA | {"additionalProperties": False}}
    answer = client.messages.create(**WISH, messages=WEATHER, output_config={"format": wanted})
    assert '"city"' in answer.content[0].text


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type: "),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text: "),
        ({"tool_choice": CALL}, "tool_choice.name: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice: requires tools"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"extra_body": {"temperature": -1}}, "temperature: "),
        ({"extra_body": {"mcp_servers": []}}, "mcp_servers: unknown field"),
    ],
)
def test_what_is_wrong_is_named(client: "anthropic.Anthropic", wish: dict, named: str) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**WISH | {"messages": ASK} | wish)
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]


def test_an_unknown_model_is_not_found(client: "anthropic.Anthropic") -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(model="nosuch", max_tokens=1, messages=ASK)
    assert refused.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="nosuch", messages=ASK)

"""`/v1/chat/completions`: its translation, and tools between a client and a fake core."""

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.http.openai.protocol import ChatRequest
from scheduler_service.frontend.http.openai.serving_chat import generate_request
from scheduler_service.frontend.input.tool_choice import with_call_schema
from scheduler_service.frontend.input.validation import check_request
from tests.support.fake_core import FakeCore
from tests.support.http_frontends import http_served
from tests.support.json_schemas import accepts
from tests.support.tokenizers import byte_level, model_files, tokens

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED = SCHEMA | {"additionalProperties": False}
OPEN = {"additionalProperties": True}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": SCHEMA},
}
TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}"
    "{{ message.tool_call_id }}{{ message.name }}{% endfor %}{{ mood }}"
)


def translated(**wish: Any) -> pb.GenerateRequest:
    body = ChatRequest.model_validate({"messages": [USER]} | wish)
    request = generate_request(body)
    check_request(request)
    return with_call_schema(request)


def test_every_part_of_a_conversation_is_translated() -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    chat = translated(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "get_weather"},
        ],
        tools=[TOOL],
        chat_template_kwargs={"mood": "glad"},
        reasoning_effort="low",
        add_generation_prompt=False,
    ).chat
    assert [(m.role, m.content) for m in chat.messages] == [
        ("system", ""),
        ("assistant", ""),
        ("tool", "sunny"),
    ]
    assert [part.text for part in chat.messages[0].content_parts] == ["a", "b"]
    assert chat.messages[1].tool_calls[0].arguments_json == '{"city": "Paris"}'
    assert (chat.messages[2].tool_call_id, chat.messages[2].name) == ("c1", "get_weather")
    assert json.loads(chat.tools[0].parameters_json) == SCHEMA
    assert json.loads(chat.template_arguments_json) == {"mood": "glad", "reasoning_effort": "low"}
    assert chat.add_generation_prompt is False


def test_parts_and_calls_may_be_written_as_vllm_allows() -> None:
    call = {"function": {"name": "f", "arguments": {"city": "é"}}}
    chat = translated(
        messages=[
            {"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "c", "annotations": [], "logprobs": []},
                    {"type": "refusal", "refusal": "no"},
                ],
            },
            {"role": "assistant", "tool_calls": [call, {"id": "2", "function": {"name": "g"}}]},
        ]
    ).chat
    assert [[part.text for part in turn.content_parts] for turn in chat.messages] == [
        ["a", "b"],
        ["c", "no"],
        [],
    ]
    calls = chat.messages[2].tool_calls
    assert [(call.id, call.name, call.arguments_json) for call in calls] == [
        ("", "f", '{"city": "é"}'),
        ("2", "g", ""),
    ]


def test_a_required_call_is_a_schema_of_calls() -> None:
    request = translated(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    schema = json.loads(request.sampling_params.json_schema)
    (call,) = schema["items"]["anyOf"]
    assert call["properties"] == {"name": {"const": "get_weather"}, "parameters": CLOSED}
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)


def test_a_named_call_is_the_schema_of_its_parameters() -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    request = translated(tools=[TOOL], tool_choice=choice)
    assert json.loads(request.sampling_params.json_schema) == CLOSED
    as_it_says = TOOL | {"function": TOOL["function"] | {"strict": False}}
    request = translated(tools=[as_it_says], tool_choice=choice)
    assert json.loads(request.sampling_params.json_schema) == SCHEMA
    assert [tool.name for tool in request.chat.tools] == ["get_weather"]


REFERRING = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "others": {"$ref": "#/$defs/Cities"}},
    "required": ["city"],
}
CITY = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters} | fields
    return {"type": "function", "function": function}


@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_functions_with_definitions_of_equal_names_may_be_required(place: str) -> None:
    def parameters(city: Any) -> dict[str, Any]:
        cities = {"type": "array", "items": {"$ref": f"#/{place}/City"}}
        text = json.dumps(REFERRING).replace("$defs", place)
        return {**json.loads(text), place: {"City": city, "Cities": cities}}

    tools = [tool("f", parameters(CITY)), tool("g", parameters({"type": "integer"}))]
    schema = translated(tools=tools, tool_choice="required").sampling_params.json_schema
    f = {"name": "f", "parameters": {"city": {"name": "Bonn"}, "others": [{"name": "Ulm"}]}}
    g = {"name": "g", "parameters": {"city": 1, "others": [2]}}
    assert accepts(schema, [f])
    assert accepts(schema, [g, f])
    assert not accepts(schema, [f | {"name": "g"}])
    assert not accepts(schema, [g | {"name": "f"}])
    assert not accepts(schema, [f | {"parameters": {"city": {"name": "Bonn", "z": 1}}}])
    choice = {"type": "function", "function": {"name": "f"}}
    named = translated(tools=tools, tool_choice=choice).sampling_params.json_schema
    assert accepts(named, f["parameters"])
    assert not accepts(named, g["parameters"])


@pytest.mark.parametrize(
    "parameters",
    [
        *(None, {}, {"type": "object"}, {"type": "object", "properties": {}}),
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "title": "Now"},
        {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
    ],
    ids=str,
)
def test_a_function_without_parameters_is_called_without_arguments(parameters: Any) -> None:
    now = tool("now", parameters)
    required = translated(tools=[now], tool_choice="required").sampling_params.json_schema
    assert accepts(required, [{"name": "now", "parameters": {}}])
    assert not accepts(required, [{"name": "now", "parameters": {"a": 1}}])
    assert not accepts(required, [{"name": "now", "parameters": 1}])
    choice = {"type": "function", "function": {"name": "now"}}
    named = translated(tools=[now], tool_choice=choice).sampling_params.json_schema
    assert accepts(named, {})
    assert not accepts(named, {"a": 1})
    assert not accepts(named, 1)


@pytest.mark.parametrize(
    "function",
    [
        tool("f", {"type": "object"}, strict=False),
        tool("f", {"type": "object", "additionalProperties": True}),
    ],
    ids=str,
)
def test_a_function_that_says_so_takes_any_object(function: Any) -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    schema = translated(tools=[function], tool_choice=choice).sampling_params.json_schema
    assert accepts(schema, {"a": [1]})
    assert not accepts(schema, 1)


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}},
        {"$ref": "#/$defs/F", "$defs": {"F": {"type": ["object", "array"], "properties": {}}}},
        {"anyOf": [{"type": "string"}, {"type": "object", "properties": {}}]},
    ],
    ids=str,
)
def test_arguments_are_an_object_even_if_the_schema_allows_other_values(parameters: Any) -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    for wanted, wrap in ((choice, False), ("required", True)):
        schema = translated(tools=[tool("f", parameters)], tool_choice=wanted)
        for value, is_allowed in (({}, True), (None, False), ([], False), ("x", False)):
            call = [{"name": "f", "parameters": value}] if wrap else value
            assert accepts(schema.sampling_params.json_schema, call) == is_allowed


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "array", "items": {}}, r"parameters_json.type: expected 'object', got 'array'"),
        ({"type": "string"}, r"parameters_json.type: expected 'object', got 'string'"),
        ({"type": ["string", "null"]}, r"expected 'object', got \['string', 'null'\]"),
        ({"const": 5}, r"parameters_json.const: expected an object"),
        ({"enum": ["a", "b"]}, r"parameters_json.enum: expected an object"),
    ],
)
def test_a_required_call_whose_arguments_can_be_no_object_is_refused(
    parameters: Any, message: str
) -> None:
    tools = [TOOL, tool("f", parameters)]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        with pytest.raises(InvalidArgument, match=message) as refused:
            translated(tools=tools, tool_choice=choice)
        assert "tools[1]" in str(refused.value)
    other = {"type": "function", "function": {"name": "get_weather"}}
    assert translated(tools=tools, tool_choice=other)


@pytest.mark.parametrize("parameters", [[], "text", True, 5])
def test_parameters_that_are_no_schema_are_refused(parameters: Any) -> None:
    with pytest.raises(ValidationError, match="parameters"):
        translated(tools=[tool("f", parameters)], tool_choice="required")
    function = pb.Tool(name="f", parameters_json=json.dumps(parameters))
    request = pb.GenerateRequest(
        chat=pb.Chat(tools=[function], messages=[pb.ChatMessage(role="u")])
    )
    with pytest.raises(InvalidArgument, match=r"chat.tools\[0\].parameters_json: expected"):
        check_request(request)


def test_a_schema_with_too_many_levels_is_refused() -> None:
    text = '{"items":' * 900 + "{}" + "}" * 900
    function = pb.Tool(name="f", parameters_json=text)
    request = pb.GenerateRequest(chat=pb.Chat(tools=[function]))
    request.chat.tool_choice.required = True
    with pytest.raises(InvalidArgument, match="expected schemas with fewer levels"):
        with_call_schema(request)


def test_without_a_choice_the_model_does_not_hear_of_tools() -> None:
    assert not translated(tools=[TOOL], tool_choice="none").chat.tools


STRUCTURED: list[tuple[dict[str, Any], str, Any]] = [
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", CLOSED),
    ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        "json_schema",
        CLOSED,
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": False},
            }
        },
        "json_schema",
        SCHEMA,
    ),
    ({"guided_json": SCHEMA}, "json_schema", CLOSED),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", CLOSED),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", CLOSED),
    ({"structured_outputs": {"json": SCHEMA | OPEN}}, "json_schema", SCHEMA | OPEN),
    ({"structured_outputs": {"json": True}}, "json_schema", True),
    ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"guided_grammar": "g"}, "grammar", "g"),
    ({"structured_outputs": {"grammar": "g"}}, "grammar", "g"),
    ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
    ({"response_format": {"type": "text"}}, "", None),
]


@pytest.mark.parametrize("schema", ["{", "[" * 5000, '{"properties": []}'])
def test_text_that_is_no_schema_is_left_to_the_check_of_constraints(schema: str) -> None:
    params = translated(guided_json=schema).sampling_params
    assert params.json_schema.startswith(schema.rstrip("}"))


@pytest.mark.parametrize(("wish", "kind", "value"), STRUCTURED)
def test_constraints_by_any_name(wish: dict[str, Any], kind: str, value: Any) -> None:
    params = translated(**wish).sampling_params
    assert (params.WhichOneof("structured_output") or "") == kind
    if kind == "json_schema":
        assert json.loads(params.json_schema) == value
    elif kind == "choice":
        assert list(params.choice.choices) == value
    elif kind:
        assert getattr(params, kind) == value


def test_two_constraints_are_one_too_many() -> None:
    with pytest.raises(InvalidArgument, match="guided_regex"):
        translated(guided_regex="a", response_format={"type": "json_object"})
    with pytest.raises(InvalidArgument, match="tool_choice"):
        translated(guided_regex="a", tools=[TOOL], tool_choice="required")
    assert list(translated(allowed_token_ids=[7, 5]).sampling_params.allowed_token_ids) == [7, 5]


def core_with_tools() -> FakeCore:
    files = model_files(byte_level()) | {"chat_template.jinja": TEMPLATE.encode()}
    return FakeCore(files={"tiny": files})


async def test_the_template_sees_tools_calls_and_results() -> None:
    async with http_served(core_with_tools()) as served:
        call = {"id": "c1", "type": "function"}
        call |= {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}  # type: ignore
        wish = {
            "messages": [
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "w"},
            ],
            "tools": [TOOL],
            "chat_template_kwargs": {"mood": "glad"},
        }
        answer = asyncio.create_task(served.client.post(PATH, json=wish))
        request = await served.core.next_request()
        text = byte_level().decode(request.prompt, skip_special_tokens=False)
        assert text == f"<tool_call>{json.dumps(TOOL)}Parissunnyc1wglad"
        await request.complete(tokens("ok"))
        assert (await answer).json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, [False, False]), ({"thinking": True, "mood": "glad"}, [False, True])],
)
def test_no_reasoning_effort_switches_thinking_off(
    given: dict[str, Any], expected: list[bool]
) -> None:
    body = {"messages": [USER], "reasoning_effort": "none", "chat_template_kwargs": given}
    chat = generate_request(ChatRequest.model_validate(body)).chat
    switches = dict(zip(("enable_thinking", "thinking"), expected, strict=True))
    assert json.loads(chat.template_arguments_json) == given | switches | {
        "reasoning_effort": "none"
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_told_as_calls(stream: bool) -> None:
    text = 'Wait. <tool_call>{"name": "get_weather", "arguments": {"city": "Pa"}}</tool_call>'
    async with http_served(core_with_tools()) as served:
        wish = {"messages": [USER], "tools": [TOOL], "stream": stream}
        answer = asyncio.create_task(served.client.post(PATH, json=wish))
        request = await served.core.next_request()
        await request.accept()
        for token_id in tokens(text):
            await request.send_tokens([token_id])
        await request.finish_choice(reason=pb.FINISH_REASON_STOP)
        await request.finish()
        message, finish = folded((await answer).text) if stream else whole(await answer)
    assert message["content"].strip() == "Wait."
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Pa"}'}
    assert len(call["id"]) == 9
    assert finish == "tool_calls"


def whole(answer: Any) -> tuple[dict[str, Any], str]:
    (choice,) = answer.json()["choices"]
    return choice["message"], choice["finish_reason"]


def folded(body: str) -> tuple[dict[str, Any], str]:
    """The message that a client puts together of the chunks."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    finish = ""
    for line in body.split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        finish = choice["finish_reason"] or finish
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(
                    {"id": call["id"], "function": {"name": "", "arguments": ""}}
                )
            into = message["tool_calls"][call["index"]]["function"]
            into["name"] += call["function"].get("name", "")
            into["arguments"] += call["function"]["arguments"]
    return message, finish


async def test_deeply_nested_json_is_refused_and_breaks_nothing() -> None:
    nested = "[" * 100_000 + "]" * 100_000
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "documents": {nested}}}'
    async with http_served() as served:
        headers = {"content-type": "application/json"}
        answer = await served.client.post(PATH, content=body, headers=headers)
        assert answer.status_code == 400
        assert (await served.client.get("/health")).status_code == 200

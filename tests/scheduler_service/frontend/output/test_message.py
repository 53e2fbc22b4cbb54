"""The parts of a chat's answer, and what is left of them for a client that has received some."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.input.processor import resolve_request
from scheduler_service.frontend.models.frontend_model import build_model
from scheduler_service.frontend.output.message import call_id
from scheduler_service.frontend.requests.choice_stream import ChoiceStream
from tests.support.fake_core import model_info
from tests.support.frontends import generate_request
from tests.support.tokenizers import byte_level, letters, model_files

TEMPLATE = "{{ messages[0].content }}{# <think> <tool_call> #}"
FILES = model_files(byte_level()) | {"chat_template.jinja": TEMPLATE.encode()}
MODEL = build_model(model_info(), FILES)
TOOLS = [pb.Tool(name="f"), pb.Tool(name="g")]
CALLS = (
    'First.<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
    '<tool_call>{"name":"g","arguments":{}}</tool_call>'
)
THOUGHT = "<think>Hm.</think>" + CALLS
INTERLEAVED = 'A<tool_call>{"name":"f","arguments":{}}</tool_call>B'


def new_choice(**fields: Any) -> ChoiceStream:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")], tools=TOOLS, **fields)
    request = generate_request(None, chat=chat)
    return ChoiceStream(0, resolve_request(request, "r", MODEL))


def play(choice: ChoiceStream, token_ids: list[int], size: int = 1) -> list[pb.ChoiceDelta]:
    """The deltas after every `size` tokens, then those at the end."""
    deltas = []
    for start in range(0, len(token_ids), size):
        choice.received_token_ids += token_ids[start : start + size]
        choice.advance()
        deltas += choice.take(1000, 0)
    choice.receive_finish(scheduler_pb.ChoiceFinished(reason=pb.FINISH_REASON_STOP))
    choice.advance()
    return deltas + (choice.take(1000, 0) if choice.has_output else [])


def joined(deltas: list[pb.ChoiceDelta]) -> pb.ChoiceDelta:
    """What a client makes of all deltas."""
    whole = pb.ChoiceDelta()
    for delta in deltas:
        whole.text += delta.text
        whole.reasoning += delta.reasoning
        whole.token_ids.extend(delta.token_ids)
        for call in delta.tool_calls:
            if call.index == len(whole.tool_calls):
                whole.tool_calls.add(index=call.index, id=call.id, name=call.name)
            whole.tool_calls[call.index].arguments += call.arguments
    return whole


def resumed_of(received: pb.ChoiceDelta) -> pb.ResumedChoice:
    return pb.ResumedChoice(
        token_ids=received.token_ids,
        num_chars=len(received.text),
        num_reasoning_chars=len(received.reasoning),
        num_tool_calls=len(received.tool_calls),
        num_argument_chars=sum(len(call.arguments) for call in received.tool_calls),
    )


def test_calls_are_parts_of_their_own() -> None:
    whole = joined(play(new_choice(), letters(CALLS)))
    assert whole.text == "First."
    assert [(call.name, call.arguments) for call in whole.tool_calls] == [
        ("f", '{"a":1}'),
        ("g", "{}"),
    ]
    assert [call.id for call in whole.tool_calls] == [call_id("r", 0, n) for n in (0, 1)]


@given(
    st.sampled_from([CALLS, THOUGHT, THOUGHT[:12], INTERLEAVED, "plain"]),
    st.integers(1, 7),
    st.data(),
)
def test_a_resumed_choice_continues_its_message_where_the_client_was(
    text: str, size: int, data: st.DataObject
) -> None:
    token_ids = letters(text)
    deltas = play(new_choice(), token_ids, size)
    undisturbed = joined(deltas)
    received = joined(deltas[: data.draw(st.integers(0, len(deltas) - 1))])
    choice = new_choice()
    choice.restore(resumed_of(received), "resume[0]")
    rest = choice.take(1000, 0) if choice.has_output else []
    rest += play(choice, token_ids[len(received.token_ids) :])
    assert joined([*as_deltas(received), *rest]) == undisturbed


def as_deltas(received: pb.ChoiceDelta) -> list[pb.ChoiceDelta]:
    return [received] if received.ByteSize() else []


def test_tokens_of_a_thought_are_counted_also_where_it_is_left_out() -> None:
    choices = [new_choice(), new_choice(include_reasoning=False)]
    whole, short = (joined(play(choice, letters(THOUGHT))) for choice in choices)
    assert (whole.reasoning, short.reasoning) == ("Hm.", "")
    assert whole.text == short.text == "First."
    numbers = [choice.num_reasoning_tokens for choice in choices]
    assert numbers[0] == numbers[1] == len(">Hm.</think")


def test_deltas_count_the_tokens_of_the_reasoning_as_they_come() -> None:
    token_ids = letters(THOUGHT)
    deltas = play(new_choice(), token_ids)
    num_before = token_ids.index(letters("F")[0])
    numbers = [delta.reasoning_tokens for delta in deltas]
    assert sum(numbers) == sum(numbers[:num_before]) == len(">Hm.</think")
    choice = new_choice()
    choice.restore(pb.ResumedChoice(token_ids=token_ids[:9], num_reasoning_chars=2), "resume[0]")
    rest = play(choice, token_ids[9:])
    assert sum(delta.reasoning_tokens for delta in rest) == sum(numbers[9:])


def special_model(*markers: str) -> Any:
    """A model with these special tokens."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens(list(markers))
    return build_model(model_info(), FILES | {"tokenizer.json": tokenizer.to_str().encode()})


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_that_mark_a_thought_are_read_and_not_shown(skip: bool) -> None:
    model = special_model("<think>", "</think>", "<other>")
    text = "<think>Hm<other></think>Yes<other>"
    token_ids = model.tokenizer.encode(text, add_special_tokens=False)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])
    request = generate_request(None, chat=chat, skip_special_tokens=skip)
    whole = joined(play(ChoiceStream(0, resolve_request(request, "r", model)), token_ids))
    other = "" if skip else "<other>"
    assert (whole.reasoning, whole.text) == (f"Hm{other}", f"Yes{other}")


def test_text_after_a_call_is_an_entry_of_its_own() -> None:
    *deltas, end = play(new_choice(), letters(INTERLEAVED), 1000)
    assert end.finish_reason
    assert [(delta.text.strip(), len(delta.tool_calls)) for delta in deltas] == [("A", 1), ("B", 0)]
    assert [len(delta.token_ids) for delta in deltas] == [len(letters(INTERLEAVED)), 0]


def test_without_parallel_calls_only_the_first_is_kept() -> None:
    whole = joined(play(new_choice(parallel_tool_calls=False), letters(CALLS)))
    assert [call.name for call in whole.tool_calls] == ["f"]


def test_call_ids_differ_between_requests_choices_and_calls() -> None:
    ids = {call_id(r, choice, call) for r in "ab" for choice in (0, 1) for call in (0, 1)}
    assert len(ids) == 8
    assert all(len(id) == 9 and id.isalnum() for id in ids)


@pytest.mark.parametrize("field", ["num_reasoning_chars", "num_tool_calls", "num_argument_chars"])
def test_more_than_the_tokens_contain_cannot_have_been_received(field: str) -> None:
    choice = new_choice()
    with pytest.raises(InvalidArgument) as caught:
        choice.restore(pb.ResumedChoice(token_ids=letters("ab"), **{field: 1}), "resume[0]")
    assert caught.value.field == f"resume[0].{field}"


@pytest.mark.parametrize(
    ("choice", "text", "name"),
    [
        (pb.ToolChoice(required=True), '[{"name":"g","parameters":{"b":2}}]', "g"),
        (pb.ToolChoice(name="f"), '{"b":2}', "f"),
    ],
)
def test_a_required_call_is_a_call_over_grpc_too(
    choice: pb.ToolChoice, text: str, name: str
) -> None:
    whole = joined(play(new_choice(tool_choice=choice), letters(text)))
    assert [(call.name, call.arguments) for call in whole.tool_calls] == [(name, '{"b":2}')]
    assert not whole.text


@pytest.mark.parametrize(
    ("begun", "reasoning", "text"),
    [("It is", "", " so.</think>"), ("<think>It is", "so.", "Yes."), ("", "so.", "Yes.")],
)
def test_an_answer_that_has_begun_is_no_thought_without_a_mark(
    begun: str, reasoning: str, text: str
) -> None:
    """Also of models whose answers begin within a thought that has none."""
    template = "{% for m in messages %}<｜Assistant｜>{{ m.content }}{% endfor %}"
    files = FILES | {"chat_template.jinja": template.encode()}
    model = build_model(model_info(reasoning_parser="deepseek_r1"), files)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])
    if begun:
        chat.messages.add(role="assistant", content=begun)
        chat.continue_final_message = True
    request = resolve_request(generate_request(None, chat=chat), "r", model)
    rest = " so.</think>" + ("Yes." if reasoning else "")
    choice = ChoiceStream(0, request)
    whole = joined(play(choice, byte_level().encode(rest, add_special_tokens=False).ids))
    assert (whole.reasoning.strip(), whole.text) == (reasoning, text)


@pytest.mark.parametrize("thought", ["", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize(
    ("rest", "text"),
    [(" so.", " so."), ("\n\nYes.", "\n\nYes."), (f" so. {CALLS} Yes.", " so. First. Yes.")],
)
def test_an_answer_that_has_begun_goes_on_with_the_space_that_is_next(
    thought: str, rest: str, text: str
) -> None:
    """Also after a thought, which Qwen3's template writes even if it is empty."""
    template = "<|im_start|>{{ messages[-1].content }}{# <think> <tool_call> #}"
    model = build_model(model_info(), FILES | {"chat_template.jinja": template.encode()})
    chat = pb.Chat(
        messages=[pb.ChatMessage(role="assistant", content=f"{thought}It is")],
        tools=TOOLS,
        continue_final_message=True,
    )
    request = resolve_request(generate_request(None, chat=chat), "r", model)
    output = byte_level().encode(rest, add_special_tokens=False).ids
    assert joined(play(ChoiceStream(0, request), output)).text == text


@pytest.mark.parametrize("thought", ["", "<think>Hm.</think>"])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_required_call_that_is_cut_off_is_no_text(thought: str, is_named: bool) -> None:
    call = '{"name": "f", "parameters": {"a": [1]}}'
    text = '{"a": [1]}' if is_named else f"[{call},\n {call}]"
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")], tools=TOOLS)
    chat.tool_choice.CopyFrom(pb.ToolChoice(name="f") if is_named else pb.ToolChoice(required=True))
    wish = resolve_request(generate_request(None, chat=chat), "r", MODEL)
    for end in range(len(text) + 1):
        output = byte_level().encode(thought + text[:end], add_special_tokens=False).ids
        whole = joined(play(ChoiceStream(0, wish), output))
        assert (whole.reasoning, whole.text) == ("Hm." if thought else "", "")
        if not is_named:
            assert len(whole.tool_calls) == text[:end].count('"f"')


STOPPED = [
    ("is", "<think>This is.</think>\n\nIt is so.", "This is.", "It "),
    ("is", "It is so.", "", "It "),
    ("\n", "<think>\nThis.\n\nThat.\n</think>\n\nIt is.\nIt was.", "This.\n\nThat.", "It is."),
    ("</think>", "<think>Hm.</think>It is.", "Hm.", "It is."),
    ("Ix", "<think>Io and Ix</think>Io Ix", "Io and Ix", "Io "),
    ("A B", "<think>A B</think> A B C", "A B", ""),
    (" A", "<think>A</think> A A", "A", "A"),
    ("name", "<think>name</think>" + CALLS, "name", 'First.<tool_call>{"'),
]
"""A stop string, an answer, and the reasoning and content before the stop string."""


@pytest.mark.parametrize(("stop", "answer", "reasoning", "content"), STOPPED)
def test_stop_strings_are_looked_for_after_the_reasoning(
    stop: str, answer: str, reasoning: str, content: str
) -> None:
    """Otherwise an answer whose reasoning has one would be empty."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")], tools=TOOLS)
    request = generate_request(None, chat=chat, stop=[stop])
    choice = ChoiceStream(0, resolve_request(request, "r", MODEL))
    deltas = play(choice, byte_level().encode(answer, add_special_tokens=False).ids)
    whole = joined(deltas)
    assert (whole.reasoning, whole.text, len(whole.tool_calls)) == (reasoning, content, 0)
    has_stopped = content != "It is." or stop == "\n"
    assert deltas[-1].stop_string == (stop if has_stopped else "")

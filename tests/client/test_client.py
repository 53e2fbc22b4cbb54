"""Both clients against a server that misbehaves on cue."""

import pickle
import threading
from typing import Any

import grpc
import pytest

import pagewire_client
from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import (
    NO_RETRIES,
    AsyncClient,
    Client,
    RequestOutput,
    RetryPolicy,
    SamplingParams,
    errors,
)
from tests.support.fake_frontend import (
    DRAWN_SEED,
    MODEL,
    STOP_TOKEN,
    UNAVAILABLE,
    Break,
    Failure,
    FakeFrontend,
    piece,
    token,
)

KILLED = Failure(code=grpc.StatusCode.UNAVAILABLE, reason="", message="Socket closed")
TEN = SamplingParams(max_tokens=10)
CHAT = [{"role": "user", "content": "Hi"}]


def expected_tokens(prompt: str, count: int, *, choice: int = 0) -> list[int]:
    return [token(prompt, DRAWN_SEED, choice, position) for position in range(count)]


def expected_text(prompt: str, count: int, *, choice: int = 0) -> str:
    return "".join(map(piece, expected_tokens(prompt, count, choice=choice)))


def comparable(output: RequestOutput) -> RequestOutput:
    output.request_id = ""
    return output


def test_generate_returns_the_whole_answer(client: Any) -> None:
    output = client.generate("Hello", SamplingParams(max_tokens=5, n=2, stop_token_ids=[7]))
    assert output.finished
    assert output.prompt == "Hello"
    assert output.prompt_token_ids == [ord(character) for character in "Hello"]
    assert output.model == MODEL
    assert output.seed == DRAWN_SEED
    assert output.usage.completion_tokens == 10
    assert output.timings.total_us == 100
    assert output.text == expected_text("Hello", 5)
    for index, choice in enumerate(output.outputs):
        assert choice.index == index
        assert choice.token_ids == expected_tokens("Hello", 5, choice=index)
        assert choice.text == expected_text("Hello", 5, choice=index)
        assert choice.finish_reason == "stop"
        assert choice.stop_reason == STOP_TOKEN
        assert choice.logprobs is None


def test_a_stream_yields_the_pieces_of_its_output(client: Any) -> None:
    stream = client.stream("Hello", TEN)
    deltas = list(stream)
    assert len(deltas) == 10
    assert "".join(delta.text for delta in deltas) == stream.output.text
    assert [t for delta in deltas for t in delta.token_ids] == stream.output.outputs[0].token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * 9 + ["length"]
    assert stream.output.finished


def test_log_probabilities_come_by_token_id_with_the_chosen_one_first(client: Any) -> None:
    output = client.generate("Hi", SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1))
    choice = output.outputs[0]
    for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert list(position) == [token_id, 3]
        assert position[token_id].rank == 2
        assert position[token_id].decoded_token == piece(token_id)
        assert position[3].rank == 1
    chosen = [
        position[token_id].logprob
        for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True)
    ]
    assert choice.cumulative_logprob == sum(chosen)
    assert output.prompt_logprobs[0] is None
    assert list(output.prompt_logprobs[1]) == [ord("i"), 3]


def test_a_chat_is_sent_as_messages(client: Any, frontend: FakeFrontend) -> None:
    client.chat([{"role": "user", "content": "Hi"}], TEN, model=MODEL, add_generation_prompt=False)
    request = frontend.requests[0]
    assert request.chat == pb.Chat(
        messages=[pb.ChatMessage(role="user", content="Hi")], add_generation_prompt=False
    )
    assert request.model == MODEL


def test_a_chat_takes_tools_and_variables_of_the_template(
    client: Any, frontend: FakeFrontend
) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    variables = {"enable_thinking": False}
    client.chat(CHAT, tools=tools, chat_template_kwargs=variables, max_tokens=1)
    client.generate({"messages": CHAT, "tools": tools, "chat_template_kwargs": variables})
    assert frontend.requests[0].chat == frontend.requests[1].chat
    assert [tool.name for tool in frontend.requests[0].chat.tools] == ["add"]
    assert frontend.requests[0].chat.template_arguments_json == '{"enable_thinking": false}'


def test_a_chat_chooses_tools_and_leaves_reasoning_out(client: Any, frontend: FakeFrontend) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    named = {"type": "function", "function": {"name": "add"}}
    for choice in (None, "auto", "none", "required", named):
        client.chat(CHAT, tools=tools, tool_choice=choice, max_tokens=1)
    client.chat(CHAT, tools=tools, include_reasoning=False, parallel_tool_calls=False, max_tokens=1)
    *chats, last = [request.chat for request in frontend.requests]
    assert [len(chat.tools) for chat in chats] == [1, 1, 0, 1, 1]
    assert [chat.HasField("tool_choice") for chat in chats] == [False] * 3 + [True] * 2
    assert (chats[3].tool_choice.required, chats[4].tool_choice.name) == (True, "add")
    assert not chats[0].HasField("include_reasoning")
    assert not last.include_reasoning
    assert last.HasField("include_reasoning")
    assert not last.parallel_tool_calls
    assert last.HasField("parallel_tool_calls")
    with pytest.raises(ValueError, match="tool_choice must be"):
        client.chat(CHAT, tools=tools, tool_choice="any")


def test_what_the_caller_says_is_what_the_server_hears(client: Any, frontend: FakeFrontend) -> None:
    options = {"priority": -2, "model": MODEL, "num_speculative_tokens": 0, "cache_salt": "s"}
    client.generate("Hi", SamplingParams(seed=3), request_id="mine", **options)
    client.generate_many(["Hi"], SamplingParams(seed=3), **options)
    request, of_many = frontend.requests
    for sent in (request, of_many):
        assert (sent.priority, sent.model) == (-2, MODEL)
        assert sent.HasField("num_speculative_tokens")
        assert sent.num_speculative_tokens == 0
        assert sent.cache_salt == "s"
    assert request.request_id == "mine"
    assert request.sampling_params == SamplingParams(seed=3).to_proto()


def test_without_sampling_params_an_answer_has_sixteen_tokens(client: Any) -> None:
    assert len(client.generate("Hi").outputs[0].token_ids) == 16


@pytest.mark.parametrize(
    ("method", "prompt"),
    [
        *[("generate", "Hi"), ("stream", "Hi"), ("chat", CHAT)],
        *[("generate_many", ["Hi"]), ("try_generate_many", ["Hi"])],
    ],
)
def test_sampling_parameters_may_be_keyword_arguments(
    client: Any, frontend: FakeFrontend, method: str, prompt: Any
) -> None:
    call = getattr(client, method)
    answer = call(prompt, temperature=0, max_tokens=3, model=MODEL)
    if method == "stream":
        list(answer)
    (request,) = frontend.requests
    assert request.sampling_params == SamplingParams(temperature=0, max_tokens=3).to_proto()
    assert request.model == MODEL
    with pytest.raises(TypeError, match=r"sampling_params and .* \(temperature\) are mutually"):
        call(prompt, TEN, temperature=0)
    with pytest.raises(TypeError, match=r"unknown argument 'temprature'; .* 'temperature'"):
        call(prompt, temprature=0)
    with pytest.raises(TypeError, match=r"unknown argument 'timout'; .* 'timeout'"):
        call(prompt, timout=3)
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, not dict"):
        call(prompt, {"temperature": 0})


def test_arguments_of_other_methods_are_refused(client: Any) -> None:
    for name in ("tools", "max_in_flight", "use_tqdm"):
        with pytest.raises(TypeError, match=f"unknown argument '{name}'"):
            client.generate("Hi", **{name: 1})
    with pytest.raises(TypeError, match=r"unknown argument 'request_id'"):
        client.generate_many(["Hi"], request_id="mine")
    with pytest.raises(TypeError, match=r"unknown argument 'lora_request'; .* 'lora'"):
        client.generate("Hello", lora_request=None)
    with pytest.raises(TypeError, match=r"unknown argument 'tool'; .* 'tools'"):
        client.chat(CHAT, tool=[])


@pytest.mark.parametrize("params", [None, SamplingParams(temperature=0)])
def test_the_answer_in_a_chat_may_be_as_long_as_the_model_allows(
    client: Any, frontend: FakeFrontend, params: SamplingParams | None
) -> None:
    client.chat(CHAT, params)
    client.generate_many([CHAT], params)
    list(client.stream(CHAT, params))
    assert [r.sampling_params.HasField("max_tokens") for r in frontend.requests] == [False] * 3


@pytest.mark.parametrize("failure", [KILLED, UNAVAILABLE, None])
@pytest.mark.parametrize("after_tokens", [0, 1, 7, 19, 20])
def test_a_broken_stream_goes_on_and_ends_as_if_undisturbed(
    client: Any, frontend: FakeFrontend, after_tokens: int, failure: Failure | None
) -> None:
    params = SamplingParams(max_tokens=10, n=2, logprobs=0, prompt_logprobs=1)
    undisturbed = client.generate("Hello", params)
    frontend.breaks.append(Break(after_tokens=after_tokens, failure=failure))
    stream = client.stream("Hello", params)
    texts = ["", ""]
    for delta in stream:
        texts[delta.index] += delta.text
    assert comparable(stream.output) == comparable(undisturbed)
    assert texts == [choice.text for choice in undisturbed.outputs]
    assert len(frontend.requests) == 3


def test_a_continued_request_says_what_was_received(client: Any, frontend: FakeFrontend) -> None:
    frontend.breaks.append(Break(after_tokens=3, failure=KILLED))
    client.generate("Hello", SamplingParams(max_tokens=10, temperature=0.5))
    first, second = frontend.requests
    assert not first.resume
    assert second.request_id == first.request_id
    assert second.text == "Hello"
    assert second.model == MODEL
    assert second.sampling_params.seed == DRAWN_SEED
    assert second.sampling_params.temperature == 0.5
    # A token's text comes with the token after it.
    assert list(second.resume) == [
        pb.ResumedChoice(
            index=0,
            token_ids=expected_tokens("Hello", 3),
            num_chars=len(expected_text("Hello", 2)),
        )
    ]


def test_before_the_first_response_the_same_request_is_sent_again(
    client: Any, frontend: FakeFrontend
) -> None:
    frontend.breaks.append(Break(failure=KILLED))
    client.generate("Hello", TEN)
    first, second = frontend.requests
    assert (first.attempt, second.attempt) == (0, 1), "it takes over what the first may have left"
    second.ClearField("attempt")
    assert first == second


@pytest.mark.parametrize(
    ("failure", "words"),
    [(KILLED, "the server closes the connection"), (None, "before the answer was complete")],
)
def test_without_retries_a_cut_stream_is_an_error(
    make_client: Any, frontend: FakeFrontend, failure: Failure | None, words: str
) -> None:
    frontend.breaks.append(Break(after_tokens=3, failure=failure))
    stream = make_client(frontend.address, retry=NO_RETRIES).stream("Hello", TEN)
    with pytest.raises(errors.Unavailable, match=words):
        list(stream)
    assert stream.output.outputs[0].token_ids == expected_tokens("Hello", 3)
    assert not stream.output.finished


def test_a_stream_moves_to_another_frontend_when_its_own_dies(make_client: Any) -> None:
    with FakeFrontend() as first, FakeFrontend() as second:
        client = make_client([first.address, second.address])
        first.hold.clear()
        stream = client.stream("Hello", TEN)
        received = [next(stream)]
        first.stop()
        received += list(stream)
        assert stream.output.text == expected_text("Hello", 10)
        assert second.requests[0].resume
        client.generate("Again", TEN)
        assert len(second.requests) == 2


def test_an_address_nobody_listens_on_is_passed_over(
    make_client: Any, frontend: FakeFrontend
) -> None:
    client = make_client(["127.0.0.1:1", frontend.address])
    assert client.generate("Hello", TEN).text == expected_text("Hello", 10)


def test_no_server_at_all_is_an_error_after_the_retries(make_client: Any) -> None:
    with pytest.raises(errors.Unavailable, match=r"cannot connect to 127\.0\.0\.1:1: "):
        make_client("127.0.0.1:1").generate("Hello", TEN)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgument),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.FailedPrecondition),
        (grpc.StatusCode.UNAUTHENTICATED, errors.NotAuthorized),
        (grpc.StatusCode.NOT_FOUND, errors.NotFound),
        (grpc.StatusCode.ALREADY_EXISTS, errors.AlreadyExists),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.CANCELLED, errors.RequestAborted),
        (grpc.StatusCode.INTERNAL, errors.ServerError),
    ],
)
def test_errors_are_typed_and_keep_what_the_server_said(
    client: Any, frontend: FakeFrontend, code: grpc.StatusCode, kind: type[errors.PagewireError]
) -> None:
    failure = Failure(code=code, message="because", reason="WHY", field="sampling_params.n")
    frontend.breaks.append(Break(after_tokens=1, failure=failure))
    with pytest.raises(kind, match="because") as caught:
        client.generate("Hello", TEN)
    assert caught.value.reason == "WHY"
    assert caught.value.field == "sampling_params.n"
    assert caught.value.details == {"detail": "42"}
    assert len(frontend.requests) == 1


def test_a_full_server_is_tried_again(client: Any, frontend: FakeFrontend) -> None:
    full = Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_ms=20)
    frontend.breaks.append(Break(failure=full))
    assert client.generate("Hello", TEN).finished


def test_a_timeout_ends_the_request_here_and_there(client: Any, frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    while not frontend.requests:  # on a busy machine one may end on its way
        with pytest.raises(errors.DeadlineExceeded, match="the timeout passed before"):
            client.generate("Hello", TEN, timeout=0.3)
    assert frontend.ended_early.wait(60)


def test_a_client_has_a_timeout_for_calls_without_one(
    make_client: Any, frontend: FakeFrontend
) -> None:
    frontend.hold.clear()
    client = make_client(frontend.address, timeout=0.3)
    for call in (client.generate, client.chat, client.generate_many):
        with pytest.raises(errors.DeadlineExceeded):
            call(CHAT, TEN)
    with pytest.raises(errors.DeadlineExceeded):
        list(client.stream("Hello", TEN))
    frontend.hold.set()
    assert client.generate("Hello", TEN, timeout=float("inf")).finished


def test_a_timeout_of_the_client_bounds_unary_calls(make_client: Any) -> None:
    """Between two attempts, or during one on a busy machine."""
    client = make_client("127.0.0.1:1", timeout=0.1, retry=RetryPolicy(max_retries=1_000_000))
    for call in (client.get_model, client.get_status, lambda: client.tokenize("Hi")):
        with pytest.raises(errors.DeadlineExceeded, match=r"timeout (while retrying|passed)"):
            call()


def test_options_may_differ_over_the_same_connections(frontend: FakeFrontend) -> None:
    with Client(frontend.address) as client:
        client.get_model()
        frontend.breaks.append(Break(failure=KILLED))
        with pytest.raises(errors.Unavailable):
            client.with_options(retry=NO_RETRIES).generate("Hello", TEN)
        frontend.breaks.append(Break(failure=KILLED))
        assert client.generate("Hello", TEN).finished
        frontend.hold.clear()
        with pytest.raises(errors.DeadlineExceeded):
            client.with_options(timeout=1).generate("Hello", TEN)
        frontend.hold.set()
    assert len(frontend.peers) == 1


def test_address_and_key_come_from_the_environment(
    make_client: Any, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_ADDRESS", f"127.0.0.1:1 {frontend.address}")
    monkeypatch.setenv("PAGEWIRE_API_KEY", "secret")
    make_client().generate("Hello", TEN)
    make_client(frontend.address, api_key="other").generate("Hello", TEN)
    make_client(frontend.address, api_key="").generate("Hello", TEN)
    make_client(frontend.address, api_key=" of_several\tthe_first").generate("Hello", TEN)
    sent = [metadata.get("authorization") for metadata in frontend.metadata]
    assert sent == ["Bearer secret", "Bearer other", None, "Bearer of_several"]


def test_a_stream_yields_its_text_and_its_whole_answer(client: Any) -> None:
    params = SamplingParams(max_tokens=10, n=2)
    assert "".join(client.stream("Hello", params).text_deltas()) == expected_text("Hello", 10)
    stream = client.stream("Hello", params)
    next(stream)
    output = stream.final()
    assert output.finished
    assert output.text == expected_text("Hello", 10)


def test_the_log_probability_of_a_text_is_that_of_its_tokens(
    client: Any, frontend: FakeFrontend
) -> None:
    def known(character: str) -> float:
        return -ord(character) / 1024

    (found,) = client.logprobs("Hi!")
    assert found.token_ids == [ord("H"), ord("i"), ord("!")]
    assert found.logprobs == [None, known("i"), known("!")]
    assert found.logprob == known("i") + known("!")
    both = client.logprobs(["c", [100, 101]], context="ab")
    assert [text.token_ids for text in both] == [[99], [100, 101]]
    assert [text.logprobs for text in both] == [[known("c")], [known("d"), known("e")]]
    assert list(frontend.requests[-1].token_ids.ids) == [1, 97, 98, 100, 101]


def test_every_error_is_exported() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.PagewireError)
    }
    assert defined <= set(pagewire_client.__all__)
    assert all(hasattr(pagewire_client, name) for name in pagewire_client.__all__)
    assert set(pagewire_client.__all__) <= set(dir(pagewire_client))


def test_closing_a_stream_cancels_the_request(client: Any, frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    stream = client.stream("Hello", TEN)
    next(stream)
    stream.close()
    assert frontend.ended_early.wait(60)
    assert list(stream) == []
    assert not stream.output.finished
    assert len(frontend.requests) == 1


@pytest.mark.parametrize(
    "address", ["", "localhost", "host:", "host:0", "host:99999", "unix:", [], 5, [b"x"]]
)
def test_a_malformed_address_is_refused_before_any_call(make_client: Any, address: Any) -> None:
    with pytest.raises(ValueError, match="address"):
        make_client(address)


def test_the_small_calls_answer(client: Any) -> None:
    assert client.tokenize("ab") == [1, 97, 98]
    assert client.tokenize([{"role": "user", "content": "b"}], add_special_tokens=False) == [98]
    assert client.detokenize([97, 98]) == "ab"
    with pytest.raises(ValueError, match="token_ids cannot be"):
        client.detokenize([-1])
    with pytest.raises(ValueError, match="messages must be a list"):
        client.tokenize(5)
    assert client.get_model().max_model_len == 100
    assert client.get_status().version == "1.2.3"
    with pytest.raises(errors.NotFound, match="other"):
        client.get_model("other")


def test_abort_names_a_request(client: Any) -> None:
    client.generate("Hello", TEN, request_id="mine")
    client.abort("mine")
    with pytest.raises(errors.NotFound):
        client.abort("not mine")


def test_status_is_watched_over_a_break(client: Any, frontend: FakeFrontend) -> None:
    frontend.breaks.append(Break(after_tokens=2, failure=KILLED))
    statuses = client.watch_status(0.1)
    assert [next(statuses).uptime_s for _ in range(4)] == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("interval_s", [float("nan"), -1, 0, 61])
def test_an_interval_out_of_range_is_named(client: Any, interval_s: float) -> None:
    with pytest.raises(ValueError, match=r"interval_s: expected 0\.1 to 60 seconds, got"):
        next(client.watch_status(interval_s))


def test_a_prompt_larger_than_a_message_is_the_request_s_fault(client: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="larger than max"):
        client.generate("a" * (17 << 20))


def test_dropping_a_stream_cancels_the_request(frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    with Client(frontend.address) as client:
        for _ in client.stream("Hello", TEN):
            break
        assert frontend.ended_early.wait(60)


def test_another_thread_may_close_a_stream_that_waits(frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    with Client(frontend.address) as client:
        stream = client.stream("Hello", TEN)
        next(stream)
        next(stream)
        closer = threading.Timer(0.1, stream.close)
        closer.start()
        assert list(stream) == []
        closer.join()


def test_a_client_shows_its_addresses_and_no_key() -> None:
    for kind in (Client, AsyncClient):
        client = kind(["127.0.0.1:1", "unix:/x"], api_key="secret")
        assert repr(client) == f"{kind.__name__}('127.0.0.1:1,unix:/x')"


def test_a_client_that_is_pickled_says_what_to_do(frontend: FakeFrontend) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(TypeError, match="create one in each process"):
            pickle.dumps(kind(frontend.address))


def test_a_closed_client_says_so(frontend: FakeFrontend) -> None:
    client = Client(frontend.address)
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.generate("Hello", TEN)

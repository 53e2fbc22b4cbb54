"""The `pagewire` command: what it prints, where, and how it ends."""

import importlib.metadata
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

import pagewire_client
from pagewire.connection_errors import in_words
from pagewire.v1.sampling_pb2 import (
    EARLY_STOPPING_NEVER,
    EARLY_STOPPING_WHEN_HOPELESS,
    BeamSearch,
    ChoiceList,
    SamplingParams,
)
from pagewire_cli import terminal
from pagewire_cli.app import _hint, app
from pagewire_cli.chat import Conversation
from pagewire_cli.local import LocalServices, engine_args, health, service_commands
from pagewire_cli.options import SAMPLING_AND_ANSWERS
from pagewire_cli.serve import Deployment, _http_address
from pagewire_client.errors import Unavailable
from pagewire_client.outputs import OutputDelta, RequestOutput
from tests.support.fake_frontend import (
    MODEL,
    Break,
    Failure,
    FakeFrontend,
    piece,
    token,
)

CHAT_TEXT = ""  # The fake frontend's tokens depend on the text of a prompt, which a chat has not.


def run(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> Any:
    """The command in a process of its own, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "pagewire_cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env=service_commands.environment() | _client_path() | (env or {}),
    )


def _client_path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def begin(frontend: FakeFrontend, command: str, *arguments: str) -> "subprocess.Popen[str]":
    """The command in a process of its own, with pipes to it."""
    return subprocess.Popen(
        [sys.executable, "-m", "pagewire_cli", command, "--address", frontend.address, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=service_commands.environment() | _client_path(),
    )


def answer(prompt: str, count: int, seed: int) -> str:
    return "".join(piece(token(prompt, seed, 0, position)) for position in range(count))


@pytest.fixture
def invoke(frontend: FakeFrontend) -> Any:
    """Invokes a command in this process, with the fake frontend's address."""

    def call(*arguments: str, stdin: str | None = None) -> Any:
        return CliRunner().invoke(
            app, [*arguments, "--address", frontend.address], input=stdin, catch_exceptions=False
        )

    return call


def test_generate_streams_the_answer_to_standard_output(invoke: Any) -> None:
    result = invoke("generate", "Hello", "--max-tokens", "4", "--seed", "5")
    assert result.exit_code == 0
    assert result.stdout == answer("Hello", 4, 5) + "\n"
    assert result.stderr == ""


def test_generate_takes_its_prompt_from_standard_input(invoke: Any) -> None:
    result = invoke("generate", "--max-tokens", "2", "--seed", "5", stdin="Hi there")
    assert result.stdout == answer("Hi there", 2, 5) + "\n"


def test_generate_takes_what_the_answer_must_match_as_text_or_from_a_file(
    invoke: Any, frontend: FakeFrontend, tmp_path: Path
) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    for options, field, value in (
        (["--json-schema", '{"const": 1}'], "json_schema", '{"const": 1}'),
        (["--json-schema", str(file)], "json_schema", '{"type": "object"}'),
        (["--regex", "a" * 5000], "regex", "a" * 5000),
        (["--grammar", 'start: "a"'], "grammar", 'start: "a"'),
        (["--choice", "yes", "--choice", "no"], "choice", ChoiceList(choices=["yes", "no"])),
    ):
        assert invoke("generate", "x", *options).exit_code == 0
        sampling = frontend.requests[-1].sampling_params
        assert sampling.WhichOneof("structured_output") == field
        assert getattr(sampling, field) == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json-schema", "/nope.json"], "--json-schema: expected a file or a text with {, got"),
        (["--grammar", "nope.lark"], "--grammar: expected a file or a text with :, got"),
        (["--logprobs", "2"], "--logprobs: expected with --json, which prints them"),
    ],
)
def test_options_of_generate_that_would_do_nothing(
    invoke: Any, options: list[str], message: str
) -> None:
    result = invoke("generate", "x", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", "").split())


def test_generate_prints_all_there_is_as_json(invoke: Any) -> None:
    result = invoke("generate", "Hello", "--max-tokens", "2", "--seed", "5", "--json")
    output = json.loads(result.stdout)
    assert output["outputs"][0]["text"] == answer("Hello", 2, 5)
    assert output["model"] == MODEL
    assert output["usage"]["completion_tokens"] == 2


def test_sampling_options_reach_the_server(invoke: Any, frontend: FakeFrontend) -> None:
    invoke("generate", "x", "--top-k", "-1", "--top-p", "0.5", "--stop", "a", "--stop", "b")
    invoke("generate", "x", "--min-tokens", "3", "--max-tokens", "3", "--ignore-eos")
    params, measured = (request.sampling_params for request in frontend.requests)
    assert (params.top_k, params.top_p, list(params.stop)) == (0, 0.5, ["a", "b"])
    assert not params.HasField("temperature")
    assert (measured.min_tokens, measured.ignore_eos) == (3, True)


def test_several_answers_are_printed_one_after_the_other(
    invoke: Any, frontend: FakeFrontend
) -> None:
    result = invoke("generate", "Hello", "-n", "2", "--max-tokens", "3", "--seed", "5")
    texts = [
        "".join(piece(token("Hello", 5, choice, position)) for position in range(3))
        for choice in range(2)
    ]
    assert result.stdout == "".join(f"{text}\n" for text in texts)
    assert result.stderr == "answer 1 of 2\nanswer 2 of 2\n"
    assert frontend.requests[0].max_hold_ms > 0


@pytest.mark.parametrize(
    ("options", "params"),
    [
        (["--n", "2", "--best-of", "5"], {"n": 2, "best_of": 5}),
        (["--truncate-prompt-tokens", "-1"], {"truncate_prompt_tokens": 0}),
        (
            ["--beam-width", "4", "--length-penalty", "0.5", "--early-stopping", "never"],
            {
                "beam_search": BeamSearch(
                    width=4, length_penalty=0.5, early_stopping=EARLY_STOPPING_NEVER
                )
            },
        ),
        (
            ["--beam-width", "4", "--early-stopping", "false"],
            {"beam_search": BeamSearch(width=4, early_stopping=EARLY_STOPPING_WHEN_HOPELESS)},
        ),
    ],
)
def test_how_answers_are_found_reaches_the_server(
    invoke: Any, frontend: FakeFrontend, options: list[str], params: dict[str, Any]
) -> None:
    assert invoke("generate", "x", *options).exit_code == 0
    assert frontend.requests[0].sampling_params == SamplingParams(max_tokens=256, **params)


def test_no_server_is_an_error_with_the_addresses_that_were_tried_and_an_exit_code() -> None:
    done = run("generate", "Hello", "--address", "127.0.0.1:1,127.0.0.1:2")
    assert "tried in turn: 127.0.0.1:1, 127.0.0.1:2" in done.stderr.splitlines()
    done = run("generate", "Hello", "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stdout == ""
    told, hint = done.stderr.splitlines()
    assert told == ("error: no server answers: cannot connect to 127.0.0.1:1: connection refused")
    assert "pagewire serve" in hint
    assert "Traceback" not in done.stderr


def test_an_address_of_http_is_recognised() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = run("generate", "Hello", "--address", f"localhost:{server.server_port}")
        server.shutdown()
    assert done.returncode == 1
    assert "an HTTP server answers there" in done.stderr
    assert "`pagewire serve` starts" not in done.stderr
    assert "gRPC has a port of its own" in done.stderr
    assert "%5B" not in done.stderr


def test_each_address_of_a_name_is_named_with_what_it_answered() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert health.attempts(f"127.0.0.1:{server.server_port}") == [f"  127.0.0.1: {health.HTTP}"]
        server.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert health.attempts(address, timeout_s=0.01) == ["  127.0.0.1: no answer"]
    assert health.attempts(address) == ["  127.0.0.1: connection refused"]
    assert health.attempts("unix:/nowhere") == health.attempts("no.such.host.invalid:1") == []


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (
            "failed to connect to all addresses; last error: INTERNAL: ipv4:127.0.0.1:8000: Failed"
            " parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 80)"
            " (Trying to connect an http1.x server (HTTP status 400))",
            "cannot connect to 127.0.0.1:8000: an HTTP server answers there; gRPC has a port of its"
            " own, 7600 by default (a core's: 7610)",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:9: Failed"
            " parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 79)",
            f"cannot connect to 127.0.0.1:9: {health.HTTP}",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:8000: Failed"
            " to connect to remote host: Connection refused",
            "cannot connect to [::1]:8000: connection refused",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7707: Tls"
            " handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL"
            " routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: certificate has expired: OK",
            "cannot connect to 127.0.0.1:7707: its certificate, or that of the authority, has"
            " expired",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7707: Tls"
            " handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL"
            " routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self signed certificate: OK",
            "cannot connect to 127.0.0.1:7707: no known authority has signed its certificate",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:192.0.2.1:3128: HTTP"
            " proxy returned response code 503",
            "cannot connect to 192.0.2.1:3128: proxy returned response code 503",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:8105: Cannot"
            " check peer: missing selected ALPN property.",
            f"cannot connect to 127.0.0.1:8105: {health.HTTP}",
        ),
    ],
)
def test_messages_of_grpc_are_put_in_words(details: str, words: str) -> None:
    assert in_words(details) == words


@pytest.mark.parametrize(
    "module",
    [
        ("pagewire_cli", "serve"),
        ("scheduler_service", "frontend"),
        ("scheduler_service", "scheduler"),
        ("worker_service",),
    ],
)
def test_no_file_and_no_help_depends_on_the_locales_encoding(module: tuple[str, ...]) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", *module, "--help"],
        env=os.environ | ascii_only | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_proxy_is_named_unless_the_server_is_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    error = Unavailable("cannot connect to 192.0.2.1:3128: proxy returned response code 503")
    error.addresses = ("127.0.0.1:7600",)
    assert "https_proxy" not in _hint(error)
    error.addresses = ("llm.example:7600",)
    assert "the variable https_proxy names a proxy" in _hint(error)


def test_only_where_nothing_listens_does_the_hint_start_a_server() -> None:
    def unavailable(why: str) -> Unavailable:
        return Unavailable(f"cannot connect to 127.0.0.1:7600: {why}")

    for why in ("connection refused", "No such file or directory"):
        assert "`pagewire serve` starts one" in _hint(unavailable(why))
    assert _hint(unavailable("the server does not speak TLS")) == ""


def test_an_authority_that_is_not_known_can_be_named() -> None:
    why = "cannot connect to 127.0.0.1:7600: no known authority has signed its certificate"
    assert "--tls-ca" in _hint(Unavailable(why))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "Hello", "--model", "other"], "no model 'other' is served"),
        (
            ["generate", "Hello", "--seed", str(2**64)],
            "--seed: expected an integer from -9223372036854775808 to 18446744073709551615, got",
        ),
        (["generate", "Hello", "--tls-ca", "/none.pem"], "No such file"),
    ],
)
def test_a_wrong_request_is_one_line_and_an_exit_code(
    frontend: FakeFrontend, arguments: list[str], words: str
) -> None:
    done = run(*arguments, "--address", frontend.address)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_chat_shows_and_sets_what_a_model_without_defaults_is_sampled_with(
    invoke: Any, frontend: FakeFrontend
) -> None:
    frontend.generation_defaults = ["repetition_penalty"]
    result = invoke("chat", "--max-tokens", "2", stdin="Hi\n")
    assert "temperature 0.7 and top_p 0.9" in result.stderr
    params = frontend.requests.pop().sampling_params
    assert (round(params.temperature, 6), round(params.top_p, 6)) == (0.7, 0.9)


@pytest.mark.parametrize(
    ("arguments", "defaults"),
    [
        (["--temperature", "0"], []),
        (["--top-k", "5"], []),
        ([], ["temperature"]),
        ([], ["repetition_penalty", "top_k"]),
    ],
)
def test_chat_leaves_what_the_user_or_the_model_has_chosen(
    invoke: Any, frontend: FakeFrontend, arguments: list[str], defaults: list[str]
) -> None:
    frontend.generation_defaults = defaults
    result = invoke("chat", "--max-tokens", "2", *arguments, stdin="Hi\n")
    assert "top_p" not in result.stderr
    assert not frontend.requests.pop().sampling_params.HasField("top_p")


def test_chat_answers_each_line_and_remembers(invoke: Any, frontend: FakeFrontend) -> None:
    result = invoke("chat", "--max-tokens", "2", "--seed", "1", stdin="Hi\n\nMore\n/exit\nNo\n")
    said = answer(CHAT_TEXT, 2, 1)
    assert result.exit_code == 0
    assert result.stdout == f"{said}\n{said}\n"
    assert MODEL in result.stderr
    assert [
        [(message.role, message.content) for message in request.chat.messages]
        for request in frontend.requests
    ] == [
        [("user", "Hi")],
        [("user", "Hi"), ("assistant", said), ("user", "More")],
    ]


def test_chat_forgets_when_told_to_but_not_its_system_message(
    invoke: Any, frontend: FakeFrontend
) -> None:
    invoke("chat", "--system", "Be kind.", "--max-tokens", "1", stdin="Hi\n/reset\nHello\n")
    messages = frontend.requests[1].chat.messages
    assert [message.content for message in messages] == ["Be kind.", "Hello"]


def test_chat_goes_on_after_an_answer_that_failed(invoke: Any, frontend: FakeFrontend) -> None:
    long = Failure(code=grpc.StatusCode.FAILED_PRECONDITION, message="too long")
    frontend.breaks.append(Break(failure=long))
    result = invoke("chat", "--max-tokens", "1", stdin="Hi\nHello\n")
    assert result.exit_code == 0
    assert "error: too long" in result.stderr
    assert [message.content for message in frontend.requests[1].chat.messages] == ["Hello"]


def _refusal(field: str) -> Break:
    code, message = grpc.StatusCode.INVALID_ARGUMENT, f"{field}: expected more"
    return Break(failure=Failure(code=code, message=message, field=field))


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("sampling_params.max_tokens", "--max-tokens"),
        ("sampling_params.beam_search.width", "--beam-width"),
        ("sampling_params.beam_search.length_penalty", "--length-penalty"),
        ("sampling_params.beam_search.early_stopping", "--early-stopping"),
        ("sampling_params.stop[1]", "--stop"),
        ("sampling_params.choice.choices[0]", "--choice"),
        ("sampling_params.json_schema", "--json-schema"),
        ("model", "--model"),
        ("text", "text"),
    ],
)
def test_a_refused_field_is_named_as_the_option_that_filled_it(
    invoke: Any, frontend: FakeFrontend, field: str, option: str
) -> None:
    frontend.breaks.append(_refusal(field))
    with pytest.raises(ValueError, match=f"^{option}: expected more$"):
        invoke("generate", "Hello")


def test_every_sampling_parameter_of_a_request_is_named_as_an_option() -> None:
    fields = {field.name for field in SamplingParams.DESCRIPTOR.fields} - {"beam_search"}
    # `beam_search` is of three options, and these have none.
    without = {
        *("logit_bias", "stop_token_ids", "bad_words", "allowed_token_ids", "prompt_logprobs"),
        *("skip_special_tokens", "include_stop_in_output", "thought"),
    }
    assert fields - without <= {option.name for option in SAMPLING_AND_ANSWERS.parameters}


def test_chat_names_a_refused_field_as_the_option_too(invoke: Any, frontend: FakeFrontend) -> None:
    frontend.breaks.append(_refusal("sampling_params.top_p"))
    result = invoke("chat", stdin="Hi\n")
    assert "error: --top-p: expected more\n" in result.stderr


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    with begin(frontend, "chat") as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write("Hi\n")
        chat.stdin.flush()
        assert chat.stdout.read(1) == " ", "the answer has begun"
        chat.send_signal(signal.SIGINT)
        assert frontend.ended_early.wait(60)
        frontend.hold.set()
        _, errors = chat.communicate("Again\n/exit\n", timeout=30)
        assert chat.returncode == 0, errors
    assert [message.content for message in frontend.requests[1].chat.messages][-1] == "Again"
    assert "Traceback" not in errors


class _Interrupted:
    """A stream of nothing, which ctrl-C stops."""

    output = RequestOutput(request_id="one")

    def __iter__(self) -> Iterator[OutputDelta]:
        raise KeyboardInterrupt

    def close(self) -> None:
        """Nothing is open."""


class _AskedClient:
    """Keeps the conversations of which a turn is requested."""

    def __init__(self) -> None:
        self.conversations: list[list[str]] = []

    def stream(self, messages: Any, *_: Any, **__: Any) -> _Interrupted:
        self.conversations.append([message["content"] for message in messages])
        return _Interrupted()


def test_a_question_that_ctrl_c_left_without_an_answer_is_forgotten() -> None:
    client = _AskedClient()
    chat = Conversation(client, MODEL, pagewire_client.SamplingParams(), "Be kind.")  # type: ignore[arg-type]
    with CliRunner().isolation("Hi\nAgain\n"):
        chat.run()
    assert client.conversations == [["Be kind.", "Hi"], ["Be kind.", "Again"]]


def test_who_waits_is_told_that_it_is_not_there_yet(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.note_if_slow("still waiting", after_s=0) as timer:
        timer.join(60)
    with terminal.note_if_slow("never said", after_s=1000) as timer:
        pass
    timer.join(60)
    assert not timer.is_alive()
    assert capsys.readouterr().err == "still waiting\n"


def test_ctrl_c_ends_generate_quietly(frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    with begin(frontend, "generate", "Hi") as generate:
        assert generate.stdout is not None
        assert generate.stdout.read(1) == " ", "the answer has begun"
        generate.send_signal(signal.SIGINT)
        _, errors = generate.communicate(timeout=30)
        assert generate.returncode == 130
        assert errors == ""
    assert frontend.ended_early.wait(60)


def test_status_shows_queues_and_workers(invoke: Any) -> None:
    result = invoke("status")
    assert result.exit_code == 0
    for words in ("1.2.3", MODEL, "2 running", "worker-0", "ready", "25 of 100"):
        assert words in result.stdout


def test_status_shows_states_saved_states_and_prefix_hits_by_cache_group(invoke: Any) -> None:
    texts = [" ".join(line.split()) for line in invoke("status").stdout.splitlines()]
    assert texts[-2:] == [
        "worker-0 growing, 64 tokens a block 17 blocks in use, 20 cached, 64 % of tokens found",
        "worker-0 state, 4 blocks each 2 in use, 5 saved, 3 on the host, 51 % of tokens found",
    ]


def test_status_says_since_when_it_counts_and_lists_lost_workers_for_five_minutes(
    invoke: Any,
) -> None:
    lines = [line.split() for line in invoke("status").stdout.splitlines()]
    texts = [" ".join(line) for line in lines]
    since = next(i for i, text in enumerate(texts) if text.startswith("since the core's start "))
    assert texts[since + 1] == "finished 7 requests"
    assert "lost workers 4" in texts[since:]
    assert [text for text in texts if " ago" in text[1:] and "lost" in text] == [
        f"gone lost 12 s ago {MODEL}"
    ]


@pytest.mark.parametrize("columns", ["40", "80"])
def test_status_shows_a_line_for_each_worker_on_a_narrow_terminal(
    invoke: Any, monkeypatch: pytest.MonkeyPatch, frontend: FakeFrontend, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    frontend.group_id = "4072c8dda0" * 3
    lines = [line for line in invoke("status").stdout.splitlines() if "4072c8dda0" * 3 in line]
    line, *cache_groups = lines
    assert len(cache_groups) == 2
    assert "ready" in line
    assert "25 of 100" in line


def test_a_missing_api_key_names_the_option_for_one(frontend: FakeFrontend) -> None:
    missing = Failure(
        code=grpc.StatusCode.UNAUTHENTICATED, reason="NO_API_KEY", message="expected an API key"
    )
    frontend.breaks.append(Break(after_tokens=0, failure=missing))
    done = run("generate", "x", "--address", frontend.address)
    assert done.returncode == 1
    assert done.stderr == ("error: expected an API key\n--api-key or PAGEWIRE_API_KEY sends one\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--model", "b"], "--model (or PAGEWIRE_MODEL): expected one model, got b and a"),
        (
            ["a", "--model", "embedded"],
            "--model (or PAGEWIRE_MODEL): expected one model, got embedded",
        ),
        (["", "--model", "a"], "--model (or PAGEWIRE_MODEL): expected one model, got a and"),
        (["--workers", "100000000"], "--workers: expected 1 to 1024, got 100000000"),
        (["--http", "off", "--port", "8000"], "--http off serves no HTTP"),
        (["--http", "off", "--host", "::1"], "--http off serves no HTTP"),
    ],
)
def test_options_of_serve_that_contradict_each_other(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_empty_name_of_a_model_does_not_mean_the_embedded_one() -> None:
    with pytest.raises(ValueError, match=r"--model: expected a directory, file, .* got no text"):
        CliRunner().invoke(app, ["serve", ""], catch_exceptions=False)


def test_drain_without_a_core_says_where_its_address_is(tmp_path: Path) -> None:
    done = run("drain", "worker-0", "--core", f"unix:{tmp_path}/none.sock")
    assert done.returncode == 1
    assert "--core names the core: `pagewire serve` prints its address at start" in done.stderr


def test_bench_ends_with_exit_code_1_if_a_request_failed(
    invoke: Any, frontend: FakeFrontend
) -> None:
    arguments = ["--num-requests", "3", "--input-tokens", "4", "--output-tokens", "4"]
    assert invoke("bench", *arguments, "--warmup", "0").exit_code == 0
    full = Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED, message="full")
    frontend.breaks.append(Break(failure=full))
    done = invoke("bench", *arguments, "--warmup", "0")
    assert done.exit_code == 1
    assert "1 requests failed: Overloaded: full" in done.stderr
    assert "2" in next(line for line in done.stdout.splitlines() if "complete" in line)


def test_bench_refuses_a_file_without_a_directory_before_it_measures(invoke: Any) -> None:
    with pytest.raises(ValueError, match=r"--json: cannot write /no/such/figures\.json: No such"):
        invoke("bench", "--json", "/no/such/figures.json")
    with pytest.raises(ValueError, match="--json: cannot write /: Is a directory"):
        invoke("bench", "--json", "/")


def test_status_is_json_for_programs(invoke: Any) -> None:
    snapshot = json.loads(invoke("status", "--json").stdout)
    assert snapshot["version"] == "1.2.3"
    assert snapshot["num_waiting"] == 0
    assert snapshot["groups"][0]["num_free_gpu_blocks"] == 75


def test_status_may_be_watched(invoke: Any, frontend: FakeFrontend) -> None:
    ends = Failure(code=grpc.StatusCode.INTERNAL, message="enough")
    frontend.breaks.append(Break(after_tokens=3, failure=ends))
    with pytest.raises(Exception, match="enough"):
        invoke("status", "--watch", "--json")


def test_what_is_watched_without_a_terminal_is_printed_one_by_one(
    frontend: FakeFrontend,
) -> None:
    ends = Failure(code=grpc.StatusCode.INTERNAL, message="enough")
    frontend.breaks.append(Break(after_tokens=3, failure=ends))
    result = CliRunner().invoke(app, ["status", "--watch", "--address", frontend.address])
    assert result.stdout.count("version") == 3


@pytest.mark.parametrize("timeout", ["0", "-1", "nan"])
def test_a_timeout_of_a_core_s_status_is_above_0(timeout: str) -> None:
    with pytest.raises(ValueError, match="--timeout: expected a number of seconds above 0"):
        _invoke_at_core("status", "--timeout", timeout)


def _invoke_at_core(*arguments: str) -> Any:
    core = "127.0.0.1:1"
    return CliRunner().invoke(app, [*arguments, "--core", core], catch_exceptions=False)


def test_a_timeout_of_drain_is_checked_before_the_group_is_drained() -> None:
    alone = _invoke_at_core("drain", "worker-0", "--timeout", "5")
    assert alone.exit_code == 2
    assert "--timeout: expected with --wait" in alone.stderr
    with pytest.raises(ValueError, match=r"--timeout: expected a number of seconds .* got -5"):
        _invoke_at_core("drain", "worker-0", "--wait", "--timeout", "-5")


def test_the_version_is_the_distributions() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.stdout.strip() == importlib.metadata.version("pagewire")


@pytest.mark.parametrize(
    ("role", "option"), [("worker", "--model"), ("conformance", "--core-listen")]
)
def test_a_role_passes_all_arguments_on_help_too(role: str, option: str) -> None:
    done = run(role, "--help", env={"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert option in done.stdout
    assert "python -m" in done.stdout or "Usage" in done.stdout
    wrong = run(role, "--no-such-flag", "1")
    assert wrong.returncode == 2
    assert "--no-such-flag" in wrong.stderr


def test_serve_and_llm_know_every_flag_of_the_services() -> None:
    """Read from the services' own command lines, so that a new flag cannot be forgotten."""
    from scheduler_service.__main__ import make_app
    from worker_service.__main__ import serve as worker

    commands = {
        command.callback.__name__: command.callback for command in make_app().registered_commands
    }
    del commands["replay"]  # no service
    commands["worker"] = worker
    placed_by_us = {"model", "core", "listen", "advertise", "group_id", "profile_dir"}
    placed_by_us |= {"http", "http_share_port", "metrics_port", "health_listen"}
    placed_by_us |= {"api_key"}  # from the environment only, never in a list of processes
    placed_by_us |= {"cpu_share", "rank", "local_rank", "distributed_init", "launcher_pid"}
    placed_by_us |= {"launcher", "num_nodes", "node_rank"}
    placed_by_us |= {"ray_address", "ray_cpus_per_rank", "ray_timeout"}
    for service, command in commands.items():
        theirs = set(inspect.signature(command).parameters) - placed_by_us
        ours = {flag.name for flag in engine_args.FLAGS if flag.is_for(service)}
        assert ours == theirs, service


def test_each_worker_of_a_machine_is_told_of_gpus_of_its_own() -> None:
    services = LocalServices("m", engine_flags={"tensor_parallel_size": 2}, num_workers=3)
    told = [
        process.command[process.command.index("--local-rank") + 1]
        for process in services.processes
        if "--local-rank" in process.command
    ]
    services.stop()
    assert told == ["2", "4"]  # the first takes 0 and 1, unless the environment says otherwise


def test_each_worker_of_a_machine_gets_a_part_of_its_cores_of_its_own() -> None:
    def shares(num_workers: int) -> list[str]:
        services = LocalServices("m", num_workers=num_workers)
        commands = [process.command for process in services.processes]
        services.stop()
        return [
            command[command.index("--cpu-share") + 1]
            for command in commands
            if "--cpu-share" in command
        ]

    assert shares(3) == ["0/3", "1/3", "2/3"]
    assert shares(1) == []


def test_a_simulated_worker_is_told_by_flag_or_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert service_commands.kind_of_worker(simulate=False) == "worker"
    assert service_commands.kind_of_worker(simulate=True) == "simulated worker"
    monkeypatch.setenv("PAGEWIRE_SIMULATE", "True")
    assert service_commands.kind_of_worker(simulate=False) == "simulated worker"


def test_flags_become_arguments_of_the_services_that_take_them() -> None:
    values = {
        "dtype": "float32",
        "enable_chunked_prefill": False,
        "trust_remote_code": True,
        "grace_period": 1.5,
        "block_size": None,
        "hf_overrides": {"sliding_window": None},
    }
    assert engine_args.arguments("worker", values) == [
        *("--dtype", "float32", "--hf-overrides", '{"sliding_window": null}'),
        *("--trust-remote-code", "--grace-period", "1.5"),
    ]
    assert engine_args.arguments("scheduler", values) == [
        *("--no-enable-chunked-prefill", "--grace-period", "1.5")
    ]
    assert engine_args.arguments("frontend", values) == ["--grace-period", "1.5"]
    with pytest.raises(TypeError, match="dtpye"):
        engine_args.check_names({"dtpye": "float32"})


INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from pagewire_cli import main
sys.argv = ["pagewire", "serve"]
main()
"""


def test_ctrl_c_while_the_command_is_still_being_imported_ends_it_without_a_traceback() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], env=environment, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_host_of_serve_needs_no_brackets(host: str) -> None:
    assert _http_address(Deployment(host=host, port=8117)) == "[::1]:8117"

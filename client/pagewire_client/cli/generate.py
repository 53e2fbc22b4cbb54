"""`pagewire generate`: one prompt, one answer."""

import dataclasses
import json
import sys
from typing import Annotated, Any

import typer

from pagewire_client.cli import terminal
from pagewire_client.cli.options import CONNECTION, SAMPLING, Connection, Sampling, with_options
from pagewire_client.outputs import RequestOutput
from pagewire_client.prompts import Prompt

_WAITING = "waiting for the first token; `pagewire status` shows what is being served, and queues"


@with_options(connection=CONNECTION, sampling=SAMPLING)
def generate(
    connection: Connection,
    sampling: Sampling,
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
    """Stream a model's answer to one prompt."""
    text = sys.stdin.read() if prompt is None else prompt
    asked: Prompt = [{"role": "user", "content": text}] if chat else text
    with connection.client() as client:
        stream = client.stream(asked, sampling.params(), model=model, timeout=timeout)
        with terminal.note_if_slow(_WAITING) as waiting:
            for delta in stream:
                waiting.cancel()
                if not as_json:
                    terminal.write(delta.text)
        terminal.write(json.dumps(_as_dict(stream.output)) + "\n" if as_json else "\n")


def _as_dict(output: RequestOutput) -> dict[str, Any]:
    return dataclasses.asdict(output)

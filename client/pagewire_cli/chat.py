"""`pagewire chat`: a conversation in a terminal."""

import contextlib
import sys
from dataclasses import replace
from typing import Annotated

import typer

from pagewire.usage_errors import spelled_as_options
from pagewire_cli import terminal
from pagewire_cli.options import (
    CONNECTION,
    SAMPLING,
    Connection,
    spelled_with_parameters,
    with_options,
)
from pagewire_client.chat import ChatMessage
from pagewire_client.client import Client
from pagewire_client.errors import FailedPrecondition, InvalidArgument
from pagewire_client.sampling_params import SamplingParams

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  Gives `input` line editing and history, where Python has it.

CHAT_TEMPERATURE, CHAT_TOP_P = 0.7, 0.9
"""For models without such defaults of their own: at the general ones, 1, small models ramble."""
_DRAWING = ("temperature", "top_p", "top_k", "min_p")
"""The parameters by which tokens are drawn."""

_HELP = "/exit ends, /reset forgets the conversation, ctrl-C stops an answer"


@with_options(connection=CONNECTION, params=SAMPLING)
def chat(
    connection: Connection,
    params: SamplingParams,
    model: Annotated[str | None, typer.Option(help="Which of the served models.")] = None,
    system: Annotated[
        str | None, typer.Option(help="System message at the start of the conversation.")
    ] = None,
) -> None:
    """Talk with a model."""
    with connection.client() as client:
        with terminal.note_if_slow("waiting for a model to be served"):
            info = client.get_model(model)
        terminal.note(f"talking with {info.name}; {_HELP}")
        chosen = {name for name in _DRAWING if getattr(params, name) is not None}
        if not (chosen or set(_DRAWING) & set(info.generation_defaults)):
            terminal.note(
                f"the model names no sampling parameters, so temperature {CHAT_TEMPERATURE} and "
                f"top_p {CHAT_TOP_P}; --temperature and --top-p change them"
            )
            params = replace(params, temperature=CHAT_TEMPERATURE, top_p=CHAT_TOP_P)
        Conversation(client, info.name, params, system).run()


class Conversation:
    """The conversation so far, and the loop that continues it."""

    def __init__(
        self, client: Client, model: str, params: SamplingParams, system: str | None
    ) -> None:
        self._client = client
        self._model = model
        self._params = params
        self._opening: list[ChatMessage] = []
        if system is not None:
            self._opening.append({"role": "system", "content": system})
        self._messages = list(self._opening)

    def run(self) -> None:
        """Question and answer until /exit or the end of the input."""
        while (line := _ask()) is not None and line != "/exit":
            if line == "/reset":
                self._messages = list(self._opening)
            elif line.startswith("/"):
                terminal.note(_HELP)
            elif line:
                self._answer(line)

    def _answer(self, question: str) -> None:
        messages = [*self._messages, ChatMessage(role="user", content=question)]
        stream = self._client.stream(messages, self._params, model=self._model)
        try:
            terminal.write_answer(stream)
        except KeyboardInterrupt:
            stream.close()
            terminal.write("\n")
        except InvalidArgument as error:
            names = {option.name for option in SAMPLING.parameters}
            terminal.error(spelled_as_options(spelled_with_parameters(error), names))
            return
        except FailedPrecondition as error:
            # For example a conversation that is too long: /reset starts another one.
            terminal.error(error.message)
            return
        answers = [choice.message for choice in stream.output.outputs[:1]]
        if answers:  # or templates that need turns to alternate would refuse the next question
            self._messages = [*messages, *answers]


def _ask() -> str | None:
    """A line of input; None at its end, or when ctrl-C is pressed at the prompt."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None

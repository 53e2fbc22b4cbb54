"""Vectors, scores, ranks and labels of texts: the messages of a call, and its results.

A call may be repeated: a text has the same vector every time. After a lost connection it continues
with the texts that have no result.
"""

import copy
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import errors
from pagewire_client.chat import encodable
from pagewire_client.requests import token_ids_proto
from pagewire_client.sampling_params import message_of

if TYPE_CHECKING:  # imported where a vector is returned: generation works without numpy
    import numpy as np
    from numpy.typing import NDArray

    Float32Array: TypeAlias = NDArray[np.float32]

MAX_MESSAGE_TEXTS, MAX_MESSAGE_BYTES = 256, 1 << 18
"""Number and approximate size of the texts of one message."""


class PoolingOptions(TypedDict, total=False):
    """Options of all methods that pool."""

    model: str | None
    """May be left out when one model is served that does this."""
    priority: int
    """Lower values are served earlier if the scheduler's policy is `priority`."""
    truncate_prompt_tokens: int | None
    """Most tokens of a text; longer ones are cut. -1: the model's limit. None: a text that is too
    long for the model fails."""
    truncation_side: Literal["left", "right"] | None
    """The end that is cut. None: as the model's tokenizer does."""
    add_special_tokens: bool
    """Whether the model's special tokens are added around texts."""
    cache_salt: str | None
    """As of methods that generate."""
    timeout: float | None
    """Seconds, for the whole call. None: the client's own."""


class EmbedOptions(PoolingOptions, total=False):
    """Options of methods that return vectors."""

    dimensions: int | None
    """Only the first numbers, of models trained for that (Matryoshka)."""
    normalize: bool | None
    """Whether vectors are divided by their Euclidean norm. None: as the model's files say."""
    pooling_type: Literal["last", "mean", "cls"] | None
    """How a vector is made of the tokens' hidden states. None: as the model's files say."""
    prompt_name: str | None
    """A prompt of the model, such as `query`, that precedes all texts; "" for none. None: the
    model's default prompt."""
    prompt: str | None
    """A prompt of your own instead."""


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document and how well it answers the query."""

    index: int
    """Its place among the documents of the call."""
    score: float
    document: str


@dataclass(frozen=True, slots=True)
class Classification:
    """The labels of a text or a token."""

    labels: Sequence[str]
    """The model's labels."""
    probs: "Float32Array"
    """One number per label: its probability, or its logit."""

    @property
    def label(self) -> str:
        """The most probable label."""
        return self.labels[int(self.probs.argmax())]


def options_proto(options: Mapping[str, Any]) -> pb.PoolingOptions:
    """The options of a call. Raises TypeError for an unknown name, and ValueError."""
    values = {name: value for name, value in options.items() if name != "timeout"}
    if unknown := values.keys() - PoolingOptions.__annotations__.keys():
        raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}")
    side = values.pop("truncation_side", None)
    if side not in (None, "left", "right"):
        raise ValueError(f"truncation_side must be 'left' or 'right', not {side!r}")
    if side is not None:
        values["truncation_side"] = f"TRUNCATION_SIDE_{side.upper()}"
    return message_of(pb.PoolingOptions, values)


def embed_proto(options: dict[str, Any], *, of_tokens: bool) -> pb.EmbedOptions:
    """The options of vectors, which are removed from all options of a call."""
    own = EmbedOptions.__annotations__.keys() - PoolingOptions.__annotations__.keys()
    values = {name: options.pop(name) for name in own & options.keys()}
    kind = values.pop("pooling_type", None)
    if kind not in (None, "last", "mean", "cls"):
        raise ValueError(f"pooling_type must be 'last', 'mean' or 'cls', not {kind!r}")
    if of_tokens and kind is not None:
        raise ValueError(f"pooling_type: expected none for vectors of tokens, got {kind!r}")
    if kind := "all" if of_tokens else kind:
        values["type"] = f"POOLING_TYPE_{kind.upper()}"
    return message_of(pb.EmbedOptions, values)


def text_input(text: Any) -> pb.PoolingInput:
    """A text, a list of token ids, or a pair of texts as an input."""
    if isinstance(text, str):
        return pb.PoolingInput(text=encodable(text))
    if isinstance(text, Sequence) and len(text) == 2 and isinstance(text[0], str):
        return pb.PoolingInput(pair=pair_input(text))
    try:
        return pb.PoolingInput(token_ids=token_ids_proto(text))
    except (TypeError, ValueError):
        kind = type(text).__name__
        raise ValueError(
            f"expected a text or a list of token ids from 0 to 2**32 - 1, got {kind}"
        ) from None


def pair_input(pair: Any) -> pb.TextPair:
    """A pair of texts."""
    match pair:
        case (str(first), str(second)):
            return pb.TextPair(first=encodable(first), second=encodable(second))
    raise ValueError(f"expected two texts, got {type(pair).__name__}")


def document_input(document: Any) -> str:
    """A document."""
    if not isinstance(document, str):
        raise ValueError(f"expected a text, got {type(document).__name__}")
    return encodable(document)


class PooledInputs:
    """The inputs of one call, and their results over all connections."""

    def __init__(
        self,
        method: str,
        first: Any,
        make_input: Callable[[Any], Any],
        values: Iterable[Any],
        name: str,
        *,
        of_tokens: bool = False,
    ) -> None:
        """method: of the service; first: its first message, without inputs; make_input: what the
        message has for each of the values; name: what errors call these, for example `texts`;
        of_tokens: whether a result comes in several parts. Raises ValueError that names a value."""
        self.method = method
        self.labels: Sequence[str] = ()
        self._first = first
        self._inputs = []
        for place, value in enumerate(values):
            try:
                self._inputs.append(make_input(value))
            except ValueError as error:
                raise ValueError(f"{name}[{place}]: {error}") from None
        self._name = name
        self._of_tokens = of_tokens
        self._field = next(f.name for f in first.DESCRIPTOR.fields if f.is_repeated)
        self._results: list[list[Any]] = [[] for _ in self._inputs]
        self._sent: list[int] = []
        """The inputs of the current call, by their indexes there."""

    def results(self) -> list[list[Any]]:
        """The entries of each input, in order; one except for vectors of tokens."""
        return self._results

    def start(self) -> bool:
        """Begin a call with the inputs that have no result; returns False if all have one. Vectors
        of tokens are all requested again, because only the end of the call shows which of them are
        complete."""
        if self._of_tokens:
            self._results = [[] for _ in self._inputs]
        self._sent = [place for place, found in enumerate(self._results) if not found]
        return bool(self._sent) or not self._inputs

    async def messages(self) -> AsyncGenerator[Any, None]:
        """The messages of the current call."""
        message = copy.deepcopy(self._first)
        num_bytes = 0
        for number, place in enumerate(self._sent, 1):
            item = self._inputs[place]
            getattr(message, self._field).append(item)
            num_bytes += len(item) if isinstance(item, str) else item.ByteSize()
            if num_bytes > MAX_MESSAGE_BYTES or number % MAX_MESSAGE_TEXTS == 0:
                yield message
                message, num_bytes = type(self._first)(), 0
        if message.ListFields() or not self._sent:
            yield message

    def receive(self, response: Any) -> bool:
        """Add the entries of a response; returns whether it is the last one. Raises the error of
        the first input that failed."""
        for field, value in response.ListFields():
            if field.name == "labels":
                self.labels = list(value)
            for entry in value if field.is_repeated and field.message_type else ():
                place = self._sent[entry.index]
                if entry.HasField("error"):
                    raise self._error(place, entry.error)
                self._results[place].append(entry)
        return bool(response.HasField("usage"))

    def _error(self, place: int, error: pb.RequestError) -> errors.PagewireError:
        prefix = rf"^(?:{self._field}\[\d+\](?:\.\w+)*(\[\d+\])?: )?"
        problem = re.sub(prefix, rf"{self._name}[{place}]\1: ", error.message, count=1)
        return errors.from_status(error.code, problem, error.status)


def vectors_of(entries: Sequence[Any]) -> "Float32Array":
    """The numbers of an input's entries: [n]."""
    import numpy as np

    return np.frombuffer(b"".join(entry.values for entry in entries), "<f4")

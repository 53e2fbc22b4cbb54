"""One call for vectors, scores or labels: its texts at the core, and the results to be read.

A call may have any number of inputs and holds a few hundred of them: those that are at the core,
and those whose results have not been read. `put` waits while there are more.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.errors import (
    DeadlineExceeded,
    GenerationFailed,
    PagewireError,
    QueueFull,
    TenantLimit,
)
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.core_client import CoreClient
from scheduler_service.frontend.input.processor import salt_context
from scheduler_service.frontend.models.adapters import RequestAdapter
from scheduler_service.frontend.models.frontend_model import FrontendModel
from scheduler_service.frontend.pooling.inputs import Encoded, EncodedInput, Input, slice_of
from scheduler_service.frontend.pooling.work import ALL, PoolingRequest, Work, resolve_work
from scheduler_service.frontend.requests.pooled_text import PooledText
from scheduler_service.tasks import Interrupted, Interruptible

INLINE_CHARS = 1024
"""Inputs up to this length together are tokenized on the event loop, in less time than a thread
needs to begin."""

MAX_OPEN_BYTES = 32 << 20
"""Most bytes of the tokens and vectors of a call's open inputs, unless it has a single one."""

MAX_TOGETHER, MAX_TOGETHER_ALL = 64, 4
"""Inputs that are tokenized and submitted together; fewer where each token has a vector."""

MAX_READ_BYTES = 1 << 20
"""Approximate limit of results that are read together: clients accept messages of 4 MiB."""

FLOAT_BYTES = 4

RETRY_DELAY_S = 0.5
"""Delay after which the core gets a text again that it had no room for, unless it names another."""


@dataclass(slots=True, eq=False)
class PoolingResult:
    """What an input got, or a part of it: the vectors of some of its tokens."""

    index: int
    """Index of the input in the call."""
    num_tokens: int = 0
    """Tokens of the input."""
    values: bytes = b""
    """The vector or the numbers of the labels, float32, little-endian; with one vector per token,
    those of consecutive tokens."""
    first_token: int = 0
    """With one vector per token: index of the first of them."""
    score: float = 0.0
    """Of Score and Rank."""
    error: PagewireError | None = None
    """Instead of the numbers."""
    is_last: bool = True
    """Whether no further part of this input follows."""

    def array(self, size: int) -> npt.NDArray[np.float32]:
        """The numbers as vectors: [-1, size]."""
        return np.frombuffer(self.values, "<f4").reshape(-1, size)


_First: TypeAlias = tuple[Any, FrontendModel, RequestAdapter | None]


class PoolingCall:
    """A call's inputs and results. `put` and `next` may be awaited by different tasks."""

    first: Any
    """The message that the call began with."""
    work: Work
    """What it wants."""
    adapter: RequestAdapter | None
    """Of all its texts."""

    def __init__(
        self,
        core_client: CoreClient,
        tenant: Principal,
        deadline: float | None,
        max_open: Callable[[], int],
    ) -> None:
        """deadline: on the monotonic clock. max_open: how many inputs may be open now."""
        self.call_id = uuid.uuid4().hex
        self.tenant = tenant
        self.arrived = time.monotonic()
        self.usage = inference_pb.PoolingUsage()
        self.error: PagewireError | None = None
        """Why the call as a whole has ended early."""
        self.num_inputs = self.num_answered = self.num_failed = 0
        self.was_accepted = False
        """Whether the core has accepted any text: others then wait for room at the core."""
        self._core_client = core_client
        self._max_open = max_open
        self._deadline = deadline
        self._timers: list[asyncio.TimerHandle] = []
        self._beginning = Interruptible()
        self._live: dict[PooledText, None] = {}
        """Texts at the core."""
        self._refused: deque[PooledText] = deque()
        """Texts that the core had no room for."""
        self._open: dict[int, tuple[list[PooledText], int]] = {}
        """The texts of each input whose result has not been read, and the bytes that they need."""
        self._open_bytes = 0
        self._first: tuple[tuple[str, ...], PooledText] | None = None
        """The first text of the last pair, such as a query: the next one may share it."""
        self._results: deque[PoolingResult] = deque()
        self._is_complete = False
        self._updated, self._released = asyncio.Event(), asyncio.Event()
        """Set when there may be something to read, and room for another input."""

    async def begin(self, reading: Coroutine[Any, Any, _First]) -> None:
        """Resolve the work of the call, whose first message, model and adapter `reading` returns.
        Raises PagewireError; the end of the call ends the wait. From here on `close` must follow.
        """
        if self._deadline is not None:
            late = DeadlineExceeded("the call's deadline has passed")
            self._call_later(self._deadline - time.monotonic(), self.fail, late)
        try:
            with self._beginning:
                self.first, model, self.adapter = await reading
        except Interrupted:
            raise self.error or asyncio.CancelledError from None
        self.work = resolve_work(self.first, model)
        self._template = scheduler_pb.Submit(
            model=model.info.name,
            tenant=self.tenant.name,
            priority=self.first.options.priority,
            pooling=self.work.params,
            context=[
                *salt_context(self.first.options),
                *(() if self.adapter is None else (self.adapter.context_part,)),
            ],
        )

    # Inputs.

    async def put(self, message: PoolingRequest) -> None:
        """Submit all inputs of a message, waiting while too many are open. Returns early if the
        call has failed."""
        inputs = list(self.work.inputs(message, self.num_inputs))
        together = MAX_TOGETHER_ALL if self.work.params.type == ALL else MAX_TOGETHER
        position = 0
        while position < len(inputs):
            while (room := self._room()) < 1 and self.error is None:
                self._released.clear()
                await self._released.wait()
            if self.error is not None:
                return
            texts = inputs[position : position + min(room, together)]
            count = slice_of([text[-1] for text in texts])
            await self._put(texts[:count])
            position += count

    def complete(self) -> None:
        """No further inputs follow."""
        self._is_complete = True
        self._updated.set()

    def _room(self) -> int:
        """How many inputs may be put now."""
        if self._refused or (self._open and self._open_bytes >= MAX_OPEN_BYTES):
            return 0
        return max(self._max_open(), 1) - len(self._open)

    async def _put(self, inputs: Sequence[tuple[Input, ...]]) -> None:
        """Tokenize inputs together and submit their texts. An input of two texts shares the first
        with the input before it, if it is the same."""
        texts: list[Input] = []
        places: list[list[int]] = []
        first, place = None if self._first is None else self._first[0], -1
        for item in inputs:
            if len(item) == 2 and item[0].texts != first:
                first, place = item[0].texts, len(texts)
                texts.append(item[0])
            places.append([*([place] if len(item) == 2 else []), len(texts)])
            texts.append(item[-1])
        made = [self._text(encoded) for encoded in await self._encode(texts)]
        if self.error is not None:
            return
        if self._first is not None:
            made.append(self._first[1])
        if first is not None:
            self._first = first, made[place]
        for item_places in places:
            self._add([made[place] for place in item_places])

    async def _encode(self, texts: Sequence[Input]) -> list[Encoded]:
        encode = self.work.encoder.encode
        if sum(len("".join(text.texts)) for text in texts) <= INLINE_CHARS:
            return encode(texts)
        return await asyncio.to_thread(encode, texts)

    def _text(self, encoded: Encoded) -> PooledText:
        if not isinstance(encoded, EncodedInput):
            text = PooledText(self, self._deadline, b"")
            text.error, text.has_ended = encoded, True
            return text
        return PooledText(self, self._deadline, *encoded)

    def _add(self, texts: list[PooledText]) -> None:
        """Open the next input, of these texts, and submit those that are new."""
        index, self.num_inputs = self.num_inputs, self.num_inputs + 1
        num_bytes = sum(len(text.prompt) + self._vector_bytes(text) for text in texts)
        self._open[index] = texts, num_bytes
        self._open_bytes += num_bytes
        for text in texts:
            if not text.has_ended:
                text.indexes.append(index)
                if not text.submission.handle:
                    self._submit(text)
        self._end_input(index)

    def _vector_bytes(self, text: PooledText) -> int:
        num_vectors = text.num_tokens if self.work.params.type == ALL else 1
        return num_vectors * self.work.value_size * FLOAT_BYTES

    def _submit(self, text: PooledText) -> None:
        self._live[text] = None
        self._core_client.submit(text)

    # From the core, for one of its texts.

    @property
    def model_name(self) -> str:
        """The model's name."""
        return self.work.model.info.name

    def submit_message(self, text: PooledText) -> scheduler_pb.Submit:
        """See `TextOwner`."""
        submit = scheduler_pb.Submit()
        submit.CopyFrom(self._template)
        submit.request_id = text.request_id
        submit.prompt_token_ids = text.prompt
        submit.pooling.second_text_start = text.second_text_start
        text.submission.write(submit)
        return submit

    def receive_vector(self, text: PooledText, vector: scheduler_pb.PooledVector) -> None:
        """See `TextOwner`. Vectors of tokens that have come before are skipped."""
        if self.work.params.type != ALL:
            text.values, text.num_vectors = vector.values, 1
            return
        size = self.work.value_size * FLOAT_BYTES
        values = vector.values[max(0, text.num_vectors - vector.first_token) * size :]
        if self.work.is_streamed and values:
            result = PoolingResult(text.indexes[0], text.num_tokens, first_token=text.num_vectors)
            result.values, result.is_last = self.work.transform(values), False
            self._add_result(result)
        else:
            text.values += values
        text.num_vectors += len(values) // size

    def receive_end(self, text: PooledText, cached_tokens: int) -> None:
        """See `TextOwner`."""
        expected = text.num_tokens if self.work.params.type == ALL else 1
        size = self._vector_bytes(text)
        if text.num_vectors != expected or len(text.values) not in (size, 0):
            problem = f"the worker sent {text.num_vectors} vectors of {len(text.values)} bytes"
            text.error = GenerationFailed(f"{problem}, not {expected} of {size}")
        elif not np.isfinite(np.frombuffer(text.values, "<f4")).all():
            text.error = GenerationFailed("the text's vector has numbers that are not finite")
        else:
            self.usage.prompt_tokens += text.num_tokens
            self.usage.cached_tokens += cached_tokens
        self._end_text(text)

    def receive_failed(self, text: PooledText, error: PagewireError) -> None:
        """See `TextOwner`. A text that the core has no room for waits until another one has ended;
        if none of the call was ever accepted, the call ends."""
        if not isinstance(error, QueueFull | TenantLimit):
            text.error = error
            self._end_text(text)
            return
        self._remove(text)
        if not self._live and not self.was_accepted:
            self.fail(error)
            return
        self._refused.append(text)
        if not self._live:
            self._call_later(error.retry_delay_s or RETRY_DELAY_S, self._submit_refused)

    def _submit_refused(self) -> None:
        if self._refused and not self._live:
            self._submit(self._refused.popleft())

    def _remove(self, text: PooledText) -> None:
        self._live.pop(text, None)
        self._core_client.close(text)

    def _end_text(self, text: PooledText) -> None:
        self._remove(text)
        text.has_ended = True
        indexes, text.indexes = text.indexes, []
        for index in indexes:
            self._end_input(index)
        for _ in range(min(2, len(self._refused))):  # one in its place, and one more
            self._submit(self._refused.popleft())

    def _end_input(self, index: int) -> None:
        """Make the result of an input if all of its texts have ended."""
        texts, _ = self._open[index]
        if not all(text.has_ended for text in texts):
            return
        result = PoolingResult(index, sum(text.num_tokens for text in texts))
        result.error = next((text.error for text in texts if text.error is not None), None)
        if result.error is not None:
            self.num_failed += 1
            self._add_result(result)
            return
        if self.work.is_scored:
            result.score = self.work.score([text.values for text in texts])
        else:
            result.values = self.work.transform(texts[0].values)
        self.num_answered += 1
        self._add_result(result)

    def _add_result(self, result: PoolingResult) -> None:
        self._results.append(result)
        self._updated.set()

    # Results.

    async def next(self) -> list[PoolingResult] | None:
        """Results that have not been read, as many as fit into one message; waits for the first.
        None after the last one. Raises the error with which the call as a whole has ended."""
        while not self._results:
            if self.error is not None:
                raise self.error
            if self._is_complete and not self._open:
                return None
            self._updated.clear()
            await self._updated.wait()
        results: list[PoolingResult] = []
        num_bytes = 0
        while self._results and num_bytes < MAX_READ_BYTES:
            result = self._results.popleft()
            num_bytes += len(result.values) + FLOAT_BYTES
            if result.is_last:
                self._open_bytes -= self._open.pop(result.index)[1]
            results.append(result)
        self._released.set()
        return results

    def fail(self, error: PagewireError) -> None:
        """End the call early; only the first error counts."""
        if self.error is None:
            self.error = error
            self.close()

    def close(self) -> None:
        """Cancel what is left of the call, in any state."""
        self._beginning.interrupt()
        for timer in self._timers:
            timer.cancel()
        for text in self._live:
            self._core_client.close(text)
        self._live.clear()
        self._refused.clear()
        self._updated.set()
        self._released.set()

    def _call_later(self, delay_s: float, callback: Callable[..., object], *arguments: Any) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, callback, *arguments)
        self._timers.append(timer)

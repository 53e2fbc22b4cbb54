"""A text at its core that gets a vector. A call has thousands of them: each is a few fields, and
its call does everything else."""

import time
from typing import ClassVar, Protocol

from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.errors import PagewireError
from scheduler_service.frontend.requests.submission import Submission


class TextOwner(Protocol):
    """The call that a text is of."""

    call_id: str
    was_accepted: bool

    @property
    def model_name(self) -> str:
        """The model's name."""

    def submit_message(self, text: "PooledText") -> scheduler_pb.Submit:
        """The message that submits the text to a core, the first or a later one."""

    def receive_vector(self, text: "PooledText", vector: scheduler_pb.PooledVector) -> None:
        """Receive the text's vector, or those of some of its tokens."""

    def receive_end(self, text: "PooledText", cached_tokens: int) -> None:
        """Record that all of the text's vectors have come."""

    def receive_failed(self, text: "PooledText", error: PagewireError) -> None:
        """Record that the core has refused the text or ended it with an error."""

    def fail(self, error: PagewireError) -> None:
        """End the call with an error."""


class PooledText:
    """One text from its submission to its vector; for the core a request without choices."""

    __slots__ = (
        *("_owner", "error", "has_ended", "indexes", "num_tokens", "num_vectors", "prompt"),
        *("second_text_start", "submission", "values"),
    )

    choices: ClassVar = ()

    def __init__(
        self,
        owner: TextOwner,
        deadline: float | None,
        prompt: bytes,
        num_tokens: int = 0,
        second_text_start: int = 0,
    ) -> None:
        """deadline: on the monotonic clock; prompt: token ids, an int32 column;
        second_text_start: as in PoolingParams."""
        self._owner = owner
        self.indexes: list[int] = []
        """The inputs of its call that wait for it."""
        self.prompt = prompt
        self.num_tokens = num_tokens
        self.second_text_start = second_text_start
        self.submission = Submission(time.monotonic(), deadline)
        self.values = b""
        """Its vector, or the vectors of the tokens that have come and not been passed on."""
        self.num_vectors = 0
        """Vectors that have come."""
        self.has_ended = False
        """Whether it has its vectors or an error."""
        self.error: PagewireError | None = None

    @property
    def request_id(self) -> str:
        """Unique while its handle is."""
        return f"{self._owner.call_id}-{self.submission.handle}"

    @property
    def model_name(self) -> str:
        """The model of its call."""
        return self._owner.model_name

    def submit_message(self) -> scheduler_pb.Submit:
        """See `TextOwner`."""
        return self._owner.submit_message(self)

    def client_field(self, field: str) -> str:
        """A field that the core refuses, which no client has set."""
        return field

    def record_loss(self) -> None:
        """Nothing: the time of a single text is not measured."""

    def receive_accepted(self) -> None:
        """Record that the core has accepted the text, and will not refuse it later."""
        self.submission.is_accepted = self.submission.was_accepted = True
        self._owner.was_accepted = True

    def receive_vector(self, vector: scheduler_pb.PooledVector) -> None:
        """See `TextOwner`."""
        self._owner.receive_vector(self, vector)

    def receive_finished(self, finished: scheduler_pb.RequestFinished) -> None:
        """Record that all vectors have come."""
        self.submission.has_ended = True
        self._owner.receive_end(self, finished.cached_tokens)

    def receive_failed(self, error: PagewireError) -> None:
        """Record the core's error."""
        self.submission.has_ended = True
        self._owner.receive_failed(self, error)

    def fail(self, error: PagewireError) -> None:
        """End its call with an error of this process's."""
        self._owner.fail(error)

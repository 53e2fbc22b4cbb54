"""The interface of an engine to benchmarks, and its options."""

from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from benchmarks.model_shapes import Shape
from benchmarks.workloads import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all engines of a run have in common."""

    shape: Shape
    dtype: str
    checkpoints: Path
    """Folder of the checkpoints that all engines load."""
    device: str = "cpu"
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_cache_gib: int = 3
    """Memory for KV, the same for each engine that has such an option."""
    threads: int = 2
    logs: Path | None = None
    """Folder for what the engines say; None throws it away."""

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits that memory."""
        return self.kv_cache_gib * 2**30 // self.shape.kv_bytes(self.dtype)

    def log(self, name: str) -> Path | None:
        """Where an engine's messages go."""
        return None if self.logs is None else self.logs / f"{name}.log"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Result of a run."""

    token_ids: list[list[int]]
    """Of each job, in order."""
    seconds: float
    """From the first request until the last token, by the engine's nearest clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What is reported about an engine in addition to its figures."""

    version: str
    settings: dict[str, Any] = field(default_factory=dict)
    """In which it differs from what it does by default."""


class Engine(Protocol):
    """Something that runs jobs greedily, each to its number of tokens whatever they are.

    A context manager: it is started and warm inside, and gone after.
    """

    name: str
    about: About

    @property
    def pids(self) -> list[int]:
        """Its processes, less their descendants."""
        ...

    def run(self, jobs: list[Job]) -> Outputs:
        """Run all jobs together."""
        ...

    def pause(self) -> None:
        """Take no more processor time until `resume`."""
        ...

    def resume(self) -> None:
        """Be ready to run."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

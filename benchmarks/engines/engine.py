"""The interface of an engine to benchmarks, and its options."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from benchmarks.engines.workloads import Job
from benchmarks.models.checkpoints import checkpoint
from benchmarks.models.model_shapes import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings shared by all engines of a run."""

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
    kv_cache_dtype: str = "auto"
    attention_backend: str | None = None
    batch_invariant: bool = False
    quantization: str | None = None
    """What Pagewire rounds the weights of a dense checkpoint to; as `shape.weights`, which the
    floor is that of."""
    model_path: str | None = None
    """A checkpoint, or a GGUF file, that all engines load instead of one of `shape`, which must
    need as much memory for KV or more."""
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    """Paths of LoRA adapters by name."""
    max_loras: int = 8
    """How many of these a batch may have."""
    http: bool = False
    """Whether Pagewire and vLLM are servers, called over HTTP."""
    logs: Path | None = None
    """Directory for the engines' logs; None discards them."""

    LIMITS: ClassVar = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
    """Names of the settings that bound a batch."""
    FLAGS: ClassVar = ("kv_cache_dtype", "attention_backend", "batch_invariant", "quantization")
    """Names of the settings that are Pagewire's flags."""

    def model(self) -> str:
        """The path of the checkpoint that all engines load; created if necessary."""
        shape = self.shape if self.quantization is None else self.shape.dense()
        return self.model_path or str(checkpoint(shape, self.dtype, self.checkpoints))

    def dense(self) -> "Settings":
        """The same settings with the dense checkpoint of the same shape."""
        return replace(self, shape=self.shape.dense(), quantization=None, model_path=None)

    def named(self, *names: str) -> dict[str, Any]:
        """The settings of these names."""
        return {name: getattr(self, name) for name in names}

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits into `kv_cache_gib`."""
        return self.kv_cache_gib * 2**30 // self.shape.kv_bytes(self.dtype)

    def log(self, name: str) -> Path | None:
        """File for an engine's log."""
        return None if self.logs is None else self.logs / f"{name}.log"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Result of a run."""

    token_ids: list[list[int]]
    """Output tokens of each job, in order."""
    seconds: float
    """From the first request until the last token, by the engine's nearest clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """Facts about an engine that are reported with its figures."""

    version: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from its defaults."""


class Engine(Protocol):
    """Runs jobs greedily, each to its number of tokens, past end-of-sequence tokens.

    A context manager: the engine is started and warmed up on entry, and ended on exit.
    """

    name: str
    about: About

    @property
    def pids(self) -> list[int]:
        """The engine's processes, without their descendants."""
        ...

    def run(self, jobs: list[Job]) -> Outputs:
        """Run all jobs together."""
        ...

    def pause(self) -> None:
        """Use no processor time until `resume`."""
        ...

    def resume(self) -> None:
        """Prepare to run."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

"""Which model to load and how, and what comes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption
from worker_service.models.interface import Model
from worker_service.parallel.ranks import Ranks

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("safetensors", "dummy")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model to load, and in which form."""

    model: str
    """Checkpoint directory, model id on the Hugging Face hub, or `embedded`."""

    revision: str | None = None
    """Branch, tag or commit on the hub; None takes the default branch."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`; `auto` takes a GPU if there is one."""

    dtype: str = "auto"
    """`auto`, `float32`, `bfloat16` or `float16`; see `worker_service.loader.device`."""

    load_format: str = "safetensors"
    """`safetensors`, or `dummy`: seeded random weights from `config.json` alone."""

    max_model_len: int | None = None
    """Most tokens of prompt and output together; None takes the model's own limit."""

    attention_backend: str | None = None
    """Name of a backend in `pagewire_kernels.backends`; None chooses by device and model."""

    batch_invariant: bool = False
    """Whether a row's logits must not depend on its batch, bitwise. On a CPU they never do; on a
    GPU it costs speed."""

    threads: int | None = None
    """Threads of torch and of our kernels on a CPU; None takes as many as the model can keep busy,
    at most as many as torch finds cores."""

    cpus: tuple[int, ...] | None = None
    """The CPUs that the model's threads are pinned to, one each; None lets the system place
    them."""

    trust_remote_code: bool = False
    """Whether Python code in the checkpoint may be run."""

    local_rank: int = 0
    """Place among the ranks on this machine: which GPU `auto` and `cuda` take."""

    layout: Layout = field(default_factory=Layout)
    """Which share of the model to load."""

    show_progress: bool | None = None
    """Whether to draw a progress bar on stderr; None draws it on a terminal only."""

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidOption("model: expected a directory or a hub id, got an empty string")
        if self.dtype not in DTYPES:
            raise InvalidOption(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.load_format not in LOAD_FORMATS:
            expected = ", ".join(LOAD_FORMATS)
            raise InvalidOption(
                f"load_format: expected one of {expected}, got {self.load_format!r}"
            )
        if self.max_model_len is not None and self.max_model_len < 1:
            raise InvalidOption(f"max_model_len: expected at least 1, got {self.max_model_len}")
        if self.threads is not None and self.threads < 1:
            raise InvalidOption(f"threads: expected at least 1, got {self.threads}")
        if self.cpus is not None and (self.threads or 0) > len(self.cpus):
            raise InvalidOption(
                f"threads: expected at most the {len(self.cpus)} of cpu_affinity,"
                f" got {self.threads}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model with its weights on the device, and the facts others need of it."""

    model: Model
    config: ModelConfig
    """As asked for, with `device`, `dtype`, `max_model_len` and `attention_backend` resolved."""

    block_size: int
    """Tokens per KV block: as asked for, or what the attention backend prefers."""

    model_dir: Path
    hf_config: Mapping[str, Any]
    """The content of `config.json`."""

    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence; may be empty."""

    bos_token_id: int | None
    fingerprint: str
    batch_invariant: bool
    """Whether a row's logits are bitwise the same whatever else is in the batch and however its
    tokens were computed."""

    ranks: Ranks = field(default_factory=lambda: Ranks(Layout()))
    """The others that have a share of the model; mostly there are none."""

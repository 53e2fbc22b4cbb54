"""The interface between the engine and an executor of plans: a model on a device, or a simulation.

Nothing here imports torch, so that a worker without a model starts without it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from worker_service.plan import StepPlan, StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCounts:
    """How many KV blocks fit into memory."""

    num_gpu_blocks: int
    num_cpu_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts about a loaded model, as reported to the core; `model.proto` explains each field."""

    architecture: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    block_size: int
    """Tokens per KV block."""

    block_bytes: int
    num_parameters: int
    batch_invariant: bool
    structured_output: bool
    """Whether constraints of sequences are supported."""

    device: str
    """`cpu`, `cuda:0` or another name that the executor gives it."""

    attention_backend: str
    """Empty if there is none."""

    arithmetic: str
    """Identity of the arithmetic: equal strings mean bitwise equal logits."""

    uses_cuda_graphs: bool = False
    """Whether decode steps are replayed as CUDA graphs."""

    num_speculative_tokens: int = 0
    """Maximum number of drafts that the worker adds to a row."""


class Step(Protocol):
    """A step that was launched."""

    def collect(self) -> StepResult:
        """Return the step's result, once the device is done.

        Called once, on any single thread, in the order in which steps were launched. It does not
        block the model thread, which launches the next step meanwhile. Raises the device's failure,
        after which the results of later steps are invalid.
        """
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step whose result was computed when it was launched."""

    result: StepResult

    def collect(self) -> StepResult:
        """Return the step's result."""
        return self.result


class Runner(Protocol):
    """Executes the plans of one epoch, over caches of fixed sizes.

    A step is launched, then collected. A GPU may be given the next step before this one is
    collected, so that it never waits for the host to read a token; on a CPU launching computes.
    """

    def launch(self, plan: StepPlan) -> Step:
        """Start a plan's step. Raises InvalidPlan, after which the runner must be reset."""
        ...

    def reset(self) -> None:
        """Forget all sequences; the caches' contents become meaningless."""
        ...


class Executor(Protocol):
    """A model and its caches. All methods are called on the model thread, except for `assets` and
    `interrupt`."""

    def load(self) -> ModelFacts:
        """Load the model; called once, before anything else. Raises WorkerError."""
        ...

    def profile_blocks(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> BlockCounts:
        """How many blocks fit together with the largest batch. Raises OutOfMemory if none does."""
        ...

    def make_runner(self, num_gpu_blocks: int, num_cpu_blocks: int, epoch: int) -> Runner:
        """A runner over caches of these sizes, which replaces the one before.

        One of several ranks joins the others for the epoch; raises GroupBroken if one is missing.
        """
        ...

    def check_device(self) -> None:
        """Wait for the device. Raises DeviceLost if this process cannot use it any more."""
        ...

    def interrupt(self) -> None:
        """Make waits for other ranks raise GroupBroken. May be called on any thread."""
        ...

    def assets(self) -> Iterator[tuple[str, bytes]]:
        """(file name, content) of each of the model's files that frontends need."""
        ...

    def start_profile(self) -> None:
        """Begin a trace of this thread. Raises OutOfOrder if one is running."""
        ...

    def stop_profile(self) -> str:
        """End the trace. Returns its file's path; raises OutOfOrder if none is running."""
        ...

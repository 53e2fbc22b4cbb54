"""What the engine needs of whatever executes plans: a model on a device, or a simulation.

Nothing here knows torch, so that a worker without a model starts without it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from worker_service.plan import StepPlan, StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCounts:
    """How many blocks fit."""

    num_gpu_blocks: int
    num_cpu_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What others learn of a loaded model; `model.proto` explains each field."""

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
    """Whether sequences' constraints are kept to."""

    device: str
    """`cpu`, `cuda:0` or whatever else the executor calls it."""

    attention_backend: str
    """Empty where there is none."""

    arithmetic: str
    """Identity of the arithmetic: equal strings mean bitwise equal logits."""


class Step(Protocol):
    """A step that was launched."""

    def collect(self) -> StepResult:
        """Return the step's result, once the device is done.

        Called once, from any one thread, and in the order in which steps were launched. It does
        nothing that would stop the model thread from launching the next step meanwhile. What it
        raises is the device's failure, after which nothing that was launched later counts.
        """
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was computed in full when it was launched."""

    result: StepResult

    def collect(self) -> StepResult:
        """Return the step's result."""
        return self.result


class Runner(Protocol):
    """Executes the plans of one epoch, over caches of fixed sizes.

    A step is launched, then collected. On a device that computes beside the host the next step may
    be launched before this one is collected, so that the device never waits for the host to learn
    of a token; on a CPU launching is computing.
    """

    def launch(self, plan: StepPlan) -> Step:
        """Begin what the plan says. Raises InvalidPlan, after which the runner is to be reset."""
        ...

    def reset(self) -> None:
        """Forget all sequences; the caches' contents become meaningless."""
        ...


class Executor(Protocol):
    """A model and its caches. All methods are called on the model thread, but for `assets` and
    `interrupt`."""

    def load(self) -> ModelFacts:
        """Make the model ready; called once, before anything else. Raises WorkerError."""
        ...

    def profile_blocks(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> BlockCounts:
        """How many blocks fit beside the largest batch. Raises OutOfMemory if not one does."""
        ...

    def make_runner(self, num_gpu_blocks: int, num_cpu_blocks: int, epoch: int) -> Runner:
        """A runner over caches of these sizes, in place of any made before.

        A rank of several meets the others for the epoch; raises GroupBroken if they do not come.
        """
        ...

    def check_device(self) -> None:
        """Wait for the device. Raises DeviceLost if it computes nothing more for this process."""
        ...

    def interrupt(self) -> None:
        """From any thread: have what waits for other ranks give up, with GroupBroken."""
        ...

    def assets(self) -> Iterator[tuple[str, bytes]]:
        """(file name, content) of each file a frontend needs and the model has."""
        ...

    def start_profile(self) -> None:
        """Begin a trace of this thread. Raises OutOfOrder if one is running."""
        ...

    def stop_profile(self) -> str:
        """End the trace; returns its file's path. Raises OutOfOrder if none is running."""
        ...

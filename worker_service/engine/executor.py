"""The interface between the engine and an executor of plans, and the threads that call it.

An executor is a model on a device, or a simulation.

Nothing here imports torch, so that a worker without a model starts without it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from worker_service.adapters.store import AdapterLoader
from worker_service.block_transfer.memory import BlockMemory
from worker_service.cache_groups import CacheGroup
from worker_service.plan import KeptSequence, StepPlan, StepResult
from worker_service.pooling_facts import PoolingFacts


class WorkKind(Enum):
    """A kind of work that a worker does for its model."""

    GENERATION = auto()
    POOLING = auto()


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
    cache_groups: tuple[CacheGroup, ...]

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

    weights: str = ""
    """The format in which most weights are stored, such as `BF16` or `Q4_1`."""

    cache_layout: str = ""
    """The cache groups with their attention backends, and what is unused of blocks, for people."""

    uses_cuda_graphs: bool = False
    """Whether decode steps are replayed as CUDA graphs."""

    work_kinds: tuple[WorkKind, ...] = (WorkKind.GENERATION,)
    pooling: PoolingFacts | None = None
    """What it pools; None without the work kind pooling."""

    whole_prompt: bool = False
    """Whether a prompt must be computed in one row."""

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

    @property
    def block_memory(self) -> BlockMemory | None:
        """The caches' blocks; None for a model without any."""
        ...

    def launch(self, plan: StepPlan) -> Step:
        """Start a plan's step. Raises InvalidPlan, after which the runner must be reset."""
        ...

    def kept_sequences(self) -> list[KeptSequence]:
        """What the caches hold of the sequences that have not failed, once their launched steps are
        done; without those whose tokens do not become known soon. Raises GroupBroken if other ranks
        have left, and the device's failure."""
        ...

    def reset(self) -> None:
        """Forget all sequences; the contents of the caches stay."""
        ...


class Executor(Protocol):
    """A model and its caches. All methods are called on the model thread, except for `assets`,
    `interrupt` and those of `adapters`, which may be called on any thread, beside steps."""

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

    def interrupt(self, epoch: int) -> None:
        """Make waits for other ranks raise GroupBroken, also those of epochs up to `epoch` that
        have not begun. May be called on any thread."""
        ...

    def assets(self) -> Iterator[tuple[str, bytes]]:
        """(file name, content) of each of the model's files that frontends need."""
        ...

    @property
    def adapters(self) -> AdapterLoader[Any]:
        """Loads adapters, once the model is loaded."""
        ...

    def start_profile(self) -> None:
        """Begin a trace of this thread. Raises OutOfOrder if one is running."""
        ...

    def stop_profile(self) -> str:
        """End the trace. Returns its file's path; raises OutOfOrder if none is running."""
        ...


logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class ModelThread:
    """The thread on which the model runs, and the one that collects its results.

    Jobs run in the order in which they were posted, so that the model's state needs no lock and the
    event loop never waits for the device.

    The second thread collects each step and reports its result, in order too, for two reasons.
    Waiting for a GPU must not delay the launch of the next step. And waking the event loop takes a
    system call, which passes the interpreter lock to the loop for as long as it has messages to
    handle: the device would be idle for milliseconds between two steps. The second thread gets the
    lock when the next step releases it, that is, while the device computes. If no step is queued,
    and there is nothing to wait for, the result is reported by the first thread: handing it over
    would only delay it.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._sequels: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_sequels = self._num_done_sequels = 0
        """Those that the second thread was given, and that it has run. One thread changes each."""
        self._busy_since: dict[str, float] = {}
        """When the present job began, in monotonic seconds, by thread; none for idle threads."""
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()
        self._follow_up = threading.Thread(
            target=self._run_sequels, name="model-sequels", daemon=True
        )
        self._follow_up.start()

    @property
    def busy_s(self) -> float:
        """How long the older of both threads' present jobs has been running; 0 when idle."""
        since = list(self._busy_since.values())
        return time.monotonic() - min(since) if since else 0.0

    def post(self, job: Callable[[], None]) -> None:
        """Queue `job` for the model thread; it must handle its own exceptions."""
        self._jobs.put(job)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the model thread. Returns or raises what it does."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # the work is done even if its caller is cancelled

        def job() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
            except BaseException as panic:  # of a library in Rust; callers expect an Exception
                what = f"{type(panic).__name__}: {panic}"
                future.set_exception(RuntimeError(what).with_traceback(panic.__traceback__))

        self.post(job)
        return await asyncio.wrap_future(future)

    def follow_up(self, sequel: Callable[[], None], *, may_wait: bool = True) -> None:
        """Run `sequel` on the second thread, in the order of these calls; called by jobs.

        It must handle its own exceptions. may_wait: whether it may wait, as for the device; one
        that does not runs at once, on this thread, if neither thread has anything else to do.
        """
        is_idle = self._num_done_sequels == self._num_sequels and self._jobs.empty()
        if not may_wait and is_idle:
            sequel()
        else:
            self._num_sequels += 1
            self._sequels.put(sequel)

    def stop(self, *, wait_s: float) -> bool:
        """End both threads after their queued jobs, and wait for that at most `wait_s` seconds.

        Returns whether they have ended; a thread that is stuck never does.
        """
        self._jobs.put(None)
        deadline = time.monotonic() + wait_s
        for thread in (self._thread, self._follow_up):
            thread.join(max(deadline - time.monotonic(), 0))
        return not self._thread.is_alive() and not self._follow_up.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run_job(job)
        self._sequels.put(None)

    def _run_sequels(self) -> None:
        while (sequel := self._sequels.get()) is not None:
            self._run_job(sequel)
            self._num_done_sequels += 1

    def _run_job(self, job: Callable[[], None]) -> None:
        name = threading.current_thread().name
        self._busy_since[name] = time.monotonic()
        try:
            job()
        except BaseException:  # a bug in a job; later streams need this thread
            logger.exception("unhandled error thread=%s", name)
        finally:
            del self._busy_since[name]

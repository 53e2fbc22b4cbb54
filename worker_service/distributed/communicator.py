"""Tensor- and pipeline-parallel communication over torch.distributed: gloo on CPUs, NCCL on GPUs.

A model's layers hold a `Communicator` for as long as the model lives. While it has joined the other
ranks for an epoch it forwards to that epoch's `ProcessGroups`. Before that nothing is sent: sums
are this rank's own part, gathered logits repeat its own, and a later stage computes synthetic
hidden states. Shapes and memory are the same, so each rank loads, tests and profiles its model
alone.

A process group that lost a rank cannot be repaired, so the groups are created for each epoch and
belong to no global state. `stage` joins the ranks that share layers; a `stage-link` joins two ranks
of consecutive stages; `everyone` joins all ranks, always over gloo, and carries sampled tokens.

Sums. Between CPUs the partial sums are gathered and added in the order of the ranks, so that a
row's result never depends on its position in a batch; gloo's own all-reduce adds an element's parts
in an order that depends on its position. Between GPUs it is NCCL's all-reduce.

gloo cannot abort a collective: one that waits for a silent peer ends with its timeout. So waits are
sliced, `interrupt` ends them from any thread, and a daemon thread waits for a collective that is
still running.
"""

import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from worker_service.distributed.layout import Layout
from worker_service.distributed.rendezvous import EpochRendezvous, Rendezvous
from worker_service.errors import GroupBroken

_SLICE = timedelta(milliseconds=200)
_MAX_SENDS = 16
"""Pending sends of hidden states; with more, a stage waits for the next one to receive."""

_CLOSE_TIMEOUT_S = 1.0
"""How long a rank that leaves waits for its own process groups to close."""

_INTERRUPTED = "this rank's collectives were interrupted: its epoch has ended"


class Transfer:
    """A running collective, and the tensor that it reads or fills."""

    def __init__(self, work: Any, tensor: Tensor, broken: threading.Event) -> None:
        self.tensor = tensor
        self.work = work
        self._broken = broken

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return bool(self.work.is_completed())

    def wait(self) -> Tensor:
        """Wait for the collective. Returns the tensor; raises GroupBroken."""
        while True:
            try:
                self.work.wait(_SLICE)
            except RuntimeError as error:
                if self.work.is_completed():
                    # A reference to the work keeps the connections open, and an exception refers
                    # to this frame.
                    self.work = None
                    reason = str(error).splitlines()[0]
                    raise GroupBroken(f"lost another rank: {reason}") from None
            else:
                return self.tensor
            if self._broken.is_set():
                self.work = None
                raise GroupBroken(_INTERRUPTED)


class ProcessGroups:
    """The process groups of one epoch. Used on one thread, except for `interrupt`."""

    def __init__(self, layout: Layout, meeting: EpochRendezvous, device: torch.device) -> None:
        """Create the groups with the other ranks; raises GroupBroken if one is missing."""
        self._on_gpu = device.type == "cuda"
        self._broken = meeting.cancelled
        self._layout = layout
        self._sends: deque[Transfer] = deque()
        size, rank, column = layout.tensor_parallel_size, layout.rank, layout.tensor_rank
        first = layout.stage * size
        self._everyone = meeting.process_group("everyone", range(layout.world_size))
        make = meeting.device_process_group if self._on_gpu else meeting.process_group
        self._stage = make(f"stage-{layout.stage}", range(first, first + size))
        self._from_previous = self._to_next = None
        if not layout.is_first_stage:
            self._from_previous = make(f"stage-link-{layout.stage}-{column}", (rank - size, rank))
        if not layout.is_last_stage:
            self._to_next = make(f"stage-link-{layout.stage + 1}-{column}", (rank, rank + size))

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over the ranks of this stage."""
        partial = partial.contiguous()
        if self._on_gpu:
            self._stage.allreduce(partial).wait()
            return partial
        parts = self._gather(partial)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(partial.dtype)

    def gather_columns(self, part: Tensor) -> Tensor:
        """[n, width] of each rank of this stage, concatenated by columns."""
        return torch.cat(self._gather(part.contiguous()), dim=1)

    def send_hidden(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage."""
        while self._sends and (self._sends[0].is_done or len(self._sends) >= _MAX_SENDS):
            self._finish(self._sends.popleft())
        self._sends.append(self._broadcast(self._to_next, hidden.contiguous(), root=0))

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill `hidden` with the hidden states of the previous stage."""
        self._finish(self._broadcast(self._from_previous, hidden, root=0))
        return hidden

    def share_with_all(self, numbers: Tensor) -> Transfer:
        """Broadcast from the sampling rank; the others pass a tensor of the same size."""
        return self._broadcast(self._everyone, numbers, root=self._layout.sampler)

    def check(self) -> None:
        """Raises GroupBroken after an interruption: results of GPUs are invalid then."""
        if self._broken.is_set():
            raise GroupBroken(_INTERRUPTED)

    def interrupt(self) -> None:
        """Make running and later waits raise GroupBroken. May be called on any thread."""
        self._broken.set()
        if self._on_gpu:
            for group in self._groups():
                group.abort()

    def close(self) -> None:
        """Close the groups; collectives of other ranks that wait for this one then fail."""
        self.interrupt()
        self._sends.clear()
        groups = self._groups()
        self._stage = self._everyone = self._from_previous = self._to_next = None
        threads = []
        while groups:
            threads.append(threading.Thread(target=_release, args=([groups.pop()],), daemon=True))
            threads[-1].start()
        # A running collective delays the end of its group; on gloo until a peer or the timeout ends
        # it. Usually none is running, and the threads have ended before the process does.
        until = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _groups(self) -> list[Any]:
        groups = (self._stage, self._from_previous, self._to_next, self._everyone)
        return [group for group in groups if group is not None]

    def _gather(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self._layout.tensor_parallel_size)]
        self._finish(Transfer(self._stage.allgather([parts], [part]), part, self._broken))
        return parts

    def _finish(self, transfer: Transfer) -> None:
        """Wait for a collective; on a GPU the device waits, not this thread."""
        if self._on_gpu:
            transfer.work.wait()
        else:
            transfer.wait()

    def _broadcast(self, group: Any, tensor: Tensor, root: int) -> Transfer:
        return Transfer(group.broadcast(tensor, root), tensor, self._broken)


def _release(group: list[Any]) -> None:
    group.clear()


class Communicator:
    """This rank's layout, and its process groups while it has joined the others."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.groups: ProcessGroups | None = None
        self._cancelled = threading.Event()
        """Interrupts the rendezvous of the present epoch, even before that begins."""

    @property
    def joined(self) -> ProcessGroups:
        """The process groups of this epoch. Raises GroupBroken without any."""
        if self.groups is None:
            raise GroupBroken("this rank has not joined the others")
        return self.groups

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over the ranks of this stage, identical on each."""
        if self.groups is None or self.layout.tensor_parallel_size == 1:
            return partial
        return self.groups.sum(partial)

    def gather_columns(self, part: Tensor) -> Tensor:
        """[n, width] of each rank of this stage, concatenated by columns on every rank."""
        if self.layout.tensor_parallel_size == 1:
            return part
        if self.groups is None:
            return part.repeat(1, self.layout.tensor_parallel_size)
        return self.groups.gather_columns(part)

    def send_hidden(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage, without waiting until it receives them."""
        if self.groups is not None:
            self.groups.send_hidden(hidden)

    def receive(self, token_ids: Tensor, positions: Tensor, like: Tensor) -> Tensor:
        """Hidden states of the previous stage, [num_tokens, hidden_size].

        like: [hidden_size], of the wanted type and device. Before joining, each row depends on its
        token and position only.
        """
        if self.groups is not None:
            return self.groups.receive(like.new_empty(len(token_ids), len(like)))
        columns = torch.arange(1, len(like) + 1, device=like.device)
        return torch.sin((token_ids + 7 * positions + 1).unsqueeze(1) * columns).to(like.dtype)

    def join(self, rendezvous: Rendezvous, epoch: int, device: torch.device) -> None:
        """Join the other ranks for an epoch. Raises GroupBroken unless all of them do."""
        self.leave()
        cancelled = self._cancelled = threading.Event()
        meeting = rendezvous.meet(epoch, cancelled)
        meeting.wait_for_all()
        self.groups = ProcessGroups(self.layout, meeting, device)

    def interrupt(self) -> None:
        """Make waits for other ranks raise GroupBroken. May be called on any thread."""
        self._cancelled.set()
        groups = self.groups
        if groups is not None:
            groups.interrupt()

    def leave(self) -> None:
        """Leave the group; ranks that wait for this one are notified."""
        groups, self.groups = self.groups, None
        if groups is not None:
            groups.close()

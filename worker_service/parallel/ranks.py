"""A rank's line to the others, as the layers of a model use it.

A model is loaded, tried and measured by each rank alone; it meets the others when an epoch begins.
Until then nothing is sent: sums are this rank's own part, gathered logits repeat its own, and a
later stage computes on made-up hidden states. Shapes and memory are the same.
"""

import threading

import torch
from torch import Tensor

from worker_service.distributed.communicator import Lines
from worker_service.distributed.layout import Layout
from worker_service.distributed.rendezvous import Rendezvous
from worker_service.errors import GroupBroken


class Ranks:
    """This rank's place, and its lines to the others while it has joined them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.lines: Lines | None = None
        self._cancelled = threading.Event()
        """Of the present epoch's meeting, from before it begins."""

    @property
    def joined(self) -> Lines:
        """The lines of this epoch. Raises GroupBroken without any."""
        if self.lines is None:
            raise GroupBroken("this rank has not joined the others")
        return self.lines

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of what the ranks of this stage have, the same on each."""
        if self.lines is None or self.layout.tensor_parallel_size == 1:
            return partial
        return self.lines.sum(partial)

    def gather_columns(self, part: Tensor) -> Tensor:
        """[n, width] of each rank of this stage side by side, on every rank."""
        if self.layout.tensor_parallel_size == 1:
            return part
        if self.lines is None:
            return part.repeat(1, self.layout.tensor_parallel_size)
        return self.lines.gather_columns(part)

    def send_on(self, hidden: Tensor) -> None:
        """Hand hidden states to the next stage; does not wait for it to take them."""
        if self.lines is not None:
            self.lines.send_on(hidden)

    def receive(self, token_ids: Tensor, positions: Tensor, like: Tensor) -> Tensor:
        """Hidden states of the previous stage, [num_tokens, hidden_size].

        like: [hidden_size], of the type and on the device wanted. Before joining, rows that depend
        on their token and position, and on nothing else.
        """
        if self.lines is not None:
            return self.lines.receive(like.new_empty(len(token_ids), len(like)))
        columns = torch.arange(1, len(like) + 1, device=like.device)
        return torch.sin((token_ids + 7 * positions + 1).unsqueeze(1) * columns).to(like.dtype)

    def join(self, rendezvous: Rendezvous, epoch: int, device: torch.device) -> None:
        """Meet the others for an epoch. Raises GroupBroken if not all of them come."""
        self.leave()
        cancelled = self._cancelled = threading.Event()
        meeting = rendezvous.meet(epoch, cancelled)
        meeting.wait_for_all()
        self.lines = Lines(self.layout, meeting, device)

    def interrupt(self) -> None:
        """From any thread: whatever waits for other ranks gives up, with GroupBroken."""
        self._cancelled.set()
        lines = self.lines
        if lines is not None:
            lines.interrupt()

    def leave(self) -> None:
        """Part with the others; those that wait for this rank learn of it."""
        lines, self.lines = self.lines, None
        if lines is not None:
            lines.close()

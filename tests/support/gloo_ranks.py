"""Ranks that believe that they are on GPUs, and communicate by gloo: as objects of this process, or
as processes of their own, which can be killed."""

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from worker_service.address import TcpAddress
from worker_service.distributed.communicator import (
    SYMMETRIC_BYTES,
    Communicator,
    EpochRendezvous,
    Rendezvous,
)
from worker_service.distributed.layout import Layout


class GlooMeeting(EpochRendezvous):
    """Makes groups of gloo where ranks on GPUs have those of NCCL."""

    def device_process_group(self, name: str, ranks: Any) -> Any:
        return self.process_group(name, ranks)


class GlooRendezvous(Rendezvous):
    """Where they meet."""

    def meet(self, epoch: int, cancelled: threading.Event) -> EpochRendezvous:
        return GlooMeeting(self._store(f"epoch-{epoch}"), self._layout, "127.0.0.1", cancelled)


class SymmetricMeeting(GlooMeeting):
    """Where ranks get host memory as symmetric memory."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.buffer = torch.full((SYMMETRIC_BYTES,), 7, dtype=torch.uint8)

    def symmetric_buffer(self, group: Any, device: torch.device) -> tuple[Tensor, Any]:
        return self.buffer, None


class SymmetricRendezvous(GlooRendezvous):
    """Where they meet."""

    def meet(self, epoch: int, cancelled: threading.Event) -> EpochRendezvous:
        self.meeting = SymmetricMeeting(
            self._store(f"epoch-{epoch}"), self._layout, "127.0.0.1", cancelled
        )
        return self.meeting


class RankProcess:
    """A rank with `--symmetric-memory` as a process. It does one thing at a time."""

    def __init__(self, layout: Layout, port: int) -> None:
        """port: of rank 0's store."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # with torch, which takes seconds to import
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, layout, port), daemon=True)
        self.process.start()
        other.close()

    def begin(self, action: str, number: float) -> None:
        """Join the epoch `number` or sum a tensor of `number`; returns once that has begun. A rank
        that fails leaves the others."""
        self._pipe.send((action, number))
        assert self._pipe.recv() == "begun"

    def is_done(self) -> bool:
        """Whether what began has ended."""
        return self._pipe.poll()

    def result(self, timeout_s: float) -> Any:
        """The sum and what the symmetric memory then begins with, None of another action, or the
        exception. Raises TimeoutError."""
        if not self._pipe.poll(timeout_s):
            raise TimeoutError
        return self._pipe.recv()

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self.process.kill()
        self.process.join()


def _serve(pipe: "Connection[Any, Any]", layout: Layout, port: int) -> None:
    rendezvous = SymmetricRendezvous(TcpAddress("127.0.0.1", port), layout)
    rendezvous.open()
    communicator = Communicator(layout, symmetric=True, connect=lambda *_: 0)

    def join(epoch: float) -> None:
        communicator.join(rendezvous, int(epoch), torch.device("cuda"))

    def add(number: float) -> tuple[float, float]:
        total = communicator.sum(torch.full((3, 5), float(number)))
        return float(total.unique()), float(rendezvous.meeting.buffer[:4].view(torch.float32))

    actions: dict[str, Callable[[float], Any]] = {"join": join, "sum": add}
    while True:
        try:
            action, number = pipe.recv()
        except EOFError:  # the test has ended
            return
        pipe.send("begun")
        try:
            pipe.send(actions[action](number))
        except Exception as error:
            communicator.leave()  # as a worker does whose step has failed
            pipe.send(error)

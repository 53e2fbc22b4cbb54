"""Tensor- and pipeline-parallel communication over torch.distributed: gloo on CPUs, NCCL on GPUs.

A model's layers hold a `Communicator` for as long as the model lives. While it has joined the other
ranks for an epoch it forwards to that epoch's `ProcessGroups`. Before that nothing is sent: sums
are this rank's own part, gathered logits repeat its own, and a later stage computes synthetic
hidden states. Shapes and memory are the same, so each rank loads, tests and profiles its model
alone.

A process group that lost a rank cannot be repaired, so the groups are created for each epoch and
belong to no global state. Rank 0 hosts a small store at a fixed address for as long as it lives;
for every epoch the ranks meet there under the epoch's number, so that a group can start again with
a replaced rank while the others keep their weights. `stage` joins the ranks that share layers; a
`stage-link` joins two ranks of consecutive stages; `everyone` joins all ranks, always over gloo,
and carries drafts, and tokens that are sampled on the host. Tokens sampled on a GPU are broadcast
within its stage, by NCCL.

NCCL's collectives are queued on the current stream, where they can be captured in CUDA graphs. Such
graphs refer to the communicator of their epoch, so they are captured again for the next one, and
are destroyed before the group is closed: NCCL does not free a communicator before.

Sums. Between CPUs, and between GPUs with `--batch-invariant`, the partial sums are gathered and
added in the order of the ranks, so that a row's result never depends on its position in a batch;
gloo's and NCCL's own all-reduce add an element's parts in an order that depends on its position and
on the size of the batch. Otherwise GPUs use NCCL's all-reduce, which transfers less; with
`--symmetric-memory` small sums are copied to memory that NCCL has registered on all ranks, whose
kernels can be aborted as its others can, unlike torch's `symm_mem` operators, which wait for a lost
rank for ever.

gloo cannot abort a collective: one that waits for a silent peer ends with its timeout. So waits are
sliced, `interrupt` ends them from any thread, and a daemon thread waits for a collective that is
still running.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, distributed
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from service_common.errors import CannotListen
from worker_service.address import TcpAddress, local_host_towards
from worker_service.distributed.layout import Layout
from worker_service.errors import GroupBroken, InvalidOption

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT = timedelta(seconds=10)
"""For connections to rank 0's store, and among ranks that have met: one may be lost meanwhile."""

_MEET_TIMEOUT_S = 60.0
_POLL_S = 0.01
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Longer than any step, since a rank waits for the others' parts of it."""

SYMMETRIC_BYTES = 2**20
"""The largest sum that goes through symmetric memory: larger ones are bound by bandwidth, for which
NCCL's other algorithms are better."""

ESTIMATED_DEVICE_BYTES = 2**30
"""NCCL's memory on a GPU that shares its model with others, until it is measured. A generous
estimate, not measured."""


class Rendezvous:
    """Access to the group's store, which rank 0 hosts unless torchrun does."""

    def __init__(self, address: TcpAddress, layout: Layout) -> None:
        self._address = address
        self._layout = layout
        self._server: Any = None

    def open(self) -> None:
        """Start the store on rank 0. Raises CannotListen."""
        if self._layout.rank != 0 or _is_store_of_torchrun():
            return
        try:
            self._server = TCPStore(
                self._address.host, self._address.port, is_master=True, wait_for_workers=False
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CannotListen(f"{self._address} for the group's store", reason) from None

    def meet(self, epoch: int, cancelled: threading.Event) -> "EpochRendezvous":
        """The rendezvous of an epoch. Raises GroupBroken if rank 0 cannot be reached.

        cancelled: see `EpochRendezvous`; may be set while this connects to rank 0.
        """
        local_host = local_host_towards(self._address)
        return EpochRendezvous(self._store(f"epoch-{epoch}"), self._layout, local_host, cancelled)

    def _store(self, prefix: str) -> Any:
        address = self._address
        options: Any = {"is_master": False, "wait_for_workers": False, "timeout": _CONNECT_TIMEOUT}
        try:
            store = TCPStore(address.host, address.port, **options)
        except RuntimeError:
            raise GroupBroken(f"no store of rank 0 at {address}") from None
        return PrefixStore(prefix, store)


class EpochRendezvous:
    """The rendezvous of one epoch."""

    def __init__(
        self, store: Any, layout: Layout, local_host: str, cancelled: threading.Event
    ) -> None:
        self.cancelled = cancelled
        """Set on any thread to interrupt this rank's waits, present and future."""
        self._store = store
        self._layout = layout
        self._local_host = local_host

    def wait_for_all(self, settings: str = "") -> None:
        """Return once every rank has arrived. Raises GroupBroken, also if one has other settings.

        settings: those on which the order or the size of collectives depends.
        """
        names = [f"rank-{rank}" for rank in range(self._layout.world_size)]
        until = time.monotonic() + _MEET_TIMEOUT_S
        try:
            self._store.set(names[self._layout.rank], settings)
            while not self._store.check(names):
                if self.cancelled.is_set() or time.monotonic() > until:
                    raise GroupBroken("not all ranks of the group have joined")
                time.sleep(_POLL_S)
            for name in names:
                if (other := self._store.get(name).decode()) != settings:
                    raise GroupBroken(
                        f"start all ranks with the same flags: {name} has {other}, rank-"
                        f"{self._layout.rank} has {settings}"
                    )
        except RuntimeError as error:
            raise GroupBroken(f"lost rank 0: {str(error).splitlines()[0]}") from None

    def process_group(self, name: str, ranks: Sequence[int]) -> Any:
        """A gloo group of some ranks, including this one. Raises GroupBroken."""
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        device = ProcessGroupGloo.create_device(hostname=self._local_host)
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            device = ProcessGroupGloo.create_default_device()
        options._devices = [device]
        options._timeout = _CONNECT_TIMEOUT
        options._threads = 1
        group = self._make(ProcessGroupGloo, name, ranks, options)
        group._set_default_timeout(_COLLECTIVE_TIMEOUT)
        return group

    def device_process_group(self, name: str, ranks: Sequence[int]) -> Any:
        """An NCCL group of some ranks, including this one, which connect when it is first used."""
        survive_lost_peers(os.environ)
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = _COLLECTIVE_TIMEOUT
        return self._make(distributed.ProcessGroupNCCL, name, ranks, options)

    def symmetric_buffer(self, group: Any, device: torch.device) -> tuple[Tensor, Any]:
        """Memory that NCCL's kernels read on the other ranks of a group directly, uint8
        [SYMMETRIC_BYTES], and the pool that holds it. All ranks of the group call this. Raises
        GroupBroken."""
        try:
            group.eager_connect_single_device(device)
            pool = torch.cuda.MemPool(group.mem_allocator)
            with torch.cuda.use_mem_pool(pool, device):
                buffer = torch.empty(SYMMETRIC_BYTES, dtype=torch.uint8, device=device)
            group.register_mem_pool(pool, symm=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise GroupBroken(
                f"no symmetric memory, leave out --symmetric-memory: {reason}"
            ) from None
        return buffer, pool

    def _make(self, kind: Any, name: str, ranks: Sequence[int], options: Any) -> Any:
        store = PrefixStore(name, self._store)
        try:
            return kind(store, ranks.index(self._layout.rank), len(ranks), options)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise GroupBroken(f"cannot create process group {name!r}: {reason}") from None


def survive_lost_peers(environment: MutableMapping[str, str]) -> None:
    """Make torch raise NCCL errors, unless the environment says otherwise. By default it ends the
    process of a rank that detects the loss of another, and so loses its weights."""
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def require_symmetric_memory(device: torch.device, torch_version: str) -> None:
    """Raise InvalidOption unless NCCL's symmetric memory can be used and aborted: before torch 2.13
    aborting a group that has registered memory ends the process."""
    if device.type != "cuda":
        raise InvalidOption(f"symmetric_memory: expected a GPU, got {device}")
    if tuple(int(part) for part in torch_version.split(".")[:2]) < (2, 13):
        raise InvalidOption(
            f"symmetric_memory: expected torch 2.13 or newer, got {torch_version}; leave it out"
        )


def _is_store_of_torchrun() -> bool:
    """Whether torchrun's agent hosts the store, at the address that it gives to its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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
        return self.work is None or bool(self.work.is_completed())

    def drop(self) -> None:
        """Forget the collective, whose process group is being closed: a reference to it would keep
        the connections open, so that peers which wait on them were not notified."""
        self.work = None

    def wait(self) -> Tensor:
        """Wait for the collective. Returns the tensor; raises GroupBroken."""
        if self.work is None:
            raise GroupBroken(_INTERRUPTED)
        while not self._ends_within(_SLICE):
            if self._broken.is_set():
                self.drop()
                raise GroupBroken(_INTERRUPTED)
        return self.tensor

    def _ends_within(self, timeout: timedelta) -> bool:
        """Whether the collective has succeeded; raises GroupBroken if it failed."""
        try:
            self.work.wait(timeout)
        except RuntimeError:
            if not self.work.is_completed():
                return False
        else:
            return True
        # The timeout may have expired just before the end: this returns the outcome at once.
        try:
            self.work.wait()
        except RuntimeError as error:
            self.drop()  # an exception refers to this frame
            raise GroupBroken(f"lost another rank: {str(error).splitlines()[0]}") from None
        return True


class ProcessGroups:
    """The process groups of one epoch. Used on one thread, except for `interrupt`."""

    def __init__(
        self,
        layout: Layout,
        meeting: EpochRendezvous,
        device: torch.device,
        *,
        sums_in_order: bool = False,
        symmetric: bool = False,
    ) -> None:
        """Create the groups with the other ranks; raises GroupBroken if one is missing.

        sums_in_order: add partial sums in the order of the ranks on GPUs, too; symmetric: add small
        ones in symmetric memory, unless they are added in order.
        """
        self._on_gpu = device.type == "cuda"
        self._sums_in_order = sums_in_order or not self._on_gpu
        self._interrupted = False
        self._broken = meeting.cancelled
        self._layout = layout
        self._sends: deque[Transfer] = deque()
        self._broadcasts = WeakSet[Transfer]()
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
        self._symmetric: tuple[Tensor, Any] | None = None
        if symmetric and size > 1 and not self._sums_in_order:
            self._symmetric = meeting.symmetric_buffer(self._stage, device)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over the ranks of this stage."""
        partial = partial.contiguous()
        if not self._sums_in_order:
            summed = partial
            if self._symmetric is not None and partial.nbytes <= SYMMETRIC_BYTES:
                buffer = self._symmetric[0][: partial.nbytes]
                summed = buffer.view(partial.dtype).view(partial.shape).copy_(partial)
            options = self._options(distributed.AllreduceOptions)
            self._finish(self._stage.allreduce([summed], options), summed)
            # The buffer is that of the next sum, too.
            return partial if summed is partial else partial.copy_(summed)
        parts = [torch.empty_like(partial) for _ in range(self._layout.tensor_parallel_size)]
        work = self._stage.allgather([parts], [partial], self._options(AllgatherOptions))
        self._finish(work, partial)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(partial.dtype)

    def gather_columns(self, part: Tensor) -> Tensor | None:
        """[n, width] of each rank of this stage, concatenated by columns on its first rank, which
        samples; None on the others."""
        part, is_first = part.contiguous(), self._layout.tensor_rank == 0
        num_parts = self._layout.tensor_parallel_size if is_first else 0
        parts = [torch.empty_like(part) for _ in range(num_parts)]
        options = self._options(distributed.GatherOptions)
        options.rootRank = 0
        self._finish(self._stage.gather([parts] if is_first else [], [part], options), part)
        return torch.cat(parts, dim=1) if is_first else None

    def share_in_stage(self, numbers: Tensor) -> None:
        """Broadcast from the first rank of this stage to the others, in place."""
        options = self._options(distributed.BroadcastOptions)
        options.rootRank = 0
        self._finish(self._stage.broadcast([numbers], options), numbers)

    def send_hidden(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage."""
        while self._sends and (self._sends[0].is_done or len(self._sends) >= _MAX_SENDS):
            self._await(self._sends.popleft())
        self._sends.append(self._broadcast(self._to_next, hidden.contiguous(), root=0))

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill `hidden` with the hidden states of the previous stage."""
        self._await(self._broadcast(self._from_previous, hidden, root=0))
        return hidden

    def share_with_all(self, numbers: Tensor) -> Transfer:
        """Broadcast from the sampling rank; the others pass a tensor of the same size."""
        return self._broadcast(self._everyone, numbers, root=self._layout.sampler)

    def check(self) -> None:
        """Raises GroupBroken after an interruption: results of GPUs are invalid then."""
        if self._interrupted:
            raise GroupBroken(_INTERRUPTED)

    def interrupt(self) -> None:
        """Make running and later waits raise GroupBroken. May be called on any thread."""
        self._interrupted = True
        self._broken.set()
        if self._on_gpu:
            for group in self._groups():
                # Kernels end at once, but the call returns only when no graph refers to the group.
                threading.Thread(target=group.abort, daemon=True).start()

    def close(self) -> None:
        """Close the groups; collectives of other ranks that wait for this one then fail."""
        self._broken.set()
        self._sends.clear()
        for transfer in self._broadcasts:
            transfer.drop()
        groups = self._groups()
        self._stage = self._everyone = self._from_previous = self._to_next = None
        self._symmetric = None
        threads = []
        while groups:
            arguments = [groups.pop()], self._on_gpu
            threads.append(threading.Thread(target=_release, args=arguments, daemon=True))
            threads[-1].start()
        # A running collective delays the end of its group; on gloo until a peer or the timeout ends
        # it. Usually none is running, and the threads have ended before the process does.
        until = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _groups(self) -> list[Any]:
        groups = (self._stage, self._from_previous, self._to_next, self._everyone)
        return [group for group in groups if group is not None]

    def _options(self, kind: Any) -> Any:
        """Options of a collective, which is queued on the current stream of a GPU."""
        options = kind()
        options.asyncOp = not self._on_gpu
        return options

    def _finish(self, work: Any, tensor: Tensor) -> None:
        """Wait for a collective; on a GPU the device waits, not this thread. work: None if it is
        part of the current stream."""
        if work is not None:
            self._await(Transfer(work, tensor, self._broken))

    def _await(self, transfer: Transfer) -> None:
        if self._on_gpu:
            transfer.work.wait()
        else:
            transfer.wait()

    def _broadcast(self, group: Any, tensor: Tensor, root: int) -> Transfer:
        transfer = Transfer(group.broadcast(tensor, root), tensor, self._broken)
        self._broadcasts.add(transfer)
        return transfer


def connect(groups: ProcessGroups, device: torch.device) -> int:
    """Run every collective of a step once, for which NCCL connects the ranks of a stage and
    allocates buffers. Returns the bytes of the GPU that were allocated, other than by torch."""
    if not torch.cuda.is_available():
        return 0

    def used() -> int:
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)

    before = used()
    numbers = groups.sum(torch.zeros(64, 64, device=device))
    groups.gather_columns(numbers)
    groups.share_in_stage(numbers)
    torch.cuda.synchronize(device)
    return max(0, used() - before)


def _release(group: list[Any], aborts: bool) -> None:
    if aborts:
        group[0].abort()
    group.clear()


class Communicator:
    """This rank's layout, and its process groups while it has joined the others."""

    def __init__(
        self,
        layout: Layout,
        *,
        sums_in_order: bool = False,
        symmetric: bool = False,
        connect: Callable[[ProcessGroups, torch.device], int] = connect,
    ) -> None:
        """sums_in_order, symmetric: see `ProcessGroups`; connect: for tests without a GPU."""
        self.layout = layout
        self._sums_in_order = sums_in_order
        self._symmetric = symmetric
        self._connect = connect
        self._device_bytes: int | None = None
        """Bytes that NCCL took on the device in the last epoch."""
        self.groups: ProcessGroups | None = None
        self._cancelled = threading.Event()
        """Interrupts the rendezvous of the present epoch."""
        self._ended_epoch = 0
        """The greatest epoch that was interrupted, perhaps before this rank has joined others for
        it."""

    @property
    def joined(self) -> ProcessGroups:
        """The process groups of this epoch. Raises GroupBroken without any."""
        if self.groups is None:
            raise GroupBroken("this rank has not joined the others")
        return self.groups

    def bytes_to_allocate(self, device: torch.device) -> int:
        """Memory that NCCL will take on a device when this rank joins the others: as much as in the
        last epoch, or an estimate. 0 while it has joined them, as the memory is in use then."""
        if device.type != "cuda" or self.layout.world_size == 1 or self.groups is not None:
            return 0
        return ESTIMATED_DEVICE_BYTES if self._device_bytes is None else self._device_bytes

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over the ranks of this stage, identical on each."""
        if self.groups is None or self.layout.tensor_parallel_size == 1:
            return partial
        return self.groups.sum(partial)

    def gather_columns(self, part: Tensor, total: int) -> Tensor:
        """[n, width] of each rank of this stage, concatenated by columns on the rank that samples;
        the first `total` columns. The others, which do not read them, get zeros that take no
        memory."""
        size = self.layout.tensor_parallel_size
        if size == 1:
            return part
        if self.groups is None:
            gathered: Tensor | None = part.repeat(1, size)
        else:
            gathered = self.groups.gather_columns(part)
        if gathered is None:
            return part.new_zeros(()).expand(len(part), total)
        return gathered[:, :total].contiguous()

    def share_in_stage(self, numbers: Tensor) -> None:
        """Broadcast from the first rank of this stage to the others, in place. On a GPU neither
        waits for it."""
        if self.groups is not None and self.layout.tensor_parallel_size > 1:
            self.groups.share_in_stage(numbers)

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

    def join(
        self, rendezvous: Rendezvous, epoch: int, device: torch.device, settings: str = ""
    ) -> None:
        """Join the other ranks for an epoch. Raises GroupBroken unless all of them do, with the
        same settings; see `EpochRendezvous.wait_for_all`."""
        self.leave()
        cancelled = self._cancelled = threading.Event()
        if epoch <= self._ended_epoch:  # read after the event can be found
            raise GroupBroken(_INTERRUPTED)
        meeting = rendezvous.meet(epoch, cancelled)
        meeting.wait_for_all(settings)
        self.groups = ProcessGroups(
            self.layout,
            meeting,
            device,
            sums_in_order=self._sums_in_order,
            symmetric=self._symmetric,
        )
        if cancelled.is_set():  # before the groups could be found
            self.groups.interrupt()
            raise GroupBroken(_INTERRUPTED)
        if device.type == "cuda":
            self._device_bytes = self._connect(self.groups, device)
            if self._device_bytes > ESTIMATED_DEVICE_BYTES:
                logger.warning(
                    "NCCL took more memory than was left for it device_bytes=%d estimated_bytes=%d",
                    self._device_bytes,
                    ESTIMATED_DEVICE_BYTES,
                )

    def interrupt(self, epoch: int) -> None:
        """Make waits for other ranks raise GroupBroken, also those of epochs up to `epoch` that
        have not begun. May be called on any thread."""
        self._ended_epoch = max(self._ended_epoch, epoch)  # before the event is read
        self._cancelled.set()
        groups = self.groups
        if groups is not None:
            groups.interrupt()

    def leave(self) -> None:
        """Leave the group; ranks that wait for this one are notified."""
        groups, self.groups = self.groups, None
        if groups is not None:
            groups.close()

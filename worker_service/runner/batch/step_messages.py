"""What the rank that samples broadcasts to the hosts of the other ranks, step by step."""

from collections import deque

import numpy as np
import torch

from worker_service.array_types import Int64Array
from worker_service.distributed.communicator import Communicator, Transfer
from worker_service.errors import GroupBroken


class StepMessage:
    """A message of the rank that samples, on its way to this rank. It begins with a step id, which
    must equal this rank's. Implements `Outcome` of `worker_service.runner.state.sequence_state`."""

    def __init__(self, step_id: int, num_columns: int, transfer: Transfer) -> None:
        self._step_id = step_id
        self._num_columns = num_columns
        self._transfer = transfer

    @property
    def is_available(self) -> bool:
        """Whether `wait` would return at once."""
        return self._transfer.is_done

    def wait(self) -> Int64Array:
        """Its numbers, [num_rows, num_columns]. Raises GroupBroken."""
        message = self._transfer.wait().numpy()
        if message[0] != self._step_id:
            raise GroupBroken(f"rank at step {self._step_id}, the sampling rank at {message[0]}")
        return message[1:].reshape(-1, self._num_columns)


class StepMessages:
    """The messages of a rank, in the order of its steps. All ranks send or expect the same ones."""

    def __init__(self, communicator: Communicator) -> None:
        """communicator: of ranks that have joined when a message is sent or expected."""
        self.layout = communicator.layout
        self._communicator = communicator
        self._sent: deque[Transfer] = deque()

    def send(self, step_id: int, numbers: Int64Array) -> None:
        """Broadcast numbers, of any shape, without waiting until the other ranks have them."""
        while self._sent and self._sent[0].is_done:
            self._sent.popleft().wait()
        message = torch.from_numpy(np.concatenate([[step_id], numbers.ravel()]))
        self._sent.append(self._communicator.joined.share_with_all(message))

    def expect(self, step_id: int, num_rows: int, num_columns: int) -> StepMessage:
        """The message that the rank which samples sends, without waiting for it."""
        message = torch.empty(1 + num_rows * num_columns, dtype=torch.int64)
        transfer = self._communicator.joined.share_with_all(message)
        return StepMessage(step_id, num_columns, transfer)

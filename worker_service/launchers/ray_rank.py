"""What Ray starts for a rank: the parent of the rank's process, on the rank's node.

The process is the very program that any other launcher starts, so a rank is the same wherever it
runs. Its output is the actor's, which Ray brings to the command that launched the group.
"""

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from worker_service.launchers.rank_process import RankCommand, free_port


@dataclass(frozen=True, slots=True)
class RayNode:
    """Where an actor found itself."""

    node_id: str
    host: str
    """The node's address, at which the others reach it."""

    free_port: int
    gpus: str | None
    """CUDA_VISIBLE_DEVICES, as Ray set it."""


class RayRank:
    """A Ray actor: `run` on one of its threads, while others take signals."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = False

    def node(self) -> RayNode:
        """Where this is."""
        import ray

        host = ray.util.get_node_ip_address()
        return RayNode(
            node_id=ray.get_runtime_context().get_node_id(),
            host=host,
            free_port=free_port(host),
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )

    def run(self, command: RankCommand, environment: Mapping[str, str]) -> int:
        """Run the rank to its end; its exit code, negative where a signal killed it.

        environment: what is to be different from this node's.
        """
        # The process dies with the thread that started it, which waits here until its end.
        self._process = subprocess.Popen(
            command.as_child_of_this(), env=os.environ | environment, process_group=0
        )
        if self._is_ending:  # since before it was there to be told
            self._process.terminate()
        return self._process.wait()

    def terminate(self) -> None:
        """Have the rank end in order; told again, it ends at once."""
        self._is_ending = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the rank, to be run again."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

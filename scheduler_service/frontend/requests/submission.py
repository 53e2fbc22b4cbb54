"""What cores have of a request: sent to a new core again when one is lost."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.frontend.requests.choice_stream import ChoiceStream


@dataclass(slots=True, eq=False)
class Submission:
    """A request at its core, and its history at earlier ones."""

    first_arrived: float
    """When the first attempt arrived, on the monotonic clock."""
    deadline: float | None
    """On the same clock."""
    handle: int = 0
    """Number of the first choice on the stream to the core; 0 before it is submitted."""
    is_accepted: bool = False
    """Whether a core has ever accepted it."""
    was_accepted: bool = False
    """Whether a core has ever accepted it, or the earlier attempt that it replaces."""
    has_ended: bool = False
    """Whether the core has reported its end."""
    num_worker_losses: int = 0
    """Workers that died while computing it, as its cores have reported."""
    num_lone_worker_losses: int = 0
    """Those of them that died in steps that it had to itself, since its last output."""

    def replace(self, previous: "Submission") -> None:
        """Keep the place and the history of an earlier attempt at the request."""
        self.was_accepted = previous.was_accepted
        self.first_arrived = previous.first_arrived
        self.num_worker_losses = previous.num_worker_losses
        self.num_lone_worker_losses = previous.num_lone_worker_losses

    def message(
        self, resolved: scheduler_pb.Submit, choices: Iterable[ChoiceStream]
    ) -> scheduler_pb.Submit:
        """The resolved request with what its core must know of it, the first or a later one."""
        submit = scheduler_pb.Submit()
        submit.CopyFrom(resolved)
        if not submit.generation.HasField("beam_search"):  # a search outputs nothing before its end
            submit.generation.generated.extend(
                choice.generated() for choice in choices if choice.token_ids or choice.finish
            )
        self.write(submit)
        return submit

    def write(self, submit: scheduler_pb.Submit) -> None:
        """Set the fields that depend on the time and on what earlier cores have reported."""
        submit.handle = self.handle
        now = time.monotonic()
        if self.deadline is not None:
            submit.timeout_us = max(1, round((self.deadline - now) * 1e6))
        submit.was_accepted = self.was_accepted
        submit.waited_us = round((now - self.first_arrived) * 1e6)
        submit.num_worker_losses = self.num_worker_losses
        submit.num_lone_worker_losses = self.num_lone_worker_losses

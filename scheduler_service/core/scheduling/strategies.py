"""The strategies: how the result of a request comes about, by what it wants."""

from collections.abc import Mapping

from scheduler_service.core.beam_search import BeamSearch
from scheduler_service.core.request import Pooling, Request
from scheduler_service.core.scheduling.beams import Beams
from scheduler_service.core.scheduling.pooling import Pooled
from scheduler_service.core.scheduling.sampling import Sampling
from scheduler_service.core.scheduling.strategy import StrategyScheduler
from scheduler_service.core.sequence import SequenceGroup, Strategy


def make_strategy(request: Request) -> Strategy:
    """The strategy of a new request."""
    work = request.work
    if isinstance(work, Pooling):
        return Pooled(work)
    if work.beam_search is not None:
        return Beams(BeamSearch(work.beam_search, work.stop_token_ids, work.max_tokens))
    return Sampling()


class StrategySchedulers:
    """A worker group's schedulers by strategy."""

    def __init__(self, schedulers: Mapping[type[Strategy], StrategyScheduler]) -> None:
        self._schedulers = schedulers

    def of(self, seq_group: SequenceGroup) -> StrategyScheduler:
        """The one that schedules a group."""
        return self._schedulers[type(seq_group.strategy)]

"""What is promised to every request, whatever happens to its workers, its frontend and its core."""

from collections.abc import Callable, Iterable

from scheduler_service.core import RequestTimings, SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.config import PoolingType
from scheduler_service.core.context import num_source_tokens
from scheduler_service.core.request import Pooling
from tests.support.records import RequestRecord
from tests.support.symbolic_worker import undisturbed, undisturbed_beams, undisturbed_vector


class Promises:
    """Checks the ends of requests against undisturbed runs."""

    def __init__(
        self, config: SchedulerConfig, capacities: Callable[[], Iterable[WorkerGroupCapacity]]
    ) -> None:
        """`capacities`: of the worker groups there are."""
        self.num_cached_tokens = 0
        """Prompt tokens of finished requests that were found in prefix caches."""
        self.max_model_lens: dict[str, int] = {}
        """Of all workers, by model."""
        self.workers: list[WorkerGroupCapacity] = []
        """All there ever were."""
        self._config = config
        self._capacities = capacities

    def _expected(self, record: RequestRecord, index: int) -> list[int]:
        request = record.request
        room = self.max_model_lens[request.model] - len(request.prompt_token_ids)
        if request.work.beam_search is not None:
            beams = undisturbed_beams(
                request.prompt_token_ids,
                request.work.sampling,
                request.work.beam_search,
                request.work.stop_token_ids,
                min(request.work.max_tokens, room),
            )
            return [] if beams is None else beams[index]
        return undisturbed(
            request.prompt_token_ids,
            index,
            request.work.sampling,
            request.work.stop_token_ids,
            min(request.work.max_tokens, room),
        )

    def _check_prefixes(self, record: RequestRecord) -> None:
        for index, choice in enumerate(record.choices):
            expected = self._expected(record, index)
            assert choice.tokens == expected[: len(choice.tokens)], "other tokens than undisturbed"

    def check_finished(self, record: RequestRecord, now: float) -> None:
        """It has all its tokens, and why it ended and what it took are as they must be."""
        request = record.request
        if isinstance(request.work, Pooling):
            self._check_vector(record, request.work)
            return
        self._check_prefixes(record)
        for index, choice in enumerate(record.choices):
            if choice.stopped_by_frontend:
                continue
            expected = self._expected(record, index)
            assert choice.tokens == expected, "not all tokens came"
            stopped = bool(expected) and expected[-1] in request.work.stop_token_ids
            assert choice.finish_reason == ("stop" if stopped else "length")
            if request.work.wants_logprobs and not request.work.generated:
                assert choice.num_logprobs == len(expected)
        is_begun = any(choice.tokens for choice in record.choices)
        if request.work.wants_prompt_logprobs and is_begun and not request.work.generated:
            assert record.num_prompt_logprobs == len(request.prompt_token_ids) - 1
        assert record.finished is not None
        self._check_cached_tokens(record)
        _check_timings(record, record.finished, now)

    def _check_vector(self, record: RequestRecord, work: Pooling) -> None:
        """It is the one of an undisturbed run, and came without tokens."""
        assert [choice.tokens for choice in record.choices] == [[]]
        assert record.vector == self._vectors(record)
        if work.type is not PoolingType.LAST:
            assert record.cached_tokens == 0

    def _vectors(self, record: RequestRecord) -> bytes:
        return undisturbed_vector(record.request.prompt_token_ids, record.request.work.pooling)

    def _check_cached_tokens(self, record: RequestRecord) -> None:
        request = record.request
        most = len(request.prompt_token_ids) - (0 if request.work.generated else 1)
        if request.work.wants_prompt_logprobs or not self._config.enable_prefix_caching:
            most = 0
        assert 0 <= record.cached_tokens <= most
        self.num_cached_tokens += record.cached_tokens

    def check_failed(self, record: RequestRecord) -> None:
        """Its tokens are right as far as they go, and it was to fail."""
        assert record.error is not None
        if isinstance(record.request.work, Pooling):
            is_part = record.request.work.type is PoolingType.ALL
            assert record.vector is None or is_part, "a vector before an error"
            assert self._vectors(record).startswith(record.vector or b"")
            return
        self._check_prefixes(record)
        lengths = [len(self._expected(record, i)) for i in range(len(record.choices))]
        if record.error.reason == "KV_CACHE_TOO_SMALL":
            assert int(record.error.details["num_cache_tokens"]) >= self._most_cache_tokens(record)
        if record.request.work.beam_search is not None:
            assert not any(choice.tokens for choice in record.choices), "reported before the end"
            return
        if record.error.reason == "NON_FINITE_LOGITS":
            fails_at = record.request.work.sampling.fails_at
            assert fails_at in [len(choice.tokens) for choice in record.choices]
        if record.error.reason == "WORKERS_LOST":
            assert record.num_lone_losses >= self._config.max_worker_losses - 1
        if record.error.reason == "KV_CACHE_TOO_SMALL":
            longest = len(record.request.prompt_token_ids) + max(lengths)
            workers = [w for w in self.workers if w.model == record.request.model]
            assert longest > min(num_cache_tokens(record, worker) for worker in workers)

    def _most_cache_tokens(self, record: RequestRecord) -> int:
        """Of the groups there are in which a request can have all the tokens that it asks for."""
        model = record.request.model
        groups = [group for group in self._capacities() if group.model == model]
        longest = max(group.max_model_len for group in groups)
        groups = [group for group in groups if group.max_model_len == longest]
        return max(num_cache_tokens(record, group) for group in groups)


def num_cache_tokens(record: RequestRecord, capacity: WorkerGroupCapacity) -> int:
    """Tokens of the longest sequence of a request that a worker can hold."""
    beams = record.request.work.beam_search
    num_states = 0 if beams is None else beams.width - 1
    return capacity.num_cache_tokens_beside(num_source_tokens(record.request.context), num_states)


def _check_timings(record: RequestRecord, timings: RequestTimings, now: float) -> None:
    parts = (
        timings.queue_us
        + timings.plan_us
        + timings.wire_us
        + timings.forward_us
        + timings.sample_us
        + timings.preempted_us
        + timings.recovery_us
        + timings.transfer_us
    )
    assert parts == timings.total_us
    assert timings.total_us <= round((now - record.submitted) * 1e6) + 1

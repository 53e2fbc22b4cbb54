"""The registry of live requests, by id and by handle."""

from collections import Counter
from collections.abc import Callable, Container

from scheduler_service.core.placement import WorkerLosses
from scheduler_service.core.progress import Growth
from scheduler_service.core.request import EngineOutputs, Request
from scheduler_service.core.request_timing import RequestClock, RequestPhase
from scheduler_service.core.scheduling.strategies import make_strategy
from scheduler_service.core.sequence import Frontend, Sequence, SequenceGroup, SequenceStatus
from scheduler_service.core.tenants import Tenants

_MAX_SEQ_ID = 2**31 - 1


class RequestRegistry:
    """Live requests by id and by their frontends' handles; creates their sequence groups.

    A sequence id is not used again before all others have been used.
    """

    def __init__(
        self, rank: Callable[[Request, tuple[int, int]], tuple[int, ...]], tenants: Tenants
    ) -> None:
        self._rank = rank
        self._tenants = tenants
        self._seq_groups: dict[tuple[str, str], SequenceGroup] = {}
        """Live groups by tenant and request id: tenants choose ids independently."""
        self._frontends: dict[str, Frontend] = {}
        self._live_seq_ids: set[int] = set()
        self._last_seq_id = 0
        self._num_arrivals = 0
        self._num_added: Counter[tuple[str, bytes]] = Counter()
        """Requests so far, by model and adapter, for adapters that the model has."""

    def __len__(self) -> int:
        return len(self._seq_groups)

    def seq_groups(self) -> list[SequenceGroup]:
        """All live groups."""
        return list(self._seq_groups.values())

    def num_with(self, model: str, adapter: bytes) -> int:
        """Live requests for a model with an adapter."""
        return sum(
            seq_group.adapter == adapter and seq_group.request.model == model
            for seq_group in self._seq_groups.values()
        )

    def num_ever_with(self, model: str, adapter: bytes) -> int:
        """Requests for a model with an adapter since the model has it, live ones included."""
        return self._num_added[model, adapter]

    def forget_adapters(self, model: str, present: Container[bytes]) -> None:
        """Forget how many requests have used the adapters of a model that are not `present`."""
        for name, adapter in [*self._num_added]:
            if name == model and adapter not in present:
                del self._num_added[name, adapter]

    def by_adapter(self) -> Counter[tuple[str, bytes, bool]]:
        """Live requests with an adapter by model, adapter, and whether a sequence runs."""
        return Counter(
            (seq_group.request.model, seq_group.adapter, bool(seq_group.num_running))
            for seq_group in self._seq_groups.values()
            if seq_group.adapter is not None
        )

    def seq_groups_of(self, frontend_id: str) -> list[SequenceGroup]:
        """A frontend's live groups."""
        frontend = self._frontends.get(frontend_id)
        sequences = frontend.sequences.values() if frontend is not None else ()
        return list(dict.fromkeys(seq.seq_group for seq in sequences))

    def find(self, tenant: str, request_id: str) -> SequenceGroup | None:
        """The live group of a tenant's request id."""
        return self._seq_groups.get((tenant, request_id))

    def find_sequence(self, frontend_id: str, handle: int) -> Sequence | None:
        """The sequence with a frontend's handle, even if it has ended, if its request is live."""
        frontend = self._frontends.get(frontend_id)
        return frontend.sequences.get(handle) if frontend is not None else None

    def has_handles_of(self, request: Request) -> bool:
        """Whether a live request of its frontend uses one of its handles."""
        handles = range(request.handle, request.handle + request.work.num_choices)
        return any(
            self.find_sequence(request.frontend_id, handle) is not None for handle in handles
        )

    def make_seq_group(self, request: Request, now_us: int) -> SequenceGroup:
        """A group for a request, not live yet, with the tokens that it resumes with."""
        self._num_arrivals += 1
        frontend = self._frontends.get(request.frontend_id) or Frontend(request.frontend_id)
        phase = RequestPhase.RECOVERY if request.is_continued else RequestPhase.QUEUE
        seq_group = SequenceGroup(
            request=request,
            strategy=make_strategy(request),
            tenant=self._tenants.find(request.tenant),
            frontend=frontend,
            rank=self._rank(request, (now_us - request.waited_us, self._num_arrivals)),
            clock=RequestClock.start(now_us, phase),
            losses=WorkerLosses(request.num_worker_losses, request.num_lone_worker_losses),
        )
        indices = range(request.work.num_sequences)
        seq_group.set_sequences([self._make_sequence(seq_group, index) for index in indices])
        return seq_group

    def add(self, seq_group: SequenceGroup) -> None:
        """Register a group: it is live."""
        frontend = seq_group.frontend
        self._seq_groups[_key(seq_group)] = seq_group
        self._frontends[frontend.frontend_id] = frontend
        self._tenants.add_request(seq_group.tenant, seq_group.clock.submitted_us)
        if seq_group.adapter is not None:
            self._num_added[seq_group.request.model, seq_group.adapter] += 1
        for seq in seq_group.choices():
            frontend.sequences[seq.handle] = seq
        for seq in seq_group.sequences:
            seq.register(self._next_seq_id())
            self._live_seq_ids.add(seq.seq_id)

    def remove(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Remove an ended group."""
        del self._seq_groups[_key(seq_group)]
        self._tenants.remove_request(seq_group.tenant, seq_group.num_prompt_tokens, now_us)
        for seq in seq_group.choices():
            del seq_group.frontend.sequences[seq.handle]
        for seq in seq_group.sequences:
            self._live_seq_ids.remove(seq.seq_id)
        seq_group.set_sequences([])

    def remove_frontend(self, frontend_id: str) -> None:
        """Remove a frontend and its outputs; its groups must have been removed before."""
        frontend = self._frontends.pop(frontend_id, None)
        assert frontend is None or not frontend.sequences

    def pop_outboxes(self) -> dict[str, EngineOutputs]:
        """Take the outputs since the last call, by frontend, of frontends that have any."""
        return {
            frontend.frontend_id: frontend.pop_outbox()
            for frontend in self._frontends.values()
            if frontend.outbox
        }

    def _make_sequence(self, seq_group: SequenceGroup, choice_index: int) -> Sequence:
        request = seq_group.request
        generated = request.work.generated.get(choice_index)
        output = list(generated.token_ids) if generated is not None else []
        is_finished = generated is not None and generated.finished
        return Sequence(
            seq_group=seq_group,
            choice_index=choice_index,
            handle=request.handle + choice_index,
            stop_token_ids=request.work.stop_token_ids,
            order=(seq_group.rank, choice_index),
            growth=Growth(len(request.prompt_token_ids) + len(output)),
            output_token_ids=output,
            status=SequenceStatus.FINISHED_STOPPED if is_finished else SequenceStatus.WAITING,
        )

    def _next_seq_id(self) -> int:
        seq_id = self._last_seq_id % _MAX_SEQ_ID + 1
        while seq_id in self._live_seq_ids:
            seq_id = seq_id % _MAX_SEQ_ID + 1
        self._last_seq_id = seq_id
        return seq_id


def _key(seq_group: SequenceGroup) -> tuple[str, str]:
    return seq_group.request.tenant, seq_group.request.request_id

"""What sequences need to enter a batch."""

from dataclasses import replace
from typing import Any

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.manager import KVCacheManager
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.scheduling.resources import (
    Entrants,
    Memory,
    Places,
    acquire_all,
    fit_all,
)
from scheduler_service.core.sequence import Sequence
from scheduler_service.core.tenants import Tenants
from tests.support.core_driver import make_capacity
from tests.support.tenants import make_group

CONFIG = SchedulerConfig(max_num_seqs=3)


class Slots:
    """Two slots of something, one for each sequence."""

    def __init__(self) -> None:
        self.num_free = 2
        self.asked = 0

    def fits(self, entrants: Entrants) -> AllocStatus:
        self.asked += 1
        is_enough = len(entrants.sequences) <= self.num_free
        return AllocStatus.OK if is_enough else AllocStatus.LATER

    def acquire(self, entrants: Entrants, batch: Batch) -> None:
        del batch
        self.num_free -= len(entrants.sequences)

    def release(self, seq: Sequence) -> None:
        del seq
        self.num_free += 1


def entrants(cache: KVCacheManager, *, num_tokens: int = 5, seq_id: int = 1) -> Entrants:
    tenants = Tenants(CONFIG.default_tenant, {})
    (seq,) = make_group(tenants, "", num_prompt_tokens=num_tokens).sequences
    seq.register(seq_id)
    return Entrants([seq], (seq, cache.prefixes.match(seq, is_fetched=None)))


def make_cache(**changes: Any) -> KVCacheManager:
    return KVCacheManager(replace(CONFIG, watermark=0.0), make_capacity(**changes))


def test_sequences_enter_only_if_every_resource_has_enough_for_them() -> None:
    cache, slots = make_cache(), Slots()
    resources = Places(3), Memory(cache), slots
    for seq_id in (1, 2):
        entering = entrants(cache, seq_id=seq_id)
        assert fit_all(resources, entering) is AllocStatus.OK
        acquire_all(resources, entering, Batch(CONFIG, 1, 0))
    assert fit_all(resources, entrants(cache, seq_id=3)) is AllocStatus.LATER
    for resource in resources:
        resource.release(entering.sequences[0])
    assert fit_all(resources, entrants(cache, seq_id=3)) is AllocStatus.OK
    assert resources[0].num_used == 1
    assert not cache.tables.holds(entering.sequences[0])


def test_no_resource_is_asked_after_the_first_that_has_not_enough() -> None:
    cache, slots = make_cache(), Slots()
    assert fit_all((Places(0), Memory(cache), slots), entrants(cache)) is AllocStatus.LATER
    too_long = entrants(cache, num_tokens=65)
    assert fit_all((Places(1), Memory(cache), slots), too_long) is AllocStatus.NEVER
    assert slots.asked == 0

"""Models with windows or chunks, whose blocks the scheduler releases while sequences run."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.eagle_heads import head_for
from tests.support.in_process import AheadWorker, InProcessEngine, InProcessWorker
from tests.support.paged_driver import NAN
from tests.support.speculation import NUM_DRAFTS, SpeculatingEngine
from tests.support.transformers_oracle import oracle
from worker_service.config import CacheConfig
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.loader import load_draft_model, load_eagle_head, load_model
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.models.interface import Model
from worker_service.runner.drafting.draft_model import DraftModel
from worker_service.runner.drafting.drafter import Drafter
from worker_service.runner.drafting.head_drafter import HeadDrafter
from worker_service.runner.drafting.suffix_drafter import SuffixDrafter

# Windows alone, two lifetimes, two shapes of heads, sinks, and chunks.
FAMILIES = ("mistral", "qwen2_sliding", "gemma4", "gemma4_shared", "gpt_oss", "llama4")
NUM_TOKENS = 60
LENGTHS = (3, 17, 30, 41)

pytestmark = pytest.mark.usefixtures("one_thread")


class ReleasingEngine(InProcessEngine):
    """An engine of a tiny model whose windows are cache groups of their own. Blocks are full of NaN
    until something is written to them."""

    worker_type: type[InProcessWorker] = InProcessWorker

    def __init__(self, family: str, **options: Any) -> None:
        super().__init__(checkpoint(family), releases_windows=True, **options)

    def make_worker(self, num_gpu_blocks: int, num_cpu_blocks: int) -> InProcessWorker:
        worker = self.worker_type(
            self.loaded.model,
            num_gpu_blocks=num_gpu_blocks,
            block_size=self.block_size,
            num_cpu_blocks=num_cpu_blocks,
            device=self.device,
        )
        worker._cache.device_cache.fill_(NAN)
        return worker


class AheadEngine(ReleasingEngine):
    """The same, launching steps ahead as on a GPU."""

    worker_type = AheadWorker


class DraftingEngine(SpeculatingEngine):
    """The same with drafts: of the model itself, of another one, of a random head, or from
    earlier outputs."""

    def __init__(self, family: str, kind: str, **options: Any) -> None:
        self._kind = kind
        super().__init__(checkpoint(family), releases_windows=True, **options)

    def load_draft(self) -> Model | DraftHead | None:
        if self._kind == "suffix":
            return None
        if self._kind == "draft":
            return load_model(self.loaded.config).model
        if self._kind == "other draft":
            return load_draft_model(str(checkpoint("llama")), self.loaded, CacheConfig())
        name = str(head_for(self.loaded.model.hidden_size, VOCAB_SIZE))  # type: ignore[attr-defined]
        head = load_eagle_head(name, self.loaded, CacheConfig())
        assert head is not None
        return head

    def make_drafter(self, cache: CacheEngine) -> Drafter:
        cache.device_cache.fill_(NAN)
        if isinstance(self.draft, DraftHead):
            return HeadDrafter(self.draft, cache.draft_caches)
        if self.draft is not None:
            return DraftModel(self.draft, cache.draft_caches)
        return SuffixDrafter()


def _prompts() -> list[list[int]]:
    draw = np.random.default_rng(4)
    return [draw.integers(5, VOCAB_SIZE, size=length).tolist() for length in LENGTHS]


@cache
def _expected(family: str) -> list[list[int]]:
    """Those of a model that keeps all tokens, which are those of transformers."""
    engine = InProcessEngine(checkpoint(family))
    outputs = [output.token_ids for output in engine.generate(_prompts(), NUM_TOKENS)]
    assert {len(output) for output in outputs} == {NUM_TOKENS}
    assert outputs == [*map(oracle(checkpoint(family)).choices, _prompts(), outputs)]
    return outputs


@pytest.mark.parametrize(
    ("family", "block_size", "engine_type"),
    [
        *((family, 4, ReleasingEngine) for family in FAMILIES),
        *(
            ("qwen2_sliding", size, kind)
            for size, kind in ((16, ReleasingEngine), (4, AheadEngine))
        ),
        ("gpt_oss", 16, AheadEngine),
        ("llama4", 16, ReleasingEngine),
        *(("llama4", size, AheadEngine) for size in (4, 16)),
    ],
)
def test_tokens_are_those_of_transformers_past_several_windows(
    family: str, block_size: int, engine_type: type[ReleasingEngine]
) -> None:
    engine = engine_type(family, block_size=block_size)
    for _ in range(2):  # the second time with hits
        outputs = engine.generate(_prompts(), NUM_TOKENS)
        assert [output.token_ids for output in outputs] == _expected(family)
    assert max(output.cached_tokens for output in outputs) >= 32


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
@pytest.mark.parametrize("family", ["qwen2_sliding", "gpt_oss", "llama4"])
def test_preempted_sequences_keep_their_tokens(family: str, mode: PreemptionMode) -> None:
    config = SchedulerConfig(preemption_mode=mode, max_num_batched_tokens=24, watermark=0.0)
    engine = ReleasingEngine(family, num_gpu_blocks=40, num_cpu_blocks=120, config=config)
    outputs = engine.generate(_prompts(), NUM_TOKENS)
    assert [output.token_ids for output in outputs] == _expected(family)
    assert engine.core.snapshot().num_preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_of_a_prompt_are_those_of_a_model_that_keeps_all_tokens(family: str) -> None:
    sampling = {"temperature": 1.0, "seed": 7}
    engines = [
        ReleasingEngine(family),
        ReleasingEngine(family, num_gpu_blocks=60, num_cpu_blocks=60),
        InProcessEngine(checkpoint(family)),
    ]
    outputs = [
        [output.token_ids for output in engine.generate(_prompts()[2:], 40, 3, **sampling)]
        for engine in engines
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(set(map(tuple, outputs[0]))) == len(outputs[0])


DRAFTING = [
    ("mistral", "draft"),
    ("gpt_oss", "draft"),
    ("mistral", "eagle"),
    ("qwen2_sliding", "eagle"),
    ("llama4", "other draft"),
    ("llama4", "suffix"),
]


@pytest.mark.parametrize(("family", "kind"), DRAFTING)
def test_windows_are_released_beside_drafts_and_change_no_token(family: str, kind: str) -> None:
    """In a pool that is too small for a sequence which keeps all blocks."""
    num_tokens, chunk = LENGTHS[-1] + NUM_TOKENS, 8
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=chunk, max_speculative_seqs=4, watermark=0.0
    )
    engine = DraftingEngine(family, kind, config=config)
    spec = engine.loaded.model.kv_cache_spec
    kept = sum(-(-num_tokens // group.block_tokens) for group in spec.groups(4))
    num_blocks = spec.num_blocks(num_tokens, chunk + NUM_DRAFTS, 4) + 1
    assert num_blocks < kept - 5
    engine.reset(num_gpu_blocks=num_blocks, config=config)
    for _ in range(2):  # the second time with hits
        outputs = engine.generate(_prompts(), NUM_TOKENS)
        assert [output.token_ids for output in outputs] == _expected(family)
    assert engine.lengths.num_drafts > 50
    if kind == "draft":
        assert engine.lengths.num_accepted > 0.9 * engine.lengths.num_drafts

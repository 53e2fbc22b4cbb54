"""Whatever memory, chunks, pipelining, neighbours and losses do to a request, its tokens are those
of an undisturbed run, and its log probabilities bit for bit.

Each configuration is drawn by its number, the test's id. One by itself:

    pytest "tests/end_to_end/test_random_configurations.py::test_…_undisturbed_run[17]"
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.support.checkpoints import NATIVE_FAMILIES, checkpoint
from tests.support.deployment import Deployment, Received
from tests.support.eagle_heads import head_for
from tests.support.in_process import (
    AheadWorker,
    InProcessWorker,
    KnowingDrafter,
    SpeculatingWorker,
)
from tests.support.mtp_heads import mtp_checkpoint
from tests.support.quantized_checkpoints import FORMATS
from tests.support.quantized_files import make_quantized, make_w8a8
from tests.support.random_configurations import (
    MODELS,
    Configuration,
    draw_configuration,
    with_speculation,
)
from tests.support.rank_threads import ParallelWorker, RankThreads
from tests.support.runners import recorded
from worker_service.config import QUANTIZATIONS, CacheConfig, ModelConfig, RunnerConfig
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.loader import LoadedModel, load_eagle_head, load_model, load_mtp_head
from worker_service.loader.loaded_model import release_windows
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.models.decoder.model import DecoderModel
from worker_service.models.interface import Model
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.models.native import NativeModel
from worker_service.runner.drafting.draft_model import DraftModel
from worker_service.runner.drafting.head_drafter import HeadDrafter
from worker_service.runner.drafting.suffix_drafter import SuffixDrafter

EMBEDDED = Path(__file__).parents[2] / "worker_service/embedded_model"

NUM_QUICK, NUM_LONG = 18, 252
"""Each model once, and many times."""
QUICK = range(NUM_QUICK)
LONG = range(NUM_QUICK, NUM_LONG)
STATEFUL = ("lfm2", "qwen3_next", "qwen3_5", "mamba2", "falcon_h1")
"""Families of which some layers keep a state, or all do."""
OTHERS = {
    "longcat_flash": range(1, 18, 4),
    "hy_v4": range(2, 18, 4),
    "minimax_m3": (10,),
    "bailing_hybrid": (4,),
    "axk2": (12,),
    "dots3_note": (0, 13),
    "glm5_next": (6,),
    "step3p5": (8,),
    "laguna": (9,),
    "muse_glimmer": (2,),
}
"""Families of which the layers are of other kinds than those of `MODELS`: two attentions, several
residual streams, sparse attention, latents with windows or beside states, gates of heads; and their
configurations."""

AHEAD, MORE_AHEAD = range(0, NUM_QUICK, 2), range(1, 24, 2)
SPECULATING = QUICK
WITH_HEAD = ("glm4_moe-mtp", "deepseek_v3-mtp", "qwen3_next-mtp")
"""Models with a draft head in their checkpoint, which drafts for them."""
DRAFTERS = ("knowing", "draft", "suffix", "knowing", "ngram", "eagle", "knowing")
"""In turn; their number and that of the models have no common divisor."""

RANK_DRAFTERS = ("eagle", "draft", "suffix", "ngram")
STAGED = [
    (number, RANK_DRAFTERS[index % len(RANK_DRAFTERS)])
    for index, number in enumerate(
        number for number in range(NUM_LONG) if MODELS[number % len(MODELS)] in NATIVE_FAMILIES
    )
]
"""Configurations of models that can be divided into stages, each with a drafter in turn."""
NUM_QUICK_STAGED = 4

KINDS = (
    "preemptions",
    "swapped-out blocks",
    "swapped-in blocks",
    "recomputed answers",
    "cached tokens",
    "chunks",
    "copied blocks",
    "forks",
    "plans sent ahead",
    "plans sent together",
    "wasted tokens",
    "beam searches",
    "constraints",
    "constraints taken up again",
    "cancels",
    "stop strings",
    "lost workers",
    "lost steps",
    "lost cores",
    "drained workers",
    "outgrown workers",
    "leased blocks",
)
"""What makes up a disturbed run. Each must have happened, or the test shows less than it says."""


def model(name: str) -> Model:
    return loaded(name).model


@cache
def loaded(name: str) -> LoadedModel:
    return release_windows(load(name), CacheConfig())


@cache
def with_drafts(name: str, kind: str) -> tuple[Model, Model | DraftHead]:
    """A model, and itself as its draft model, so that most drafts are right, or a random head, of
    which most are wrong. Models with chunks or states are draft models of none."""
    target = load(name)
    model = target.model
    drafting = "llama" if name == "llama4" or model.kv_cache_spec.has_states else name
    draft: Model | DraftHead | None = load(drafting).model if kind == "draft" else None
    if kind == "eagle":
        assert isinstance(model, NativeModel)
        stored = "int8" if model.kv_cache_spec.dtype == torch.int8 else "auto"
        path = head_for(model.hidden_size, model.vocab_size)
        draft = load_eagle_head(str(path), target, CacheConfig(kv_cache_dtype=stored))
    if kind == "mtp":
        draft = load_mtp_head(target)
    assert draft is not None
    model.kv_cache_spec = model.kv_cache_spec.with_drafts(draft.kv_cache_spec)
    return release_windows(target, CacheConfig()).model, draft


def load(name: str) -> LoadedModel:
    name, _, rounded = name.partition("-")
    path = EMBEDDED if name == "embedded" else _folder(name, has_head=rounded == "mtp")
    quantization = rounded if rounded in QUANTIZATIONS else None
    cache = CacheConfig(kv_cache_dtype="int8" if rounded == "kv" else "auto")
    with TemporaryDirectory() as folder:
        if rounded == "w8a8":
            inputs = {"dynamic": True, "strategy": "token"}
            path, _ = make_w8a8(Path(folder), inputs, family=name)
        if rounded == "nf4":
            nested = FORMATS["nf4 with scales that are codes"]
            path, _ = make_quantized(Path(folder), *nested, family=name)
        config = ModelConfig(
            model=str(path), device="cpu", dtype="float32", quantization=quantization
        )
        return load_model(config, cache)


def _folder(family: str, *, has_head: bool) -> Path:
    return mtp_checkpoint(family).path if has_head else checkpoint(family)


@cache
def configuration(
    number: int, speculates: bool = False, family: str | None = None
) -> Configuration:
    """family: of the model, in place of the one that is drawn."""
    lengths = {name: model(name).max_model_len for name in MODELS}
    drawn = draw_configuration(number, lengths)
    if family is not None:
        drawn = replace(drawn, model=family)
    return with_speculation(drawn) if speculates else drawn


@cache
def undisturbed(number: int, speculates: bool = False, family: str | None = None) -> list[Received]:
    """What each job gets when it is alone; never with drafts."""
    drawn = configuration(number, speculates, family)
    runs: list[Received] = []
    for job in drawn.jobs:
        history: list[int] = []
        if job.follows is not None:
            before = runs[job.follows]
            history = [*before.request.prompt_token_ids, *before.choices[0].token_ids]
        alone = drawn.undisturbed(job)
        runs += Deployment(alone, model(drawn.model), [[*history, *job.tokens]]).run()
    return runs


def compare(got: Received, wanted: Received) -> None:
    if not got.is_cancelled:
        assert str(got.error) == str(wanted.error)
    for ours, theirs in zip(got.choices, wanted.choices, strict=True):
        num_tokens = len(ours.token_ids)
        if wanted.error is not None:  # one choice's error ends the others wherever they are
            num_tokens = min(num_tokens, len(theirs.token_ids))
        elif not got.is_cancelled and ours.finish != ("stop string", None):
            assert ours.finish == theirs.finish
            assert num_tokens == len(theirs.token_ids)
        assert ours.token_ids[:num_tokens] == theirs.token_ids[:num_tokens]
        assert ours.logprobs[:num_tokens] == theirs.logprobs[:num_tokens]
    if not got.is_cancelled:
        assert got.prompt_logprobs == wanted.prompt_logprobs


def run_and_compare(
    drawn: Configuration,
    deployment: Deployment,
    expected: list[Received],
    compare: Callable[[Received, Received], None] = compare,
) -> Counter[str]:
    """Run a deployment of a configuration and compare; how much it was disturbed."""
    for index, (got, wanted) in enumerate(zip(deployment.run(), expected, strict=True)):
        try:
            compare(got, wanted)
        except AssertionError as error:
            job = f"job {index}: {drawn.jobs[index]}"
            raise AssertionError(f"{drawn.describe()}\n{job}\n{error}") from None
    return deployment.disturbance


def compare_runs(
    number: int,
    worker_type: Callable[..., InProcessWorker] = InProcessWorker,
    compare: Callable[[Received, Received], None] = compare,
    *,
    speculates: bool = False,
    family: str | None = None,
) -> Counter[str]:
    """Run a configuration and compare; how much it was disturbed."""
    drawn = configuration(number, speculates, family)
    expected = undisturbed(number, speculates, family)
    prompts = [list(received.request.prompt_token_ids) for received in expected]
    deployment = Deployment(drawn, model(drawn.model), prompts, worker_type)
    return run_and_compare(drawn, deployment, expected, compare)


@cache
def disturbance(number: int) -> Counter[str]:
    """How much a configuration was disturbed, all tokens being right."""
    return compare_runs(number)


@pytest.mark.parametrize("number", QUICK)
def test_tokens_are_those_of_an_undisturbed_run(number: int) -> None:
    assert disturbance(number)["steps"] > 0


def test_the_runs_were_disturbed_in_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    total = sum((disturbance(number) for number in QUICK), Counter[str]())
    with capsys.disabled():
        print(f"\n{NUM_QUICK} configurations: {dict(total)}")
    assert [kind for kind in KINDS if total[kind] == 0] == []


def numbers_of(family: str) -> range:
    """Configurations of a family with states: every third, others than the next family's."""
    return range(STATEFUL.index(family) % 3, NUM_QUICK, 3)


@pytest.mark.parametrize("family", STATEFUL)
def test_states_are_those_of_an_undisturbed_run(family: str) -> None:
    numbers = numbers_of(family)
    total = sum((compare_runs(number, family=family) for number in numbers), Counter[str]())
    kinds = {"cached tokens", "forks", "lost workers"}
    assert [kind for kind in sorted(kinds) if total[kind] == 0] == []


@pytest.mark.parametrize(
    ("family", "number"), [(family, number) for family in OTHERS for number in OTHERS[family]]
)
def test_layers_of_other_kinds_compute_as_in_an_undisturbed_run(family: str, number: int) -> None:
    assert compare_runs(number, family=family)["steps"] > 0


def compare_tokens(got: Received, wanted: Received) -> None:
    """The device's sampler rounds log probabilities in another way."""
    for ours, theirs in zip(got.choices, wanted.choices, strict=True):
        assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
        assert len(ours.logprobs) == len(theirs.logprobs[: len(ours.token_ids)])
        if not got.is_cancelled and ours.finish != ("stop string", None):
            assert (ours.finish, len(ours.token_ids)) == (theirs.finish, len(theirs.token_ids))


@pytest.mark.parametrize("number", AHEAD)
def test_a_worker_that_launches_ahead_gives_the_same_tokens(number: int) -> None:
    disturbance = compare_runs(number, AheadWorker, compare_tokens)
    assert disturbance["steps"] > 0


@cache
def speculation(number: int, *, ahead: bool = False, family: str | None = None) -> Counter[str]:
    """Run a configuration with drafts of which most are right; how much it was disturbed. ahead:
    whether workers launch steps ahead; family: as for `configuration`."""
    drafter = "mtp" if family in WITH_HEAD else DRAFTERS[number % len(DRAFTERS)]
    drawn, expected = configuration(number, True, family), undisturbed(number, True, family)
    worker_type = drafting_worker(drafter, drawn, expected)
    if ahead:
        worker_type = partial(worker_type, kind=recorded)
        return compare_runs(number, worker_type, compare_tokens, speculates=True)
    return compare_runs(number, worker_type, speculates=True, family=family)


def drafting_worker(
    drafter: str, drawn: Configuration, expected: list[Received]
) -> Callable[..., InProcessWorker]:
    """Workers with one of `DRAFTERS`, or `mtp`; `expected`: what they will output, for those that
    know it."""
    outputs = [
        [*received.request.prompt_token_ids, *choice.token_ids]
        for received in expected
        for choice in received.choices
    ]
    makers: dict[str, Callable[..., InProcessWorker]] = {
        "knowing": partial(SpeculatingWorker, make_drafter=lambda _: KnowingDrafter(outputs)),
        "ngram": worker_with_ngrams,
        "suffix": worker_with_history,
        "draft": partial(worker_with_draft_model, drawn.model),
        **{kind: partial(worker_with_head, drawn.model, kind) for kind in ("eagle", "mtp")},
    }
    return partial(makers[drafter], num_drafts=Random(drawn.number).choice((1, 2, 4, 7)))


def worker_with_history(model: Model, **options: Any) -> InProcessWorker:
    """A worker whose drafts come from what it has output recently, which it soon forgets."""
    return SpeculatingWorker(model, make_drafter=lambda _: SuffixDrafter(200), **options)


def worker_with_ngrams(model: Model, **options: Any) -> InProcessWorker:
    return SpeculatingWorker(model, make_drafter=lambda _: SuffixDrafter(0), **options)


def worker_with_draft_model(name: str, model: Model, **options: Any) -> InProcessWorker:
    target, draft = with_drafts(name, "draft")
    assert not isinstance(draft, DraftHead)
    make = partial(_make_draft_model, draft)
    return SpeculatingWorker(
        target, make_drafter=make, **_enlarged(options, model, target.kv_cache_spec)
    )


def _make_draft_model(draft: Model, cache: CacheEngine) -> DraftModel:
    return DraftModel(draft, cache.draft_caches)


def _make_head_drafter(head: DraftHead, cache: CacheEngine) -> HeadDrafter:
    return HeadDrafter(head, cache.draft_caches)


def _enlarged(options: dict[str, Any], model: Model, drafting: KVCacheSpec) -> dict[str, Any]:
    """The options with as many more blocks as sequences need that have drafts, too. drafting: the
    model's specification with them."""
    size, length = options["block_size"], model.max_model_len
    counts = [spec.num_blocks(length, length, size) for spec in (model.kv_cache_spec, drafting)]
    sizes = ("num_gpu_blocks", "num_cpu_blocks")
    return options | {name: -(-options.get(name, 0) * counts[1] // counts[0]) for name in sizes}


def worker_with_head(name: str, drafter: str, model: Model, **options: Any) -> InProcessWorker:
    """A model for which there is no head has n-grams: one that runs through transformers, or has
    several residual streams."""
    if not isinstance(model, DecoderModel) or model.streams is not None:
        return worker_with_ngrams(model, **options)
    target, head = with_drafts(name, drafter)
    assert isinstance(head, DraftHead)
    make = partial(_make_head_drafter, head)
    return SpeculatingWorker(
        target, make_drafter=make, **_enlarged(options, model, target.kv_cache_spec)
    )


@pytest.mark.parametrize("number", SPECULATING)
def test_tokens_are_those_of_a_run_without_drafts(number: int) -> None:
    assert speculation(number)["steps"] > 0


@pytest.mark.parametrize("number", AHEAD)
def test_drafts_of_a_worker_that_launches_ahead_change_no_token(number: int) -> None:
    assert speculation(number, ahead=True)["steps"] > 0


@pytest.mark.parametrize("family", STATEFUL)
def test_drafts_leave_states_as_they_are_in_a_run_without(family: str) -> None:
    assert drafts_on_states(family)["kept drafts"] > 0


@cache
def drafts_on_states(family: str) -> Counter[str]:
    numbers = numbers_of(family)
    return sum((speculation(number, family=family) for number in numbers), Counter[str]())


def test_drafts_on_states_were_kept_and_refused_among_all_else() -> None:
    total = sum((drafts_on_states(family) for family in STATEFUL), Counter[str]())
    assert total["rows with drafts"] > total["kept drafts"] / 2 > 50
    assert total["kept log probabilities"] > 50
    assert [kind for kind in KINDS if total[kind] == 0] == []


@pytest.mark.parametrize("name", WITH_HEAD)
def test_drafts_of_a_head_in_the_checkpoint_change_no_token(name: str) -> None:
    numbers = range(WITH_HEAD.index(name), NUM_QUICK, 6)
    total = sum((speculation(number, family=name) for number in numbers), Counter[str]())
    assert total["rows with drafts"] > 20


def test_drafts_were_kept_and_refused_among_all_else() -> None:
    total = sum((speculation(number) for number in SPECULATING), Counter[str]())
    assert total["rows with drafts"] > total["kept drafts"] / 2 > 50
    assert total["kept log probabilities"] > 50
    assert [kind for kind in KINDS if total[kind] == 0] == []


def speculation_on_two_stages(number: int, drafter: str) -> Counter[str]:
    """Run a configuration on groups of two ranks, which are lost as one; compare as before."""
    target = model(configuration(number).model)
    path = checkpoint(configuration(number).model)
    named = {"draft": path}
    if drafter == "eagle":
        assert isinstance(target, NativeModel)
        named["eagle"] = head_for(target.hidden_size, target.vocab_size)
    runner = RunnerConfig(
        speculative=drafter,
        speculative_model=str(named[drafter]) if drafter in named else None,
        num_speculative_tokens=Random(number).choice((1, 2, 4, 7)),
    )
    groups: list[RankThreads] = []

    def join(model: Model, *, block_size: int, **options: int) -> ParallelWorker:
        drafting = replace(model.kv_cache_spec, has_shared_drafts=drafter in named)
        sizes = _enlarged({**options, "block_size": block_size}, model, drafting)
        group = RankThreads(path, pipeline_parallel_size=2, block_size=block_size, runner=runner)
        groups.append(group)
        return ParallelWorker(group, sizes["num_gpu_blocks"], sizes["num_cpu_blocks"])

    try:
        return compare_runs(number, join, speculates=True)
    finally:
        for group in groups:
            group.close()


@pytest.mark.parametrize(("number", "drafter"), STAGED[:NUM_QUICK_STAGED])
def test_tokens_of_two_stages_with_drafts_are_those_of_one_without(
    number: int, drafter: str
) -> None:
    assert speculation_on_two_stages(number, drafter)["rows with drafts"] > 0


@pytest.mark.long
@pytest.mark.parametrize(("number", "drafter"), STAGED[NUM_QUICK_STAGED:])
def test_tokens_of_two_stages_in_many_more_are_those_of_one(number: int, drafter: str) -> None:
    assert speculation_on_two_stages(number, drafter)["steps"] > 0


@pytest.mark.long
@pytest.mark.parametrize("family", STATEFUL)
def test_states_of_more_are_those_of_an_undisturbed_run_with_and_without_drafts(
    family: str,
) -> None:
    for number in set(range(24)).difference(numbers_of(family)):
        assert compare_runs(number, family=family)["steps"] > 0
        assert speculation(number, family=family)["steps"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "number"),
    [(family, number) for family in OTHERS for number in LONG[: 12 * len(OTHERS[family])]],
)
def test_more_layers_of_other_kinds_do_so_with_and_without_drafts(family: str, number: int) -> None:
    assert compare_runs(number, family=family)["steps"] > 0
    assert speculation(number, family=family)["steps"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_HEAD)
def test_drafts_of_a_head_change_no_token_of_more(name: str) -> None:
    total = sum((speculation(number, family=name) for number in range(48)), Counter[str]())
    assert total["rows with drafts"] > total["kept drafts"] > 0


@pytest.mark.long
@pytest.mark.parametrize("number", MORE_AHEAD)
def test_more_workers_that_launch_ahead_give_the_same_tokens(number: int) -> None:
    assert compare_runs(number, AheadWorker, compare_tokens)["steps"] > 0
    assert speculation(number, ahead=True)["steps"] > 0


@pytest.mark.long
@pytest.mark.parametrize("number", LONG)
def test_tokens_of_many_more_are_those_of_a_run_without_drafts(number: int) -> None:
    assert speculation(number)["steps"] > 0


@pytest.mark.long
@pytest.mark.parametrize("number", LONG)
def test_tokens_of_many_more_are_those_of_an_undisturbed_run(number: int) -> None:
    assert compare_runs(number)["steps"] > 0

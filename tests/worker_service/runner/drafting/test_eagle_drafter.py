"""Drafts of an EAGLE-3 head: those of a plain implementation, wherever its keys and values come
from; outputs stay; heads of other models are refused."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.models.draft_heads import write_head
from pagewire_kernels.batch import UNKNOWN_TOKEN, LayerCaches
from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, make_checkpoint
from tests.support.eagle_heads import make_head
from tests.support.in_process import InProcessEngine
from tests.support.loading import load
from tests.support.rank_threads import AheadExecutor, ParallelEngine
from tests.support.runners import RUNNERS, host
from tests.support.speculation import (
    NUM_DRAFTS,
    PROMPTS,
    SAMPLING,
    SpeculatingEngine,
    loaded_executor,
)
from worker_service.array_types import Int64Array
from worker_service.config import CacheConfig, RunnerConfig
from worker_service.errors import BadCheckpoint, InvalidOption, UnsupportedModel, WorkerError
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.loader import load_eagle_head
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.device.drafts import DeviceHeadDrafter, StepDrafts
from worker_service.runner.device.rows import DeviceRows
from worker_service.runner.device.sampler import DeviceSampler
from worker_service.runner.drafting.drafter import Draft, Drafter
from worker_service.runner.drafting.head_drafter import HeadDrafter
from worker_service.runner.state.sequence_table import SequenceTable

LAYERS = [1, 2, 4]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=5)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = {"eagle_aux_hidden_state_layer_ids": LAYERS}
    return make_head(tmp_path_factory.mktemp("head"), **layers)


class Reference:
    """A head in plain torch, which computes a sequence from its first token on for each draft."""

    def __init__(self, target: Path, head: Path) -> None:
        import transformers

        self._target = transformers.LlamaForCausalLM.from_pretrained(target).eval()
        self._weights = load_file(head / "model.safetensors")
        self._config = json.loads((head / "config.json").read_text())
        self._layers = self._config["eagle_aux_hidden_state_layer_ids"]
        of_target = self._target.get_output_embeddings().weight
        self._head = self._weights.get("lm_head.weight", of_target)
        self.tokens = torch.arange(len(self._head))
        if "d2t" in self._weights:
            self.tokens += self._weights["d2t"]

    @torch.no_grad()
    def logits(self, tokens: list[int], num_drafts: int) -> Tensor:
        """Of the draft vocabulary after `tokens`, whose last ones are drafts."""
        num_computed = len(tokens) - num_drafts - 1
        states = self._target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        fused = torch.cat([states[layer][0] for layer in self._layers], dim=1)
        hidden = fused[:num_computed] @ self._weights["fc.weight"].T
        embedding = self._target.get_input_embeddings().weight
        for _ in range(num_drafts + 1):
            following = embedding[torch.tensor(tokens[1 : len(hidden) + 1])]
            output = self._layer(following, hidden)
            hidden = torch.cat([hidden, output[-1:]])
        return self._norm(output[-1], "norm") @ self._head.T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        size = (x.shape[-1],)
        weight = self._weights[f"{name}.weight"]
        return nn.functional.rms_norm(x, size, weight, self._config["rms_norm_eps"])

    def _layer(self, following: Tensor, hidden: Tensor) -> Tensor:
        """The hidden states after the layer; hidden: [num_rows, size], of all rows."""
        normed = self._norm(hidden, "midlayer.hidden_norm")
        x = torch.cat([self._norm(following, "midlayer.input_layernorm"), normed], dim=1)
        residual = normed if self._config.get("norm_before_residual") else hidden
        query, key, value = (
            (x @ self._weights[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(
                1, (-1, self._config["head_dim"])
            )
            for name in "qkv"
        )
        group = self._config["num_attention_heads"] // self._config["num_key_value_heads"]
        key, value = (part.repeat_interleave(group, dim=1) for part in (_rotate(key), value))
        attended = nn.functional.scaled_dot_product_attention(
            *(part.transpose(0, 1) for part in (_rotate(query), key, value)), is_causal=True
        )
        attended = attended.transpose(0, 1).flatten(1)
        residual = residual + attended @ self._weights["midlayer.self_attn.o_proj.weight"].T
        x = self._norm(residual, "midlayer.post_attention_layernorm")
        gate, up = (x @ self._weights[f"midlayer.mlp.{name}_proj.weight"].T for name in _GATED)
        down = self._weights["midlayer.mlp.down_proj.weight"]
        return residual + (nn.functional.silu(gate) * up) @ down.T


_GATED = ("gate", "up")


def _rotate(heads: Tensor) -> Tensor:
    """RoPE of [num_rows, num_heads, head_dim], for rows from the first position on."""
    num_rows, _, head_dim = heads.shape
    powers = torch.arange(0, head_dim, 2) / head_dim
    angles = torch.arange(num_rows)[:, None] * 10000.0**-powers
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Recorded:
    """What a head has drafted."""

    def __init__(self, head: DraftHead, caches: Sequence[LayerCaches]) -> None:
        super().__init__(head, caches)  # type: ignore[call-arg]
        self.drafts: list[tuple[list[int], list[int]]] = []
        """Tokens of a sequence, and its drafts."""

    def assert_drafts_are_those_of(
        self, reference: Reference, every: int = 7, num_without: int = 0
    ) -> None:
        """Greedy drafts have the largest logits of the reference, but for rounding. num_without:
        the most steps that have none."""
        assert len(self.drafts) > 20
        assert sum(not drafts for _, drafts in self.drafts) <= num_without
        for tokens, drafts in self.drafts[::every]:
            for count, draft in enumerate(drafts):
                logits = reference.logits([*tokens, *drafts[:count]], count)
                [index] = np.flatnonzero(reference.tokens == draft)
                assert logits.max() - logits[index] < 1e-3, (tokens, drafts, count)


class RecordedOnHost(Recorded, HeadDrafter):
    """On a CPU."""

    def propose(self, row_ids: Int64Array, counts: list[int], table: SequenceTable) -> list[Draft]:
        found = super().propose(row_ids, counts, table)
        for row_id, drafts in zip(row_ids.tolist(), found, strict=True):
            tokens = table.token_ids[row_id, : table.num_tokens[row_id]].tolist()
            self.drafts.append((tokens, drafts.tokens.tolist()))
        return found


class RecordedOnDevice(Recorded, DeviceHeadDrafter):
    """On a device, whose memory the host may read here at any time."""

    def __init__(self, head: DraftHead, caches: Sequence[LayerCaches]) -> None:
        super().__init__(head, caches)
        self.unread: list[tuple[int, list[int], int, list[int]]] = []
        """Rows, tokens that were known, number of tokens, and drafts, of sequences whose tokens
        the host has yet to read."""

    def plan(self, rows: StepRows, table: SequenceTable) -> StepDrafts:
        self._read(table)
        planned, begin = super().plan(rows, table), StepDrafts.begin
        counts = [0] * len(rows.row_ids) if rows.drafts is None else rows.drafts.counts.tolist()
        num_tokens = table.num_tokens[rows.row_ids].tolist()
        columns = zip(rows.row_ids.tolist(), counts, num_tokens, strict=True)

        def recorded(sent: list[Tensor]) -> None:
            begin(planned, sent)
            for row_id, count, length in columns:
                if count:
                    is_known = table.token_ids[row_id, :length] != UNKNOWN_TOKEN
                    known = table.token_ids[row_id, :length][is_known].tolist()
                    end = length + int(self.tables.num_ahead[row_id])
                    drafts = self.tables.drafts[row_id, :count].tolist()
                    self.unread.append((row_id, known, end, drafts))

        planned.begin = recorded  # type: ignore[method-assign]
        return planned

    def _read(self, table: SequenceTable) -> None:
        unread, self.unread = self.unread, []
        for row_id, known, end, drafts in unread:
            tokens = table.token_ids[row_id, :end].tolist()
            if tokens[: len(known)] == known:  # else the sequence is forgotten
                if UNKNOWN_TOKEN in tokens or table.num_tokens[row_id] < end:
                    self.unread.append((row_id, known, end, drafts))
                else:
                    self.drafts.append((tokens, drafts))


class RecordedEagerly(RecordedOnDevice):
    """Replays no passes."""

    def attach(self, rows: DeviceRows, sampler: DeviceSampler, graphs: object = None) -> None:
        super().attach(rows, sampler)


class Engine(SpeculatingEngine):
    """Drafts with a head."""

    def __init__(self, model: Path, head: Path, *, has_graphs: bool = True, **options: Any) -> None:
        """has_graphs: whether passes on a device may be replayed."""
        self.head_name, self.has_graphs = str(head), has_graphs
        super().__init__(model, **options)

    def load_draft(self) -> DraftHead:
        self.head = load_eagle_head(self.head_name, self.loaded, CacheConfig())
        assert self.head is not None
        return self.head

    def make_drafter(self, cache: CacheEngine) -> Drafter:
        assert self.head is not None
        make = RecordedOnHost if self.kind is host else RecordedOnDevice
        if not self.has_graphs:
            make = RecordedEagerly
        self.drafter = made = make(self.head, cache.draft_caches)
        return made


@pytest.mark.parametrize("before", [False, True])
def test_drafts_are_those_of_a_plain_implementation(
    target: Path, head: Path, before: bool, tmp_path: Path
) -> None:
    """The layout of vLLM, too: the layer numbered, and a prefix."""
    if before:
        settings = json.loads((head / "config.json").read_text()) | {"norm_before_residual": True}
        head = write_head(tmp_path / "head", load_file(head / "model.safetensors"), settings)
    reference = Reference(target, head)
    if before:
        tensors = load_file(head / "model.safetensors")
        renamed = {
            name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}": tensor
            for name, tensor in tensors.items()
        }
        numbered = {name.replace("midlayer", "layers.0"): each for name, each in renamed.items()}
        save_file(numbered, head / "model.safetensors")
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 16}
    engine = Engine(target, head, config=SchedulerConfig(max_speculative_seqs=8, **limits))
    engine.generate(PROMPTS, 12)
    engine.drafter.assert_drafts_are_those_of(reference, every=3)


@pytest.mark.parametrize(
    "runner",
    [name if name != "eager" else pytest.param(name, marks=pytest.mark.long) for name in RUNNERS],
)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_outputs_are_those_without_drafts(
    target: Path, head: Path, sampling: dict[str, Any], runner: str
) -> None:
    engine = Engine(target, head, runner=runner)
    engine.assert_outputs_are_those_without_drafts(PROMPTS, 40, num_choices=2, **sampling)
    assert engine.lengths.num_drafts > 100


@pytest.mark.parametrize("sampling", SAMPLING)
def test_replayed_passes_leave_what_eager_ones_do(
    target: Path, head: Path, sampling: dict[str, Any]
) -> None:
    """Three rows are padded to four; drafts, hidden states, keys and values have the same bits."""

    def drafter_of(has_graphs: bool) -> RecordedOnDevice:
        engine = Engine(target, head, runner="recorded", has_graphs=has_graphs)
        engine.generate(PROMPTS[:3], 20, **sampling)
        drafter = engine.drafter
        assert isinstance(drafter, RecordedOnDevice)
        assert (drafter.graphs is not None) == has_graphs
        return drafter

    eager, replayed = map(drafter_of, (False, True))
    assert len(eager.drafts) > 20
    assert eager.drafts == replayed.drafts
    assert eager.hidden.equal(replayed.hidden)
    for caches in zip(eager.caches, replayed.caches, strict=True):
        assert all(map(torch.equal, *caches))


@pytest.mark.parametrize("runner", ["host", "recorded"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_drafts_stay_right_through_preemption_and_forks(
    target: Path, head: Path, mode: str, runner: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts end within a block, so that choices share no block that they continue differently.
    The step after a swap has no drafts."""
    prompts = [prompt[:-1] if len(prompt) % 4 == 0 else prompt for prompt in PROMPTS]
    engine = Engine(
        target,
        head,
        num_gpu_blocks=44,
        num_cpu_blocks=256,
        config=SchedulerConfig(max_speculative_seqs=2, preemption_mode=PreemptionMode(mode)),
        runner=runner,
    )
    engine.assert_outputs_are_those_without_drafts(prompts, 60, num_choices=2)
    moved = "num_swapped" if mode == "swap" else "num_recomputed"
    assert re.search(f"{moved}=[1-9]", caplog.text)
    num_without = 2 if mode == "swap" else 0
    engine.drafter.assert_drafts_are_those_of(Reference(target, head), 11, num_without)


def test_a_cached_prefix_has_the_head_s_keys(target: Path, head: Path) -> None:
    engine = Engine(target, head)
    prompt = PROMPTS[3]
    first = engine.generate([prompt], 20)
    engine.drafter.drafts.clear()
    second = engine.generate([[*prompt, *first[0].token_ids]], 30)
    assert second[0].cached_tokens > len(prompt)
    engine.drafter.assert_drafts_are_those_of(Reference(target, head))


def test_no_drafts_beyond_the_length_of_the_head(target: Path, tmp_path: Path) -> None:
    head = make_head(tmp_path, max_position_embeddings=30)
    engine = Engine(target, head)
    engine.assert_outputs_are_those_without_drafts(PROMPTS[:1], 60)
    lengths = [len(tokens) + len(drafts) for tokens, drafts in engine.drafter.drafts if drafts]
    assert 25 < max(lengths) <= 30


def change_config(**fields: Any) -> Callable[[Path], None]:
    def change(head: Path) -> None:
        config = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps(config | fields))

    return change


def change_tensors(**changed: Tensor | None) -> Callable[[Path], None]:
    """By name, with _ for dots; None leaves it out."""

    def change(head: Path) -> None:
        tensors = load_file(head / "model.safetensors")
        for name, tensor in changed.items():
            name = next(known for known in tensors if known.replace(".", "_") == name)
            if tensor is None:
                del tensors[name]
            else:
                tensors[name] = tensor
        save_file(tensors, head / "model.safetensors")

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (change_config(vocab_size=301), InvalidOption, "vocab_size: expected 300"),
        (change_config(num_hidden_layers=2), InvalidOption, "num_hidden_layers: expected 1"),
        (change_config(target_hidden_size=32), InvalidOption, "target_hidden_size: expected 64"),
        (
            change_config(eagle_aux_hidden_state_layer_ids=None),
            InvalidOption,
            r"target's 2 layers, got none, which means \[2, 1, -1\]",
        ),
        (
            change_config(architectures=["DeepSeekMTPModel"]),
            InvalidOption,
            "got DeepSeekMTPModel in .*: another kind of head",
        ),
        (
            change_config(architectures=["EagleLlamaForCausalLM"]),
            InvalidOption,
            "another kind of head",
        ),
        (
            change_config(architectures=["LlamaForCausalLM"], draft_vocab_size=None),
            InvalidOption,
            "expected a head of EAGLE-3 .* a whole model",
        ),
        (change_config(hidden_act="tanh"), UnsupportedModel, "activation"),
        (change_config(num_attention_heads=8), BadCheckpoint, "q_proj.weight is"),
        (change_tensors(fc_weight=None), BadCheckpoint, "missing tensors: fc.weight"),
        (change_tensors(lm_head_weight=None), BadCheckpoint, "lm_head.weight is missing"),
        (change_tensors(d2t=None), BadCheckpoint, "d2t is missing, but the head drafts only 120"),
        (change_tensors(d2t=torch.zeros(7)), BadCheckpoint, "d2t: expected 120 numbers"),
        (
            change_tensors(d2t=torch.full((120,), 200)),
            BadCheckpoint,
            "d2t: expected 120 distinct tokens below 300",
        ),
        (
            change_tensors(t2d=torch.ones(300, dtype=torch.bool)),
            BadCheckpoint,
            "t2d: expected true exactly for the tokens of d2t",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    change: Callable[[Path], None], error: type[WorkerError], message: str, tmp_path: Path
) -> None:
    head = make_head(tmp_path)
    change(head)
    target = load(checkpoint("llama"))
    with pytest.raises(error, match=f"^speculative_model: .*{message}"):
        load_eagle_head(str(head), target, CacheConfig())


def test_a_target_that_runs_through_transformers_is_refused(tmp_path: Path) -> None:
    target = load(checkpoint("phi"))
    with pytest.raises(UnsupportedModel, match="got PhiForCausalLM, which runs through"):
        load_eagle_head(str(make_head(tmp_path)), target, CacheConfig())


def test_settings_of_other_tools_mean_the_same(target: Path, head: Path, tmp_path: Path) -> None:
    """The same layers named by their outputs, or the configuration of `speculators`."""
    config = json.loads((head / "config.json").read_text())
    tensors = load_file(head / "model.safetensors")
    del config["eagle_aux_hidden_state_layer_ids"]
    inner = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYERS]}
    by_outputs = write_head(tmp_path / "outputs", tensors, config | {"eagle_config": inner})
    speculators = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": config.pop("draft_vocab_size"),
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "transformer_layer_config": config,
    }
    nested = write_head(tmp_path / "nested", tensors, speculators)
    drafts = []
    for folder in (head, by_outputs, nested):
        engine = Engine(target, folder)
        engine.generate(PROMPTS[:2], 20)
        drafts.append(engine.drafter.drafts)
    assert drafts[0] == drafts[1] == drafts[2]


def test_the_budget_and_the_swap_space_hold_the_head_s_keys_too(target: Path, head: Path) -> None:
    plain = loaded_executor(target).loaded.model.kv_cache_spec
    drafting = loaded_executor(target, speculative="eagle", speculative_model=str(head))
    block_bytes = plain.block_bytes(16) + 16 * 2 * 2 * 16 * 4
    counts = drafting.profile_blocks(max_num_seqs=2, max_num_batched_tokens=64)
    assert counts.num_gpu_blocks == counts.num_cpu_blocks == 2**20 // block_bytes
    drafting.make_runner(counts.num_gpu_blocks, counts.num_cpu_blocks, 1)


def record_the_rank_that_samples(engine: ParallelEngine) -> RecordedOnHost:
    """Record the drafts of ranks, of which only the one that samples has the head."""
    sampler = engine.group.ranks[engine.group.ranks[0].layout.sampler]
    assert sampler.runner is not None
    loaded, cache = sampler.executor._draft, sampler.executor._cache
    assert isinstance(loaded, DraftHead)
    assert cache is not None
    drafter = sampler.runner._speculation._drafter = RecordedOnHost(loaded, cache.draft_caches)
    others = [rank for rank in engine.group.ranks if rank is not sampler]
    assert [rank.executor._draft for rank in others] == [None] * len(others)
    return drafter


@pytest.mark.parametrize(("layout", "has_lm_head"), [((1, 2), True), ((2, 2), False)])
def test_the_rank_that_samples_drafts_from_hidden_states_of_all_stages(
    target: Path, head: Path, layout: tuple[int, int], has_lm_head: bool, tmp_path: Path
) -> None:
    """It has copies of what it shares with the target, of which each rank has a part."""
    if not has_lm_head:
        layers = {"eagle_aux_hidden_state_layer_ids": LAYERS[::-1]}
        head = make_head(tmp_path, draft_vocab_size=VOCAB_SIZE, **layers)
        change_tensors(lm_head_weight=None, d2t=None, t2d=None)(head)
    runner = RunnerConfig(
        speculative="eagle", speculative_model=str(head), num_speculative_tokens=NUM_DRAFTS
    )
    tensor, pipeline = layout
    engine = ParallelEngine(
        target, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, runner=runner
    )
    try:
        drafter = record_the_rank_that_samples(engine)
        drafting = engine.generate(PROMPTS, 12)
    finally:
        engine.group.close()
    plain = InProcessEngine(target).generate(PROMPTS, 12)
    assert [answer.token_ids for answer in drafting] == [answer.token_ids for answer in plain]
    drafter.assert_drafts_are_those_of(Reference(target, head))


def test_a_worker_with_a_device_drafts_there(target: Path, head: Path) -> None:
    runner = RunnerConfig(
        speculative="eagle", speculative_model=str(head), num_speculative_tokens=NUM_DRAFTS
    )
    engine = ParallelEngine(target, runner=runner, executor=AheadExecutor)
    try:
        [rank] = engine.group.ranks
        drafting = engine.generate(PROMPTS, 12)
        assert rank.runner is not None
        assert rank.runner._speculation is not None
        assert isinstance(rank.runner._speculation.drafter, DeviceHeadDrafter)
        assert rank.executor._state is not None
        shape, num_recorded = rank.executor._state.shape, rank.executor.num_recorded
        assert num_recorded == shape.num_graphs > 2 * len(shape.sizes) + len(shape.mixed)
        drafts = rank.executor._state.rows.sampling.drafts
        assert drafts.shape[1] == NUM_DRAFTS
        assert drafts.any(), "some were made"
    finally:
        engine.group.close()
    plain = InProcessEngine(target).generate(PROMPTS, 12)
    assert [answer.token_ids for answer in drafting] == [answer.token_ids for answer in plain]

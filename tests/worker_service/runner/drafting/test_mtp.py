"""Drafts of a head in the model's own checkpoint: those of a plain implementation, wherever its
keys and values come from; outputs stay; heads that are not there, or do not fit, are refused."""

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pagewire_kernels.cpu.linear import NativeWeight
from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from tests.support.checkpoints import checkpoint
from tests.support.in_process import InProcessEngine
from tests.support.loading import copy_checkpoint, edit_tensors, load
from tests.support.mtp_heads import FAMILIES, MTPCheckpoint, make_mtp, mtp_checkpoint
from tests.support.quantized_checkpoints import FORMATS
from tests.support.quantized_files import quantize_checkpoint
from tests.support.rank_threads import AheadExecutor, Executor, ParallelEngine
from tests.support.runners import RUNNERS, host
from tests.support.speculation import (
    NUM_DRAFTS,
    PROMPTS,
    SAMPLING,
    SpeculatingEngine,
    loaded_executor,
)
from tests.worker_service.runner.drafting.test_eagle_drafter import (
    RecordedOnDevice,
    RecordedOnHost,
    record_the_rank_that_samples,
)
from worker_service.config import RunnerConfig
from worker_service.distributed.communicator import Communicator
from worker_service.distributed.layout import Layout
from worker_service.errors import BadCheckpoint, InvalidOption, UnsupportedModel, WorkerError
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.loader import load_mtp_head
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.runner.device.drafts import DeviceHeadDrafter
from worker_service.runner.drafting.drafter import Drafter
from worker_service.runner.model_options import check_drafts_with_states

MTP = RunnerConfig(speculative="mtp", num_speculative_tokens=NUM_DRAFTS)
ON_DEVICE = [family for family in FAMILIES if not family.startswith("qwen3")]
"""Families that draft on a device, and on several ranks: those without states."""


class Engine(SpeculatingEngine):
    """Drafts with the head of the model's checkpoint."""

    def load_draft(self) -> DraftHead:
        self.head = load_mtp_head(self.loaded)
        assert self.head is not None
        return self.head

    def make_drafter(self, cache: CacheEngine) -> Drafter:
        assert self.head is not None
        make = RecordedOnHost if self.kind is host else RecordedOnDevice
        self.drafter = made = make(self.head, cache.draft_caches)
        return made


@pytest.mark.parametrize("family", list(FAMILIES))
def test_drafts_are_those_of_a_plain_implementation(family: str) -> None:
    made = mtp_checkpoint(family)
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 16}
    engine = Engine(made.path, config=SchedulerConfig(max_speculative_seqs=8, **limits))
    engine.generate(PROMPTS, 12)
    num_without = 0 if family in ON_DEVICE else 40  # steps without room for states
    engine.drafter.assert_drafts_are_those_of(made.reference(), 3, num_without)
    assert engine.lengths.num_drafts > 60


@pytest.mark.parametrize(
    ("family", "runner", "sampling"),
    [
        *((family, "host", sampling) for family in FAMILIES for sampling in SAMPLING[1:2]),
        *(("deepseek_v3", kind, sampling) for kind in RUNNERS for sampling in SAMPLING),
    ],
)
def test_outputs_are_those_without_drafts(
    family: str, runner: str, sampling: dict[str, Any]
) -> None:
    engine = Engine(mtp_checkpoint(family).path, runner=runner)
    engine.assert_outputs_are_those_without_drafts(PROMPTS, 24, num_choices=2, **sampling)
    assert engine.lengths.num_drafts > 60


@pytest.mark.parametrize(
    ("family", "num_gpu_blocks"), [("deepseek_v3", 44), ("glm4_moe", 44), ("qwen3_5", 56)]
)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_drafts_stay_right_through_preemption_and_forks(
    mode: str, family: str, num_gpu_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts end within a block, so that choices share no block that they continue differently.
    The step after a swap has no drafts."""
    made = mtp_checkpoint(family)
    prompts = [prompt[:-1] if len(prompt) % 4 == 0 else prompt for prompt in PROMPTS]
    engine = Engine(
        made.path,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=256,
        config=SchedulerConfig(max_speculative_seqs=2, preemption_mode=PreemptionMode(mode)),
    )
    engine.assert_outputs_are_those_without_drafts(prompts, 60, num_choices=2)
    moved = "num_swapped" if mode == "swap" else "num_recomputed"
    assert re.search(f"{moved}=[1-9]", caplog.text)
    num_without = 2 if mode == "swap" else 0
    num_without += 0 if family in ON_DEVICE else 80
    engine.drafter.assert_drafts_are_those_of(made.reference(), 11, num_without)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_cached_prefix_has_the_head_s_keys(family: str) -> None:
    made = mtp_checkpoint(family)
    engine = Engine(made.path)
    prompt = PROMPTS[3]
    first = engine.generate([prompt], 20)
    engine.drafter.drafts.clear()
    second = engine.generate([[*prompt, *first[0].token_ids]], 30)
    assert second[0].cached_tokens > len(prompt)
    engine.drafter.assert_drafts_are_those_of(made.reference())


def test_experts_of_a_head_may_be_stored_otherwise_than_others(tmp_path: Path) -> None:
    """And all names may be those of a text model in a multimodal one, except the head's."""

    def edit(tensors: dict[str, Tensor]) -> None:
        prefix, parts = "mtp.layers.0.mlp.experts.", []
        for expert in range(4):
            names = [f"{prefix}{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
            parts.append([tensors.pop(name) for name in names])
        gates, ups, downs = (torch.stack(of_kind) for of_kind in zip(*parts, strict=True))
        tensors[f"{prefix}gate_up_proj"] = torch.cat([gates, ups], dim=1)
        tensors[f"{prefix}down_proj"] = downs
        for name in list(tensors):
            inner = name.replace("model.", "model.language_model.", 1)
            tensors[inner] = tensors.pop(name)

    made = mtp_checkpoint("qwen3_5_moe")
    engine = Engine(edited(made, tmp_path, edit))
    engine.generate(PROMPTS, 12)
    engine.drafter.assert_drafts_are_those_of(made.reference(), 3, 40)


def edited(made: MTPCheckpoint, folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a checkpoint with other tensors."""
    path = Path(shutil.copytree(made.path, folder / "edited"))
    edit_tensors(path, edit)
    return path


_OUTPUTS = ("o_proj.weight", "o_proj.bias", "down_proj.weight", "down_proj", "out_proj.weight")
"""Ends of names of what is added to the residual stream."""


def make_right(tensors: dict[str, Tensor], names: Mapping[str, str]) -> None:
    """Let a token depend on the one before it alone, and the head compute the same of its
    embedding."""
    for name, tensor in tensors.items():
        if name.endswith(_OUTPUTS):
            tensor.zero_()
    size = len(tensors["model.norm.weight"])
    offset = 0.0 if "head" not in names else 1.0
    tensors[f"{names['projection']}.weight"] = torch.eye(size, 2 * size)
    tensors[f"{names['embedding_norm']}.weight"] = torch.full((size,), offset)
    tensors[f"{names['norm']}.weight"] = tensors["model.norm.weight"].clone()
    for part, of_target in (("embedding", "model.embed_tokens"), ("head", "lm_head")):
        if part in names:
            tensors[f"{names[part]}.weight"] = tensors[f"{of_target}.weight"].clone()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_drafts_of_a_head_that_is_right_are_accepted(family: str, tmp_path: Path) -> None:
    made = mtp_checkpoint(family)
    path = edited(made, tmp_path, lambda tensors: make_right(tensors, made.names))
    engine = Engine(path)
    for sampling in SAMPLING[:2]:
        engine.assert_outputs_are_those_without_drafts(PROMPTS, 24, **sampling)
    assert engine.head.embedding is engine.head.head is None, "they are the target's"
    assert engine.lengths.num_accepted > 0.9 * engine.lengths.num_drafts > 30


@pytest.mark.parametrize("layout", [(1, 2), (2, 1)])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_rank_that_samples_drafts(layout: tuple[int, int], family: str) -> None:
    made, (tensor, pipeline) = mtp_checkpoint(family), layout
    engine = ParallelEngine(
        made.path, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, runner=MTP
    )
    try:
        drafter = record_the_rank_that_samples(engine)
        drafting = engine.generate(PROMPTS, 12)
        plain = ParallelEngine(
            made.path, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline
        )
        try:
            expected = plain.generate(PROMPTS, 12)
        finally:
            plain.group.close()
    finally:
        engine.group.close()
    assert [answer.token_ids for answer in drafting] == [answer.token_ids for answer in expected]
    drafter.assert_drafts_are_those_of(made.reference())


@pytest.mark.parametrize("executor", [Executor, AheadExecutor])
def test_a_worker_drafts_with_the_flag_alone(executor: type[Executor]) -> None:
    path = mtp_checkpoint("deepseek_v3").path
    engine = ParallelEngine(path, runner=MTP, executor=executor)
    try:
        [rank] = engine.group.ranks
        drafting = engine.generate(PROMPTS, 12)
        assert rank.runner is not None
        assert rank.runner._speculation is not None
        is_on_device = isinstance(rank.runner._speculation.drafter, DeviceHeadDrafter)
        assert is_on_device == (executor is AheadExecutor)
    finally:
        engine.group.close()
    plain = InProcessEngine(path).generate(PROMPTS, 12)
    assert [answer.token_ids for answer in drafting] == [answer.token_ids for answer in plain]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_head_is_rounded_as_its_target(family: str, tmp_path: Path) -> None:
    sizes = ("moe_intermediate_size", "intermediate_size", "shared_expert_intermediate_size")
    made = make_mtp(family, tmp_path, **dict.fromkeys(sizes, 64))
    target = load(made.path, quantization="int8")
    head = load_mtp_head(target)
    assert head is not None
    stored = load_file(made.path / "model.safetensors")
    prefix = "mtp.layers.0" if family.startswith("qwen3") else f"model.layers.{made.layer}"
    for linear, name in (
        (head.projection, made.names["projection"]),
        (head.layer.attention.output, f"{prefix}.self_attn.o_proj"),
    ):
        assert isinstance(linear.packed, NativeWeight)
        columns = linear.packed.apply(torch.eye(linear.packed.in_features)).T
        error = (columns - stored[f"{name}.weight"]).abs().max()
        assert 1e-4 < error < 0.02, name


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("deepseek_v3", "gptq 4"),
        ("glm4_moe", "pack-quantized 8"),
        ("deepseek_v3", "float-quantized of outputs"),
    ],
)
def test_a_quantized_head_drafts_as_a_dense_one_of_the_same_weights(
    family: str, kind: str, tmp_path: Path
) -> None:
    made = make_mtp(family, tmp_path, moe_intermediate_size=64, intermediate_size=128)
    path = quantize_checkpoint(made.path, tmp_path / "quantized", *FORMATS[kind])
    dense = load_file(made.path / "model.safetensors")
    edit_tensors(made.full, lambda t: t.update({n: dense[n] for n in t if n in dense}))
    engine = Engine(path)
    engine.generate(PROMPTS, 12)
    assert engine.lengths.num_drafts > 60
    engine.drafter.assert_drafts_are_those_of(made.reference(), 3)


def test_dummy_weights_have_a_head() -> None:
    loaded = load(checkpoint("deepseek_v3"), load_format="dummy")
    head = load_mtp_head(loaded)
    assert head is not None
    assert head.captured_layers == (2,)


def test_tensors_of_a_head_are_no_surplus(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load(mtp_checkpoint("deepseek_v3").path)
    assert "draft head found, for --speculative mtp num_tensors=" in caplog.text
    assert "tensors not used" not in caplog.text


def test_the_budget_holds_the_head_s_keys_too() -> None:
    path = mtp_checkpoint("deepseek_v3").path
    plain = loaded_executor(path).loaded.model.kv_cache_spec.block_bytes(16)
    drafting = loaded_executor(path, speculative="mtp")
    assert drafting.loaded.model.kv_cache_spec.block_bytes(16) == plain * 3 // 2


@pytest.mark.parametrize(
    ("device", "layout", "expected"),
    [
        ("cuda", Layout(), "none on a GPU"),
        ("cpu", Layout(pipeline_parallel_size=2), "none with stages"),
        ("cpu", Layout(tensor_parallel_size=2), "ngram or suffix on 2 ranks"),
    ],
)
def test_a_head_beside_states_is_refused_where_it_is_not_supported(
    device: str, layout: Layout, expected: str
) -> None:
    executor = loaded_executor(mtp_checkpoint("qwen3_5").path, speculative="mtp")
    loaded = replace(
        executor.loaded,
        config=replace(executor.loaded.config, device=device),
        communicator=Communicator(layout),
    )
    match = f"speculative: expected {expected} for Qwen3_5ForCausalLM, .* got mtp"
    with pytest.raises(InvalidOption, match=match):
        check_drafts_with_states(loaded, executor._runner)


@pytest.mark.parametrize(
    ("family", "error", "message"),
    [
        ("llama", UnsupportedModel, "not of LlamaForCausalLM; leave the flag out"),
        ("nemotron_h", UnsupportedModel, "not of NemotronHForCausalLM"),
        ("phi", UnsupportedModel, "not of PhiForCausalLM"),
        (
            "deepseek_v3",
            InvalidOption,
            r"deepseek_v3 holds no head: expected tensors model.layers.2.\* in",
        ),
    ],
)
def test_a_model_without_a_head_is_refused(
    family: str, error: type[WorkerError], message: str
) -> None:
    with pytest.raises(error, match=f"^speculative mtp: .*{message}"):
        load_mtp_head(load(checkpoint(family)))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("eh_proj.weight", None, "missing tensors: model.layers.2.eh_proj.weight"),
        ("mlp.experts.3.up_proj.weight", None, "missing tensors: model.layers.2.mlp.experts.3"),
        ("eh_proj.weight", torch.ones(64, 64), r"eh_proj.weight is \[64, 64\], expected \[64, 128"),
        ("shared_head.head.weight", torch.ones(3, 64), r"head.weight is \[3, 64\], expected \[300"),
        ("indexer.weight", torch.ones(3), "unexpected tensors: model.layers.2.indexer.weight"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    name: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors.pop(f"model.layers.2.{name}", None)
        if tensor is not None:
            tensors[f"model.layers.2.{name}"] = tensor

    loaded = load(edited(mtp_checkpoint("deepseek_v3"), tmp_path, edit))
    with pytest.raises(BadCheckpoint, match=f"^speculative mtp: .*{message}"):
        load_mtp_head(loaded)


def test_a_layer_of_one_more_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy_checkpoint("deepseek_v3", tmp_path)
    edit_tensors(path, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(2)}))
    load(path)
    assert "tensors not used num=1 names=model.layers.3.eh_proj.weight" in caplog.text

"""Experts of native models: their weights stay packed, or are ordinary linear layers."""

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pagewire_kernels import reference
from pagewire_kernels.cpu import library
from pagewire_kernels.cpu.experts import NativeExperts
from pagewire_kernels.reference import Gate, Routing
from pagewire_kernels.reference.backend import LayerKernels
from tests.support.checkpoints import checkpoint, make_checkpoint
from tests.support.gguf_files import make_gguf
from tests.support.loading import assert_same, copy_checkpoint, edit_tensors, load, logits
from tests.support.quantized_checkpoints import AWQ, FP8, NF4
from tests.support.quantized_files import (
    GROUP_SIZE,
    awq,
    bitsandbytes,
    fp8,
    integers,
    make_quantized,
)
from worker_service.distributed.layout import Shard
from worker_service.errors import UnsupportedModel
from worker_service.loader import LoadedModel
from worker_service.models.feed_forward.experts import (
    Experts,
    ExpertsSpec,
    ExpertStorage,
    ExpertWeights,
)
from worker_service.models.interface import ModelContext
from worker_service.models.linear.linear import FloatLinear

SHAPE = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 32}
needs_kernels = pytest.mark.skipif(library() is None, reason="the kernels are not built")


def _all(loaded: LoadedModel) -> list[ExpertWeights]:
    model = loaded.model
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, ExpertWeights)]


def _suffixes(loaded: LoadedModel) -> set[str]:
    found = set()
    for experts in _all(loaded):
        packed = experts._packed
        assert isinstance(packed, NativeExperts)
        found |= {packed._gate_up[0].suffix, packed._down[0].suffix}
    return found


def _to_awq(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    if module.endswith("shared_expert_gate"):  # one output does not fill a word
        return {"weight": weight}, weight
    rounded = integers(weight, 4, size=GROUP_SIZE, symmetric=False)
    return awq(rounded, 4), rounded.values


def _to_fp8(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    return fp8(weight, (1, weight.shape[1]), "weight_scale", [-1, 1])


def _to_nf4(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    return bitsandbytes(weight, nested=True)


def _to_small_blocks(module: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    return fp8(weight, (8, 8), "weight_scale_inv", [-(-size // 8) for size in weight.shape])


KINDS = {"_int4": (AWQ, _to_awq), "_float8": (FP8, _to_fp8), "_float4": (NF4, _to_nf4)}
"""Settings and conversions of checkpoints, by the suffix of the kernels."""


@needs_kernels
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "_int4") for family in ("mixtral", "qwen2_moe", "qwen3_moe")),
        ("mixtral", "_float8"),
        ("mixtral", "_float4"),
    ],
)
def test_quantized_experts_stay_packed(
    family: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, convert = KINDS[kind]
    path, dense = make_quantized(tmp_path, settings, convert, family=family, **SHAPE)
    with caplog.at_level(logging.INFO):
        loaded = load(path)
    assert "weights dequantized" not in caplog.text
    assert _suffixes(loaded) == {kind}
    assert loaded.batch_invariant
    assert loaded.model.num_parameters == load(dense).model.num_parameters
    assert_same(loaded, dense)


@needs_kernels
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(("kind", "suffix"), [("Q8_0", "_int8"), ("Q4_0", "_int4")])
def test_experts_of_gguf_files_stay_packed(
    family: str, kind: str, suffix: str, tmp_path: Path
) -> None:
    file, dense = make_gguf(family, kind, tmp_path)
    loaded = load(file)
    assert _suffixes(loaded) == {suffix}
    assert_same(loaded, dense)


def test_the_log_says_what_is_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {**FP8, "weight_block_size": [8, 8]}
    path, dense = make_quantized(tmp_path, settings, _to_small_blocks, family="mixtral")
    with caplog.at_level(logging.INFO):
        assert_same(load(path), dense)
    assert "reason=groups of 8 inputs" in caplog.text


@needs_kernels
def test_experts_are_part_of_the_recorded_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint("qwen2_moe", tmp_path)
    with caplog.at_level(logging.INFO):
        assert_same(path, path)
    assert "layers run eagerly" not in caplog.text


CLAMPED = Gate(limit=0.7, alpha=1.702, offset=1.0)
BIASES = ("gate_up_bias", "down_bias")
PARTS = ("gate", "up", "down")
STORED = {
    ExpertStorage.SEPARATE: ("gate.*", "up.*", "down.*"),
    ExpertStorage.IN_TURN: ("gate_up.*", "down.*", *BIASES),
    ExpertStorage.STACK: ("gate_up", "down", *BIASES),
    ExpertStorage.STACKS: PARTS,
    ExpertStorage.TRANSPOSED_STACK: ("gate_up", "down", *BIASES),
    ExpertStorage.TRANSPOSED_HALVES: ("gate_up", "down", *BIASES),
}


def _dense(stored: dict[str, Tensor], storage: ExpertStorage) -> tuple[list[Tensor], list[Tensor]]:
    """Of each expert the weight of gate, then up, and that of down."""
    if storage is ExpertStorage.STACK:
        return list(stored["gate_up"]), list(stored["down"])
    if storage is ExpertStorage.STACKS:
        return list(torch.cat([stored["gate"], stored["up"]], dim=1)), list(stored["down"])
    if storage is ExpertStorage.TRANSPOSED_HALVES:
        return list(stored["gate_up"].mT), list(stored["down"].mT)
    if storage is ExpertStorage.TRANSPOSED_STACK:
        in_turn, down = list(stored["gate_up"].mT), list(stored["down"].mT)
    else:
        down = [stored[f"down.{i}.weight"] for i in range(4)]
        if storage is ExpertStorage.SEPARATE:
            parts = [(stored[f"gate.{i}.weight"], stored[f"up.{i}.weight"]) for i in range(4)]
            return [torch.cat(part) for part in parts], down
        in_turn = [stored[f"gate_up.{i}.weight"] for i in range(4)]
    return [torch.cat([weight[::2], weight[1::2]]) for weight in in_turn], down


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("storage", "has_bias"),
    [
        *((storage, False) for storage in ExpertStorage),
        *((storage, True) for storage in ExpertStorage if storage is not ExpertStorage.STACKS),
    ],
)
def test_without_kernels_for_the_dtype_experts_are_linear_layers(
    dtype: torch.dtype, storage: ExpertStorage, has_bias: bool
) -> None:
    size, inner = 32, 48
    spec = ExpertsSpec(
        routing=Routing(num_experts=4, num_chosen=2, normalizes=True),
        inner_size=inner,
        activation="silu",
        bias=has_bias,
        gate=CLAMPED if has_bias else None,
        storage=storage,
    )
    context = ModelContext(dtype=dtype, device=torch.device("cpu"))
    experts = ExpertWeights(spec, size, Shard.full(inner), context)
    generator, stored = torch.Generator().manual_seed(0), {}
    for target in experts.targets(*STORED[storage]):
        if target.name not in stored:
            stored[target.name] = torch.randn(target.source_shape, generator=generator) * 0.2
        target.target.copy_(stored[target.name][target.source_index or ...])
    assert any(name.endswith("bias") for name in stored) == has_bias
    experts.pack()
    assert experts.weight is None
    assert (experts._packed is None) == (dtype == torch.float16 or library() is None)
    x, logits = torch.randn(9, size, generator=generator), torch.randn(9, 4, generator=generator)
    shared = torch.randn(9, size, generator=generator)
    factors = torch.rand(4, generator=generator) + 0.5
    found = experts(x.to(dtype), logits, spec.routing, None, factors, shared.to(dtype), None)
    gate_up, down = _dense(stored, storage)
    of_gate_up, of_down = (stored.get(name, torch.zeros(4, 1)) for name in BIASES)
    if has_bias and storage is ExpertStorage.SEPARATE:
        gate_bias, up_bias, of_down = (
            torch.stack([stored[f"{part}.{i}.bias"] for i in range(4)]) for part in PARTS
        )
        of_gate_up = torch.cat([gate_bias, up_bias], dim=1)
    elif has_bias and storage in (ExpertStorage.TRANSPOSED_STACK, ExpertStorage.IN_TURN):
        of_gate_up = torch.cat([of_gate_up[:, ::2], of_gate_up[:, 1::2]], dim=1)
    total = reference.gated_experts(
        x,
        *reference.route(logits, spec.routing, factors=factors),
        lambda e, rows, _: rows @ gate_up[e].T + of_gate_up[e],
        lambda e, rows, _: rows @ down[e].T + of_down[e],
        spec.gate or Gate(),
        spec.routing,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found.float(), total + shared, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "hunyuan_moe"])
def test_a_router_keeps_its_float32_weight_in_a_bfloat16_model(family: str) -> None:
    path = checkpoint(family)
    router = next(m for m in load(path, dtype="bfloat16").model.modules() if type(m) is FloatLinear)
    exact = next(m for m in load(path).model.modules() if isinstance(m, Experts)).router
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = exact.multiply(x.float(), None, torch.float32)
    torch.testing.assert_close(
        router.multiply(x, None, torch.float32), expected, atol=1e-5, rtol=1e-6
    )


def test_a_router_that_was_rounded_when_it_was_saved_is_one_weight() -> None:
    context = ModelContext(dtype=torch.bfloat16, device=torch.device("cpu"))
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    for rounded, num_terms in ((weight.bfloat16().float(), 1), (weight, 3)):
        router = FloatLinear(16, 4, context, LayerKernels())
        (target,) = router.targets("gate")
        target.target.copy_(rounded)
        router.pack()
        found = router.packed.out_features if router.packed else len(router.weight)
        assert found == 4 * num_terms


def test_a_router_that_torch_multiplies_by_may_be_packed_again() -> None:
    context = ModelContext(dtype=torch.float16, device=torch.device("cpu"))  # without kernels
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(4, 16, generator=generator), torch.randn(3, 16, generator=generator)
    router = FloatLinear(16, 4, context, LayerKernels())
    (target,) = router.targets("gate")
    target.target.copy_(weight)
    products = []
    for _ in range(2):  # once it is filled, and once the model is loaded
        router.pack()
        products.append(router.multiply(x.half(), None, torch.float32))
    torch.testing.assert_close(products[0], x.half().float() @ weight.T, atol=1e-3, rtol=1e-3)
    assert torch.equal(*products)


def test_more_experts_of_a_token_than_there_are_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe", tmp_path, num_experts_per_tok=5)
    with pytest.raises(
        UnsupportedModel, match=r"config\.json: experts: num_chosen: expected 1 to 4, got 5"
    ):
        load(path)


def test_experts_of_qwen3_5_may_be_stored_in_one_tensor(tmp_path: Path) -> None:
    path = copy_checkpoint("qwen3_5_moe", tmp_path)
    expected = logits(load(path))

    def stack(tensors: dict[str, Tensor]) -> None:
        for layer in range(3):
            prefix = f"model.layers.{layer}.mlp.experts"
            parts = {
                part: torch.stack([tensors.pop(f"{prefix}.{i}.{part}.weight") for i in range(4)])
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            gate_up = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
            tensors[f"{prefix}.gate_up_proj"] = gate_up
            tensors[f"{prefix}.down_proj"] = parts["down_proj"].contiguous()

    edit_tensors(path, stack)
    assert torch.equal(logits(load(path)), expected)

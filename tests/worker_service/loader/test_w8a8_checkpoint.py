"""Checkpoints with 8-bit activations compute as transformers do where compressed-tensors rounds."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pagewire_kernels.quantized_weight import quantize
from tests.support.checkpoints import make_checkpoint
from tests.support.loading import (
    TOKENS,
    edit_config,
    edit_tensors,
    layouts,
    linears,
    load,
    open_weights,
)
from tests.support.native import native_libraries
from tests.support.paged_driver import PagedDriver
from tests.support.quantized_checkpoints import LAYER, replace_part
from tests.support.quantized_files import make_w8a8
from tests.support.transformers_oracle import Oracle
from worker_service.distributed.layout import Layout
from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.models.linear.packing import can_pack

pytestmark = pytest.mark.skipif(not native_libraries(), reason="the kernels are not compiled")

INPUTS: dict[str, dict[str, Any]] = {
    "dynamic": {"dynamic": True, "strategy": "token"},
    "dynamic asymmetric": {"dynamic": True, "strategy": "token", "symmetric": False},
    "static": {"strategy": "tensor"},
    "static asymmetric": {"strategy": "tensor", "symmetric": False},
}
STATIC = {"input_scale": torch.tensor([0.023]), "input_zero_point": torch.tensor([-11]).char()}


def _make(folder: Path, inputs: Mapping[str, Any], **options: Any) -> tuple[Path, Path]:
    """As `make_quantized`, with the tensors that such inputs need."""
    names = [] if inputs.get("dynamic") else ["input_scale"]
    names += ["input_zero_point"] if names and not inputs.get("symmetric", True) else []
    return make_w8a8(folder, inputs, {name: STATIC[name] for name in names}, **options)


@contextmanager
def _rounded_inputs(model: nn.Module, inputs: Mapping[str, Any] | None) -> Iterator[None]:
    """The library rounds what the layers' weights are multiplied by; None: it does not."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    if inputs is None:
        yield
        return
    settings, linear = QuantizationArgs(**inputs), nn.functional.linear
    weights = {
        parameter.untyped_storage().data_ptr()
        for name, parameter in model.named_parameters()
        if "layers" in name and not name.endswith("gate.weight")
    }

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.untyped_storage().data_ptr() in weights:
            rows = x.reshape(1, -1, x.shape[-1])  # a token is what the last of three axes holds
            scale = STATIC["input_scale"]
            zero = None if settings.symmetric else STATIC["input_zero_point"]
            if settings.dynamic:
                scale, zero = compute_dynamic_scales_and_zp(rows, settings, model)
            x = fake_quantize(rows, scale, zero, settings).reshape(x.shape)
        return linear(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", multiply)
        yield


def _errors(path: Path, reference: Path, inputs: Mapping[str, Any] | None) -> Tensor:
    """Of all logits, in their standard deviations; checks that the greedy tokens are the same."""
    oracle = Oracle(reference)
    oracle.model.set_experts_implementation("eager")
    with _rounded_inputs(oracle.model, inputs):
        tokens = TOKENS + oracle.generate(TOKENS, 12)
        expected = oracle.logits(tokens)
    found = PagedDriver(load(path).model).run([(0, 0, tokens)])[0]
    if inputs is not None:
        assert found.argmax(1)[len(TOKENS) - 1 : -1].tolist() == tokens[len(TOKENS) :]
    return (found - expected).abs() / expected.std()


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_dense_checkpoint_is_rounded_like_a_stored_one(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path, intermediate_size=96, ffn_dim=96)
    oracle = Oracle(path)
    head = oracle.model.get_output_embeddings()
    for module in oracle.model.modules():
        if isinstance(module, nn.Linear):
            rounded = quantize(module.weight.data, "int8" if module is head else "w8a8")
            module.weight.data.copy_(rounded.dequantize())
    with _rounded_inputs(oracle.model, INPUTS["dynamic"]):
        expected = oracle.logits(TOKENS)
    found = PagedDriver(load(path, quantization="w8a8").model).run([(0, 0, TOKENS)])[0]
    unrounded = (oracle.logits(TOKENS) - expected).abs().median()
    assert (found - expected).abs().median() < unrounded / 8


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in INPUTS),
        *(("gemma2", kind) for kind in INPUTS),
        *((family, "dynamic") for family in ("qwen2", "qwen3", "opt", "mixtral", "phi3")),
    ],
)
def test_logits_are_those_of_rounded_inputs(family: str, kind: str, tmp_path: Path) -> None:
    """With a scale of its own, a number of a row may lie in the middle between two codes; with a
    symmetric one the largest does, if it is negative. There the last bit of float32 decides, which
    depends on the processor, and a code that differs is seen in others."""
    path, reference = _make(tmp_path, INPUTS[kind], family=family)
    errors = _errors(path, reference, INPUTS[kind])
    unrounded = _errors(path, reference, None)
    if kind.startswith("dynamic"):
        assert errors.max() < 0.15
        assert errors.median() < (unrounded.median() / 8 if kind == "dynamic" else 1e-5)
    else:
        assert errors.max() < 1e-5
        assert unrounded.median() > 1e-3


def test_a_row_has_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    path, _ = _make(tmp_path, INPUTS["dynamic"])
    for dtype in ("float32", "bfloat16"):
        loaded = load(path, dtype=dtype)
        assert loaded.batch_invariant
        whole = PagedDriver(loaded.model).run([(0, 0, TOKENS), (1, 0, TOKENS[::-1])])
        driver = PagedDriver(loaded.model)
        alone = [driver.run([(0, i, [token])])[0] for i, token in enumerate(TOKENS)]
        assert torch.cat(alone).equal(whole[0])


def test_ranks_share_a_layer(tmp_path: Path) -> None:
    """Each part of a layer's inputs has a scale of its own."""
    path, _ = _make(tmp_path, INPUTS["dynamic"])

    def products(layout: Layout, name: str, rows: Tensor) -> Tensor:
        packed = linears(path, layout)[0][name].packed
        assert packed is not None
        return packed.apply(rows)

    whole = products(Layout(), "layers.0.feed_forward.down", torch.eye(128))
    ranks = layouts(tensor=2, pipeline=1)
    parts = [products(rank, "layers.0.feed_forward.down", torch.eye(64)) for rank in ranks]
    assert torch.cat(parts).equal(whole)
    weight = whole / torch.tensor(127 / 127.5)  # 1 is rounded to that
    rows = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    rows[:, 64:] *= 100
    halves = rows.unflatten(1, (2, 64))
    scales = halves.abs().amax(2, keepdim=True) / 127.5
    rounded = ((halves / scales).clamp(-128, 127).round() * scales).flatten(1)
    both = [
        products(rank, "layers.0.feed_forward.down", halves[:, i]) for i, rank in enumerate(ranks)
    ]
    torch.testing.assert_close(both[0] + both[1], rounded @ weight, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_layers_of_one_product_must_round_alike(family: str, tmp_path: Path) -> None:
    path, _ = _make(tmp_path, INPUTS["static"], family=family)
    names = [
        name for name in load_file(path / "model.safetensors") if name.endswith("k_proj.weight")
    ]
    module = names[0].removesuffix(".weight")
    if family == "mixtral":  # whose queries, keys and values are layers of their own
        module = "model.layers.0.block_sparse_moe.experts.0.w1"

    def scaled(tensors: dict[str, Tensor]) -> None:
        tensors[f"{module}.input_scale"] *= 2

    def dense(tensors: dict[str, Tensor]) -> None:
        scale = tensors.pop(f"{module}.weight_scale")
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] * scale
        del tensors[f"{module}.input_scale"]

    for edit in (scaled, dense):
        edit_tensors(path, edit)
        with pytest.raises(UnsupportedModel, match=f"the same 8-bit input_activations.*{module}"):
            load(path)


def test_machines_without_the_kernels_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = _make(tmp_path, INPUTS["dynamic"])
    assert not can_pack(torch.bfloat16, torch.device("cuda"))
    monkeypatch.setattr("worker_service.models.linear.packing.library", lambda: None)
    with pytest.raises(UnsupportedModel, match=r"\(W8A8\) need the compiled CPU kernels.*cpu"):
        load(path)


def test_a_layer_that_needs_dense_weights_is_refused(tmp_path: Path) -> None:
    path, _ = _make(tmp_path, INPUTS["dynamic"])
    name = f"{LAYER}.weight"
    with pytest.raises(UnsupportedModel, match=f"{name}: expected no input_activations"):
        open_weights(path).tensors[name][...]


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("input_scale", None, f"missing tensors: {LAYER}.input_scale"),
        ("input_zero_point", None, f"missing tensors: {LAYER}.input_zero_point"),
        ("input_scale", torch.tensor([0.0]), "input_scale: expected a positive number, got 0.0"),
        ("input_scale", torch.tensor([-1.0]), "input_scale: expected a positive number, got -1"),
        ("input_scale", torch.tensor([torch.nan]), "input_scale: expected finite numbers, got nan"),
        ("input_scale", torch.ones(2), r"input_scale is \[2\], expected \[1\]"),
        ("input_scale", torch.ones(1).int(), "input_scale is stored as I32, expected F16 or"),
        ("input_zero_point", torch.ones(1), "input_zero_point is stored as F32, expected I8"),
    ],
)
def test_tensors_of_inputs_are_checked(
    part: str, value: Tensor | None, message: str, tmp_path: Path
) -> None:
    path, _ = _make(tmp_path, INPUTS["static asymmetric"])
    edit_tensors(path, replace_part(part, value))
    with pytest.raises(BadCheckpoint, match=message):
        load(path)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("input_activations", {"type": "float"}, "type: expected int, got 'float'"),
        ("input_activations", {"num_bits": 4}, "num_bits: expected 8, got 4"),
        ("input_activations", {"dynamic": "local"}, "dynamic: expected True or False, got 'local'"),
        ("input_activations", {"strategy": "tensor"}, "strategy: expected token, got 'tensor'"),
        ("input_activations", {"strategy": "group"}, "strategy: expected token, got 'group'"),
        ("input_activations", {"dynamic": False}, "strategy: expected tensor, got 'token'"),
        ("input_activations", {"symmetric": 1}, "symmetric: expected True or False, got 1"),
        ("weights", {"symmetric": False}, "symmetric: expected True, got False"),
        ("weights", {"strategy": "group"}, "strategy: expected tensor or channel, got 'group'"),
    ],
)
def test_other_settings_of_inputs_are_refused(
    part: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path, _ = _make(tmp_path, INPUTS["dynamic"])
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    settings["config_groups"]["group_0"][part] |= changes
    edit_config(path, quantization_config=settings)
    with pytest.raises(UnsupportedModel, match=rf"group_0\.{part}\.{message}"):
        load(path)

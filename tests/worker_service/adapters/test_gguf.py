"""Adapters in GGUF files are those of PEFT that they were converted from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import checkpoint
from tests.support.gguf_files import make_gguf, write
from tests.support.lora import EMBEDDING, HEAD, make_adapter
from worker_service.adapters.peft_format import ModelAdapter, read_peft
from worker_service.adapters.store import AdapterInfo
from worker_service.config import AdapterConfig, CacheConfig, ModelConfig
from worker_service.errors import AdapterNotFound, BadAdapter
from worker_service.loader import load_model
from worker_service.loader.files.config import read_config
from worker_service.loader.gguf.adapter import read_gguf_lora
from worker_service.runner.torch_executor import Profiler, TorchExecutor

STORED = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.out_proj": "ssm_out",
}
VOCABULARY = {"model.embed_tokens": "token_embd", "lm_head": "output"}
ALPHA = 6.0
SETTINGS: Mapping[str, Any] = {
    "general.type": "adapter",
    "adapter.type": "lora",
    "adapter.lora.alpha": ALPHA,
}


def write_adapter(
    path: Path,
    adapter: ModelAdapter,
    architecture: str,
    heads: Mapping[str, int],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **settings: Any,
) -> None:
    """Write an adapter as llama.cpp does. heads: of the projections whose rows are permuted."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (SETTINGS | settings).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_string
        add(key, value)
    for name, module in adapter.modules.items():
        a, b = module.a.numpy(), module.b.numpy()
        if name in VOCABULARY:
            a = a.T if name == "model.embed_tokens" else a
            for end, matrix in (("lora_a", a), ("lora_b", b)):
                stored = gguf.quantize(np.ascontiguousarray(matrix), kind)
                writer.add_tensor(f"{VOCABULARY[name]}.weight.{end}", stored, raw_dtype=kind)
            continue
        _, _, layer, part = name.split(".", 3)
        if (num_heads := heads.get(part.rpartition(".")[2])) is not None:
            halves = b.reshape(num_heads, 2, -1, b.shape[1])
            b = halves.swapaxes(1, 2).reshape(b.shape)
        for end, matrix in (("lora_a", a), ("lora_b", b)):
            stored = gguf.quantize(np.ascontiguousarray(matrix), kind)
            writer.add_tensor(f"blk.{layer}.{STORED[part]}.weight.{end}", stored, raw_dtype=kind)
    write(writer)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("llama", "llama"), ("mistral", "llama"), ("qwen2", "qwen2"), ("phi3", "phi3")],
)
def test_a_file_has_the_digest_of_the_folder_that_it_was_made_from(
    family: str, architecture: str, tmp_path: Path
) -> None:
    config = read_config(checkpoint(family))
    made = make_adapter(checkpoint(family), tmp_path / "peft", r=4, lora_alpha=ALPHA)
    adapter = read_peft(made.folder)
    heads = {}
    if architecture == "llama":
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    write_adapter(tmp_path / "a.gguf", adapter, architecture, heads)
    assert read_gguf_lora(tmp_path / "a.gguf", config).info == adapter.info
    half = tmp_path / "half.gguf"
    write_adapter(half, adapter, architecture, heads, kind=gguf.GGMLQuantizationType.F16)
    for name, module in read_gguf_lora(half, config).modules.items():
        assert module.b.equal(adapter.modules[name].b.half())


def test_heads_of_delta_nets_have_the_order_of_the_folder(tmp_path: Path) -> None:
    config = read_config(checkpoint("qwen3_5"))
    names = [name.rpartition(".")[2] for name in STORED if name.startswith("linear_attn.")]
    made = make_adapter(
        checkpoint("qwen3_5"), tmp_path / "peft", target_modules=names, lora_alpha=ALPHA
    )
    adapter = read_peft(made.folder)
    num_keys = config["linear_num_key_heads"]
    first = {"in_proj_qkv": 2 * num_keys * config["linear_key_head_dim"]}

    def interleaved(rows: Tensor, first: int) -> Tensor:
        heads = rows[first:].unflatten(0, (num_keys, -1, width)).swapaxes(0, 1)
        return torch.cat([rows[:first], heads.flatten(0, 2)])

    changed = {}
    for name, module in adapter.modules.items():
        part, a, b = name.rpartition(".")[2], module.a, module.b
        width = 1 if part in ("in_proj_a", "in_proj_b") else config["linear_value_head_dim"]
        if part == "out_proj":
            a = interleaved(a.T, 0).T.contiguous()
        else:
            b = interleaved(b, first.get(part, 0))
        changed[name] = module._replace(a=a, b=b)
    write_adapter(tmp_path / "a.gguf", ModelAdapter.of_modules(changed), "qwen35", {})
    assert read_gguf_lora(tmp_path / "a.gguf", config).info == adapter.info


def load(base: Path, adapter: Path) -> AdapterInfo:
    """Load an adapter on a worker with this base."""
    config = ModelConfig(model=str(base), device="cpu", dtype="float32")
    cache = CacheConfig(block_size=4)
    executor = TorchExecutor(
        cache,
        Profiler(Path()),
        lambda: load_model(config, cache),
        adapters=AdapterConfig(enable_lora=True),
    )
    executor.load()
    return executor.adapters.load(str(adapter))


def test_workers_load_a_file_for_a_base_in_either_format(tmp_path: Path) -> None:
    file, folder = make_gguf("llama", "F32", tmp_path)
    adapter = read_peft(make_adapter(folder, tmp_path / "peft", lora_alpha=ALPHA).folder)
    config = read_config(folder)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    write_adapter(tmp_path / "a.gguf", adapter, "llama", heads)
    for base in (file, folder):
        assert load(base, tmp_path / "a.gguf") == load(base, tmp_path / "peft") == adapter.info


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("qwen2", {}, "general.architecture: expected 'llama', got 'qwen2'"),
        ("llama", {"general.type": "model"}, "general.type: expected 'adapter', got 'model'"),
        ("llama", {"adapter.type": "dora"}, "adapter.type: expected 'lora', got 'dora'"),
        (
            "llama",
            {"adapter.alora.invocation_tokens": "1"},
            "adapter.alora.invocation_tokens: expected none",
        ),
    ],
)
def test_files_that_mean_something_else_are_refused(
    architecture: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = checkpoint("llama")
    adapter = read_peft(make_adapter(base, tmp_path / "peft").folder)
    write_adapter(tmp_path / "a.gguf", adapter, architecture, {}, **settings)
    with pytest.raises(BadAdapter, match=message):
        read_gguf_lora(tmp_path / "a.gguf", read_config(base))


def test_the_embedding_and_the_head_are_those_of_the_folder(tmp_path: Path) -> None:
    base = checkpoint("llama")
    settings = {"targets": (EMBEDDING, HEAD), "r": 4, "lora_alpha": ALPHA}
    adapter = read_peft(
        make_adapter(base, tmp_path / "peft", **settings).folder, lambda name, weight: None
    )
    assert set(adapter.modules) == set(VOCABULARY)
    write_adapter(tmp_path / "a.gguf", adapter, "llama", {})
    assert read_gguf_lora(tmp_path / "a.gguf", read_config(base)).info == adapter.info
    assert load(base, tmp_path / "a.gguf") == load(base, tmp_path / "peft") == adapter.info


def test_missing_damaged_and_incomplete_files_are_refused(tmp_path: Path) -> None:
    config = read_config(checkpoint("llama"))
    with pytest.raises(AdapterNotFound, match="expected a GGUF file"):
        read_gguf_lora(tmp_path / "none.gguf", config)
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(BadAdapter, match="expected a GGUF file"):
        read_gguf_lora(tmp_path / "text.gguf", config)
    for name, message in (
        ("blk.0.attn_norm.weight", "expected only TENSOR.weight.lora_a and lora_b"),
        ("blk.0.attn_v.weight.lora_a", "expected lora_A and lora_B, got only lora_A"),
        ("blk.0.attn_q.weight.lora_b", "lora_b: expected a multiple of"),
    ):
        writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_tensor(name, np.ones((3, 64), np.float32))
        write(writer)
        with pytest.raises(BadAdapter, match=message):
            read_gguf_lora(tmp_path / "part.gguf", config)

"""The result of loading a checkpoint: tensors, facts, files for frontends, a fingerprint."""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    MAX_POSITIONS,
    VOCAB_SIZE,
    checkpoint,
    make_checkpoint,
)
from tests.support.gguf_files import make_gguf
from tests.support.loading import copy_checkpoint, edit_config, edit_tensors, load, logits
from worker_service.config import CacheConfig, ModelConfig
from worker_service.errors import InvalidOption
from worker_service.gguf.tokenizer_process import TokenizerProcess
from worker_service.load_progress import LoadProgress
from worker_service.loader import load_model
from worker_service.loader.device import gpu_number, resolve_dtype, set_threads, warn_of_rounding
from worker_service.loader.files import fingerprint as fingerprints
from worker_service.loader.files.assets import iter_assets
from worker_service.runner.torch_executor import Profiler, TorchExecutor

CPU = torch.device("cpu")


def test_automatic_settings_are_resolved() -> None:
    loaded = load(checkpoint("llama"), dtype="auto")
    assert loaded.config.dtype == "float32"
    assert loaded.config.device == "cpu"
    assert loaded.config.max_model_len == MAX_POSITIONS
    assert loaded.config.attention_backend == "cpu"
    assert loaded.eos_token_ids == (EOS_TOKEN_ID,)
    assert loaded.bos_token_id == BOS_TOKEN_ID
    assert loaded.hf_config["architectures"] == ["LlamaForCausalLM"]
    assert loaded.model_dir == checkpoint("llama")


@pytest.mark.parametrize(
    ("name", "dtype", "device", "num_parameters", "warns"),
    [
        ("auto", torch.bfloat16, "cpu", 135_000_000, True),
        ("auto", torch.bfloat16, "cpu", 600_000_000, False),
        ("auto", torch.float32, "cpu", 135_000_000, False),
        ("bfloat16", torch.bfloat16, "cpu", 135_000_000, False),
        ("auto", torch.bfloat16, "cuda:0", 135_000_000, False),
    ],
)
def test_a_small_model_in_bfloat16_by_default_on_a_cpu_is_a_warning(
    name: str,
    dtype: torch.dtype,
    device: str,
    num_parameters: int,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_rounding(name, dtype, torch.device(device), num_parameters)
    assert ("may answer worse in bfloat16: --dtype float32" in caplog.text) == warns


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_shards_load_as_one_file_does(family: str, tmp_path: Path) -> None:
    whole = checkpoint(family)
    sharded = Path(shutil.copytree(whole, tmp_path / "sharded"))
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::3], names[1::3], names[2::3])):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in part}, sharded / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"weight_map": weight_map}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(load(sharded)), logits(load(whole)))


@pytest.mark.parametrize(("family", "prefix"), [("gpt2", "transformer."), ("opt", "model.")])
def test_a_checkpoint_of_the_inner_model_alone_loads(
    family: str, prefix: str, tmp_path: Path
) -> None:
    inner = copy_checkpoint(family, tmp_path)
    file = inner / "model.safetensors"
    tensors = {k.removeprefix(prefix): v for k, v in load_file(file).items()}
    if family == "gpt2":
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)  # a mask, as old checkpoints have it
    save_file(tensors, file)
    assert torch.equal(logits(load(inner)), logits(load(checkpoint(family))))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_dummy_weights_need_no_weight_file_and_are_the_same_each_time(
    family: str, tmp_path: Path
) -> None:
    shutil.copy(checkpoint(family) / "config.json", tmp_path)
    first, second = (logits(load(tmp_path, load_format="dummy")) for _ in range(2))
    assert bool(first.isfinite().all())
    assert torch.equal(first, second)
    assert first.std() > 0


@pytest.mark.parametrize(
    ("saved", "native", "expected"),
    [
        ("float32", False, torch.float32),
        ("float16", False, torch.float32),
        ("float16", True, torch.float32),
        ("bfloat16", False, torch.float32),
        ("bfloat16", True, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_auto_takes_a_half_precision_type_only_on_cpus_that_support_it(
    monkeypatch: pytest.MonkeyPatch, key: str, saved: str, native: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert resolve_dtype("auto", {key: saved}, CPU) == expected
    assert resolve_dtype("auto", {"text_config": {key: saved}}, CPU) == expected
    assert resolve_dtype("bfloat16", {key: saved}, CPU) == torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_float16_on_a_cpu_is_refused_with_what_to_use_instead(family: str) -> None:
    with pytest.raises(
        InvalidOption, match="dtype: expected auto, bfloat16 or float32 on a CPU, got float16"
    ):
        load(checkpoint(family), dtype="float16")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_float16_checkpoint_gives_a_cpu_the_logits_of_its_values_in_float32(
    family: str, tmp_path: Path
) -> None:
    found = []
    for dtype in (torch.float16, torch.float32):
        path = copy_checkpoint(family, tmp_path / str(dtype))

        def rounded(tensors: dict[str, torch.Tensor], dtype: torch.dtype = dtype) -> None:
            tensors.update({name: tensor.half().to(dtype) for name, tensor in tensors.items()})

        edit_tensors(path, rounded)
        edit_config(path, dtype=str(dtype).removeprefix("torch."))
        loaded = load(path, dtype="auto")
        assert loaded.config.dtype == "float32"
        found.append(logits(loaded))
    assert torch.equal(*found)


def test_workers_may_share_gpus_and_ranks_of_one_model_may_not() -> None:
    whole = [gpu_number(None, local_rank, 2, is_alone=True) for local_rank in range(4)]
    assert whole == [0, 1, 0, 1]
    assert gpu_number(1, 0, 2, is_alone=True) == 1
    assert gpu_number(None, 1, 2, is_alone=False) == 1
    for asked, local_rank, is_alone in ((None, 2, False), (2, 0, True)):
        with pytest.raises(InvalidOption, match=r"expected a GPU below 2, .*, got cuda:2"):
            gpu_number(asked, local_rank, 2, is_alone=is_alone)


@pytest.mark.parametrize(
    ("asked", "num_parameters", "expected"),
    [(None, 7_000_000_000, 2), (None, 1_000_000, 1), (2, 1_000_000, 2), (1, 7_000_000_000, 1)],
)
def test_a_small_model_takes_one_thread_unless_more_are_asked_for(
    asked: int | None, num_parameters: int, expected: int
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        set_threads(asked, num_parameters)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_generation_defaults_come_before_the_configuration(tmp_path: Path) -> None:
    path = copy_checkpoint("llama", tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 7]}))
    loaded = load(path)
    assert loaded.eos_token_ids == (7, 9)
    assert loaded.bos_token_id == BOS_TOKEN_ID


@pytest.mark.parametrize(
    ("stored", "expected"),
    [("</s>", ()), ([7, "9", [8]], (7,)), ([7, VOCAB_SIZE, -1, 10**30], (7,)), (True, ())],
)
def test_what_is_no_token_ends_no_sequence_and_is_a_warning(
    stored: object, expected: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy_checkpoint("llama", tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
    assert load(path).eos_token_ids == expected
    assert f"eos_token_id: expected ids of the vocabulary's {VOCAB_SIZE} tokens" in caplog.text


def test_assets_are_the_files_a_frontend_needs_and_no_others() -> None:
    path = checkpoint("llama")
    assets = dict(iter_assets(path))
    assert set(assets) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all(content == (path / name).read_bytes() for name, content in assets.items())


def test_frontends_can_have_the_files_before_the_weights_are_loaded(tmp_path: Path) -> None:
    gguf, _ = make_gguf("llama", "Q8_0", tmp_path)
    phases: list[str] = []
    for path in (checkpoint("llama"), gguf):
        progress = LoadProgress(show_bar=False)
        progress.on_files = partial(lambda of: phases.append(of.state.phase), progress)
        loaded = load_model(ModelConfig(model=str(path), device="cpu"), progress=progress)
        assert progress.files is not None
        assert progress.files.contents == loaded.assets
        assert progress.files.fingerprint == loaded.fingerprint == fingerprint(path)
    assert phases[0] == "starting"
    killed = TokenizerProcess(gguf)
    os.kill(killed.pid, signal.SIGKILL)
    again = load_model(ModelConfig(model=str(gguf), device="cpu"), tokenizer=killed)
    other = load_model(ModelConfig(model=str(gguf), device="cpu"), tokenizer=TokenizerProcess(gguf))
    assert again.assets == other.assets == loaded.assets
    assert len(phases) == 2  # those of the GGUF file are made while its weights are read


def test_files_of_a_model_that_pools_have_no_fingerprint_before_it_is_loaded() -> None:
    progress = LoadProgress(show_bar=False)
    config = ModelConfig(model=str(checkpoint("llama")), device="cpu", runner="pooling")
    assert load_model(config, progress=progress).pooler is not None
    assert progress.files is None


def test_chat_templates_and_tokens_in_files_of_their_own_are_assets(tmp_path: Path) -> None:
    path = copy_checkpoint("llama", tmp_path)
    more = path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("T")
    (more / "notes.txt").write_text("no template")
    names = {"chat_template.jinja", "chat_template.json", "added_tokens.json"}
    for name in names:
        (path / name).write_text("{}")
    assets = dict(iter_assets(path))
    assert names < set(assets)
    assert assets["tool_use.jinja"] == b"T"
    assert "notes.txt" not in assets


def test_a_tokenizer_of_the_older_form_is_converted(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    words = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer"})
    )
    content = dict(iter_assets(tmp_path))["tokenizer.json"]
    assert Tokenizer.from_str(content.decode()).encode("ab ab").ids == [3, 4, 3]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("vocab.json", '{"a": 0, "b": 1}', "has no tokens for 'a b'"),
        ("tokenizer.model", "no pieces", "tokenizer.model"),
        ("tekken.json", "{}", "tekken.json is not read, only a tokenizer.json is"),
    ],
)
def test_files_that_are_no_tokenizer_are_named_and_not_an_empty_one(
    name: str, content: str, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The library makes an empty vocabulary where it does not find what it looks for."""
    (tmp_path / name).write_text(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer"})
    )
    assert "tokenizer.json" not in dict(iter_assets(tmp_path))
    assert problem in caplog.text


def test_a_model_without_a_tokenizer_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy_checkpoint("llama", tmp_path)
    (model / "tokenizer.json").unlink(missing_ok=True)
    executor = TorchExecutor(CacheConfig(), Profiler(tmp_path), lambda: load(model))
    executor.load()
    assert f"no tokenizer.json, only token ids can be prompts model={model}" in caplog.text


def test_a_model_with_an_unreadable_tokenizer_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy_checkpoint("llama", tmp_path)
    (model / "tokenizer.json").write_text("{}")
    executor = TorchExecutor(CacheConfig(), Profiler(tmp_path), lambda: load(model))
    assert not executor.load().structured_output
    assert "no structured output error=tokenizer.json: " in caplog.text


def fingerprint(model_dir: Path, *options: str) -> str:
    return fingerprints.fingerprint(model_dir, dict(iter_assets(model_dir)), *options)


def test_the_fingerprint_differs_between_models_but_not_between_copies(tmp_path: Path) -> None:
    original = checkpoint("llama")
    copied = Path(shutil.copytree(original, tmp_path / "copy"))
    assert fingerprint(copied) == fingerprint(original)
    assert fingerprint(copied, "dummy") != fingerprint(original)
    edit_tensors(copied, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].mul_(1.01))
    assert fingerprint(copied) != fingerprint(original)  # another version of the same model
    shutil.copy(original / "model.safetensors", copied)
    assert fingerprint(copied) == fingerprint(original)
    assert fingerprint(make_checkpoint("llama", tmp_path / "other", hidden_size=32)) != fingerprint(
        original
    )
    (copied / "tokenizer_config.json").write_text("{}")
    assert fingerprint(copied) != fingerprint(original)


def test_batch_invariance_can_be_required_where_it_holds() -> None:
    assert load(checkpoint("llama"), batch_invariant=True).batch_invariant
    with pytest.raises(InvalidOption, match="reference is not batch-invariant"):
        load(checkpoint("llama"), batch_invariant=True, attention_backend="reference")

"""Errors name the path, option or checkpoint that is wrong."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.capabilities import bound_by_permissions
from tests.support.checkpoints import checkpoint, make_checkpoint
from tests.support.gguf_files import make_gguf
from tests.support.hub import HubHandler
from tests.support.loading import copy_checkpoint, edit_config, edit_tensors, load
from worker_service.config import CacheConfig, ModelConfig
from worker_service.distributed.layout import Layout
from worker_service.errors import (
    BadAdapter,
    BadCheckpoint,
    InvalidOption,
    ModelNotFound,
    OutOfMemory,
    UnsupportedModel,
    WorkerError,
)
from worker_service.loader import check_model, load_model
from worker_service.loader.adapters import read_adapter

Tensors = dict[str, torch.Tensor]

KEYS = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return copy_checkpoint("llama", tmp_path)


def _refuse(path: Path, **options: object) -> None:
    """Raise the error with which the model is refused, before anything is loaded, too."""
    config = ModelConfig(model=str(path), device="cpu", **options)  # type: ignore[arg-type]
    with pytest.raises(WorkerError) as early:
        check_model(config, CacheConfig())
    with pytest.raises(WorkerError) as late:
        load_model(config)
    assert repr(early.value) == repr(late.value)
    raise early.value


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", "^/no/such/folder: no such directory or file"),
        ("folder/model.gguf", r"^folder/model\.gguf: no such file$"),
        ("nosuchfolder", "no such directory or file, and not of a hub id's form"),
        (__file__, r"test_faults\.py is a file; expected"),
        (os.fspath(Path(__file__).parent), r"holds no config\.json"),
    ],
    ids=["absolute", "gguf", "no hub id", "a file", "a folder"],
)
def test_what_is_no_folder_of_a_model_is_named(path: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        _refuse(Path(path))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: (path / "config.json").write_text("{"),
            r"config\.json cannot be read as JSON",
        ),
        (lambda path: edit_config(path, architectures=None), "names no architecture"),
        (
            lambda path: edit_config(path, intermediate_size=None),
            "LlamaForCausalLM needs the key 'intermediate_size'",
        ),
        (
            lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
            r"only pickled weights \(pytorch_model\.bin\)",
        ),
        (lambda path: (path / "model.safetensors").unlink(), r"holds no \*\.safetensors file"),
        (
            lambda path: (path / "model.safetensors.index.json").write_text(
                '{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}'
            ),
            "names missing files: model-00001-of-00002",
        ),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_named_before_it_is_loaded(
    llama: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(llama)
    with pytest.raises(BadCheckpoint, match=message):
        _refuse(llama)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architectures", [None], "names no architecture"),
        ("num_attention_heads", 0, "num_attention_heads: expected a positive number, got 0"),
        ("hidden_size", "64", "hidden_size: expected a positive number, got '64'"),
        ("num_hidden_layers", 10**20, "num_hidden_layers: expected a positive number, got 1000"),
        ("head_dim", "16", "head_dim: expected a number, got '16'"),
        ("global_head_dim", "16", "global_head_dim: expected a number, got '16'"),
        ("head_dim", [16], r"head_dim: expected a number, got \[16\]"),
        ("max_position_embeddings", "8", "max_position_embeddings: expected a number, got '8'"),
        ("max_position_embeddings", -1, "max_position_embeddings: expected a number, got -1"),
        ("max_position_embeddings", 10**20, "max_position_embeddings: expected a number, got 1000"),
        ("hidden_act", -1, "hidden_act: expected a name, got -1"),
        ("hidden_act", [], r"hidden_act: expected a name, got \[\]"),
        ("intermediate_size", [88, 88], r"inner_size: expected a number, got \[88, 88\]"),
        ("rms_norm_eps", "1e-5", "norm.eps: expected a number, got '1e-5'"),
        ("rms_norm_eps", float("nan"), "norm.eps: expected a number, got nan"),
        ("intermediate_size", 0, "feed_forward.inner_size: expected at least 1, got 0"),
        ("rope_parameters", {"rope_theta": "big"}, "rope_theta: expected a number above 0, got 'b"),
        ("rope_parameters", {"rope_theta": -1}, "rope_theta: expected a number above 0, got -1"),
        ("rope_parameters", "x", "rope_parameters: expected an object, got 'x'"),
        (
            "rope_parameters",
            {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
            "rope_theta: expected a number above 1, got 1.0",
        ),
        (
            "rope_parameters",
            {"rope_type": "llama3", "factor": 4.0},
            "low_freq_factor: expected a positive number, which rope_type llama3 needs, got None",
        ),
        (
            "rope_parameters",
            {"rope_type": "yarn", "factor": -2},
            "factor: expected a positive number, which rope_type yarn needs, got -2",
        ),
    ],
)
def test_a_setting_of_another_kind_is_named_before_the_model_is_loaded(
    llama: Path, key: str, value: Any, message: str
) -> None:
    edit_config(llama, **{key: value})
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=message):
        _refuse(llama)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", "64", "hidden_size: expected a positive number, got '64'"),
        ("num_attention_heads", 0, "num_attention_heads: expected a positive number, got 0"),
        ("hidden_act", 5, "config.json: hidden_act: expected a name, got 5"),
        ("layer_types", ["full_attention"], "config.json: .*`layer_types`"),
        ("text_config", "x", "text_config: expected an object, got 'x'"),
    ],
)
def test_settings_of_another_kind_are_named_of_models_of_transformers_too(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    path = copy_checkpoint("phi", tmp_path)
    edit_config(path, **{key: value})
    with pytest.raises(BadCheckpoint, match=message):
        load(path)


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("falcon", "activation", {"a": 1}, "activation: expected a name, got {'a': 1}"),
        ("falcon", "activation", 1.5, "activation: expected a name, got 1.5"),
        ("opt", "activation_function", [], r"activation: expected a name, got \[\]"),
        ("gpt2", "n_layer", 10**20, "n_layer: expected a positive number, got 1000"),
        ("mpt", "n_heads", "4", "n_heads: expected a positive number, got '4'"),
        ("llama4", "no_rope_layers", [1], "a value cannot be used: list index out of range"),
        ("deepseek_v3", "kv_lora_rank", -1, "kv_lora_rank: expected at least 0, got -1"),
        ("deepseek_v3", "q_lora_rank", -8, "q_lora_rank: expected at least 0, got -8"),
        ("gemma3n", "laurel_rank", -1, "laurel_rank: expected at least 0, got -1"),
        ("gpt2", "n_positions", -1, "n_positions: expected at least 0, got -1"),
        ("qwen3_next", "linear_num_key_heads", -1, "num_key_heads: expected at least 0, got -1"),
        ("qwen3_next", "decoder_sparse_step", 0, "by zero; 0 are: .*decoder_sparse_step"),
        ("glm4", "rope_parameters", {"partial_rotary_factor": 0.01}, "expected 2 to 24 .*, got 0"),
        ("glm4", "rope_parameters", {"partial_rotary_factor": 3}, "expected 2 to 24 .*, got 72"),
    ],
)
def test_settings_of_another_kind_are_named_of_other_families_too(
    family: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    path = copy_checkpoint(family, tmp_path)
    edit_config(path, **{key: value})
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=message):
        _refuse(path)


@pytest.mark.parametrize("of_text", [{"hidden_size": "x"}, {"sliding_window": "x"}])
def test_settings_of_another_kind_are_named_of_multimodal_models_too(
    of_text: dict[str, object], tmp_path: Path
) -> None:
    path = copy_checkpoint("gemma3", tmp_path)
    text = {"model_type": "gemma3_text", **of_text}
    architectures = ["Gemma3ForConditionalGeneration"]
    edit_config(path, architectures=architectures, model_type="gemma3", text_config=text)
    with pytest.raises(BadCheckpoint, match=f"config.json: .*{next(iter(of_text))}"):
        load(path)


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("nemotron_h", "mamba_hidden_act", "gelu", "mamba_hidden_act: expected silu, got gelu"),
        ("lfm2", "conv_L_cache", 1, "width of convolutions: expected 2 to 8, got 1"),
    ],
)
def test_a_part_with_a_state_that_is_not_computed_is_refused(
    family: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    path = copy_checkpoint(family, tmp_path)
    edit_config(path, **{key: value})
    with pytest.raises(UnsupportedModel, match=message):
        load(path)


def test_a_model_without_an_activation_is_refused(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "hidden_act": None}))
    with pytest.raises(UnsupportedModel, match="expected the name of an activation, got none"):
        _refuse(llama)


@pytest.mark.parametrize("kept", [3, 50, 4000, 100_000])
def test_a_truncated_file_is_named(llama: Path, kept: int) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is truncated or damaged"):
        _refuse(llama)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (
            lambda tensors: tensors.update({"model.extra": torch.zeros(1)}),
            r"unexpected tensors: model\.extra",
        ),
        (
            lambda tensors: tensors.update({KEYS: torch.zeros(3, 4)}),
            rf"{KEYS} is \[3, 4\], expected \[48, 64\]",
        ),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name],
            "and 10 more",
        ),
    ],
    ids=["missing", "unexpected", "misshapen", "many"],
)
def test_tensors_that_do_not_fit_are_named(
    llama: Path, edit: Callable[[Tensors], object], message: str
) -> None:
    edit_tensors(llama, edit)
    with pytest.raises(BadCheckpoint, match=message):
        load(llama)


def test_misshapen_tensors_of_models_of_transformers_are_named(tmp_path: Path) -> None:
    path = make_checkpoint("phi", tmp_path)
    edit_tensors(path, lambda tensors: tensors.update({KEYS: torch.zeros(3, 4)}))
    where = re.escape(f"{path / 'model.safetensors'}: weights do not fit PhiForCausalLM")
    with pytest.raises(
        BadCheckpoint, match=rf"^{where}: misshapen tensors: .*{KEYS}.*3, 4.*32, 64"
    ):
        load(path)


def test_the_folder_of_a_model_of_transformers_in_several_files_is_named(tmp_path: Path) -> None:
    path = make_checkpoint("phi", tmp_path)
    tensors = load_file(path / "model.safetensors")
    missing, *others = sorted(tensors)
    (path / "model.safetensors").unlink()
    for part, names in enumerate((others[::2], others[1::2])):
        save_file({name: tensors[name] for name in names}, path / f"part-{part}.safetensors")
    where = re.escape(f"{path}: weights do not fit PhiForCausalLM: missing tensors: {missing}")
    with pytest.raises(BadCheckpoint, match=f"^{where}$"):
        load(path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w1.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.0.up_proj.weight"),
        ("flex_olmo", "model.layers.1.mlp.experts.0.up_proj.weight"),
    ],
)
def test_a_missing_or_misshapen_tensor_of_an_expert_is_named(
    family: str, name: str, tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path)
    whole = load_file(path / "model.safetensors")[name]
    edit_tensors(path, lambda tensors: tensors.update({name: whole[1:].clone()}))
    found, expected = [whole.shape[0] - 1, whole.shape[1]], list(whole.shape)
    where = re.escape(f"{path / 'model.safetensors'}: weights do not fit ")
    message = f"{name} is {found}, expected {expected}"
    of_shapes = r"weights do not fit .*config\.json: "
    if family == "flex_olmo":  # through `transformers`
        of_shapes = f"{where}.*misshapen tensors: "
    with pytest.raises(BadCheckpoint, match=f"^{of_shapes}{re.escape(message)}"):
        load(path)
    edit_tensors(path, lambda tensors: tensors.pop(name))
    with pytest.raises(BadCheckpoint, match=rf"^{where}.*missing tensors: {re.escape(name)}$"):
        load(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 0}, "max_model_len: expected at least 1, got 0"),
        ({"dtype": "float8"}, "dtype: expected one of auto, float32, bfloat16, float16"),
        ({"load_format": "gguf"}, "load_format: expected one of safetensors, dummy"),
        (
            {"attention_backend": "warp"},
            "attention_backend: expected one of flash, triton, cpu, reference",
        ),
        ({"device": "tpu"}, "device: expected auto, cpu or cuda:N, got 'tpu'"),
        ({"device": "meta"}, "device: expected auto, cpu or cuda:N, got 'meta'"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        load(checkpoint("llama"), **options)


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"max_model_len: the model's limit is 256, got 257"):
        _refuse(checkpoint("llama"), max_model_len=257)


def test_a_length_whose_positions_cannot_be_computed_is_refused(llama: Path) -> None:
    """As a damaged file's, which would take the worker hours and terabytes."""
    edit_config(llama, max_position_embeddings=2**31 - 1)
    expected = r"max_model_len: expected at most 16777216, got 2147483647, the model's own limit"
    with pytest.raises(InvalidOption, match=expected):
        _refuse(llama)
    assert load(llama, max_model_len=100).model.max_model_len == 100


@pytest.mark.parametrize(
    ("family", "layout", "message"),
    [
        ("llama", {"tensor_parallel_size": 5}, "5 ranks cannot share the model's 4 attention"),
        ("llama", {"pipeline_parallel_size": 9}, "expected at most 2, the model's layers, got 9"),
        ("phi", {"tensor_parallel_size": 2}, "expected 1 for PhiForCausalLM, got 2"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(
    family: str, layout: dict[str, int], message: str
) -> None:
    with pytest.raises(InvalidOption, match=message):
        _refuse(checkpoint(family), layout=Layout(**layout))


def test_a_cache_beyond_the_memory_is_refused_before_anything_is_loaded() -> None:
    config = ModelConfig(model=str(checkpoint("llama")), device="cpu")
    with pytest.raises(OutOfMemory, match=r"kv_cache_memory: 1048576\.0 GiB are more than the"):
        check_model(config, CacheConfig(kv_cache_memory=2**50))


CHECK = """
import json, os, sys
from worker_service.config import CacheConfig, ModelConfig
from worker_service.errors import WorkerError
from worker_service.loader import check_model

assert "huggingface_hub" not in sys.modules  # it reads the variables when it is imported
for models, variables in json.load(sys.stdin):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    os.environ.update(variables)
    for model in models:
        try:
            check_model(ModelConfig(model=model, device="cpu"), CacheConfig())
        except WorkerError as error:
            print(error, flush=True)
    os._exit(0)
"""


class Hub(HubHandler):
    """Answers by owner; `some` has models with a broken `config.json` and without one."""

    requests: ClassVar[list[str]] = []
    answers: ClassVar = {
        "some": (404, "EntryNotFound"),
        "others": (404, "RepoNotFound"),
        "private": (401, "RepoNotFound"),
        "gated": (403, "GatedRepo"),
    }

    def do_HEAD(self) -> None:
        self.requests.append(self.path)
        if self.path.startswith("/some/broken/"):
            self.answer(200, b"{", ETag='"etag"')
        elif self.path.startswith("/api/models/some/file"):
            self.answer(200, b'{"id": "some/file", "siblings": []}')
        else:
            status, code = self.answers.get(self.path.split("/")[1], (500, ""))
            self.answer(status, b"", **{"X-Error-Code": code})

    do_GET = do_HEAD


def _checked(*runs: tuple[list[str], dict[str, str]], **env: str) -> list[str]:
    """The errors of `check_model` for some models, each time in another process, whose library
    reads these variables and `env`; they are forks of one that has imported torch."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        input=json.dumps(runs),
        env=os.environ | {"NO_PROXY": "127.0.0.1", "PYTHONPATH": os.pathsep.join(sys.path)} | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Retrying" not in done.stderr
    return done.stdout.splitlines()


def test_why_the_hub_gives_no_model_is_said_after_one_request(tmp_path: Path) -> None:
    models = ["some/broken", "some/file", "others/model"]
    models += ["private/model", "gated/model", "broken/hub"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{hub.server_port}"
        said = _checked((models, {"HF_ENDPOINT": endpoint}), HF_HOME=str(tmp_path))
        hub.shutdown()
        thread.join()
    broken, without, unknown, private, gated, failing = said
    assert "config.json cannot be read as JSON" in broken
    assert without.startswith("some/file: on the Hugging Face hub, but with neither a config.")
    assert unknown.startswith("others/model: no such directory or file, and the Hugging Face hub")
    assert unknown.endswith("has none that HF_TOKEN may read (status 404)")
    assert private.endswith("has none that HF_TOKEN may read (status 401)")
    assert gated.startswith("gated/model: gated on the Hugging Face hub: accept its conditions")
    assert "500 Internal Server Error" in failing
    for owner in ("private", "gated", "broken"):
        assert len([path for path in Hub.requests if path.startswith(f"/{owner}/")]) == 1


def test_why_the_hub_cannot_be_reached_is_said_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed = f"http://127.0.0.1:{probe.getsockname()[1]}"
    variables: list[dict[str, str]] = [
        {"HF_ENDPOINT": closed},
        {"HF_ENDPOINT": "http://no.such.host.invalid"},
        {
            "HF_ENDPOINT": "https://127.0.0.1:1",
            "HTTPS_PROXY": closed,
            "NO_PROXY": "",
            "no_proxy": "",
        },
        {"HF_HUB_OFFLINE": "1"},
    ]
    refused, unknown, proxied, offline = _checked(
        *((["a/b"], each) for each in variables), HF_HOME=str(tmp_path)
    )
    (of_type,) = _checked((["a/b:Q8_0"], variables[0]), HF_HOME=str(tmp_path))
    assert of_type == refused.replace("a/b:", "a/b:Q8_0:", 1)
    assert refused.endswith(f"nor is it in the local cache: {closed}: Connection refused")
    assert "http://no.such.host.invalid: " in unknown
    assert "name" in unknown.lower()
    assert proxied.endswith("Connection refused (through the proxy in HTTPS_PROXY)")
    assert offline == (
        "a/b: no such directory or file, nor in the local cache, and HF_HUB_OFFLINE is set"
    )


def test_a_model_in_the_hubs_cache_is_checked_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cached files may be older than those of the hub."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--someone--some-model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("abc")
    (cached / "snapshots/abc").mkdir(parents=True)
    (cached / "snapshots/abc/config.json").write_text("{")
    config = ModelConfig(model="someone/some-model", device="cpu")
    check_model(config, CacheConfig())
    with pytest.raises(BadCheckpoint, match=r"config\.json cannot be read as JSON"):
        load_model(config)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InvalidOption, match="torch finds no GPU"):
        load(checkpoint("llama"), device="cuda")


def test_cross_attention_in_gpt2_is_refused(tmp_path: Path) -> None:
    path = copy_checkpoint("gpt2", tmp_path)
    edit_config(path, add_cross_attention=True)
    with pytest.raises(UnsupportedModel, match="add_cross_attention: expected false"):
        load(path)


def test_scales_of_the_kv_cache_alone_are_no_quantization(llama: Path) -> None:
    settings = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    edit_config(llama, quantization_config=settings)
    load(llama)


WITHOUT_RIGHTS_OF_ROOT = """
import ctypes, os, sys
drop_from_bounding_set = 24
for capability in (1, 2):
    ctypes.CDLL(None).prctl(drop_from_bounding_set, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""A program that runs another one: root loses CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, by which it
reads every file; for others this does nothing."""


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", ".", "llama-Q8_0.gguf"]
)
def test_a_file_that_the_user_may_not_read_is_the_only_line_of_a_worker(
    llama: Path, tmp_path: Path, name: str
) -> None:
    path = make_gguf("llama", "Q8_0", tmp_path)[0] if name.endswith("gguf") else llama
    closed = path if name in (".", path.name) else path / name
    closed.chmod(0)
    if os.getuid() == 0:
        os.chown(closed, 12345, 12345)
    without_rights = [sys.executable, "-c", WITHOUT_RIGHTS_OF_ROOT]
    worker = [sys.executable, "-m", "worker_service", "--core", "127.0.0.1:1"]
    options = ["--listen", f"unix:{tmp_path}/w", "--model", str(path), "--log-level", "error"]
    done = subprocess.run(
        [*without_rights, *worker, *options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    closed.chmod(0o700)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {closed}")
    assert "permission denied" in line.lower()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "."])
def test_an_adapter_that_the_user_may_not_read_is_refused_by_its_path(
    llama: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    (folder / "adapter_model.safetensors").touch()
    loaded, closed = load(llama), folder / name
    closed.chmod(0)
    if os.getuid() == 0:
        os.chown(closed, 12345, 12345)
    with (
        pytest.raises(BadAdapter, match=f"^path: {closed}.*: permission denied; the worker runs"),
        bound_by_permissions(),
    ):
        read_adapter(str(folder), loaded)
    closed.chmod(0o700)

"""The files of a model, in a directory, on the hub or in this package; assets for frontends;
fingerprint; the files of an adapter.
"""

import copy
import hashlib
import json
import logging
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from worker_service.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE
from worker_service.config import EMBEDDED, local_model
from worker_service.errors import AdapterNotFound, BadCheckpoint, ModelNotFound
from worker_service.gguf.header import is_gguf
from worker_service.gguf.tokenizer import tokenizer_assets
from worker_service.gguf.tokenizer_process import TokenizerProcess
from worker_service.load_progress import LoadProgress
from worker_service.loader.gguf.config import gguf_config
from worker_service.loader.gguf.file import open_gguf
from worker_service.pooling_facts import PoolingFacts

logger = logging.getLogger(__name__)


_OF_BOTH = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id")
"""Keys of `config.json` that a multimodal model has for its text model as well."""

_EMBEDDED_DIR = Path(__file__).parents[2] / "embedded_model"
_WEIGHT_PATTERNS = ["*.safetensors", "*.safetensors.index.json"]
_OTHER_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


def resolve_model(
    model: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    progress: LoadProgress | None = None,
) -> Path:
    """Return the directory or GGUF file of `model`; a model of the hub is downloaded first.

    revision: of a model of the hub; weights: whether weight files are downloaded, too; progress:
    of the download. Raises ModelNotFound, which names the places that were searched.
    """
    if model == EMBEDDED:
        return _EMBEDDED_DIR
    if (found := local_model(model)) is not None:
        return found
    _require_hub_id(model)
    return _download(model, revision, weights, progress or LoadProgress())


def resolve_config(model: str, revision: str | None = None) -> Path | None:
    """Like `resolve_model`, but of a model of the hub only `config.json` is downloaded.

    None if the model is in the hub's local cache, which may be older than the hub.
    """
    if model == EMBEDDED or local_model(model) is not None:
        return resolve_model(model)
    _require_hub_id(model)
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )

    if try_to_load_from_cache(model, "config.json", revision=revision) is not None:
        return None
    with _hub_errors(model):
        # Asked once: the download repeats failures for 25 s, and hides their reason.
        get_hf_file_metadata(hf_hub_url(model, "config.json", revision=revision))
        return Path(hf_hub_download(model, "config.json", revision=revision)).parent


def resolve_adapter(path: str) -> Path:
    """Return the folder or file of an adapter; one of the hub is downloaded first.

    The path of nothing that exists is returned as it is, unless it has the form of a hub id. Raises
    AdapterNotFound, which names the places that were searched.
    """
    place = Path(path).expanduser()
    if place.exists() or path.startswith(("/", ".", "~")) or "/" not in path or is_gguf(place):
        return place
    from huggingface_hub import snapshot_download

    try:
        _require_hub_id(path)
        with _hub_errors(path):
            return Path(snapshot_download(path, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]))
    except ModelNotFound as error:
        raise AdapterNotFound(f"path: {error}") from error


def _require_hub_id(model: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if model.lower().endswith(".gguf"):
        raise ModelNotFound(f"{model}: no such file")
    try:
        validate_repo_id(model)
    except HFValidationError:
        raise ModelNotFound(
            f"{model}: no such directory or file, and not a hub id of the form owner/name"
        ) from None


def _download(model: str, revision: str | None, weights: bool, progress: LoadProgress) -> Path:
    from huggingface_hub import snapshot_download

    from worker_service.loader.files.hub_progress import download_bars

    patterns = _OTHER_PATTERNS + (_WEIGHT_PATTERNS if weights else [])
    logger.info("looking for the model on the hub model=%s revision=%s", model, revision)
    with _hub_errors(model), progress.phase("downloading") as advance:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=patterns,
                tqdm_class=download_bars(advance),
            )
        )


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Turn errors of the hub's library, and of its HTTP client, into ModelNotFound."""
    from huggingface_hub import constants, errors

    tried = f"{model}: no such directory or file, and the Hugging Face hub"
    try:
        yield
    except errors.RemoteEntryNotFoundError as error:
        raise ModelNotFound(
            f"{model}: on the Hugging Face hub, but without a config.json; download a GGUF file and"
            " name that as the model"
        ) from error
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{model}: gated on the Hugging Face hub: accept its conditions there, and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:  # which it also says of private models
        status = error.response.status_code
        raise ModelNotFound(f"{tried} has none that HF_TOKEN may read (status {status})") from error
    except errors.HfHubHTTPError as error:
        raise ModelNotFound(f"{tried} refused it: {' '.join(str(error).split())}") from error
    except Exception as error:  # the HTTP client's own, which depend on the library's version
        if constants.HF_HUB_OFFLINE:
            raise ModelNotFound(
                f"{model}: no such directory or file, nor in the local cache, and HF_HUB_OFFLINE is"
                " set"
            ) from error
        raise ModelNotFound(
            f"{tried} could not be reached, nor is it in the local cache:"
            f" {constants.ENDPOINT}:"
            f" {_cause(error)}{_proxy()}"
        ) from error


def _cause(error: BaseException) -> str:
    """What the first of a chain of errors says, on one line."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(text).splitlines()[0]


def _proxy() -> str:
    names = [name for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY") if os.environ.get(name)]
    return f" (through the proxy in {names[0]})" if names else ""


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return the content of `config.json`, or its equivalent from the metadata of a GGUF file.

    Raises BadCheckpoint or UnsupportedModel.
    """
    if is_gguf(model_dir):
        return gguf_config(model_dir)
    config = read_json(model_dir / "config.json")
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise BadCheckpoint(f"{model_dir / 'config.json'} names no architecture")
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise BadCheckpoint(f"config.json: text_config: expected an object, got {text!r}")
    for holder in (config, text):
        _require_sizes(holder)
    return _text_part(config)


_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def _require_sizes(config: Mapping[str, Any]) -> None:
    """Raise BadCheckpoint unless the sizes that all models have are positive, where they are
    given."""
    for key in _SIZES:
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise BadCheckpoint(f"config.json: {key}: expected a positive number, got {value!r}")


_TEXT_MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",  # positions of text are the same in all three axes
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
}
"""Text models of multimodal ones that can be served alone, by `model_type`."""

WHOLE_MODEL = "whole_model"
"""The key of the multimodal model's class in the configuration of its text model."""


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a multimodal model's text model, if that can be served alone; other
    configurations are returned unchanged."""
    whole, text = str(config["architectures"][0]), config.get("text_config") or {}
    if not whole.endswith("ForConditionalGeneration"):
        return config
    from transformers import AutoConfig  # which knows the defaults of absent keys

    try:
        read = AutoConfig.for_model(**copy.deepcopy(config))
    except (ValueError, TypeError, KeyError):
        return config  # which is refused by name
    except Exception as error:  # the library's own for values of another kind, by field
        raise BadCheckpoint(f"config.json: {' '.join(str(error).split())}") from error
    inner = read.get_text_config()
    name = _TEXT_MODELS.get(inner.model_type)
    if inner is read or name is None:
        return config
    # The whole model's keys, as far as it has them, apply to its text model.
    outer = {key: config.get(key, text.get(key)) for key in _OF_BOTH}
    is_tied = getattr(read, "tie_word_embeddings", None)  # which some keep in the text model
    tied = {"tie_word_embeddings": inner.tie_word_embeddings if is_tied is None else is_tied}
    return {**inner.to_dict(), **outer, **tied, "architectures": [name], WHOLE_MODEL: whole}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises BadCheckpoint if there is none."""
    content = _read_json(path)
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path} holds no JSON object")
    return content


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSON file. Raises BadCheckpoint if it is no list of objects."""
    content = _read_json(path)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise BadCheckpoint(f"{path} holds no list of JSON objects")
    return content


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read as JSON: {error}") from error


_MAX_TOKENS = 1 << 31
"""More than any vocabulary has."""


def special_tokens(
    model_dir: Path, config: Mapping[str, Any]
) -> tuple[tuple[int, ...], int | None]:
    """Return the ids of the tokens that end a sequence, and of the one that begins it, if any.

    `generation_config.json` takes precedence over `config.json`. What is no id of a token is logged
    and ignored.
    """
    generation_file = model_dir / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    inner = config.get("text_config") or {}
    num_tokens = config.get("vocab_size") or inner.get("vocab_size") or _MAX_TOKENS

    def ids(key: str) -> list[int]:
        value = next((h[key] for h in (generation, config, inner) if h.get(key) is not None), None)
        given = value if isinstance(value, list) else [] if value is None else [value]
        found = [token for token in given if type(token) is int and 0 <= token < num_tokens]
        if len(found) < len(given):
            logger.warning(
                "%s: expected ids of the vocabulary's %d tokens, others are not used: %r",
                *(key, num_tokens, value),
            )
        return found

    eos_ids, bos_ids = ids("eos_token_id"), ids("bos_token_id")
    return tuple(dict.fromkeys(eos_ids)), bos_ids[0] if bos_ids else None


ASSET_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
_SENTENCE_PIECES, _TEKKEN = "tokenizer.model", "tekken.json"
_SAMPLE = "a b"
"""A text that is tokens in every vocabulary; the library makes an empty one where it finds no file
that it knows."""

_SLOW_TOKENIZER_FILES = (_SENTENCE_PIECES, "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")


def iter_assets(
    model_dir: Path, tokenizer: TokenizerProcess | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yield (file name, content) of each file that frontends need and the model has.

    If a model has no `tokenizer.json` but the files of a slow tokenizer, `transformers` converts
    them if it can. A chat template in `tokenizer_config.json` stays there. Additional templates
    follow as `NAME.jinja`. For a GGUF file all assets are generated from its metadata; tokenizer:
    the process that does so, None: this one. Raises BadCheckpoint or UnsupportedModel.
    """
    if is_gguf(model_dir):
        yield "config.json", json.dumps(gguf_config(model_dir)).encode()
        files = None if tokenizer is None else tokenizer.files()
        if files is None:
            files = tokenizer_assets(model_dir, open_gguf(model_dir).metadata)
        yield from files.items()
        return
    for name in ASSET_NAMES:
        file = model_dir / name
        content = file.read_bytes() if file.is_file() else None
        if name == "tokenizer.json":
            content = _converted_tokenizer(model_dir) if content is None else content
            if content is not None and transformer_settings(model_dir).get("do_lower_case"):
                content = _in_lower_case(content)
        if content is not None:
            yield name, content
    for file in sorted(model_dir.glob(_MORE_TEMPLATES)):
        yield file.name, file.read_bytes()


def read_tokenizer(content: bytes) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`. Raises ValueError if it cannot be used."""
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # the library's own has no class
        raise ValueError(error) from error


_TRANSFORMER_SETTINGS = "sentence_*_config.json"


def transformer_settings(model_dir: Path) -> Mapping[str, Any]:
    """The content of sentence-transformers' `sentence_bert_config.json`, or of its equivalent for
    another family; empty without one."""
    files = sorted(model_dir.glob(_TRANSFORMER_SETTINGS))
    return read_json(files[0]) if files else {}


def _in_lower_case(tokenizer: bytes) -> bytes:
    """A `tokenizer.json` that changes texts to lower case first."""
    content = json.loads(tokenizer)
    normalizers = [{"type": "Lowercase"}, content.get("normalizer")]
    content["normalizer"] = {"type": "Sequence", "normalizers": [*filter(None, normalizers)]}
    return json.dumps(content).encode()


def _converted_tokenizer(model_dir: Path) -> bytes | None:
    """A `tokenizer.json` converted from a slow tokenizer's files; None if there are none, or if
    `transformers` cannot convert them, which is logged."""
    if not any(any(model_dir.glob(pattern)) for pattern in _SLOW_TOKENIZER_FILES):
        if any(model_dir.glob(_TEKKEN)):
            logger.warning("%s is not read, only a tokenizer.json is", _TEKKEN)
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, use_fast=True, trust_remote_code=False)
        if not tokenizer(_SAMPLE, add_special_tokens=False).input_ids:
            raise ValueError(f"what it finds in the files has no tokens for {_SAMPLE!r}")
    except Exception as error:  # tokenizers raise anything; the model can be served without one
        problem = str(error).splitlines()[:1]
        if (model_dir / _SENTENCE_PIECES).is_file() and find_spec("sentencepiece") is None:
            problem = [f"{_SENTENCE_PIECES} needs the package sentencepiece"]
        logger.warning("tokenizer cannot be converted to tokenizer.json error=%s", problem)
        return None
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        made = Path(folder) / "tokenizer.json"
        return made.read_bytes() if made.is_file() else None


_DENSE_LAYERS = "*_Dense/*.safetensors"
"""Those of sentence-transformers."""

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""


_NUM_SAMPLES, _SAMPLE_BYTES = 256, 64
"""Pieces of each weight file in a fingerprint, at equal distances: at least one of each matrix that
is a 256th of its file."""


def fingerprint(
    model_dir: Path,
    assets: Mapping[str, bytes],
    load_format: str = "safetensors",
    quantization: str | None = None,
    pooling: PoolingFacts | None = None,
) -> str:
    """Hash the assets, headers and samples of weight files, load format, quantization, and how the
    model pools, if it does.

    Not all weights are read, but `_NUM_SAMPLES` pieces of each file: two checkpoints with the same
    headers, such as two versions of a fine-tuned model, have the same fingerprint only if they
    agree in all of these. Returns 32 hexadecimal digits. Raises BadCheckpoint for a truncated file.
    """
    digest = hashlib.sha256(load_format.encode())
    if quantization is not None:
        _add(digest, quantization.encode())
    if pooling is not None:
        _add(digest, repr(pooling).encode())
    for name, content in assets.items():
        _add(digest, name.encode())
        _add(digest, content)
    if load_format == "safetensors":
        for name, file, header_bytes in _weight_files(model_dir):
            size = file.stat().st_size
            _add(digest, name.encode())
            _add(digest, str(size).encode())
            with file.open("rb", buffering=0) as stream:
                _add(digest, stream.read(header_bytes))
                for i in range(_NUM_SAMPLES):
                    stream.seek(header_bytes + (size - header_bytes) * i // _NUM_SAMPLES)
                    _add(digest, stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _weight_files(model_dir: Path) -> Iterator[tuple[str, Path, int]]:
    """Yield (name, file, bytes of its header), where the names of GGUF files are empty."""
    if is_gguf(model_dir):
        gguf = open_gguf(model_dir)
        for file, num_bytes in zip(gguf.files, gguf.header_bytes, strict=True):
            yield "", file, num_bytes
    for file in sorted([*model_dir.glob("*.safetensors"), *model_dir.glob(_DENSE_LAYERS)]):
        with file.open("rb") as stream:
            start = stream.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            raise BadCheckpoint(f"{file} is truncated")
        yield file.name, file, _LENGTH.size + min(*_LENGTH.unpack(start), _MAX_HEADER_BYTES)


def _add(digest: "hashlib._Hash", data: bytes) -> None:
    """Hash the data after its length, so that different lists of pieces have different digests."""
    digest.update(_LENGTH.pack(len(data)))
    digest.update(data)

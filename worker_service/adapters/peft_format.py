"""Adapters in the format of PEFT, of LoRA and of prompts: reading, checking, and the content that
identifies them.

The content is a JSON object that describes the modules and the prompt, spaces, a line end, and the
numbers of all matrices, in the order of the modules' names, of each module A, B and magnitudes, and
of the prompt. The spaces make the numbers begin at a multiple of `_ALIGNMENT` bytes.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from worker_service.adapters.store import AdapterInfo
from worker_service.errors import AdapterNotFound, AdaptersFull, BadAdapter
from worker_service.text_part import of_other_parts, text_name

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type", "use_dora"}
"""Settings that changes are computed from."""

_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "peft_version",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "lora_dropout",
    "fan_in_fan_out",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "lora_ga_config",
    "corda_config",
    "qalora_group_size",
    "runtime_config",
    "ensure_weight_tying",
    "monteclora_config",
    "velora_config",
}
"""Settings of training, and those that the names and shapes of tensors say again."""

_KINDS: Mapping[str, tuple[type, ...]] = {
    "rank_pattern": (dict,),
    "alpha_pattern": (dict,),
    "target_modules": (list, str),
    "target_parameters": (list,),
}
"""The JSON values of settings that have parts."""

_NAMES_OF_KINDS: Mapping[type, str] = {dict: "an object", list: "an array", str: "a string"}

_PROMPT_TYPES = ("PROMPT_TUNING", "P_TUNING")
"""Types of adapters that are the embeddings of virtual tokens. Of P-tuning, PEFT saves what its
encoder has computed."""

_PROMPT_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
    *("peft_version", "num_attention_heads", "num_layers"),
    *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path"),
    *("tokenizer_kwargs", "encoder_reparameterization_type", "encoder_hidden_size"),
    *("encoder_num_layers", "encoder_dropout"),
}
"""Settings of prompts that do not change what is computed with their embeddings."""

_PROMPT_SHAPE = {"peft_type", "num_transformer_submodules", "num_virtual_tokens", "token_dim"}
"""Settings of prompts that are checked."""

_PROMPT = "prompt_embeddings"

_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the weights of the base as they are."""

_ALIGNMENT = 64

_NAME = re.compile(
    r"base_model\.model\.(.+)\.lora_"
    r"(?:([AB])\.weight|embedding_([AB])|(magnitude)_vector(?:\.weight)?)"
)
_BASE_NAME = re.compile(r"base_model\.model\.(.+)\.base_layer\.weight")

_EXPERTS, _INSIDE = ".experts", ".base_layer"
_GATE_UP, _UP, _DOWN = "gate_up_proj", "up_proj", "down_proj"
STACKS = tuple(f"{_EXPERTS}.{kind}" for kind in (_GATE_UP, _UP, _DOWN))
"""Ends of the names of parameters with the weights of all experts."""

CheckBase = Callable[[str, Tensor], None]
"""Raises BadAdapter unless a module of the base has this weight."""


class LoraModule(NamedTuple):
    """The change of one linear layer: x @ A.T @ B.T * scale is added to its output. Tokens are the
    inputs of an embedding, so that x has a 1 at one of them. A layer that has a bias adds it to the
    result."""

    a: Tensor
    """[rank, in_features]."""

    b: Tensor
    """[out_features, rank]."""

    scale: float
    num_experts: int = 1
    """Experts whose weights are one parameter, if it is one of those. Then A has the rows of all
    experts, one after the other, and in B their columns take turns."""

    magnitudes: Tensor | None = None
    """float32 [out_features]: of DoRA, whose changed weight has rows of these norms."""

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.a.shape[0] // self.num_experts

    def of_expert(self, expert: int) -> "LoraModule":
        """The change of one expert's weight."""
        rows = slice(expert * self.rank, (expert + 1) * self.rank)
        return LoraModule(self.a[rows], self.b[:, expert :: self.num_experts], self.scale)


@dataclass(frozen=True, eq=False)
class ModelAdapter:
    """An adapter on the host: changes of layers, or a prompt. Implements
    `adapters.store.Adapter`."""

    modules: Mapping[str, LoraModule]
    """By name, as in the checkpoint of the base. Their matrices are parts of the content."""

    prompt: Tensor | None
    """[num_virtual_tokens, size]: embeddings that stand before a sequence's prompt; a part of the
    content. None: there are none."""

    content: mmap
    """See the module's docstring; not to be changed. It is in a file without a name, so that the
    memory is only what is read of it: steps use copies of the matrices."""

    @cached_property
    def info(self) -> AdapterInfo:
        """What the core learns of it."""
        return AdapterInfo(
            digest=hashlib.sha256(self.content).digest(),
            rank=max((module.rank for module in self.modules.values()), default=0),
            num_bytes=len(self.content),
            targets=tuple(sorted({name.rpartition(".")[2] for name in self.modules})),
            num_virtual_tokens=0 if self.prompt is None else len(self.prompt),
        )

    @classmethod
    def of_modules(
        cls, modules: Mapping[str, LoraModule], prompt: Tensor | None = None
    ) -> "ModelAdapter":
        """The adapter with these modules and this prompt, which are copied."""
        ordered = [(name, modules[name]) for name in sorted(modules)]
        described = [
            {
                "name": name,
                "rank": module.rank,
                "inputs": module.a.shape[1],
                "outputs": module.b.shape[0],
                "dtype": _name_of(module.a.dtype),
                "scale": module.scale,
                **({"experts": module.num_experts} if module.num_experts > 1 else {}),
                **({} if module.magnitudes is None else {"magnitudes": True}),
            }
            for name, module in ordered
        ]
        fields: dict[str, Any] = {"modules": described}
        numbers = [(m.a, m.b, m.magnitudes) for _, m in ordered]
        matrices = [matrix for of_module in numbers for matrix in of_module if matrix is not None]
        if prompt is not None:
            tokens, size = prompt.shape
            fields["prompt"] = {"tokens": tokens, "size": size, "dtype": _name_of(prompt.dtype)}
            matrices.append(prompt)
        header = json.dumps(fields, separators=(",", ":")).encode()
        content = bytearray(header)
        content += b" " * (-(len(header) + 1) % _ALIGNMENT) + b"\n"
        for matrix in matrices:
            content += matrix.contiguous().view(torch.uint8).numpy().data.cast("B")
        return cls.of_content(content)

    @classmethod
    def of_content(cls, numbers: bytearray) -> "ModelAdapter":
        """The adapter with this content. Raises BadAdapter if it is malformed."""
        if not numbers:
            raise BadAdapter("chunks: expected an adapter's content, got none")
        content = _in_file(numbers)
        at = content.find(b"\n") + 1
        modules, prompt = {}, None

        def matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            nonlocal at
            numbers = torch.frombuffer(content, dtype=dtype, count=rows * columns, offset=at)
            at += numbers.nbytes
            return numbers.view(rows, columns)

        try:
            fields = json.loads(content[:at])
            for described in fields["modules"]:
                num_experts, dtype = int(described.get("experts", 1)), _DTYPES[described["dtype"]]
                rank = int(described["rank"]) * num_experts
                a = matrix(rank, int(described["inputs"]), dtype)
                b = matrix(int(described["outputs"]), rank, dtype)
                scale = float(described["scale"])
                magnitudes = None
                if described.get("magnitudes"):
                    [magnitudes] = matrix(1, len(b), torch.float32)
                module = LoraModule(a, b, scale, num_experts, magnitudes)
                modules[str(described["name"])] = module
            if (described := fields.get("prompt")) is not None:
                sizes = int(described["tokens"]), int(described["size"])
                prompt = matrix(*sizes, _DTYPES[described["dtype"]])
        except (ValueError, KeyError, TypeError) as error:
            raise BadAdapter(f"chunks: expected an adapter's content, got {error!r}") from None
        if at != len(content) or (not modules and prompt is None):
            raise BadAdapter(f"chunks: expected {at} bytes, got {len(content)}")
        return cls(modules, prompt, content)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_file(content: bytearray) -> mmap:
    """The same content in a file. Raises AdaptersFull if there is no room for it."""
    try:
        with TemporaryFile() as file:
            file.write(content)
            file.flush()
            return mmap(file.fileno(), len(content), access=ACCESS_COPY)
    except OSError as error:
        raise AdaptersFull(f"TMPDIR: no room for {len(content)} bytes: {error}") from error


def _refuse_base(name: str, weight: Tensor) -> None:
    raise BadAdapter(f"{name}.base_layer.weight: expected none, got {list(weight.shape)}")


def read_peft(folder: Path, check_base: CheckBase = _refuse_base) -> ModelAdapter:
    """Read an adapter as `save_pretrained` of PEFT wrote it.

    check_base: is called for the weights of the base that were saved with it, which PEFT does for
    embeddings. Raises AdapterNotFound if there is none, and BadAdapter for one whose settings or
    tensors mean something that is not computed.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise AdapterNotFound(f"path: expected a folder with {CONFIG_FILE}, got {str(folder)!r}")
    try:
        settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadAdapter(f"{CONFIG_FILE}: expected JSON: {error}") from None
    if not isinstance(settings, dict):
        raise BadAdapter(f"{CONFIG_FILE}: expected an object, got {type(settings).__name__}")
    if settings.get("peft_type") in _PROMPT_TYPES:
        return ModelAdapter.of_modules({}, _prompt(_tensors(folder), settings))
    _check_settings(settings)
    tensors = _tensors(folder)
    for name in [*tensors]:
        if match := _BASE_NAME.fullmatch(name):
            check_base(text_name(match[1]), tensors.pop(name))
    modules = _modules(tensors, settings)
    base = settings.get("base_model_name_or_path")
    logger.info("adapter read folder=%s base=%s num_modules=%d", folder, base, len(modules))
    if others := [name for name in modules if not _is_target(name, settings)]:
        logger.warning(
            "adapter changes modules that its target_modules do not name, which PEFT would not"
            " folder=%s num=%d first=%s",
            folder,
            len(others),
            others[0],
        )
    return ModelAdapter.of_modules(_of_text(modules))


def _is_target(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether PEFT changes a module, as far as it depends on names alone."""
    targets = settings.get("target_modules") or []
    if isinstance(targets, str):
        return (
            targets == "all-linear"
            or _pattern("target_modules", targets).fullmatch(name) is not None
        )
    ends = [*targets, *(settings.get("target_parameters") or [])]
    return not ends or any(f".{name}".endswith(f".{end}") for end in ends)


def _pattern(field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise BadAdapter(
            f"{field}: expected regular expressions, got {pattern!r}: {error}"
        ) from None


def _check_settings(settings: Mapping[str, Any]) -> None:
    if (kind := settings.get("peft_type")) != "LORA":
        expected = ", ".join(("LORA", *_PROMPT_TYPES))
        raise BadAdapter(f"peft_type: expected one of {expected}, got {kind!r}")
    for name, value in settings.items():
        if name == "init_lora_weights":
            if value not in _PLAIN_STARTS:
                allowed = ", ".join(map(repr, _PLAIN_STARTS))
                raise BadAdapter(f"{name}: expected one of {allowed}, got {value!r}")
        elif name == "bias":
            if value not in ("none", None):
                raise BadAdapter(f"bias: expected 'none', got {value!r}")
        elif name not in _READ | _WITHOUT_EFFECT and value:
            raise BadAdapter(f"{name}: expected none, which is not computed, got {value!r}")
    for name, kinds in _KINDS.items():
        value = settings.get(name)
        if value is not None and not isinstance(value, kinds):
            expected = " or ".join(_NAMES_OF_KINDS[kind] for kind in kinds)
            raise BadAdapter(f"{name}: expected {expected}, got {value!r}")


def _prompt(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """The embeddings of virtual tokens. Raises BadAdapter if they mean something else."""
    if settings.get("num_transformer_submodules") not in (None, 1):
        got = settings["num_transformer_submodules"]
        raise BadAdapter(f"num_transformer_submodules: expected 1, of a decoder, got {got!r}")
    shape = [settings.get("num_virtual_tokens"), settings.get("token_dim")]
    for name, value in settings.items():
        if name not in _PROMPT_WITHOUT_EFFECT | _PROMPT_SHAPE and value:
            raise BadAdapter(f"{name}: expected none, which is not computed, got {value!r}")
    if [*tensors] != [_PROMPT]:
        raise BadAdapter(f"{WEIGHTS_FILE}: expected only {_PROMPT}, got {', '.join(tensors)}")
    check_tensor(_PROMPT, prompt := tensors[_PROMPT])
    if [*prompt.shape] != shape or not len(prompt):
        raise BadAdapter(f"{_PROMPT}: expected the shape {shape}, got {[*prompt.shape]}")
    return prompt


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickled = path.with_suffix(".bin").is_file()
        got = f"{path.stem}.bin, whose pickled weights are not read" if pickled else "no such file"
        raise BadAdapter(f"{folder}: expected {WEIGHTS_FILE}, got {got}")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        with suppress(FileNotFoundError):
            path.open("rb").close()  # raises PermissionError, which the library hides
        raise BadAdapter(f"{path}: expected a safetensors file: {error}") from None


def _modules(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, LoraModule]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            expected = "only base_model.model.MODULE.lora_A.weight and lora_B.weight"
            raise BadAdapter(f"{WEIGHTS_FILE}: expected {expected}, got {name!r}")
        check_tensor(name, tensor, num_dims=1 if match[4] else 2)
        pair, kind = pairs.setdefault(match[1], {}), match[2] or match[3] or match[4]
        if kind in pair:
            raise BadAdapter(
                f"{WEIGHTS_FILE}: expected one {kind} of {match[1]}, got {name!r}, too"
            )
        pair[kind] = tensor
    if not pairs:
        raise BadAdapter(f"{WEIGHTS_FILE}: expected at least one module, got none")
    found = {_parameter_of(name, pairs, settings): pair for name, pair in pairs.items()}
    return {name: module_of(name, pair, settings) for name, pair in found.items()}


def _of_text(modules: Mapping[str, LoraModule]) -> dict[str, LoraModule]:
    """The modules of a multimodal model's text model, with their names in that alone; of other
    models, all modules."""
    found: dict[str, LoraModule] = {}
    for name, module in modules.items():
        if text_name(name) in found:
            raise BadAdapter(f"{name}: expected one change of {text_name(name)}, got two")
        found[text_name(name)] = module
    if others := of_other_parts(found, modules):
        logger.warning(
            "adapter changes modules that are not of the text model, which are not used num=%d"
            " first=%s",
            len(others),
            min(others),
        )
    return {name: module for name, module in found.items() if name not in others}


def _parameter_of(name: str, names: Container[str], settings: Mapping[str, Any]) -> str:
    """The name of a module, or of a parameter with the weights of all experts.

    PEFT names a parameter by its module. That of gate and up projection, or of up projection alone,
    is before that of the down projection; if both are changed, it is the module inside.
    """
    module = name.removesuffix(_INSIDE)
    if not module.endswith(_EXPERTS):
        return name
    given = settings.get("target_parameters") or ()
    kinds = {parameter.rpartition(".")[2] for parameter in given} & {_GATE_UP, _UP, _DOWN}
    if name != module:
        kinds -= {_DOWN}
    elif f"{module}{_INSIDE}" in names:
        return f"{module}.{_DOWN}"
    if len(kinds) != 1:
        expected = f"one of {_GATE_UP}, {_UP} and {_DOWN}, as only one of them is in {name}"
        raise BadAdapter(f"target_parameters: expected {expected}, got {given!r}")
    return f"{module}.{kinds.pop()}"


def check_tensor(name: str, tensor: Tensor, *, num_dims: int = 2) -> None:
    """Raise BadAdapter unless a tensor is a matrix, or a vector, of finite numbers of an allowed
    dtype."""
    if tensor.dtype not in _DTYPES.values():
        raise BadAdapter(f"{name}: expected one of {', '.join(_DTYPES)}, got {tensor.dtype}")
    if tensor.dim() != num_dims:
        expected = "a matrix" if num_dims == 2 else "a vector"
        raise BadAdapter(f"{name}: expected {expected}, got the shape {list(tensor.shape)}")
    if not tensor.isfinite().all():
        raise BadAdapter(f"{name}: expected finite numbers, got NaN or infinity")


def module_of(name: str, pair: Mapping[str, Tensor], settings: Mapping[str, Any]) -> LoraModule:
    """The change of a layer by its matrices, A and B, and magnitudes. settings: those of `_READ`.
    Raises BadAdapter if they do not fit each other."""
    if not {"A", "B"} <= {*pair}:
        got = " and ".join(f"lora_{kind}" for kind in pair)
        raise BadAdapter(f"{name}: expected lora_A and lora_B, got only {got}")
    a, b = pair["A"], pair["B"]
    rank = _number(settings, "r", "rank_pattern", name)
    num_experts = 1
    if name.endswith(STACKS) and a.shape[0] % rank == 0:
        num_experts = max(1, int(a.shape[0] // rank))
    if not a.shape[0] == b.shape[1] == rank * num_experts:
        got = f"A {list(a.shape)} and B {list(b.shape)}"
        raise BadAdapter(f"{name}: expected matrices of rank {rank:g}, got {got}")
    if a.dtype != b.dtype:
        raise BadAdapter(f"{name}: expected one dtype, got {a.dtype} and {b.dtype}")
    alpha = _number(settings, "lora_alpha", "alpha_pattern", name)
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return LoraModule(a, b, scale, num_experts, _magnitudes(name, pair, settings))


def _magnitudes(
    name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> Tensor | None:
    """Those of a module, which all of an adapter have if it is one of DoRA."""
    found, uses_dora = tensors.get("magnitude"), bool(settings.get("use_dora"))
    if (found is not None) != uses_dora:
        expected, got = ("one", "none") if uses_dora else ("none", "one")
        problem = f"expected {expected}, as use_dora is {uses_dora}, got {got}"
        raise BadAdapter(f"{name}.lora_magnitude_vector: {problem}")
    if found is None:
        return None
    if found.shape[0] != tensors["B"].shape[0]:
        expected = f"{len(tensors['B'])} numbers"
        raise BadAdapter(f"{name}.lora_magnitude_vector: expected {expected}, got {len(found)}")
    return found.float()


def _number(settings: Mapping[str, Any], field: str, patterns: str, name: str) -> float:
    """A module's rank or alpha: that of the first pattern that its name matches, or the
    adapter's. PEFT's default for both is 8."""
    found = settings.get(patterns) or {}
    for pattern, value in found.items():
        if _pattern(patterns, rf"(.*\.)?({pattern})$").match(name):
            field, number = patterns, value
            break
    else:
        number = settings.get(field, 8)
    if (
        isinstance(number, bool)
        or not isinstance(number, int | float)
        or not 0 < number <= torch.finfo(torch.float32).max
    ):
        raise BadAdapter(f"{field}: expected a positive number, finite in float32, got {number!r}")
    return float(number)

"""Tiny random checkpoints with a draft head of their own, and the head in plain torch.

The head's layer is the last one of a model of `transformers` with a layer more, whose own module
computes it here.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import make_checkpoint
from tests.support.folders import folder_of_process

_BEHIND = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "norm": "shared_head.norm",
    "embedding": "embed_tokens",
    "head": "shared_head.head",
}
_QWEN = {
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "projection": "mtp.fc",
    "norm": "mtp.norm",
}
_QWEN_LAYERS = ["linear_attention", "full_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 3},
    "deepseek_v3_yarn": {"num_hidden_layers": 3},
    "glm4_moe": {"num_hidden_layers": 3},
    "glm4_moe_lite": {"num_hidden_layers": 3},
    "qwen3_next": {"layer_types": _QWEN_LAYERS},
    "qwen3_5": {"layer_types": _QWEN_LAYERS},
    "qwen3_5_moe": {"layer_types": _QWEN_LAYERS},
}
"""Settings of the model with a layer more, by family."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MTPCheckpoint:
    """Where a checkpoint with a head is, and the model with a layer more that it was made of."""

    path: Path
    full: Path
    layer: int
    """Index of the head's layer in `full`."""

    names: dict[str, str]
    """Names of the head's other modules."""

    def reference(self) -> "Reference":
        """The head in plain torch."""
        return Reference(self)


@cache
def mtp_checkpoint(family: str) -> MTPCheckpoint:
    """A checkpoint of this family, made once per process."""
    return make_mtp(family, folder_of_process("mtp") / family)


def make_mtp(family: str, folder: Path, **overrides: Any) -> MTPCheckpoint:
    """Write a checkpoint with a random head into `folder`; overrides: of its configuration."""
    path, full = folder / "model", folder / "full"
    for place in (path, full):
        make_checkpoint(family, place, **FAMILIES[family], **overrides)
    config = json.loads((path / "config.json").read_text())
    layer = config["num_hidden_layers"] - 1
    config["num_hidden_layers"] = layer
    for key in ("layer_types", "mlp_layer_types"):
        if config.get(key):
            config[key] = config[key][:layer]
    (path / "config.json").write_text(json.dumps(config))
    tensors, prefix = load_file(path / "model.safetensors"), f"model.layers.{layer}."
    is_qwen = family.startswith("qwen3")
    names = _QWEN if is_qwen else {part: prefix + name for part, name in _BEHIND.items()}
    if is_qwen:
        tensors = {name.replace(prefix, "mtp.layers.0."): t for name, t in tensors.items()}
    generator, size = torch.Generator().manual_seed(7), config["hidden_size"]
    for part, name in names.items():
        rows, columns = {"projection": (size, 2 * size)}.get(part, (config["vocab_size"], size))
        weight = 0.2 * torch.randn(rows, columns, generator=generator)
        if part.endswith("norm"):  # far from 1, so that a missing one changes drafts
            weight = (0.0 if is_qwen else 1.0) + 0.5 * torch.randn(size, generator=generator)
        tensors[f"{name}.weight"] = weight
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return MTPCheckpoint(path=path, full=full, layer=layer, names=names)


class Reference:
    """A head in plain torch, which computes a sequence from its first token on for each draft."""

    def __init__(self, made: MTPCheckpoint) -> None:
        import transformers

        config = json.loads((made.path / "config.json").read_text())
        kind = getattr(transformers, config["architectures"][0])
        options = {"attn_implementation": "eager", "dtype": torch.float32}
        self._target = kind.from_pretrained(made.path, **options).eval()
        full = kind.from_pretrained(made.full, **options).eval()
        self._layer, self._rotary = full.model.layers[made.layer], full.model.rotary_emb
        self._weights, self._names = load_file(made.path / "model.safetensors"), made.names
        self._offset = 1.0 if made.names is _QWEN else 0.0
        self._eps = config["rms_norm_eps"]
        shared = {
            "embedding": self._target.get_input_embeddings().weight,
            "head": self._target.get_output_embeddings().weight,
        }
        self._embedding, self._head = (
            self._weights.get(f"{made.names.get(part)}.weight", of_target)
            for part, of_target in shared.items()
        )
        self.tokens = torch.arange(len(self._head))

    @torch.no_grad()
    def logits(self, tokens: list[int], num_drafts: int) -> Tensor:
        """After `tokens`, whose last ones are drafts."""
        num_computed = len(tokens) - num_drafts - 1
        states = self._target.model(torch.tensor([tokens])).last_hidden_state[0]
        hidden = states[:num_computed]
        for _ in range(num_drafts + 1):
            following = self._embedding[torch.tensor(tokens[1 : len(hidden) + 1])]
            parts = [self._norm(following, "embedding_norm"), self._norm(hidden, "hidden_norm")]
            x = torch.cat(parts, dim=1) @ self._weight("projection").T
            output = self._norm(self._run(x), "norm")
            hidden = torch.cat([hidden, output[-1:]])
        return output[-1] @ self._head.T

    def _weight(self, part: str) -> Tensor:
        return self._weights[f"{self._names[part]}.weight"]

    def _norm(self, x: Tensor, part: str) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps)
        return scaled * (self._offset + self._weight(part))

    def _run(self, x: Tensor) -> Tensor:
        """The layer over all rows, [num_rows, size]."""
        num_rows = len(x)
        positions = torch.arange(num_rows)[None]
        mask = torch.full((num_rows, num_rows), float("-inf")).triu(1)[None, None]
        output = self._layer(
            x[None],
            position_embeddings=self._rotary(x[None], positions),
            attention_mask=mask,
            position_ids=positions,
        )
        return (output[0] if isinstance(output, tuple) else output)[0]

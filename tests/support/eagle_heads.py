"""Tiny random heads of EAGLE-3, in the layout of their authors."""

from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.models.draft_heads import head_tensors, write_head
from tests.support.checkpoints import MAX_POSITIONS, VOCAB_SIZE
from tests.support.folders import folder_of_process

HIDDEN_SIZE = 64
DRAFT_VOCAB_SIZE = 120

HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB_SIZE,
    "tie_word_embeddings": False,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
}
"""Of a target with at least two layers."""


def make_head(path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random head to `path`; overrides: of its configuration."""
    config = HEAD | overrides
    return write_head(path, head_tensors(config, seed=seed), config)


@cache
def head_for(hidden_size: int, vocab_size: int) -> Path:
    """The directory of a random head for targets of this size, made once per process."""
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size}
    return make_head(folder_of_process("head"), **sizes, draft_vocab_size=vocab_size // 3)

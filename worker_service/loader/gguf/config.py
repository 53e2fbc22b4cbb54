"""The configuration of a GGUF model as `transformers` would describe it."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.gguf.tokenizer import END_TOKENS
from worker_service.loader.gguf.file import Gguf, open_gguf
from worker_service.loader.gguf.gemma4 import GEMMA3N, GEMMA4, Gemma4
from worker_service.loader.gguf.hybrids import DELTA_NETS, HYBRIDS, STATES_ALONE, Hybrids
from worker_service.loader.gguf.metadata import ROPE_FREQUENCIES

_ROWS = Path(__file__).with_name("classes.txt").read_text(encoding="utf-8").splitlines()
_CLASSES = {row[0]: (row[1], row[2]) for row in map(str.split, _ROWS[1:])}
"""(class, `model_type`) by `general.architecture`."""

_MISTRAL = ("MistralForCausalLM", "mistral")
_MIXTRAL = ("MixtralForCausalLM", "mixtral")
"""The models with a sliding window, and with experts, whose architecture is `llama`, too."""
_OLMO3 = ("Olmo3ForCausalLM", "olmo3")
"""The model with a sliding window whose architecture is `olmo2`."""
_DEEPSEEK2 = ("DeepseekV2ForCausalLM", "deepseek_v2")
_YOUTU = ("YoutuForCausalLM", "youtu")
"""The models with scores by softmax, and without experts, whose architecture is `deepseek2`."""
_FALCON_MAMBA = ("FalconMambaForCausalLM", "falcon_mamba")
"""The model with norms before the recurrence whose architecture is `mamba`."""
_LATENT = ("deepseek_v2", "deepseek_v3", "youtu", "kimi_linear", "mistral4")
_WITH_EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoe"),
    *("glm4_moe", "ernie4_5_moe", "minimax_m2", "hunyuan_v1_moe", "deepseek_v2", "deepseek_v3"),
    *("lfm2_moe", "granitemoehybrid", "jamba", "phimoe", "kimi_linear", "qwen3_next"),
    *("qwen3_5_moe_text", GEMMA4, "llama4_text", "mistral4", "nemotron_h"),
)
_SIGMOID_SCORES = (
    *("glm4_moe", "minimax_m2", "deepseek_v3", "lfm2_moe", "kimi_linear", "nemotron_h"),
)
"""Mixtures of experts that are chosen by the sigmoid of their scores, not by a softmax."""
ENCODERS = ("bert", "nomic_bert", "modernbert")

_POOLINGS = ("ALL", "MEAN", "CLS", "LAST")
"""Names of `PoolingType` by `pooling_type`; the next number is that of a classifier."""

_CLASSIFIERS = {
    "bert": ("RobertaForSequenceClassification", ("cls", "cls.output")),
    "modernbert": ("ModernBertForSequenceClassification", ("cls", "cls.norm", "cls.output")),
}
"""Class and tensors of classifiers by `model_type`. Of others, files lack a layer: the pooler."""

LONG_ROPE = {
    "long_factor": "rope_factors_long.weight",
    "short_factor": "rope_factors_short.weight",
}
_CONTROL = 3

_END_NAMES = END_TOKENS.union(
    ("</s>", "<eos>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>"),
    ("<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)
"""With names that may also be text: those tokens end a text if the file says that they are
special."""

_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, which scale attention scores by hidden_size / num_heads
instead of head_dim."""

_WINDOW_PERIODS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gemma4": 6,
    "gpt-oss": 2,
    "modern-bert": 3,
    "cohere2": 4,
    "exaone4": 4,
    "olmo2": 4,
}
"""The last layer of each period, or the first of ModernBERT's, has full attention, unless the file
says otherwise."""

_WITH_WINDOWS = (*_WINDOW_PERIODS, "phi3", "phimoe")
"""Architectures that may have a window."""

_ROTATED_IN_PART = (
    *("phi3", "glm4", "glm4moe", "minimax-m2"),
    *("qwen3next", "qwen35", "qwen35moe"),
)
"""Architectures of which RoPE may rotate a part of each head."""

_WITHOUT_ROPE = ("jamba", "nemotron_h", "nemotron_h_moe")
"""Architectures whose files may name elements to rotate all the same."""

_OTHER_EPSILON = ("cohere2", "nemotron_h")
"""`model_type` of models with the number of layer norms, whichever norms they have."""

_SOFTMAX, _SIGMOID = 1, 2
"""Values of `expert_gating_func`."""

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
"""The parameters of all Llama 3 models with scaled RoPE; files hold only the resulting factors."""

_NO_EFFECT = (
    *(".vocab_size", ".tensor_data_layout", ".rope.scaling.finetuned"),
    ".rope.scaling.original_context_length",
    ".rope.dimension_sections",  # positions of text are the same in all of them
)
"""Ends of settings that describe a file or its history, or have an effect with others only."""

_SAVED = {"F32": "float32", "F16": "float16"}


def architecture_of(model_type: str) -> str | None:
    """`general.architecture` of files of models of this `model_type`; None if there are none."""
    found = {kind: architecture for architecture, (_, kind) in _CLASSES.items()}
    found |= {_MISTRAL[1]: "llama", _MIXTRAL[1]: "llama", _OLMO3[1]: "olmo2"}
    found[_FALCON_MAMBA[1]] = "mamba"
    return found.get(model_type)


def gguf_config(path: Path) -> dict[str, Any]:
    """The content that `config.json` would have. Raises BadCheckpoint or UnsupportedModel."""
    gguf = open_gguf(path)
    architecture = gguf.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _CLASSES:
        raise UnsupportedModel(
            f"{path}: general.architecture: expected one of {', '.join(_CLASSES)}, got"
            f" {architecture!r}"
        )
    return _Config(path, gguf, architecture).read()


def unread_settings(path: Path) -> list[str]:
    """Settings of a file's architecture that are not used. Raises as `gguf_config` does."""
    gguf = open_gguf(path)
    config = _Config(path, gguf, gguf.metadata["general.architecture"])
    config.read()
    return sorted(key for key in config.unread if not key.endswith(_NO_EFFECT))


@lru_cache(maxsize=2)
def _end_places(gguf: Gguf) -> Mapping[str, int]:
    """The ids of the tokens of `_END_NAMES`, in order. They are looked for once in a file, since
    there may be hundreds of thousands of tokens and the configuration is read several times."""
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    return {token: place for place, token in enumerate(tokens) if token in _END_NAMES}


class _Config(Hybrids, Gemma4):
    """Reads the metadata of one architecture."""

    def read(self) -> dict[str, Any]:
        """Return the equivalent of `config.json`."""
        tensors = self._gguf.tensors
        if "token_embd.weight" not in tensors:
            raise BadCheckpoint(f"{self._path}: missing tensor token_embd.weight")
        hidden_size = self._int("embedding_length")
        window = self._get("attention.sliding_window") and self._int("attention.sliding_window")
        name, kind = self._class(window)
        config: dict[str, Any] = {
            "architectures": [name],
            "model_type": kind,
            "dtype": self._dtype(),
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden_size,
            "num_hidden_layers": self._num_layers(),
            "max_position_embeddings": self._int("context_length"),
            "bos_token_id": self._token_id("bos_token_id"),
            "eos_token_id": self._eos_token_ids(),
            "pad_token_id": None,
        }
        if kind in STATES_ALONE:
            return config | self._states_alone(hidden_size, kind)
        num_heads = self._int("attention.head_count")
        head_dim, rotary_dim = self._head_dims(hidden_size // num_heads)
        config |= {
            "intermediate_size": self._of_layers(kind, "feed_forward_length"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._of_layers(kind, "attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "rope_parameters": self._rope(rotary_dim),
        }
        if kind in ENCODERS:
            return config | self._encoder(config, window) | self._pooling(kind)
        epsilon, names = "layer_norm_rms_epsilon", self._gguf.metadata
        if f"{self._architecture}.attention.layer_norm_epsilon" in names and kind in _OTHER_EPSILON:
            epsilon = "layer_norm_epsilon"
        config |= {
            "rms_norm_eps": self._float(f"attention.{epsilon}"),
            "hidden_act": "silu",
            "attention_bias": self._has("attn_q.bias"),
            "tie_word_embeddings": "output.weight" not in tensors,
            "sliding_window": window or None,
        }
        if kind in _LATENT:
            config |= self._latent(head_dim)
        if self._architecture in _WINDOW_PERIODS:
            config["layer_types"] = self._layer_types(config["num_hidden_layers"], window)
        if self._architecture in _ROTATED_IN_PART:
            config["rope_parameters"]["partial_rotary_factor"] = rotary_dim / head_dim
        may_lack = kind in HYBRIDS or kind == GEMMA4
        if kind in _WITH_EXPERTS and (not may_lack or self._get("expert_count", 0)):
            config |= self._experts(config["intermediate_size"], kind)
        config |= self._of_family(kind, config, rotary_dim)
        return config | self._pooling(kind)

    def _of_family(self, kind: str, config: Mapping[str, Any], rotary_dim: int) -> dict[str, Any]:
        """The fields that only some families have. config: the others."""
        rope, tensors = config["rope_parameters"], self._gguf.tensors
        if kind == GEMMA4:
            return self._gemma4(config)
        if kind == GEMMA3N:
            return self._gemma3n(config)
        if kind.startswith("gemma"):
            return self._gemma(config)
        if kind == "llama4_text":
            return self._llama4(config)
        if kind == "mistral4":
            rope = self._scaled_by_position(rope)
            return {"rope_parameters": rope, "has_expert_modules": True}
        if kind == "ministral3":
            rope = self._scaled_by_position(rope)
            if rope["rope_type"] == "yarn":
                weight = float(self._get("rope.scaling.yarn_log_multiplier", 0.0))
                rope |= {"mscale": weight, "mscale_all_dim": weight}
            return {"rope_parameters": rope}
        if kind in HYBRIDS:
            return self._hybrid(kind, config)
        if kind.startswith("granite"):
            return self._granite(config["head_dim"])
        if kind == "phi3":
            return self._phi3(rope, rotary_dim // 2)
        if kind == "phimoe":
            has_bias = "output.bias" in tensors
            return {**self._phi3(rope, rotary_dim // 2), "lm_head_bias": has_bias}
        if kind == "gpt_oss":
            return {"rope_parameters": {**rope, "truncate": False}}
        if kind == "olmo3":
            theta = self._float("rope.freq_base_swa", rope["rope_theta"])
            return {"rope_parameters": self._with_local_rope(rope, theta)}
        if kind == "cohere2":
            scale = self._float("logit_scale")
            return {"layer_norm_eps": config["rms_norm_eps"], "logit_scale": scale}
        if kind == "minimax_m2":
            return {"rotary_dim": rotary_dim}
        if kind == "seed_oss":
            return {"attention_out_bias": "blk.0.attn_output.bias" in tensors}
        if kind == "glm4_moe":
            return {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}
        if kind == "ernie4_5":
            return {"use_bias": config["attention_bias"]}
        return {}

    def _encoder(self, config: Mapping[str, Any], window: int | None) -> dict[str, Any]:
        """The fields that only encoders have."""
        types, kind = self._gguf.tensors.get("token_types.weight"), config["model_type"]
        epsilon = self._float("attention.layer_norm_epsilon")
        fields = {
            "layer_norm_eps": epsilon,
            "norm_eps": epsilon,
            "hidden_act": self._get("hidden_act", "silu" if kind == "nomic_bert" else "gelu"),
            "type_vocab_size": 0 if types is None else types.shape[0],
        }
        if kind == "modernbert":
            fields |= {
                "local_attention": window or 0,
                "layer_types": self._layer_types(config["num_hidden_layers"], window),
                "rope_parameters": self._with_local_rope(
                    config["rope_parameters"], self._float("rope.freq_base_swa", 10000.0)
                ),
            }
        return fields

    def _with_local_rope(self, rope: dict[str, Any], theta: float) -> dict[str, Any]:
        """RoPE of layers with full attention, and that of layers with a window. theta: of the
        latter."""
        local_rope = {"rope_type": "default", "rope_theta": theta}
        return {"full_attention": rope, "sliding_attention": local_rope}

    def _pooling(self, kind: str) -> dict[str, Any]:
        """What the file says of pooling, if anything: how vectors are made, or a classifier."""
        number, tensors = self._get("pooling_type", -1), self._gguf.tensors
        if number == -1:
            return {}
        if number in range(len(_POOLINGS)):
            return {"pooling_type": _POOLINGS[number]}
        name, parts = _CLASSIFIERS.get(kind, ("", ("",)))
        if number != len(_POOLINGS) or not all(f"{part}.weight" in tensors for part in parts):
            expected = "0 to 3: none, mean, cls, last"
            if kind in _CLASSIFIERS:
                expected += f"; or 4, a classifier, with tensors {', '.join(parts)}"
            raise self._fault("pooling_type", expected, number, UnsupportedModel)
        count = tensors["cls.output.weight"].shape[0]
        labels = self._get("classifier.output_labels", [f"LABEL_{i}" for i in range(count)])
        if not isinstance(labels, list) or len(labels) != count:
            raise self._fault("classifier.output_labels", f"{count} labels", labels)
        return {
            "architectures": [name],
            "id2label": {str(index): label for index, label in enumerate(labels)},
            "classifier_bias": "cls.bias" in tensors,
            "pad_token_id": -1,  # the first row of positions is that of the first token
        }

    def _head_dims(self, default: int) -> tuple[int, int]:
        """Elements of a head, and those of them that RoPE rotates; of latent attention only the
        latter."""
        if self._architecture in ("deepseek2", "kimi-linear", "mistral4"):
            self._require("attention.causal", True, "true")
            rotary_dim = self._int("rope.dimension_count")
            return rotary_dim, rotary_dim
        head_dim = self._int("attention.key_length", default)
        rotary_dim = self._int("rope.dimension_count", head_dim)
        size = f"{head_dim}, the size of a head"
        self._require("attention.value_length", head_dim, size)
        if self._architecture in _WITHOUT_ROPE:
            rotary_dim = head_dim
        elif self._architecture not in _ROTATED_IN_PART or rotary_dim > head_dim:
            self._require("rope.dimension_count", head_dim, size)
        is_encoder = _CLASSES[self._architecture][1] in ENCODERS
        self._require("attention.causal", not is_encoder, str(not is_encoder).lower())
        return head_dim, rotary_dim

    def _num_layers(self) -> int:
        num_layers, num_tensors = self._int("block_count"), len(self._gguf.tensors)
        if num_layers > num_tensors:
            raise self._fault(
                "block_count", f"at most the number of tensors, {num_tensors}", num_layers
            )
        further = self._get("nextn_predict_layers", 0)
        if not isinstance(further, int) or not 0 <= further < num_layers:
            expected = f"a number below that of layers, {num_layers}"
            raise self._fault("nextn_predict_layers", expected, further)
        return num_layers - further

    def _class(self, window: int | None) -> tuple[str, str]:
        """Class and `model_type`."""
        num_experts = self._get("expert_count", 0)
        name, kind = _CLASSES[self._architecture]
        if self._architecture == "llama" and (window or num_experts):
            name, kind = _MIXTRAL if num_experts else _MISTRAL
        elif self._architecture == "olmo2" and window:
            name, kind = _OLMO3
        elif self._architecture == "mamba" and self._get("ssm.dt_b_c_rms", False):
            name, kind = _FALCON_MAMBA
        elif self._architecture == "deepseek2" and not num_experts:
            name, kind = _YOUTU
        elif self._architecture == "deepseek2":
            corrects = any(key.endswith("exp_probs_b.bias") for key in self._gguf.tensors)
            function = self._get("expert_gating_func", _SIGMOID if corrects else _SOFTMAX)
            name, kind = _DEEPSEEK2 if function == _SOFTMAX else (name, kind)
        elif window and self._architecture not in _WITH_WINDOWS:
            self._require("attention.sliding_window", None, "none")
        if num_experts and kind not in _WITH_EXPERTS:
            self._require("expert_count", 0, "none")
        return name, kind

    def _dtype(self) -> str:
        """The dtype of all matrices; bfloat16 if they have several, or are quantized."""
        types = {tensor.type for tensor in self._gguf.tensors.values() if len(tensor.shape) > 1}
        return _SAVED.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"

    def _gemma(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that only Gemma has."""
        architecture, num_layers = self._architecture, config["num_hidden_layers"]
        is_wide = num_layers == _SCALED_BY_WIDTH[architecture]
        width = config["hidden_size"] // config["num_attention_heads"]
        is_gemma2 = architecture == "gemma2"
        caps = {}
        for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            stored = self._get(key, default if is_gemma2 else 0.0)
            caps[key] = self._float(key, default) if stored else None
        window = config["sliding_window"] or (4096 if is_gemma2 else None)
        rope = config["rope_parameters"]
        if not is_gemma2:
            rope = self._with_local_rope(rope, self._float("rope.freq_base_swa", 10000.0))
        return {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": width if is_wide else config["head_dim"],
            "sliding_window": window,
            "layer_types": self._layer_types(num_layers, window),
            "rope_parameters": rope,
            **caps,
        }

    def _layer_types(self, num_layers: int, window: int | None) -> list[str]:
        key = "attention.sliding_window_pattern"
        pattern = self._get(key, _WINDOW_PERIODS[self._architecture])
        if isinstance(pattern, int) and pattern > 0:
            full = 0 if self._architecture == "modern-bert" else pattern - 1
            pattern = [layer % pattern != full for layer in range(num_layers)]
        if not isinstance(pattern, list) or len(pattern) != num_layers:
            expected = f"a positive number, or one value for each of {num_layers} layers"
            raise self._fault(key, expected, pattern)
        slides = (window is not None and bool(value) for value in pattern)
        return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]

    def _latent(self, rotary_dim: int) -> dict[str, Any]:
        """The fields of latent attention. Files name the sizes of heads of expanded keys and values
        apart from those of what is cached, or are of before those had names."""
        latent_dim, key = self._int("attention.kv_lora_rank"), "attention.key_length"
        value, suffix = "attention.value_length", "_mla"
        if self._get(f"{key}{suffix}", 0):
            size = latent_dim + rotary_dim
            self._require(key, size, f"{size}, the sizes of latents and of what is rotated")
            if self._architecture == "kimi-linear":
                self._get(value, 0)  # hidden_size / num_heads, of no part
            else:
                self._require(value, latent_dim, f"{latent_dim}, the size of latents")
        else:
            suffix = ""
        key_dim = self._int(f"{key}{suffix}")
        if key_dim <= rotary_dim:
            raise self._fault(f"{key}{suffix}", f"more than {rotary_dim}, what is rotated", key_dim)
        rope = self._rope(rotary_dim)
        if rope["rope_type"] == "yarn":
            weight = float(self._get("rope.scaling.yarn_log_multiplier", 0.0)) / 0.1
            rope |= {"mscale": weight, "mscale_all_dim": weight}
        has_latents = self._has("attn_q_a.weight")
        return {
            "num_key_value_heads": self._int("attention.head_count"),
            "kv_lora_rank": latent_dim,
            "q_lora_rank": self._int("attention.q_lora_rank") if has_latents else None,
            "qk_nope_head_dim": key_dim - rotary_dim,
            "qk_rope_head_dim": rotary_dim,
            "v_head_dim": self._int(f"{value}{suffix}"),
            "rope_parameters": rope,
            "has_split_expansion": self._has("attn_k_b.weight"),
        }

    def _of_layers(self, kind: str, key: str, default: int | None = None) -> int:
        """A number of all layers, or of those that have the part that it describes."""
        if kind in (GEMMA3N, GEMMA4):  # which read those of their layers themselves
            return self._by_layer(key, self._num_layers())[0]
        return self._of_some_layers(kind, key, default)

    def _llama4(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that only Llama 4 has. Files do not say which models norm queries and keys, or
        how positions are seen: all but the one with 128 experts, and as in the released models."""
        num_layers = config["num_hidden_layers"]
        fields = {
            "intermediate_size_mlp": self._int("feed_forward_length"),
            "interleave_moe_layer_step": self._int("interleave_moe_layer_step"),
            "use_qk_norm": config["num_local_experts"] != 128,
        }
        self._require("leading_dense_block_count", 0, "0")
        if self._get("attention.sliding_window", -1) == 0:
            full = ["full_attention"] * num_layers
            return {**fields, "no_rope_layers": [1] * num_layers, "layer_types": full}
        self._require("attention.sliding_window_pattern", 4, "4")
        return fields

    def _granite(self, head_dim: int) -> dict[str, Any]:
        """The multipliers of Granite."""
        self._require(
            "rope.scaling.finetuned", True, "true, since layers without RoPE are not read"
        )
        self._require("expert_shared_feed_forward_length", 0, "none")
        return self._multipliers(head_dim)

    def _phi3(self, rope: dict[str, Any], num_factors: int) -> dict[str, Any]:
        """The fields of Phi-3 and Phi-MoE: RoPE factors beyond the trained length."""
        if not any(name in self._gguf.tensors for name in LONG_ROPE.values()):
            self._require("rope.scaling.type", "none", "none without tensors rope_factors_*")
            return {"rope_parameters": rope}
        trained = self._int("rope.scaling.original_context_length")
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": trained}
        if self._get("rope.scaling.attn_factor", 0.0):
            rope["attention_factor"] = self._float("rope.scaling.attn_factor")
        for key, name in LONG_ROPE.items():
            tensor = self._gguf.tensors.get(name)
            if tensor is None or tensor.shape != [num_factors]:
                found = "none" if tensor is None else tensor.shape
                raise BadCheckpoint(
                    f"{self._path}: {name}: expected {num_factors} numbers, got {found}"
                )
            rope[key] = tensor.stored_values().tolist()
        return {"rope_parameters": rope, "original_max_position_embeddings": trained}

    def _experts(self, intermediate_size: int, kind: str) -> dict[str, Any]:
        """The fields that only mixtures of experts have."""
        num_experts, num_used = self._int("expert_count"), self._int("expert_used_count")
        if num_used > num_experts:
            raise self._fault(
                "expert_used_count", f"at most {num_experts}, the number of experts", num_used
            )
        function, meaning = _SOFTMAX, "1, which is softmax"
        if kind in _SIGMOID_SCORES:
            function, meaning = _SIGMOID, "2, which is sigmoid"
        self._require("expert_gating_func", function, meaning)
        default = intermediate_size
        if kind not in (
            *("gpt_oss", "minimax_m2", "hunyuan_v1_moe", "granitemoehybrid", "jamba", "phimoe"),
            *(GEMMA4, "llama4_text"),
        ):
            default = max(1, intermediate_size // num_used)
        size = self._int("expert_feed_forward_length", default)
        if kind not in ("glm4_moe", "nemotron_h", *_LATENT):
            self._require("expert_weights_scale", 1.0, "1")
        config: dict[str, Any] = {"num_experts_per_tok": num_used}
        if kind == GEMMA4:
            config = {"enable_moe_block": True, "num_experts": num_experts}
            config |= {"top_k_experts": num_used, "moe_intermediate_size": size}
            return {**config, "has_expert_modules": True}
        if kind == "jamba":
            self._require("expert_feed_forward_length", intermediate_size, "feed_forward_length")
            return {**config, "num_experts": num_experts}
        if kind in ("gpt_oss", "granitemoe"):
            config["has_expert_modules"] = True
        if kind in ("mixtral", "granitemoe", "granitemoehybrid", "phimoe"):
            return {**config, "num_local_experts": num_experts}
        if kind == "llama4_text":
            config["has_expert_modules"] = True
        if kind in ("gpt_oss", "minimax_m2", "llama4_text"):
            return {**config, "num_local_experts": num_experts, "intermediate_size": size}
        if kind == "ernie4_5_moe":
            return self._ernie(num_experts, num_used, size)
        if kind == "nemotron_h":
            shared = self._int("expert_shared_feed_forward_length")
            config["moe_shared_expert_intermediate_size"] = shared
        if kind in ("glm4_moe", "nemotron_h"):
            return {**config, **self._scored(num_experts, size)}
        if kind in _LATENT:
            config |= self._scored(num_experts, size)
            limited = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
            return {**config, "topk_method": limited if kind == "deepseek_v2" else None}
        if kind == "hunyuan_v1_moe":
            self._require("expert_shared_count", 1, "1")
            self._require("expert_shared_feed_forward_length", size, f"{size}, that of experts")
            return {"num_experts": num_experts, "moe_topk": num_used, "intermediate_size": size}
        config |= {"num_experts": num_experts, "moe_intermediate_size": size}
        config["norm_topk_prob"] = kind in ("qwen3_moe", "lfm2_moe")
        if kind in ("qwen2_moe", *DELTA_NETS):
            shared = self._int("expert_shared_feed_forward_length", intermediate_size)
            config["shared_expert_intermediate_size"] = shared
        return config

    def _scored(self, num_experts: int, size: int) -> dict[str, Any]:
        """The fields of experts that are chosen as in DeepSeek-V3. size: of each expert."""
        return {
            "n_routed_experts": num_experts,
            "moe_intermediate_size": size,
            "n_shared_experts": self._get("expert_shared_count", 0),
            "first_k_dense_replace": self._get("leading_dense_block_count", 0),
            "n_group": self._int("expert_group_count", 1),
            "topk_group": self._int("expert_group_used_count", 1),
            "norm_topk_prob": bool(self._get("expert_weights_norm", False)),
            "routed_scaling_factor": self._float("expert_weights_scale", 1.0),
        }

    def _ernie(self, num_experts: int, num_used: int, size: int) -> dict[str, Any]:
        """The fields of the experts of ERNIE 4.5. size: of each expert."""
        self._get("expert_shared_feed_forward_length", 0)  # wrong in files: tensors have the size
        return {
            "moe_num_experts": num_experts,
            "moe_k": num_used,
            "moe_intermediate_size": size,
            "moe_num_shared_experts": self._get("expert_shared_count", 0),
            "moe_layer_interval": self._int("interleave_moe_layer_step", 1),
            "moe_layer_start_index": self._get("leading_dense_block_count", 0),
        }

    def _eos_token_ids(self) -> list[int]:
        keys = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        ids = [self._token_id(f"{key}_token_id") for key in keys]
        tokens = self._gguf.metadata.get("tokenizer.ggml.tokens")
        types = self._gguf.metadata.get("tokenizer.ggml.token_type")
        if isinstance(tokens, list) and isinstance(types, list) and len(types) == len(tokens):
            places = _end_places(self._gguf)
            ids += [place for token, place in places.items() if token in END_TOKENS]
            ids += [place for place in places.values() if types[place] == _CONTROL]
            if {"<|return|>", "<|call|>", "<|end|>"} <= places.keys():
                # There `<|end|>` ends a message, of which a turn has several.
                ids = [token for token in ids if token != places["<|end|>"]]
        return list(dict.fromkeys(token for token in ids if token is not None))

    def _token_id(self, key: str) -> int | None:
        found = self._gguf.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(found, int | None):
            raise BadCheckpoint(
                f"{self._path}: tokenizer.ggml.{key}: expected a token id, got {found!r}"
            )
        return found

    def _rope(self, head_dim: int) -> dict[str, Any]:
        theta = self._float("rope.freq_base", 10000.0)
        factor = self._get("rope.scaling.factor", self._get("rope.scale_linear", 0.0))
        kind = self._get("rope.scaling.type", "linear" if factor else "none")  # as in llama.cpp
        if kind == "longrope" and self._architecture in ("phi3", "phimoe"):
            kind = "none"  # its factors are read from tensors
        if kind not in ("none", "linear", "yarn"):
            raise self._fault("rope.scaling.type", "none, linear or yarn", kind, UnsupportedModel)
        if ROPE_FREQUENCIES in self._gguf.tensors and self._architecture != "gemma4":
            return self._llama3(theta, head_dim)
        rope = {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta}
        if kind != "none":
            rope["factor"] = self._float("rope.scaling.factor", factor)
        if kind == "yarn":
            trained = self._int("rope.scaling.original_context_length")
            rope["original_max_position_embeddings"] = trained
            for name in ("beta_fast", "beta_slow"):
                key = f"rope.scaling.yarn_{name}"
                if self._get(key, 0.0):
                    rope[name] = self._float(key)
        return rope

    def _scaled_by_position(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of RoPE, with that by which queries are scaled with their positions."""
        scale, trained = "attention.temperature_scale", rope.get("original_max_position_embeddings")
        if not self._get(scale, 0.0):
            return dict(rope)
        if trained is None:
            self._require(scale, 0.0, "0 without rope.scaling.type yarn")
        self._require("attention.temperature_length", trained, f"{trained}, the trained length")
        return {**rope, "llama_4_scaling_beta": self._float(scale)}

    def _llama3(self, theta: float, head_dim: int) -> dict[str, Any]:
        """The RoPE parameters that produce the stored factors, which must be those of Llama 3, or
        of Llama 4, which interpolates between no wavelengths."""
        stored = self._gguf.tensors[ROPE_FREQUENCIES].stored_values().float().numpy()
        factor = float(stored.max())
        wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        cycles = _LLAMA3["original_max_position_embeddings"] / wavelengths
        high = 1.0 if self._architecture == "llama4" else 4.0
        smooth = (cycles - 1.0) / (high - 1.0) if high > 1.0 else np.float64(cycles > 1.0)
        smooth = smooth.clip(0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
            raise UnsupportedModel(
                f"{self._path}: {ROPE_FREQUENCIES}: expected the {head_dim // 2} factors of Llama"
                f" {3 if high > 1.0 else 4} (original_max_position_embeddings 8192, low_freq_factor"
                f" 1, high_freq_factor {high:g})"
            )
        return {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "high_freq_factor": high,
            **_LLAMA3,
        }

"""Families of text encoders: settings from `config.json`.

Whatever a configuration asks for that the layers do not compute is refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.models.encoders.encoder import NUM_BUCKETS, EncoderSettings, HeadLayer
from worker_service.models.layers.activations import ACTIVATIONS
from worker_service.models.layers.rotary import SCALING_TYPES, RotarySettings
from worker_service.models.pooling import labels_of
from worker_service.plan import PoolingType

Config = Mapping[str, Any]

_KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Keys of DistilBERT, and of nomic-bert's authors, by which BERT's have other names."""

_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation")

_REQUIRED: Mapping[str, Sequence[Any]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "is_causal": (False,),
    "position_embedding_type": ("absolute",),
    "relative_attention_num_buckets": (NUM_BUCKETS,),
    "causal": (False,),
    "moe_every_n_layers": (0,),
    "parallel_block": (False,),
    "prenorm": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "use_rms_norm": (False,),
}
"""By key, the values that it may have, if any."""

_GTE_REQUIRED: Mapping[str, Sequence[Any]] = {
    "position_embedding_type": ("rope",),
    "layer_norm_type": ("layer_norm",),
    "logn_attention_scale": (False,),
    "logn_attention_clip1": (False,),
    "pack_qkv": (True,),
}
"""As `_REQUIRED`, in the configuration of GTE's authors."""

_NOMIC_GATES = {"swiglu": "silu", "geglu": "gelu"}
"""Activations of gated MLPs, by the names that the authors of nomic-bert gave these."""

_FUSED_QKV = "attn.Wqkv attn.Wqkv attn.Wqkv"
_HEAD_ACTIVATIONS = {"gelu": "GELU", "silu": "SiLU", "relu": "ReLU", "tanh": "Tanh"}
_POOLINGS = {"cls": PoolingType.CLS, "mean": PoolingType.MEAN}
_WINDOWED, _FULL = "sliding_attention", "full_attention"
_SCALINGS = tuple(kind for kind in SCALING_TYPES if kind not in ("dynamic", "longrope"))
"""The others depend on the length of the text."""


def _require(key: str, value: Any, allowed: Sequence[Any]) -> Any:
    """The value. Raises UnsupportedModel if it is not allowed; None is."""
    if value is not None and value not in allowed:
        expected = " or ".join(map(str, allowed)) or "none"
        raise UnsupportedModel(f"config.json: {key}: expected {expected}, got {value}")
    return value


def _count(config: Config, key: str, default: int, *, least: int = 0) -> int:
    """The number of a key. Raises BadCheckpoint, naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < least:
        raise BadCheckpoint(f"config.json: {key}: expected at least {least}, got {value!r}")
    return value


def _object(config: Config, key: str) -> Config:
    """The object of a key, empty if it is absent. Raises BadCheckpoint, naming the key."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise BadCheckpoint(f"config.json: {key}: expected an object, got {value!r}")
    return value


def _settings(config: Config, **changes: Any) -> EncoderSettings:
    """Settings from the keys that all families have. changes: what differs from BERT."""
    for key, allowed in _REQUIRED.items():
        _require(key, config.get(key), allowed)
    size, num_heads = config["hidden_size"], config["num_attention_heads"]
    key = next((key for key in _ACTIVATION_KEYS if key in config), _ACTIVATION_KEYS[0])
    given = {
        "architecture": config["architectures"][0],
        "vocab_size": config["vocab_size"],
        "hidden_size": size,
        "embedding_size": size,
        "inner_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "head_dim": size // num_heads,
        "max_model_len": config["max_position_embeddings"],
        "activation": _require(key, config.get(key), [*ACTIVATIONS]) or "gelu",
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "tie_word_embeddings": False,
    }
    return EncoderSettings(**given | changes)


def _biases(config: Config, flags: Mapping[str, str], default: bool) -> tuple[str, ...]:
    """The parts of a layer that have a bias. flags: keys, by parts separated by spaces."""
    return tuple(
        part for parts, key in flags.items() for part in parts.split() if config.get(key, default)
    )


def _classifier(
    config: Config, dense: str, output: str = "classifier", activation: str = "Tanh"
) -> tuple[HeadLayer, ...]:
    """The head of a classifier of texts, of two layers, or of tokens, of one. dense, output: names
    of the two; activation: of the first."""
    architecture, count = config["architectures"][0], len(labels_of(config))
    if architecture.endswith("ForTokenClassification"):
        return (HeadLayer("classifier", count),)
    if architecture.endswith("ForSequenceClassification"):
        first = HeadLayer(dense, config["hidden_size"], activation)
        return first, HeadLayer(output, count)
    return ()


def _learned(config: Config, offset: int, **changes: Any) -> EncoderSettings:
    """Settings of a family with learned positions. offset: the row of the first."""
    length = config["max_position_embeddings"] - offset
    return _settings(config, max_model_len=length, position_offset=offset, **changes)


def _token_types(config: Config) -> int:
    return _count(config, "type_vocab_size", 2)


def bert_settings(config: Config) -> EncoderSettings:
    """BERT (Devlin et al. 2018)."""
    classifier = _classifier(config, "pooler.dense")
    return _learned(config, 0, num_token_types=_token_types(config), classifier=classifier)


def roberta_settings(config: Config) -> EncoderSettings:
    """RoBERTa (Liu et al. 2019), XLM-R, CamemBERT: positions follow that of the padding."""
    offset = _count(config, "pad_token_id", 1, least=-1) + 1  # -1: of a GGUF file
    classifier = _classifier(config, "classifier.dense", "classifier.out_proj")
    return _learned(config, offset, num_token_types=_token_types(config), classifier=classifier)


def electra_settings(config: Config) -> EncoderSettings:
    """ELECTRA (Clark et al. 2020): BERT, whose embeddings are as wide as hidden states here."""
    _require("embedding_size", config.get("embedding_size", 128), (config["hidden_size"],))
    classifier = _classifier(config, "classifier.dense", "classifier.out_proj", "GELU")
    return _learned(config, 0, num_token_types=_token_types(config), classifier=classifier)


def gte_settings(config: Config) -> EncoderSettings:
    """GTE (Zhang et al. 2024): BERT with RoPE and a gated MLP, by its authors' names, which
    `transformers` writes, too."""
    for key, allowed in _GTE_REQUIRED.items():
        _require(key, config.get(key), allowed)
    parameters = _object(config, "rope_parameters") or _object(config, "rope_scaling")
    theta = config.get("rope_theta") or 160_000.0
    is_ntk = parameters.get("type") == "ntk"
    if is_ntk:
        parameters = _ntk(config, parameters, theta)
    rotary = _rotary(config, {"rope_theta": theta, **parameters})
    length = config["max_position_embeddings"]  # that of NTK scaling is the extended one
    return _settings(
        {**config, "position_embedding_type": None},
        max_model_len=length if is_ntk else rotary.max_model_len(),
        rotary=rotary,
        num_token_types=_count(config, "type_vocab_size", 1),
        biases=("norm", "qkv", "output", "down"),
        qkv="attention.qkv_proj attention.qkv_proj attention.qkv_proj",
        up="mlp.up_gate_proj mlp.up_gate_proj",
        gate_follows=True,
        classifier=_classifier(config, "pooler.dense"),
    )


def _ntk(config: Config, parameters: Config, theta: float) -> Config:
    """The rotary parameters for the fixed NTK scaling of GTE's authors, of any length of text:
    a greater theta, and all frequencies divided by the same number."""
    _require("rope_scaling.mixed_b", parameters.get("mixed_b"), ())
    head_dim, factor = config["hidden_size"] // config["num_attention_heads"], parameters["factor"]
    if type(factor) not in (int, float) or not factor > 0:
        raise BadCheckpoint(
            f"config.json: rope_scaling.factor: expected a number above 0, got {factor!r}"
        )
    return {
        "rope_type": "linear",
        "rope_theta": theta * factor,
        "factor": factor ** (2 / head_dim),
    }


def mpnet_settings(config: Config) -> EncoderSettings:
    """MPNet (Song et al. 2020): learned positions, and a bias by distance."""
    classifier = _classifier(config, "classifier.dense", "classifier.out_proj")
    return _learned(config, 2, has_relative_bias=True, classifier=classifier)


def distilbert_settings(config: Config) -> EncoderSettings:
    """DistilBERT (Sanh et al. 2019): BERT without token types."""
    classifier = _classifier(config, "pre_classifier", activation="ReLU")
    return _learned(config, 0, norm_eps=1e-12, classifier=classifier)


def modernbert_settings(config: Config) -> EncoderSettings:
    """ModernBERT (Warner et al. 2024): windows in most layers, with a RoPE of their own."""
    parameters = _object(config, "rope_parameters")
    thetas = {
        _FULL: config.get("global_rope_theta") or 160_000.0,
        _WINDOWED: config.get("local_rope_theta") or 10_000.0,
    }
    full, local = (
        _rotary(config, {"rope_theta": theta, **_object(parameters, kind)})
        for kind, theta in thetas.items()
    )
    flags = {"norm": "norm_bias", "qkv output": "attention_bias", "up down": "mlp_bias"}
    pooling = _require("classifier_pooling", config.get("classifier_pooling"), [*_POOLINGS])
    return _settings(
        config,
        max_model_len=full.max_model_len(),
        norm_eps=config.get("norm_eps", 1e-5),
        norm_first=True,
        rotary=full,
        local_rotary=local,
        sliding_windows=_windows(config),
        biases=_biases(config, flags, False),
        qkv=_FUSED_QKV,
        up="mlp.Wi mlp.Wi",
        classifier=_modernbert_classifier(config),
        classifier_type=_POOLINGS[pooling or "cls"],
    )


def _windows(config: Config) -> tuple[int | None, ...]:
    """The window of each layer of ModernBERT: half of `local_attention` on either side."""
    num_layers = config["num_hidden_layers"]
    period = _count(config, "global_attn_every_n_layers", 3, least=1)
    default = [_WINDOWED if layer % period else _FULL for layer in range(num_layers)]
    kinds: Sequence[str] = config.get("layer_types") or default
    if len(kinds) != num_layers or not set(kinds) <= {_WINDOWED, _FULL}:
        raise UnsupportedModel(
            f"config.json: layer_types: expected {_WINDOWED} or {_FULL} for each of {num_layers}"
            f" layers, got {', '.join(map(str, kinds))}"
        )
    window = _count(config, "local_attention", 128) // 2
    return tuple(window if kind == _WINDOWED else None for kind in kinds)


def _modernbert_classifier(config: Config) -> tuple[HeadLayer, ...]:
    if not config["architectures"][0].endswith("Classification"):
        return ()
    key, size = "classifier_activation", config["hidden_size"]
    activation = _require(key, config.get(key), [*_HEAD_ACTIVATIONS]) or "gelu"
    has_bias = config.get("classifier_bias", False)
    return (
        HeadLayer("head.dense", size, _HEAD_ACTIVATIONS[activation], has_bias),
        HeadLayer("head.norm", None),
        HeadLayer("classifier", len(labels_of(config))),
    )


def nomic_bert_settings(config: Config) -> EncoderSettings:
    """nomic-bert (Nussbaum et al. 2024): BERT with RoPE and, usually, a gated MLP. `config.json` is
    that of `transformers`, or that of the authors' own code."""
    key = "activation_function"
    activation = _require(key, config.get(key), [*_NOMIC_GATES, *ACTIVATIONS])
    is_gated = activation in _NOMIC_GATES or key not in config
    if config.get("rotary_scaling_factor"):  # beyond this length, RoPE depends on the text's
        length = _count(config, "max_trained_positions", 2048, least=1)
        config = {**config, "max_position_embeddings": length}
    theta = config.get("rotary_emb_base", 10_000.0 if key in config else 1000.0)
    rotary = _rotary(config, {"rope_theta": theta, **_object(config, "rope_parameters")})
    flags = {
        "qkv output": "qkv_proj_bias",
        "up": "mlp_fc1_bias",
        "down": "mlp_fc2_bias",
    }
    defaults = {"intermediate_size": 4 * config["hidden_size"]}
    defaults |= {"hidden_act": _NOMIC_GATES.get(activation, activation) or "silu"}
    return _settings(
        {**defaults, **config},
        max_model_len=rotary.max_model_len(),
        rotary=rotary,
        num_token_types=_token_types(config),
        biases=("norm", *_biases(config, flags, key in config)),
        qkv=_FUSED_QKV,
        up="mlp.fc12 intermediate.dense" if is_gated else "intermediate.dense",
        classifier=_classifier(config, "pooler.dense"),
    )


def _rotary(config: Config, parameters: Mapping[str, Any]) -> RotarySettings:
    """Raises UnsupportedModel for a scaling that depends on the text, or a part of a head."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    positions = {"max_position_embeddings": config["max_position_embeddings"]}
    rotary = RotarySettings.from_config({"rope_parameters": parameters, **positions}, head_dim)
    _require("rope_parameters.rope_type", rotary.scaling_type, _SCALINGS)
    key = "partial_rotary_factor"
    _require(f"rope_parameters.{key}", rotary.parameters.get(key), (1.0,))
    return rotary


FAMILIES: Mapping[str, Callable[[Config], EncoderSettings]] = {
    "Bert": bert_settings,
    "Roberta": roberta_settings,
    "XLMRoberta": roberta_settings,
    "Camembert": roberta_settings,
    "Data2VecText": roberta_settings,
    "Electra": electra_settings,
    "Gte": gte_settings,
    "New": gte_settings,
    "MPNet": mpnet_settings,
    "DistilBert": distilbert_settings,
    "ModernBert": modernbert_settings,
    "NomicBert": nomic_bert_settings,
}
"""By the beginning of the class name."""

_KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")

ENCODERS = {
    **{f"{family}{kind}": read for family, read in FAMILIES.items() for kind in _KINDS},
    "BertForPreTraining": bert_settings,
}
"""By the class name in `config.json`: reads settings from a configuration with BERT's keys."""


def encoder_settings(config: Config) -> EncoderSettings:
    """Settings from `config.json`; absent keys have the defaults of `transformers`.

    Raises UnsupportedModel, naming the key, for what the layers do not compute.
    """
    found = {name: config[key] for key, name in _KEYS.items() if config.get(key) is not None}
    for key in _KEYS:
        if key != "layer_norm_epsilon":
            _count(config, key, 1, least=1)
    return ENCODERS[config["architectures"][0]]({**config, **found})

"""Models that the transformers backend refuses, and its special cases."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from pagewire_kernels.batch import RowAdapters, StepBatch
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, make_checkpoint
from tests.support.loading import assert_same, load
from tests.support.paged_driver import PagedDriver
from tests.support.transformers_oracle import Oracle
from worker_service.errors import InvalidOption, UnsupportedModel
from worker_service.loader.trial import try_model
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.models.transformers_backend.build import pin_long_rotary
from worker_service.models.transformers_backend.model import TransformersModel

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    **SHAPE,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "MptForCausalLM": (
        "MptConfig",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "attn_config": {"clip_qkv": 8.0}},
        "ALiBi",
    ),
    "MiniMaxForCausalLM": ("MiniMaxConfig", SHAPE, "linear attention or a state"),
    "AXK2ForCausalLM": (
        "AXK2Config",
        {k: v for k, v in LATENT.items() if k != "first_k_dense_replace"} | {"hidden_act": "mish"},
        "sparse attention, whose tokens an indexer",
    ),
    "Dots3NoteForCausalLM": (
        "Dots3NoteTextConfig",
        {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "hidden_act": "mish"},
        "sparse attention, whose tokens an indexer",
    ),
    "Qwen4ExpForCausalLM": (
        "Qwen4ExpTextConfig",
        {"num_hidden_layers": 4, "vocab_size": VOCAB_SIZE},
        "linear attention or a state space",
    ),
    "MistralLarge4ForConditionalGeneration": (
        "MistralLarge4Config",
        {},
        "multimodal model, whose text model, mistral_large4_text, cannot be served alone",
    ),
    "InklingForCausalLM": (
        "InklingTextConfig",
        {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE},
        "hybrid",
    ),
    "BltForCausalLM": ("BltConfig", {}, "no hidden_size, since it is not one decoder"),
    "RwkvForCausalLM": ("RwkvConfig", {"hidden_size": 64, "num_hidden_layers": 2}, ""),
    "Llama4ForCausalLM": (
        "Llama4TextConfig",
        {**SHAPE, "hidden_act": "mish"},
        "layers of type chunked_attention",
    ),
    "T5ForConditionalGeneration": ("T5Config", {}, "encoder-decoder"),
    "BartForConditionalGeneration": ("BartConfig", {}, "encoder-decoder"),
    "PaliGemmaForConditionalGeneration": (
        "PaliGemmaConfig",
        {},
        "multimodal model, whose text model, gemma, cannot be served alone",
    ),
    "GitForCausalLM": (
        "GitConfig",
        {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"},
        "a table of attention classes",
    ),
    "Gemma3nForCausalLM": (
        "Gemma3nTextConfig",
        {
            **SHAPE,
            "num_kv_shared_layers": 1,
            "hidden_activation": "mish",
            "vocab_size_per_layer_input": SHAPE["vocab_size"],
        },
        "share keys and values",
    ),
    "LongcatFlashForCausalLM": (
        "LongcatFlashConfig",
        {
            **{k: v for k, v in LATENT.items() if k != "first_k_dense_replace"},
            "num_hidden_layers": 4,
            "head_dim": 8,
            "moe_topk": 3,
            "n_routed_experts": 6,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 40,
            "hidden_act": "mish",
        },
        "its code reads weights of linear layers itself",
    ),
    "BertLMHeadModel": (
        "BertConfig",
        {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"},
        "text encoder; supported families of these are Bert, ",
    ),
    "BertGenerationDecoder": (
        "BertGenerationConfig",
        {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"},
        "text encoder; supported families of these are Bert, ",
    ),
    "MllamaForCausalLM": (
        "MllamaTextConfig",
        SHAPE,
        "transformers builds no causal language model of a mllama_text_model alone",
    ),
    "CamembertForCausalLM": (
        "CamembertConfig",
        {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"} | {"is_decoder": True},
        "its positions are not 0, 1, 2",
    ),
    "PhiForCausalLM": (
        "PhiConfig",
        {
            **SHAPE,
            "qk_layernorm": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
        "dynamic rotary scaling",
    ),
    "PLBartForCausalLM": (  # whose first positions differ by less than what the trial run forgives
        "PLBartConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "decoder_layers": 2,
            "encoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 88,
            "is_encoder_decoder": False,
        },
        "does not use the positions that it is given",
    ),
    "AlbertModel": ("AlbertConfig", {}, "text encoder; supported families of these are Bert, "),
    "PersimmonForSequenceClassification": ("PersimmonConfig", SHAPE, "labels are computed of enco"),
    "NoSuchForCausalLM": ("GemmaConfig", SHAPE, "no causal language model of this name"),
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    config_class, settings, feature = REFUSED[architecture]
    config = getattr(transformers, config_class)(**settings)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"{architecture} cannot be served: .*{feature}"):
        load(tmp_path, load_format="dummy")


def test_sequences_are_as_long_as_sparse_attention_chooses_all_of_their_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint("deepseek_v32", tmp_path, index_topk=64)
    assert load(path).model.max_model_len == 64
    assert "sequences have at most 64 tokens, but max_position_embeddings is" in caplog.text
    with pytest.raises(InvalidOption, match="max_model_len: the model's limit is 64, got 65"):
        load(path, max_model_len=65)


def test_code_that_attends_without_the_interface_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library moves its models to the interface one by one, so this one is taken off it."""
    make_checkpoint("phi", tmp_path)
    module = "transformers.models.phi.modeling_phi"
    monkeypatch.delattr(f"{module}.ALL_ATTENTION_FUNCTIONS")
    with pytest.raises(
        UnsupportedModel, match=r"PhiForCausalLM cannot be served: .*attention interface"
    ):
        load(tmp_path, load_format="dummy")


def test_a_model_that_the_library_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["OddLM"], "model_type": "odd"}')
    with pytest.raises(
        UnsupportedModel, match="OddLM cannot be served: transformers does not know"
    ):
        load(tmp_path, load_format="dummy")


_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 48,
}


@pytest.mark.parametrize("family", ["phi3", "flex_olmo"])  # native, and through transformers
@pytest.mark.parametrize(("max_model_len", "prompt_len"), [(48, 40), (200, 60)])
def test_long_rotary_factors_are_chosen_by_the_length_served(
    max_model_len: int, prompt_len: int, family: str, tmp_path: Path
) -> None:
    """Short factors within the trained length, long ones beyond, as in `transformers` for sequences
    of those lengths."""
    path = make_checkpoint(family, tmp_path, rope_parameters=_LONG_ROPE, sliding_window=None)
    loaded = load(path, max_model_len=max_model_len)
    tokens = torch.arange(prompt_len).tolist()
    (logits,) = PagedDriver(loaded.model).run([(0, 0, tokens)])
    torch.testing.assert_close(logits, Oracle(path).logits(tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("max_model_len", "num_positions"), [(48, 40), (200, 60)])
def test_long_rotary_factors_of_a_layer_type_are_chosen_once(
    max_model_len: int, num_positions: int
) -> None:
    config = transformers.Gemma3TextConfig(
        head_dim=16,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": _LONG_ROPE,
        },
    )
    ours, theirs = (Gemma3RotaryEmbedding(config) for _ in range(2))
    pin_long_rotary(ours, config, max_model_len)
    for kind in ("sliding_attention", "full_attention"):
        for found, expected in zip(
            ours(torch.zeros(1), torch.arange(10)[None], kind),
            theirs(torch.zeros(1), torch.arange(num_positions)[None], kind),
            strict=True,
        ):
            assert torch.equal(found, expected[:, :10])


_TAKEN_TO_THE_HOST = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.item.default,
)


class _KeepsNumbers(TorchDispatchMode):
    """Raises on each operation that copies a tensor's value to the host, as a condition does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func not in _TAKEN_TO_THE_HOST, "a GPU would be waited for"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["flex_olmo", "phi"])
def test_a_forward_pass_copies_nothing_to_the_host(family: str) -> None:
    loaded = load(checkpoint(family))
    driver = PagedDriver(loaded.model)
    with _KeepsNumbers():
        driver.run([(0, 0, [5, 6, 7]), (1, 0, [8])])
        driver.run([(0, 3, [9]), (1, 1, [10])])


class _Misplaced:
    """A model that uses a token's index in the batch as its position."""

    architecture = "MisplacedForCausalLM"
    vocab_size = VOCAB_SIZE
    max_model_len = 256
    num_parameters = 0
    kv_cache_spec = KVCacheSpec.uniform(
        num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float32
    )

    def forward(self, batch: StepBatch) -> Tensor:
        return (batch.token_ids + 1000 * torch.arange(len(batch.token_ids))).float()[:, None]

    def compute_logits(self, hidden_states: Tensor, adapters: RowAdapters = ()) -> Tensor:
        return torch.sin(hidden_states * torch.arange(1, VOCAB_SIZE + 1))


def test_a_model_that_ignores_positions_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="a sequence computed in chunks has other logits"):
        try_model(_Misplaced(), torch.device("cpu"), 16)


def test_a_head_that_calls_a_part_of_its_model_computes_the_same_logits(tmp_path: Path) -> None:
    """OPT, with an activation that our own layers do not have."""
    path = make_checkpoint("opt", tmp_path / "opt", activation_function="quick_gelu")
    loaded = load(path)
    assert isinstance(loaded.model, TransformersModel)
    assert_same(loaded, path)

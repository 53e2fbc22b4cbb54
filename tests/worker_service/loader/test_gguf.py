"""Models from GGUF files: every type of weights and every architecture, against `transformers`."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from scheduler_service.frontend.models.tokenizer import ModelTokenizer
from tests.support.checkpoints import BOS_TOKEN_ID, EOS_TOKEN_ID, MAX_POSITIONS
from tests.support.gguf_files import CHAT_TEMPLATE, make_gguf, tokenizer_of
from tests.support.loading import assert_same, load
from worker_service.errors import BadCheckpoint, ModelNotFound, UnsupportedModel, WorkerError
from worker_service.gguf.tokenizer import tokenizer_assets
from worker_service.loader.files.assets import iter_assets
from worker_service.loader.files.config import read_config, special_tokens
from worker_service.loader.files.fingerprint import fingerprint
from worker_service.loader.gguf.config import gguf_config
from worker_service.loader.gguf.file import KNOWN_TYPES, open_gguf
from worker_service.loader.gguf.names import gguf_tensors
from worker_service.loader.tensors import OpenFiles


@pytest.mark.parametrize("kind", KNOWN_TYPES)
def test_weights_of_every_type_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    assert_same(*make_gguf("llama", kind, tmp_path))


@pytest.mark.parametrize(
    "family",
    [
        *("llama_tied", "llama_linear", "llama_yarn", "mistral", "mistral_full", "qwen2", "qwen3"),
        *("gemma2", "gemma3", "phi3", "phi3_long", "phi3_partial", "phimoe", "phimoe_long"),
        *("gemma3n", "gemma4_shared", "gemma4_plain", "gemma4_moe", "llama4"),
        *("ministral3", "mistral4", "mistral4_large", "llama_bias"),
        *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v2_expanded"),
        *("deepseek_v3", "deepseek_v3_yarn", "youtu"),
        *("hunyuan_dense", "hunyuan_alpha", "hunyuan_moe"),
        *("llama_exaone", "qwen2_vl", "qwen3_vl", "qwen3_moe_vl"),
        *("gemma", "arcee", "olmoe", "dots1", "cohere_plain", "llama_internlm", "granite_minicpm"),
        *("apertus", "olmo", "phi_plain", "starcoder2", "stablelm", "stablelm_parallel"),
        *("nemotron", "jais2", "gpt_neox", "gpt_neox_sequential", "falcon", "falcon_groups"),
        *("falcon_groups_large", "granite_minicpm_long"),
        *("gpt2", "gpt_bigcode", "bloom", "mpt", "afmoe", "exaone_moe", "mimo_v2_flash"),
        *("minicpm3", "minicpm3_long", "deepseek_v32", "glm_moe_dsa"),
        *("hy_v3", "mellum", "cohere2_moe", "solar_open"),
        *("cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "glm4", "glm4_moe", "granite"),
        *("granite_hybrid", "granite_hybrid_moe", "lfm2", "lfm2_moe", "jamba", "nemotron_h"),
        *("nemotron_h_moe", "nemotron_h_latent"),
        *("mamba", "falcon_mamba", "mamba2", "falcon_h1", "falcon_h1_normed", "kimi_linear"),
        *("qwen3_next", "qwen3_next_joined", "qwen3_5", "qwen3_5_square", "qwen3_5_moe"),
        *("granitemoe", "minimax_m2", "olmo2", "olmo3", "seed_oss", "smollm3"),
    ],
)
def test_every_architecture_computes_as_transformers_do(family: str, tmp_path: Path) -> None:
    assert_same(*make_gguf(family, "Q8_0", tmp_path))


def test_embeddings_multiplied_by_an_unknown_number_are_refused(tmp_path: Path) -> None:
    file, _ = make_gguf("falcon_h1_folded", "Q8_0", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"expected a tensor output\.weight, since embeddin"):
        gguf_config(file)


def test_heads_of_a_glm_4_of_images_are_put_in_order(tmp_path: Path) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_sections([4, 6, 6, 0])

    assert_same(*make_gguf("glm4_vl", "Q8_0", tmp_path, metadata=metadata))


def test_a_model_in_several_files_is_loaded_by_the_name_of_one(tmp_path: Path) -> None:
    file, reference = make_gguf("llama", "Q4_1", tmp_path, parts=5)
    assert len(open_gguf(file).files) > 2
    assert_same(file, reference)
    last = open_gguf(file).files[-1]
    last.unlink()
    with pytest.raises(BadCheckpoint, match=rf"missing: {last.name}"):
        load(file)


@pytest.mark.parametrize("kind", ["Q4_K", "IQ4_XS", "BF16"])
def test_experts_are_read_from_tensors_of_every_kind_of_type(kind: str, tmp_path: Path) -> None:
    assert_same(*make_gguf("qwen3_moe", kind, tmp_path))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS", "BF16"])
def test_heads_within_a_block_of_weights_are_put_in_order(kind: str, tmp_path: Path) -> None:
    assert_same(*make_gguf("qwen3_5", kind, tmp_path))


def test_experts_of_gpt_oss_are_read_in_mxfp4(tmp_path: Path) -> None:
    assert_same(*make_gguf("gpt_oss", "MXFP4", tmp_path))


def test_a_rope_without_long_factors_and_one_with_them_are_those_of_phi_3(tmp_path: Path) -> None:
    file, reference = make_gguf("phi3_long", "Q8_0", tmp_path)
    rope = gguf_config(file)["rope_parameters"]
    expected = json.loads((reference / "config.json").read_text())["rope_parameters"]
    assert rope.pop("attention_factor") == pytest.approx((1 + np.log(16) / np.log(16)) ** 0.5)
    assert rope == expected
    (tmp_path / "plain").mkdir()
    file, _ = make_gguf("phi3", "Q8_0", tmp_path / "plain")
    assert gguf_config(file)["rope_parameters"]["rope_type"] == "default"


def test_layers_that_predict_further_tokens_are_not_used(tmp_path: Path) -> None:
    def add_layer(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(3)
        writer.add_nextn_predict_layers(1)
        for name in ("nextn.eh_proj", "attn_norm"):
            writer.add_tensor(f"blk.2.{name}.weight", np.ones(4, np.float32))

    assert_same(*make_gguf("glm4_moe", "Q8_0", tmp_path, metadata=add_layer))


@pytest.mark.parametrize(("family", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_scores_by_its_width(
    family: str, num_layers: int, tmp_path: Path
) -> None:
    file, _ = make_gguf(family, "Q8_0", tmp_path)
    assert gguf_config(file)["query_pre_attn_scalar"] == 64
    (tmp_path / "large").mkdir()
    file, _ = make_gguf(
        family,
        "Q8_0",
        tmp_path / "large",
        metadata=lambda w: (w.add_block_count(num_layers), w.add_head_count(2)),
    )
    assert gguf_config(file)["query_pre_attn_scalar"] == 128


@pytest.mark.parametrize("pattern", [3, [True, True, False, True, True, False, True]])
def test_a_stored_pattern_says_which_layers_of_gemma_have_a_window(
    pattern: int | list[bool], tmp_path: Path
) -> None:
    file, _ = make_gguf(
        "gemma3", "Q8_0", tmp_path, metadata=lambda w: w.add_sliding_window_pattern(pattern)
    )
    kinds = [kind.removesuffix("_attention") for kind in gguf_config(file)["layer_types"]]
    assert kinds == [*2 * ["sliding", "sliding", "full"], "sliding"]


def test_positions_of_gemma_3_are_scaled_in_full_attention_only(tmp_path: Path) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_freq_base_swa(20000.0)

    file, _ = make_gguf("gemma3", "Q8_0", tmp_path, metadata=metadata)
    assert gguf_config(file)["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    }


@pytest.mark.parametrize(
    ("family", "metadata", "error", "message"),
    [
        (
            "qwen3",
            lambda w: w.add_float32("tokenizer.ggml.eos_token_id", 1.5),
            BadCheckpoint,
            r"tokenizer\.ggml\.eos_token_id: expected a token id, got 1\.5",
        ),
        (
            "qwen3",
            lambda w: w.add_expert_count(4),
            UnsupportedModel,
            r"qwen3\.expert_count: expected none, got 4",
        ),
        (
            "qwen3_moe",
            lambda w: w.add_expert_used_count(9),
            BadCheckpoint,
            r"qwen3moe\.expert_used_count: expected at most 3, the number of experts, got 9",
        ),
        (
            "qwen3_moe",
            lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID),
            UnsupportedModel,
            r"expert_gating_func: expected 1, which is softmax, got 2",
        ),
        (
            "glm4_moe",
            lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX),
            UnsupportedModel,
            r"expert_gating_func: expected 2, which is sigmoid, got 1",
        ),
        (
            "glm4_moe",
            lambda w: w.add_nextn_predict_layers(2),
            BadCheckpoint,
            r"nextn_predict_layers: expected a number below that of layers, 2, got 2",
        ),
        (
            "minimax_m2",
            lambda w: w.add_expert_weights_scale(2.5),
            UnsupportedModel,
            r"expert_weights_scale: expected 1, got 2\.5",
        ),
        (
            "granite",
            lambda w: w.add_bool("granite.rope.scaling.finetuned", False),
            UnsupportedModel,
            r"rope\.scaling\.finetuned: expected true, since layers without RoPE are not read",
        ),
        (
            "granite_hybrid",
            lambda w: w.add_head_count_kv([0, 2, 4]),
            BadCheckpoint,
            r"head_count_kv: expected 0, or a positive number that is the same for all other",
        ),
        (
            "lfm2",
            lambda w: w.add_head_count_kv([0, 2]),
            BadCheckpoint,
            r"head_count_kv: expected a number for each of 3 layers, got \[0, 2\]",
        ),
        (
            "granite_hybrid",
            lambda w: w.add_ssm_time_step_rank(7),
            BadCheckpoint,
            r"ssm\.time_step_rank: expected a divisor of 512, ssm\.inner_size, got 7",
        ),
        (
            "nemotron_h",
            lambda w: w.add_feed_forward_length([0, 256]),
            BadCheckpoint,
            r"feed_forward_length: expected a number for each of 4 layers, got \[0, 256\]",
        ),
        (
            "qwen3_5",
            lambda w: w.add_ssm_group_count(3),
            BadCheckpoint,
            r"ssm\.group_count: expected a divisor of 4, ssm\.time_step_rank, got 3",
        ),
        (
            "qwen3_next",
            lambda w: w.add_array("qwen3next.attention.recurrent_layers", [True, False]),
            BadCheckpoint,
            r"recurrent_layers: expected a value for each of 3 layers, got \[True, False\]",
        ),
        (
            "kimi_linear",
            lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX),
            UnsupportedModel,
            r"expert_gating_func: expected 2, which is sigmoid, got 1",
        ),
        (
            "jamba",
            lambda w: w.add_head_count_kv([2, 2, 0, 2]),
            UnsupportedModel,
            r"expected attention in layers at regular distances, got \[0, 1, 3\]",
        ),
        (
            "llama_tied",
            lambda w: w.add_head_count_kv([0, 2]),
            BadCheckpoint,
            r"head_count_kv: expected a positive number, the same for all layers, got \[0, 2\]",
        ),
        (
            "granitemoe",
            lambda w: w.add_expert_shared_feed_forward_length(64),
            UnsupportedModel,
            r"expert_shared_feed_forward_length: expected none, got 64",
        ),
        (
            "qwen3_moe",
            lambda w: w.add_expert_count(5),
            BadCheckpoint,
            r"weights do not fit Qwen3MoeForCausalLM: missing tensors: "
            r".*experts\.3\.down_proj",
        ),
        (
            "qwen2_moe",
            lambda w: w.add_sliding_window(16),
            UnsupportedModel,
            r"qwen2moe\.attention\.sliding_window: expected none, got 16",
        ),
        (
            "gemma3",
            lambda w: w.add_sliding_window_pattern([True, False]),
            BadCheckpoint,
            r"sliding_window_pattern: expected a positive number, or one value for each of 7",
        ),
        (
            "gemma4_plain",
            lambda w: w.add_head_count_kv([2, 1]),
            BadCheckpoint,
            r"weights do not fit .*layers\.1\.self_attn\.k_proj\.weight is",
        ),
        (
            "gemma4_shared",
            lambda w: w.add_head_count_kv([1, 2, 1, 2, 2, 1]),
            BadCheckpoint,
            r"head_count_kv: expected the same number for all layers of a type, got \[1, 2, 1",
        ),
        (
            "gemma4_shared",
            lambda w: w.add_feed_forward_length([256] * 4 + [512] * 2),
            BadCheckpoint,
            r"feed_forward_length: expected the same number for all layers, or twice as many for",
        ),
        (
            "gemma4_shared",
            lambda w: w.add_shared_kv_layers(6),
            BadCheckpoint,
            r"shared_kv_layers: expected a number below that of layers, 6, got 6",
        ),
        (
            "gemma4_moe",
            lambda w: (
                w.add_key_length(64),
                w.add_value_length(64),
                w.add_rope_dimension_count(64),
            ),
            UnsupportedModel,
            r"rope_freqs\.weight: expected 32 divisors, of which the first are 1, and the others",
        ),
        (
            "ministral3",
            lambda w: w.add_attn_temperature_length(32),
            UnsupportedModel,
            r"attention\.temperature_length: expected 16, the trained length, got 32",
        ),
        (
            "llama4",
            lambda w: w.add_sliding_window(4096),
            UnsupportedModel,
            r"llama4\.attention\.sliding_window: expected none, got 4096",
        ),
        (
            "gemma2",
            lambda w: w.add_attn_logit_softcapping(-1.0),
            BadCheckpoint,
            r"gemma2\.attn_logit_softcapping: expected a positive number, got -1\.0",
        ),
        (
            "gemma2",
            lambda w: w.add_block_count(1 << 30),
            BadCheckpoint,
            r"gemma2\.block_count: expected at most the number of tensors, 46, got 1073741824",
        ),
        (
            "phi3",
            lambda w: w.add_tensor("rope_factors_long.weight", np.ones(5, np.float32)),
            BadCheckpoint,
            r"missing metadata phi3\.rope\.scaling\.original_context_length",
        ),
        (
            "phi3_long",
            lambda w: w.add_rope_dimension_count(32),
            BadCheckpoint,
            r"rope_factors_long\.weight: expected 16 numbers, got \[32\]",
        ),
        (
            "phi3",
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            UnsupportedModel,
            r"phi3\.rope\.scaling\.type: expected none without tensors rope_factors_\*, got 'long",
        ),
        (
            "bloom",
            lambda w: w.add_head_count_kv(3),
            UnsupportedModel,
            r"bloom\.attention\.head_count_kv: expected 4, that of heads of queries, got 3",
        ),
        (
            "afmoe",
            lambda w: w.add_expert_group_count(2),
            UnsupportedModel,
            r"afmoe\.expert_group_count: expected 1, got 2",
        ),
        (
            "exaone_moe",
            lambda w: w.add_sliding_window_pattern([True] * 3),
            BadCheckpoint,
            r"sliding_window_pattern: expected a positive number, or one value for each of 2",
        ),
        (
            "qwen3_moe",
            lambda w: w.add_tensor("blk.7.ffn_up_exps.weight", np.ones((4, 4), np.float32)),
            BadCheckpoint,
            r"experts\.\*\.up_proj\.weight: expected 3 dimensions, the first of experts",
        ),
    ],
)
def test_what_an_architecture_cannot_have_is_named(
    family: str,
    metadata: Callable[[gguf.GGUFWriter], None],
    error: type[WorkerError],
    message: str,
    tmp_path: Path,
) -> None:
    file, _ = make_gguf(family, "Q8_0", tmp_path, metadata=metadata)
    with pytest.raises(error, match=message):
        load(file)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf("llama", "Q4_0", tmp_path_factory.mktemp("gguf"))[0]


def test_facts_and_files_for_frontends_come_from_the_metadata(llama: Path) -> None:
    loaded = load(llama)
    assert loaded.eos_token_ids == (EOS_TOKEN_ID,)
    assert loaded.bos_token_id == BOS_TOKEN_ID
    assert loaded.config.max_model_len == MAX_POSITIONS
    tokenizer = tokenizer_of(dict(iter_assets(llama)))
    assert tokenizer.tool_template_source == CHAT_TEMPLATE
    ids = tokenizer.encode("hello<eos>ä")
    names = [tokenizer.token_name(token) for token in ids]
    assert names == ["<bos>", "he", "ll", "o", "<eos>", "Ã", "¤"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "helloä"


def test_metadata_and_size_are_in_the_fingerprint(llama: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(llama.read_bytes())
    assert fingerprint(renamed, dict(iter_assets(renamed))) == fingerprint(
        llama, dict(iter_assets(llama))
    )
    content = bytearray(llama.read_bytes())
    content[content.index(b"<eos>")] = ord("(")
    renamed.write_bytes(content)
    assert fingerprint(renamed, {}) != fingerprint(llama, {})


def test_frequency_factors_of_llama_3_are_recognised(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10000.0 ** -(np.arange(0, 64, 2) / 64)
    factors = (plain / scaled.numpy()).astype(np.float32)
    file, _ = make_gguf(
        "llama", "F16", tmp_path, metadata=lambda w: w.add_tensor("rope_freqs.weight", factors)
    )
    assert gguf_config(file)["rope_parameters"] == pytest.approx(rope)
    assert load(file).model.max_model_len == MAX_POSITIONS
    (tmp_path / "other").mkdir()
    file, _ = make_gguf(
        "llama",
        "F16",
        tmp_path / "other",
        metadata=lambda w: w.add_tensor("rope_freqs.weight", factors[::-1].copy()),
    )
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight: expected the 32 factors"):
        load(file)


def test_a_size_of_heads_that_a_file_makes_up_takes_no_memory(tmp_path: Path) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        for add in (
            writer.add_key_length,
            writer.add_value_length,
            writer.add_rope_dimension_count,
        ):
            add(1 << 24)
        writer.add_tensor("rope_freqs.weight", np.ones(32, np.float32))

    file, _ = make_gguf("llama", "F16", tmp_path, metadata=metadata)
    tracemalloc.start()
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight: expected the 8388608 factors"):
        gguf_config(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 24


def _header(*, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _tensor(kind: int, *, shape: tuple[int, ...] = (32,), offset: int = 0, dims: int = 0) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return (
        _string("w")
        + struct.pack("<I", dims or len(shape))
        + sizes
        + struct.pack("<IQ", kind, offset)
    )


HUGE = 1 << 63


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: it ends within magic"),
        (b"PK\3\4" + bytes(60), "expected a GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "expected GGUF version 2 or 3"),
        (_header(tensors=HUGE), f"tensor count says {HUGE}"),
        (_header(keys=HUGE), f"metadata count says {HUGE}"),
        (_header(keys=1, rest=struct.pack("<Q", HUGE) + bytes(16)), f"says {HUGE}"),
        (_header(keys=1, rest=_string("k") + struct.pack("<IQ", 8, HUGE)), f"k says {HUGE}"),
        (_header(keys=1, rest=_string("k") + struct.pack("<IIQ", 9, 8, HUGE)), f"k says {HUGE}"),
        (_header(keys=1, rest=_string("k") + struct.pack("<IIQ", 9, 4, HUGE)), f"k says {HUGE}"),
        (
            _header(keys=1, rest=_string("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE)),
            f"k says {HUGE}",
        ),
        (
            _header(keys=1, rest=_string("k") + struct.pack("<IIQQ", 9, 8, 1, 9) + b"a"),
            "truncated: it ends within k",
        ),
        (
            _header(keys=1, rest=_string("k") + struct.pack("<IIQQ", 9, 8, 2, 3) + b"abcdefgh"),
            "truncated: it ends within k",
        ),
        (
            _header(keys=1, rest=_string("k") + struct.pack("<IIQ", 9, 9, 1)),
            "k: unknown type of ar",
        ),
        (
            _header(keys=1, rest=_string("k") + struct.pack("<IQ", 77, 1)),
            "k: unknown type of value",
        ),
        (_header(tensors=1, rest=_tensor(99)), "w: unknown tensor type 99; expected one of F16"),
        (_header(tensors=1, rest=_tensor(16)), "w: unknown tensor type IQ2_XXS"),
        (_header(tensors=1, rest=_tensor(2, shape=(33,))), "w: expected rows of a multiple of 32"),
        (_header(tensors=1, rest=_tensor(0, shape=(HUGE, HUGE))), "w needs"),
        (_header(tensors=1, rest=_tensor(0, offset=HUGE)), "w needs 128 bytes"),
        (
            _header(tensors=1, rest=_tensor(0, offset=3) + bytes(999)),
            "w: expected the offset 0, where the header ends, got 3",
        ),
        (_header(tensors=1, rest=_tensor(0, dims=1 << 31)), "w: expected 1 to 4 dimensions"),
        (_header(tensors=2, rest=2 * _tensor(0) + bytes(999)), "w occurs twice"),
    ],
)
def test_hostile_headers_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=f"bad.gguf: .*{message}"):
        load(file)


def test_a_file_cut_anywhere_is_refused(llama: Path, tmp_path: Path) -> None:
    content = llama.read_bytes()
    file = tmp_path / "cut.gguf"
    for length in (*range(0, 1500, 37), len(content) // 2, len(content) - 33):
        file.write_bytes(content[:length])
        with pytest.raises(BadCheckpoint, match=r"cut\.gguf: .*truncated"):
            open_gguf(file)


@pytest.fixture(scope="module", params=["llama", "gemma3", "phi3_long", "qwen2_moe", "glm4_moe"])
def any_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(request.param, "Q4_0", tmp_path_factory.mktemp("gguf"))[0]


@pytest.mark.parametrize("seed", range(2))
def test_damaged_headers_are_read_or_refused(seed: int, any_family: Path, tmp_path: Path) -> None:
    """Random bytes where the metadata is: whatever they mean, the error is one that names them."""
    random = Random(seed)
    content, num_bytes = any_family.read_bytes(), open_gguf(any_family).header_bytes[0]
    file = tmp_path / "damaged.gguf"
    for _ in range(50):
        damaged = bytearray(content)
        for _ in range(random.choice([1, 1, 2, 4])):
            place = random.randrange(24, random.choice([1400, num_bytes]))
            damaged[place] = random.choice([0, 1, 4, 6, 8, 9, 128, 255, random.randrange(256)])
        file.write_bytes(damaged)
        with suppress(WorkerError):
            config = read_config(file)
            special_tokens(file, config)
            fingerprint(file, dict(iter_assets(file)))
            gguf_tensors(file, OpenFiles())


def _without(name: str) -> Callable[[bytes], bytes]:
    """The name replaced by another of the same length."""
    return lambda content: content.replace(_string(name), _string("x" * len(name)), 1)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (_without("llama.block_count"), BadCheckpoint, r"missing metadata llama\.block_count"),
        (_without("token_embd.weight"), BadCheckpoint, r"missing tensor token_embd\.weight"),
        (
            _without("blk.1.ffn_up.weight"),
            BadCheckpoint,
            r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight; unexpected tensors: xxx",
        ),
        (
            lambda content: content.replace(b"llama", b"rwkv7", 1).replace(b"llama", b"rwkv7"),
            UnsupportedModel,
            "expected one of llama, qwen2, .*, modern-bert, got 'rwkv7'",
        ),
        (
            lambda content: content.replace(b"gpt-2", b"gpt-9", 1),
            UnsupportedModel,
            r"tokenizer\.ggml\.pre: expected one of gpt-2, .* got 'gpt-9'",
        ),
        (
            lambda content: content.replace(b"gpt2", b"rwkv", 1),
            UnsupportedModel,
            r"tokenizer\.ggml\.model: expected gpt2, gemma4, llama, bert or t5, got 'rwkv'",
        ),
    ],
)
def test_what_a_file_lacks_is_named(
    llama: Path,
    tmp_path: Path,
    edit: Callable[[bytes], bytes],
    error: type[WorkerError],
    message: str,
) -> None:
    file = tmp_path / "edited.gguf"
    file.write_bytes(edit(llama.read_bytes()))
    with pytest.raises(error, match=message):
        load(file)


def test_numbers_of_activations_that_a_file_lacks_are_named(tmp_path: Path) -> None:
    file, _ = make_gguf("apertus", "Q8_0", tmp_path)
    file.write_bytes(file.read_bytes().replace(b"xielu.beta", b"xielu.eta_"))
    message = r"apertus-Q8_0\.gguf: xielu\.beta: expected a number for each of 2 layers, got \[None"
    with pytest.raises(BadCheckpoint, match=message):
        load(file)


def test_layers_behind_the_last_one_have_settings_that_are_not_used(tmp_path: Path) -> None:
    file, _ = make_gguf("mimo_v2_flash", "Q8_0", tmp_path)
    config = gguf_config(file)
    (tmp_path / "longer").mkdir()

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)

    longer, _ = make_gguf("mimo_v2_flash", "Q8_0", tmp_path / "longer", metadata=metadata)
    shorter = gguf_config(longer)
    assert shorter["num_hidden_layers"] == config["num_hidden_layers"] - 1
    for key in ("layer_types", "mlp_layer_types"):
        assert shorter[key] == config[key][:-1]


def test_old_files_of_minicpm_that_lack_its_multipliers_are_refused(tmp_path: Path) -> None:
    file, _ = make_gguf("granite_minicpm", "Q8_0", tmp_path)
    file.write_bytes(file.read_bytes().replace(b"minicpm.logit_scale", b"minicpm.logit_sc___"))
    with pytest.raises(BadCheckpoint, match=r"missing metadata minicpm\.logit_scale"):
        load(file)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    file, _ = make_gguf("llama", "Q4_0", tmp_path)
    content = bytearray(file.read_bytes())
    place = content.index(b"llama.feed_forward_length") + 25 + 4
    content[place : place + 4] = struct.pack("<I", 128)
    file.write_bytes(content)
    message = r"metadata of .*\.gguf: .*mlp\.\w+\.weight is \[256, 256\], expected \["
    with pytest.raises(BadCheckpoint, match=message):
        load(file)


def test_a_directory_with_a_gguf_file_says_what_to_name(llama: Path) -> None:
    with pytest.raises(ModelNotFound, match=rf"name one of its files as the model: {llama.name}"):
        load(llama.parent)


def test_sentence_pieces_merge_by_score_and_fall_back_to_bytes() -> None:
    others = {"</s>": 3} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
    words = dict.fromkeys(["bc", "ab", "▁a", "▁ab", "▁", "a", "b", "c"], 1)
    ids = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}
    tokenizer = _sentence_pieces({**others, **words}, **ids)
    ids = tokenizer.encode("abc ab</s>é")
    names = [tokenizer.token_name(token) for token in ids]
    assert names == ["<s>", "▁a", "bc", "▁ab", "</s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abc ab é"


def _sentence_pieces(words: dict[str, int], **others: Any) -> ModelTokenizer:
    """words: types by piece; the first are worth the most."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", *words],
        "tokenizer.ggml.scores": [0.0, 0.0, *(-float(rank) for rank in range(len(words)))],
        "tokenizer.ggml.token_type": [2, 3, *words.values()],
        "tokenizer.ggml.bos_token_id": 1,
        **others,
    }
    return tokenizer_of(tokenizer_assets(Path("x.gguf"), metadata))


@pytest.mark.parametrize("spaces", ["  ", "▁▁"])
def test_runs_of_spaces_are_one_token_of_gemma(spaces: str) -> None:
    """Whether the file's converter wrote them as spaces or as pieces."""
    words = {spaces: 4, "\n\n": 4, "▁a": 1, "<start_of_turn>": 3, "\n": 1, "▁": 1, "a": 1}
    tokenizer = _sentence_pieces(words, **{"tokenizer.ggml.add_space_prefix": False})
    ids = tokenizer.encode("<start_of_turn>a  a a\n\n")
    names = [tokenizer.token_name(token) for token in ids]
    assert names == ["<s>", "<start_of_turn>", "a", spaces, "a", "▁a", "\n\n"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a  a a\n\n"


@pytest.mark.parametrize(("architecture", "newline"), [("phi3", []), ("llama", ["▁", "\n"])])
def test_phi_3_drops_white_space_after_special_tokens(
    architecture: str, newline: list[str]
) -> None:
    words = {"▁a": 1, "\n": 1, "▁": 1, "a": 1, "<|end|>": 3, "<|endoftext|>": 3}
    tokenizer = _sentence_pieces(words, **{"general.architecture": architecture})
    names = [tokenizer.token_name(token) for token in tokenizer.encode("<|end|>\n<|endoftext|>\n")]
    assert names == ["<s>", "<|end|>", *newline, "<|endoftext|>", "▁", "\n"]


def test_chat_templates_with_names_are_files_of_their_own(tmp_path: Path) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template([{"name": "tool_use", "template": "T"}])

    file, _ = make_gguf("llama", "Q8_0", tmp_path, metadata=metadata)
    assets = dict(iter_assets(file))
    assert assets["tool_use.jinja"] == b"T"
    assert assets["chat_template.jinja"].decode() == CHAT_TEMPLATE
    assert {name for name in assets if "template" in name} == {"chat_template.jinja"}


def test_a_turn_ends_where_the_chat_template_of_its_family_ends_it(tmp_path: Path) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list([*(str(number) for number in range(299)), "<end_of_turn>"])

    file, _ = make_gguf("gemma2", "Q8_0", tmp_path, metadata=metadata)
    assert gguf_config(file)["eos_token_id"] == [EOS_TOKEN_ID, 299]

"""Text encoders: hidden states and logits of every family against `transformers`."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from pagewire_kernels.cpu.native_library import library
from tests.support.encoders import (
    FAMILIES,
    classify,
    encode,
    expected_output,
    load_encoder,
    make_encoder,
    texts,
)
from tests.support.loading import edit_config, edit_tensors, layouts, load
from tools.launch import free_port
from worker_service.address import TcpAddress
from worker_service.distributed.communicator import Communicator, Rendezvous
from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.models.encoders.encoder import EncoderModel, EncoderSettings, bucket_of
from worker_service.models.encoders.families import ENCODERS
from worker_service.models.layers.rotary import RotaryTable
from worker_service.models.registry import native_settings
from worker_service.plan import PoolingHead, PoolingType

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 37, 190, 5, 64)
TOLERANCE = 2e-5
unit = nn.functional.normalize


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_of_packed_texts_are_those_of_transformers(
    family: str, backend: str | None, tmp_path: Path
) -> None:
    path, batch = make_encoder(family, tmp_path), texts(LENGTHS)
    model = load_encoder(path, backend=backend)
    for text, hidden in zip(batch, encode(model, batch), strict=True):
        expected = expected_output(path, text)
        torch.testing.assert_close(unit(hidden), unit(expected), rtol=0, atol=TOLERANCE)
        mean, expected_mean = unit(hidden.mean(0), dim=0), unit(expected.mean(0), dim=0)
        torch.testing.assert_close(mean, expected_mean, rtol=0, atol=TOLERANCE)
    assert model.pooling.vector_size == model.hidden_size
    assert model.pooling.default_type is PoolingType.MEAN
    assert torch.equal(model.pool(mean[None], PoolingHead.UNSPECIFIED), mean[None])


@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_classifiers_are_those_of_transformers(
    family: str, kind: str, tmp_path: Path
) -> None:
    path, batch = make_encoder(family, tmp_path, kind), texts(LENGTHS)
    model = load_encoder(path)
    for text, hidden in zip(batch, encode(model, batch), strict=True):
        expected = expected_output(path, text)
        torch.testing.assert_close(classify(model, hidden), expected, rtol=1e-4, atol=1e-4)
    assert len(model.pooling.labels) == 3
    is_mean = family == "modernbert_biases"
    pooled = PoolingType.MEAN if is_mean else PoolingType.CLS
    pooled = PoolingType.ALL if kind == "ForTokenClassification" else pooled
    assert model.pooling.classifier_type is pooled


@pytest.mark.skipif(library() is None, reason="no compiled kernels for this processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_has_the_same_bits_alone_and_in_any_batch(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = load_encoder(make_encoder(family, tmp_path, "ForTokenClassification"), dtype)
    lengths = [1, 2, 7, 16, 17, 33, 64, 65, 128, 190]
    batch = texts(lengths)
    alone = [encode(model, [text])[0] for text in batch]
    draw = torch.Generator().manual_seed(1)
    for _ in range(8):
        count = int(torch.randint(2, len(batch) + 1, (1,), generator=draw))
        chosen = torch.randperm(len(batch), generator=draw)[:count].tolist()
        for i, hidden in zip(chosen, encode(model, [batch[i] for i in chosen]), strict=True):
            assert torch.equal(hidden, alone[i])
            assert torch.equal(classify(model, hidden), classify(model, alone[i]))


@pytest.mark.parametrize(
    ("dtype", "quantization", "similarity"),
    [(torch.bfloat16, None, 0.99), (torch.float32, "int8", 0.99), (torch.float32, "int4", 0.8)],
)
@pytest.mark.parametrize("family", ["bert", "modernbert_biases", "nomic_bert"])
def test_vectors_of_fewer_bits_are_similar(
    family: str, dtype: torch.dtype, quantization: str | None, similarity: float, tmp_path: Path
) -> None:
    if quantization is not None and library() is None:
        pytest.skip("no compiled kernels for this processor")
    path, batch = make_encoder(family, tmp_path, intermediate_size=64), texts(LENGTHS)
    exact, model = load_encoder(path), load_encoder(path, dtype, quantization=quantization)
    for expected, got in zip(encode(exact, batch), encode(model, batch), strict=True):
        cosine = nn.functional.cosine_similarity(expected.mean(0), got.float().mean(0), dim=0)
        assert similarity < cosine < 1 - 1e-7


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_what_one_does(
    family: str, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    path, batch = make_encoder(family, tmp_path, "ForSequenceClassification"), texts(LENGTHS)
    alone = load_encoder(path)
    expected = [classify(alone, hidden) for hidden in encode(alone, batch)]
    address, ranks = TcpAddress("127.0.0.1", free_port()), layouts(tensor, pipeline)
    meetings = [Rendezvous(address, layout) for layout in ranks]
    meetings[0].open()
    models = [load_encoder(path, communicator=Communicator(layout)) for layout in ranks]
    has_finished = Barrier(2)

    def logits(rank: int) -> list[Tensor]:
        model = models[rank]
        model.communicator.join(meetings[rank], 1, torch.device("cpu"))
        found = [classify(model, hidden) for hidden in encode(model, batch)]
        has_finished.wait()
        model.communicator.leave()
        return found

    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(logits, range(2))][-1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tokens_farther_than_a_window_have_no_effect_in_a_layer_with_one(tmp_path: Path) -> None:
    kinds = {"layer_types": ["sliding_attention"], "num_hidden_layers": 1}
    model = load_encoder(make_encoder("modernbert", tmp_path, local_attention=8, **kinds))
    (text,) = texts([40])
    changed = text.clone()
    changed[20] = 5
    before, after = encode(model, [text])[0], encode(model, [changed])[0]
    differs = (before != after).any(1).nonzero().flatten().tolist()
    assert differs == list(range(16, 25))


def test_buckets_of_distances_are_those_of_transformers() -> None:
    distances = torch.arange(-2000, 2001)
    assert torch.equal(bucket_of(distances), MPNetEncoder.relative_position_bucket(distances))


@pytest.mark.parametrize("family", ["bert", "xlm_roberta", "mpnet", "distilbert", "modernbert"])
def test_a_model_for_masked_tokens_makes_vectors_and_names_what_it_drops(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, (text,) = make_encoder(family, tmp_path, "ForMaskedLM"), texts([30])
    (hidden,) = encode(load_encoder(path), [text])
    bare = shutil.copytree(path, tmp_path / "bare")
    edit_config(bare, architectures=[f"{FAMILIES[family][0]}Model"])
    torch.testing.assert_close(unit(hidden), unit(expected_output(bare, text)))
    logged = [record.message for record in caplog.records if "weights" in record.name]
    heads = {"bert": "cls.", "distilbert": "vocab_", "modernbert": "head."}
    assert logged[0].startswith("tensors not used num=")
    assert heads.get(family, "lm_head.") in logged[0]


def test_missing_and_unknown_tensors_are_errors(tmp_path: Path) -> None:
    path = make_encoder("bert", tmp_path)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["encoder.layer.0.other.weight"] = tensors.pop("embeddings.LayerNorm.bias")

    edit_tensors(path, edit)
    with pytest.raises(
        BadCheckpoint,
        match=r"BertModel: missing tensors: embeddings\.LayerNorm\.bias; unexpected tensors:"
        r" encoder\.layer\.0\.other\.weight",
    ):
        load_encoder(path)


def test_norms_of_old_checkpoints_are_read_by_their_names(tmp_path: Path) -> None:
    path, (text,) = make_encoder("bert", tmp_path), texts([30])
    expected = encode(load_encoder(path), [text])[0]

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors["bert." + old.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)

    edit_tensors(path, rename)
    assert torch.equal(encode(load_encoder(path), [text])[0], expected)


_ORIGINAL_NOMIC: dict[str, Any] = {
    "architectures": ["NomicBertModel"],
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 64,
    "n_head": 4,
    "n_inner": 96,
    "n_layer": 3,
    "n_positions": 200,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 130,
}


def _with_original_config(path: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with the configuration of the authors' own code."""
    shutil.copytree(path, target)
    (target / "config.json").write_text(json.dumps(_ORIGINAL_NOMIC | changes))
    return target


def test_nomic_bert_computes_the_same_with_the_configuration_of_its_authors(tmp_path: Path) -> None:
    path, batch = make_encoder("nomic_bert", tmp_path), texts([30, 190])
    original = load_encoder(_with_original_config(path, tmp_path / "original"))
    assert all(map(torch.equal, encode(original, batch), encode(load_encoder(path), batch)))
    scaled = load_encoder(
        _with_original_config(
            path, tmp_path / "scaled", rotary_scaling_factor=2.0, max_trained_positions=150
        )
    )
    assert (original.max_model_len, scaled.max_model_len) == (200, 150)


def test_nomic_bert_without_gates_computes_what_gates_of_one_do(tmp_path: Path) -> None:
    path, (text,) = make_encoder("nomic_bert", tmp_path, hidden_act="gelu"), texts([30])
    draw = torch.Generator().manual_seed(0)

    def add_biases(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".attn." in name or ".mlp." in name]:
            shape = tensors[name].shape[:1]
            tensors[name.replace("weight", "bias")] = torch.randn(shape, generator=draw)
            if "fc11" in name:
                tensors[name] = torch.zeros_like(tensors[name])
                tensors[name.replace("weight", "bias")] = torch.ones(shape)

    def remove_gates(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".fc1" in name]:
            tensor = tensors.pop(name)
            if "fc12" in name:
                tensors[name.replace("fc12", "fc1")] = tensor

    with_biases = dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True)
    with_biases |= {"activation_function": "geglu"}
    gated = _with_original_config(path, tmp_path / "gated", **with_biases)
    edit_tensors(gated, add_biases)
    plain = Path(shutil.copytree(gated, tmp_path / "plain"))
    edit_config(plain, activation_function="gelu")
    edit_tensors(plain, remove_gates)
    (expected,), (found,) = (encode(load_encoder(path), [text]) for path in (gated, plain))
    torch.testing.assert_close(unit(found), unit(expected), rtol=0, atol=TOLERANCE)


_ORIGINAL_GTE: dict[str, Any] = {
    "rope_parameters": None,
    "rope_theta": 20000,
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
    "model_type": "new",
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "rope_scaling": {"type": "ntk", "factor": 8.0},
}


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
def test_gte_is_served_by_its_authors_names_and_with_their_rotary_scaling(
    kind: str, tmp_path: Path
) -> None:
    path, [text] = make_encoder("gte", tmp_path, kind), texts([150])
    head_dim, theta, factor = 16, 20000, 8.0
    # As NTKScalingRotaryEmbedding of new-impl: frequency i is 1 / (theta * factor) ** (2 * i /
    # head_dim), divided by factor ** (2 / head_dim).
    scaled = {"rope_type": "linear", "factor": factor ** (2 / head_dim)}
    edit_config(path, rope_parameters={**scaled, "rope_theta": theta * factor})
    expected = expected_output(path, text)
    edit_config(path, architectures=[f"New{kind}"], **_ORIGINAL_GTE)
    if kind != "Model":
        edit_tensors(path, _as_the_authors_save)
    model = load_encoder(path)
    (hidden,) = encode(model, [text])
    if kind == "Model":
        torch.testing.assert_close(unit(hidden), unit(expected), rtol=0, atol=TOLERANCE)
    else:
        torch.testing.assert_close(classify(model, hidden), expected, rtol=1e-4, atol=1e-4)
    assert model.max_model_len == 200
    settings = native_settings(json.loads((path / "config.json").read_text()))
    assert isinstance(settings, EncoderSettings)
    assert settings.rotary is not None
    table = RotaryTable(settings.rotary, 200, torch.float64, torch.device("cpu"))
    frequencies = (theta * factor) ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(200)[:, None] * frequencies / factor ** (2 / head_dim)
    torch.testing.assert_close(table.cos, angles.cos(), rtol=0, atol=TOLERANCE)


def _as_the_authors_save(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("gte.")]:
        tensors[name.replace("gte.", "new.", 1)] = tensors.pop(name)


@pytest.mark.parametrize(
    ("family", "edit", "message"),
    [
        ("bert", {"is_decoder": True}, "is_decoder: expected False, got True"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention: expected False, got True"),
        ("bert", {"is_causal": True}, "is_causal: expected False, got True"),
        (
            "roberta",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type: expected absolute, got relative_key",
        ),
        ("bert", {"hidden_act": "mish"}, "hidden_act: expected silu or .*, got mish"),
        ("distilbert", {"activation": "mish"}, "activation: expected silu or .*, got mish"),
        ("modernbert", {"hidden_activation": "mish"}, "hidden_activation: expected .*, got mish"),
        (
            "mpnet",
            {"relative_attention_num_buckets": 64},
            "relative_attention_num_buckets: expected 32, got 64",
        ),
        ("electra", {"embedding_size": 32}, "embedding_size: expected 64, got 32"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale: expected False, got True"),
        (
            "gte",
            _ORIGINAL_GTE | {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}},
            "rope_scaling.mixed_b: expected none, got 0.6",
        ),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling: expected cls or mean"),
        (
            "modernbert",
            {"layer_types": ["full_attention"]},
            "layer_types: expected sliding_attention or full_attention for each of 3 layers",
        ),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}},
            "rope_parameters.rope_type: expected default or linear or llama3 or yarn or "
            "proportional, got dynamic",
        ),
        (
            "nomic_bert",
            {"rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor: expected 1.0, got 0.5",
        ),
        ("nomic_bert", {"moe_every_n_layers": 2}, "moe_every_n_layers: expected 0, got 2"),
        (
            "nomic_bert",
            _ORIGINAL_NOMIC | {"activation_function": "glu"},
            "activation_function: expected swiglu or .*, got glu",
        ),
        ("nomic_bert", _ORIGINAL_NOMIC | {"prenorm": True}, "prenorm: expected False, got True"),
        (
            "nomic_bert",
            _ORIGINAL_NOMIC | {"rotary_emb_scale_base": 512},
            "rotary_emb_scale_base: expected none, got 512",
        ),
    ],
)
def test_what_an_encoder_does_not_compute_is_refused_by_name(
    family: str, edit: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = make_encoder(family, tmp_path)
    edit_config(path, **edit)
    with pytest.raises(UnsupportedModel, match=f"config.json: {message}"):
        load_encoder(path)


@pytest.mark.parametrize(
    ("family", "edit", "message"),
    [
        ("bert", {"type_vocab_size": "2"}, "type_vocab_size: expected at least 0, got '2'"),
        ("roberta", {"pad_token_id": -2}, "pad_token_id: expected at least -1, got -2"),
        ("bert", {"pooling_type": "mean"}, "pooling_type: expected one of LAST, .* got 'mean'"),
        ("bert", {"pooling_type": ["MEAN"]}, r"pooling_type: expected one of .* got \['MEAN'\]"),
        ("distilbert", {"dim": "64"}, "dim: expected a positive number, got '64'"),
        ("distilbert", {"n_heads": 0}, "n_heads: expected .* got 0"),
        ("modernbert", {"local_attention": -1}, "local_attention: expected at least 0, got -1"),
        ("modernbert", {"local_attention": float("nan")}, "local_attention: .* got nan"),
        (
            "modernbert",
            {"layer_types": None, "global_attn_every_n_layers": 0},
            "global_attn_every_n_layers: expected at least 1, got 0",
        ),
        ("modernbert", {"rope_parameters": 5}, "rope_parameters: expected an object, got 5"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": 5}},
            "full_attention: expected an object, got 5",
        ),
        ("nomic_bert", {"rope_parameters": {"rope_theta": -1}}, "rope_theta: .* above 0, got -1"),
        (
            "nomic_bert",
            _ORIGINAL_NOMIC | {"rotary_scaling_factor": 2, "max_trained_positions": "x"},
            "max_trained_positions: expected at least 1, got 'x'",
        ),
        ("gte", {"rope_parameters": [1]}, r"rope_parameters: expected an object, got \[1\]"),
        (
            "gte",
            {"rope_parameters": {"type": "ntk", "factor": 0}},
            "rope_scaling.factor: expected a number above 0, got 0",
        ),
    ],
)
def test_a_setting_of_another_kind_is_refused_by_name(
    family: str, edit: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = make_encoder(family, tmp_path, num_hidden_layers=3)
    edit_config(path, **edit)
    with pytest.raises(BadCheckpoint, match=f"config.json: {message}"):
        load(path)


@pytest.mark.parametrize("name", ["BigBirdModel", "XLMRobertaXLModel", "BertForQuestionAnswering"])
def test_another_encoder_is_not_served_as_if_it_were_a_decoder(name: str, tmp_path: Path) -> None:
    import transformers

    sizes = {"vocab_size": 130, "hidden_size": 64, "intermediate_size": 96}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4}
    kind = name.removesuffix("Model").removesuffix("ForQuestionAnswering")
    config = getattr(transformers, f"{kind}Config")(**sizes, **layers)
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"{kind}.* cannot be served: it is a text encoder"):
        load(tmp_path)


def test_a_loaded_encoder_has_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    loaded = load(make_encoder("modernbert", tmp_path))
    assert isinstance(loaded.model, EncoderModel)
    assert loaded.batch_invariant == (library() is not None)


@pytest.mark.parametrize("architecture", sorted(ENCODERS))
def test_a_configuration_without_its_sizes_is_refused(architecture: str) -> None:
    with pytest.raises(BadCheckpoint, match=f"{architecture} needs the key"):
        native_settings({"architectures": [architecture]})

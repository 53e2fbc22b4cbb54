"""Tiny random text encoders of every family, and what they and `transformers` compute."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, StepBatch
from pagewire_kernels.interface import AttentionNeeds
from pagewire_kernels.select import select_kernels
from worker_service.distributed.communicator import Communicator
from worker_service.distributed.layout import Layout
from worker_service.loader.files.config import read_config
from worker_service.loader.weights.checkpoint import open_checkpoint
from worker_service.loader.weights.fill import load_weights
from worker_service.models.encoders.encoder import EncoderModel
from worker_service.models.interface import ModelContext
from worker_service.models.registry import build_native_model
from worker_service.plan import PoolingHead, PoolingType

CPU = torch.device("cpu")
VOCAB_SIZE = 130
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 200,
    "initializer_range": 0.2,
    "pad_token_id": 1,
    "num_labels": 3,
}
_DISTILBERT = {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}
_MODERNBERT = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
_ALL_BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"type_vocab_size": 3}),
    "bert_relu": ("Bert", {"hidden_act": "relu", "layer_norm_eps": 1e-5}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "xlm_roberta": ("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 4}),
    "camembert": ("Camembert", {"type_vocab_size": 1, "hidden_act": "gelu_new"}),
    "data2vec": ("Data2VecText", {"type_vocab_size": 1}),
    "electra": ("Electra", {"embedding_size": 64}),
    "gte": ("Gte", {}),
    "mpnet": ("MPNet", {}),
    "distilbert": ("DistilBert", {**_DISTILBERT, "activation": "gelu"}),
    "modernbert": ("ModernBert", {**_MODERNBERT, "local_attention": 16}),
    "modernbert_biases": (
        "ModernBert",
        {
            **_MODERNBERT,
            **_ALL_BIASES,
            "local_attention": 11,
            "classifier_pooling": "mean",
            "classifier_activation": "silu",
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "nomic_bert": ("NomicBert", {}),
}
"""Prefix of class names, and what differs from the common shape."""


def make_encoder(family: str, folder: Path, kind: str = "Model", **changes: Any) -> Path:
    """Write a checkpoint of the class that ends in `kind`. All its tensors are random."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    name, differences = FAMILIES[family]
    shape = _SHAPE | differences | changes
    config = getattr(transformers, f"{name}Config")(**shape)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}{kind}")(config)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and tensor.dim() == 1:
            tensor.add_(torch.randn(tensor.shape) * 0.2)
    path = folder / f"{family}{kind}"
    model.save_pretrained(path)
    return path


def load_encoder(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    backend: str | None = None,
    quantization: str | None = None,
    communicator: Communicator | None = None,
) -> EncoderModel:
    """The native model of a checkpoint."""
    needs = AttentionNeeds(dtype=dtype, head_dim=16)
    context = ModelContext(
        dtype=dtype,
        device=CPU,
        quantization=quantization,
        communicator=communicator or Communicator(Layout()),
    )
    kernels, config = select_kernels(CPU, needs, backend), read_config(path)
    outline = ModelContext(dtype=dtype, device=torch.device("meta"))
    model, of_all_ranks = (
        build_native_model(config, None, given, kernels) for given in (context, outline)
    )
    assert isinstance(model, EncoderModel)
    assert of_all_ranks is not None
    names = {weight.name for weight in of_all_ranks.weight_targets()}
    load_weights(model, open_checkpoint(path), others=names)
    model.finish_loading()
    return model


def texts(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Random token ids, int64 [length] each, of tokens that are not special."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(6, VOCAB_SIZE, (length,), generator=draw) for length in lengths]


def types_of(text: Tensor, num_types: int) -> Tensor:
    """Token types: those of parts of about equal length."""
    return torch.arange(len(text)) * num_types // len(text)


def encode(model: EncoderModel, batch: Sequence[Tensor]) -> list[Tensor]:
    """Last hidden states of packed texts, [length, hidden_size] each."""
    lengths, types = [len(text) for text in batch], None
    if model.uses_token_types:
        types = torch.cat([types_of(text, model.num_token_types) for text in batch])
    step = StepBatch(
        token_ids=torch.cat(list(batch)),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        attention=(AttentionMetadata.of_texts(lengths, CPU),),
        caches=(),
        token_types=types,
    )
    return list(model.forward(step).clone().split(lengths))


def classify(model: EncoderModel, hidden: Tensor) -> Tensor:
    """Logits of a text, from its hidden states."""
    pooled = {
        PoolingType.CLS: lambda: hidden[:1],
        PoolingType.MEAN: lambda: hidden.mean(0, keepdim=True),
        PoolingType.ALL: lambda: hidden,
    }[model.pooling.classifier_type]()
    return model.pool(pooled.float(), PoolingHead.CLASSIFIER)


@torch.inference_mode()
def expected_output(path: Path, text: Tensor) -> Tensor:
    """Hidden states or logits of `transformers`: [length or 1, size]."""
    import transformers

    name = json.loads((path / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(path).eval()
    inputs = {"input_ids": text[None], "attention_mask": torch.ones_like(text)[None]}
    if num_types := getattr(model.config, "type_vocab_size", 0):
        inputs["token_type_ids"] = types_of(text, num_types)[None]
    output = model(**inputs)
    return output.last_hidden_state[0] if name.endswith("Model") else output.logits.flatten(0, -2)

"""Each rank reads its share of the weights, and no more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import checkpoint, make_checkpoint
from tests.support.loading import empty_model, layouts
from worker_service.config import ModelConfig
from worker_service.distributed.layout import Layout
from worker_service.errors import BadCheckpoint
from worker_service.loader import load_model
from worker_service.loader.weights.checkpoint import open_checkpoint
from worker_service.loader.weights.fill import fill_dummy_weights, load_weights


def names_of(folder: Path) -> set[str]:
    return {weight.name for weight in empty_model(folder, Layout()).weight_targets()}


def num_bytes_read(folder: Path, layout: Layout) -> int:
    model = empty_model(folder, layout)
    files = open_checkpoint(folder)
    load_weights(model, files, others=names_of(folder))
    return files.opened.num_bytes


def is_replicated(name: str) -> bool:
    """Norms and learned positions are on every rank of a stage, and so are biases after a sum."""
    return "norm" in name or ".ln_" in name or "embed_positions" in name or "wpe" in name


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_read_disjoint_parts_that_make_up_the_whole(
    family: str, tensor: int, pipeline: int
) -> None:
    folder = checkpoint(family)
    whole = num_bytes_read(folder, Layout())
    read = [num_bytes_read(folder, layout) for layout in layouts(tensor, pipeline)]
    targets = list(empty_model(folder, Layout()).weight_targets())
    small = sum(s.target.nbytes for s in targets if s.target.dim() == 1 or is_replicated(s.name))
    tied = "lm_head.weight" not in {weight.name for weight in targets} and pipeline > 1
    embedding = max(weight.target.nbytes for weight in targets) if tied else 0
    assert whole <= sum(read) <= whole + (tensor - 1) * small + embedding
    assert max(read) < 0.75 * whole


@pytest.mark.parametrize("family", ["llama_bias", "qwen2", "gpt2", "opt_350m"])
def test_the_parts_are_those_of_the_whole(family: str) -> None:
    folder = checkpoint(family)
    weights = open_checkpoint(folder)
    whole = empty_model(folder, Layout())
    load_weights(whole, weights)
    tensors = {}
    for weight in whole.weight_targets():
        target = tensors.setdefault(weight.name, torch.full(weight.source_shape, float("nan")))
        target[weight.source_index] = weight.target
    for layout in layouts(2, 2):
        part = empty_model(folder, layout)
        load_weights(part, weights, others=names_of(folder))
        for weight in part.weight_targets():
            assert torch.equal(weight.target, tensors[weight.name][weight.source_index])


def test_large_tensors_are_read_some_rows_at_a_time(tmp_path: Path) -> None:
    """Rank by rank: rows of `fc1`, columns of `fc2`; both take 69 MB."""
    folder = make_checkpoint("opt", tmp_path, ffn_dim=270000, num_hidden_layers=1)
    stored = load_file(folder / "model.safetensors")
    name = "model.decoder.layers.0.fc{}.weight"
    for rank, layout in enumerate(layouts(2, 1)):
        model = empty_model(folder, layout)
        load_weights(model, open_checkpoint(folder), others=names_of(folder))
        part = slice(135000 * rank, 135000 * (rank + 1))
        layer: Any = model.layers[0]
        assert layer.feed_forward.up.weight.equal(stored[name.format(1)][part])
        assert layer.feed_forward.down.weight.equal(stored[name.format(2)][:, part])


def test_dummy_weights_are_parts_of_the_same() -> None:
    folder = checkpoint("gpt2")
    whole = empty_model(folder, Layout())
    fill_dummy_weights(whole.weight_targets())
    (expected,) = [s.target for s in whole.weight_targets() if s.name == whole.embedding_name]
    for layout in layouts(2, 1):
        part = empty_model(folder, layout)
        fill_dummy_weights(part.weight_targets())
        (weight,) = [s for s in part.weight_targets() if s.name == whole.embedding_name]
        assert torch.equal(weight.target, expected[weight.source_index])


def test_a_rank_reports_the_parameters_of_all_ranks() -> None:
    alone = load_model(ModelConfig(model=str(checkpoint("llama")), device="cpu"))
    for layout in layouts(2, 2):
        config = ModelConfig(model=str(checkpoint("llama")), device="cpu", layout=layout)
        assert load_model(config).model.num_parameters == alone.model.num_parameters


def test_a_tensor_of_no_rank_is_unexpected(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=3)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2')
    )
    layout = Layout(pipeline_parallel_size=2)
    with pytest.raises(BadCheckpoint, match=r"unexpected tensors: model\.layers\.2\."):
        load_model(ModelConfig(model=str(folder), device="cpu", layout=layout))

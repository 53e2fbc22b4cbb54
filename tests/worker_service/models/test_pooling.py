"""What follows the pooling: labels of a configuration, and dense layers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from worker_service.errors import UnsupportedModel
from worker_service.models.interface import ModelContext
from worker_service.models.pooling import ACTIVATIONS, Dense, facts_of
from worker_service.plan import PoolingType
from worker_service.pooling_facts import LabelActivation, PoolingFacts

CONTEXT = ModelContext(dtype=torch.bfloat16, device=torch.device("cpu"))
CLASSIFIER = "LlamaForSequenceClassification"
SIGMOID, SOFTMAX = LabelActivation.SIGMOID, LabelActivation.SOFTMAX


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), SOFTMAX),
        ({"id2label": {"1": "no", "0": "yes"}}, ("yes", "no"), SOFTMAX),
        ({"id2label": {"0": "score"}}, ("score",), SIGMOID),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), SIGMOID),
        (
            {"num_labels": 1, "problem_type": "regression"},
            ("LABEL_0",),
            LabelActivation.UNSPECIFIED,
        ),
        (
            {
                "id2label": {"0": "score"},
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            ("score",),
            LabelActivation.UNSPECIFIED,
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            ("LABEL_0", "LABEL_1"),
            SIGMOID,
        ),
    ],
)
def test_labels_and_their_activation_are_those_of_the_configuration(
    config: Mapping[str, Any], labels: tuple[str, ...], activation: LabelActivation
) -> None:
    facts = facts_of(CLASSIFIER, config, 8, PoolingFacts())
    assert (facts.labels, facts.label_activation) == (labels, activation)
    assert facts.scores_pairs == (len(labels) == 1)
    assert (facts.vector_size, facts.types) == (0, (PoolingType.LAST,))


def test_an_activation_that_is_not_one_of_labels_is_refused_by_name() -> None:
    stored = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Mish"}}
    with pytest.raises(UnsupportedModel, match=r"activation_fn: expected one of .* got .*Mish"):
        facts_of(CLASSIFIER, stored, 8, PoolingFacts())


def test_a_model_for_token_classification_has_labels_for_each_token() -> None:
    facts = facts_of("BertForTokenClassification", {}, 8, PoolingFacts())
    assert (facts.classifier_type, facts.types) == (PoolingType.ALL, (PoolingType.ALL,))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_dense_layer_computes_the_same_bits_for_a_row_in_any_batch(activation: str) -> None:
    rows = torch.randn(33, 37, generator=torch.Generator().manual_seed(1))
    layer = Dense(37, 19, CONTEXT, activation=activation)
    weight, bias = torch.randn(19, 37), torch.randn(19)
    for target in layer.linear.targets("linear"):
        target.target.copy_(weight if target.name.endswith("weight") else bias)
    layer.linear.pack()
    together = layer(rows)
    assert together.dtype == torch.float32
    torch.testing.assert_close(together, ACTIVATIONS[activation](rows @ weight.T + bias))
    assert torch.equal(together, torch.cat([layer(row[None]) for row in rows]))

"""What a worker can pool: the wire's `PoolingInfo`."""

from dataclasses import dataclass
from enum import Enum, auto

from worker_service.plan import PoolingType


class LabelActivation(Enum):
    """What turns logits into probabilities."""

    UNSPECIFIED = auto()
    """Nothing."""
    SOFTMAX = auto()
    SIGMOID = auto()


class Similarity(Enum):
    """How two vectors are compared."""

    COSINE = auto()
    DOT = auto()
    EUCLIDEAN = auto()
    MANHATTAN = auto()
    MAX_SIM = auto()
    """Of texts with one vector per token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingFacts:
    """What a model's vectors and labels are, and how its texts are prepared."""

    vector_size: int = 0
    """Numbers in a vector; 0 if it makes none."""
    default_type: PoolingType = PoolingType.LAST
    types: tuple[PoolingType, ...] = ()
    normalize: bool = False
    """Whether vectors are normalized by default."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """Lengths of vectors for which it was trained; (0,): any up to `vector_size`."""
    labels: tuple[str, ...] = ()
    """What its head has a logit for; empty if it classifies nothing."""
    classifier_type: PoolingType = PoolingType.LAST
    label_activation: LabelActivation = LabelActivation.UNSPECIFIED
    scores_pairs: bool = False
    """Whether its labels are scores of two texts that it reads together."""
    prompts: tuple[tuple[str, str], ...] = ()
    """(name, text) of texts that precede others."""
    default_prompt_name: str | None = None
    pair_template: str = ""
    """A Jinja template of the text for a pair; empty: the tokenizer joins them."""
    max_text_tokens: int = 0
    """Most tokens of a text, where that is less than the model's length; 0 elsewhere."""
    similarity: Similarity = Similarity.COSINE

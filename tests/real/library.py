"""sentence-transformers in a process of its own, for tests that compare with it.

It writes small random checkpoints of every family, with tokenizers trained on the sentences beside
this file, and computes their vectors, scores and ranks. `make test-real` installs the library into
a folder that only this process has on its path.
"""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from benchmarks.measuring.json_lines import answer_lines

PAIRS = Path(__file__).with_name("sentence_pairs.txt")
VOCAB_SIZE, HIDDEN_SIZE, MAX_TOKENS = 600, 64, 48
PROMPTS = {"query": "search a question: ", "document": ""}

SPECIAL_TOKENS = {
    "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "roberta": ("<pad>", "<unk>", "<s>", "</s>", "<mask>"),
    "qwen3": ("<|endoftext|>", "<|unk|>", "<|im_start|>", "<|im_end|>", "<|mask|>"),
    "gemma3": ("<pad>", "<unk>", "<bos>", "<eos>", "<mask>"),
}
"""Padding, unknown, first, last, mask."""
ORDER = {"roberta": (2, 0, 3, 1, 4)}
"""By which ids are given, if it is another. MPNet takes the token 1 for padding everywhere."""
TEMPLATES = {
    "bert": ("{2} $A {3}", "{2} $A {3} $B:1 {3}:1"),
    "roberta": ("{2} $A {3}", "{2} $A {3} {3} $B {3}"),
    "qwen3": ("$A {0}", "$A $B {0}"),
    "gemma3": ("{2} $A {3}", "{2} $A $B {3}"),
}
"""How special tokens are put around a text and around two."""

EMBEDDERS: dict[str, dict[str, Any]] = {
    "bert": {"pooling": "mean", "normalize": True},
    "bert_dense": {"pooling": "cls", "dense": 1, "prompts": True},
    "roberta": {"pooling": "mean", "tokens": "roberta", "algorithm": "bpe"},
    "xlm_roberta": {"pooling": "cls", "normalize": True, "tokens": "roberta"},
    "mpnet": {"pooling": "mean", "normalize": True, "tokens": "roberta", "algorithm": "wordpiece"},
    "distilbert": {"pooling": "mean"},
    "modernbert": {"pooling": "mean", "normalize": True, "algorithm": "bpe"},
    "nomic_bert": {"pooling": "mean", "prompts": True},
    "qwen3": {"pooling": "lasttoken", "normalize": True, "prompts": True, "algorithm": "bpe"},
    "gemma3": {"pooling": "mean", "dense": 2, "normalize": True, "prompts": True},
}
CROSS_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"tokens": "roberta", "algorithm": "bpe"},
    "xlm_roberta": {"tokens": "roberta"},
    "modernbert": {"algorithm": "bpe"},
    "distilbert": {},
}


def sentences() -> list[str]:
    """All sentences of the pairs."""
    lines = [line for line in PAIRS.read_text().splitlines() if not line.startswith("==")]
    return [sentence for line in lines for sentence in line.split(" | ")]


@functools.cache
def tokenizer_of(tokens: str, algorithm: str) -> Any:
    """A trained tokenizer with the special tokens of a family."""
    import transformers

    special = list(SPECIAL_TOKENS[tokens])
    ordered = [special[place] for place in ORDER.get(tokens, range(len(special)))]
    common = {"vocab_size": VOCAB_SIZE, "special_tokens": ordered, "show_progress": False}
    if algorithm == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token=special[1]))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(**common)
    elif algorithm == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **common)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token=special[1], **common)
    tokenizer.train_from_iterator(sentences(), trainer)
    single, pair = (template.format(*special) for template in TEMPLATES[tokens])
    named = [(token, tokenizer.token_to_id(token)) for token in special]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=named
    )
    inputs = ["input_ids", "attention_mask"] + ["token_type_ids"] * (tokens == "bert")
    words = dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=inputs,
        model_max_length=MAX_TOKENS,
        **{f"{name}_token": token for name, token in words.items()},
    )


def write_base(family: str, kind: str, tokenizer: Any, folder: Path) -> None:
    """A random model of `transformers` with a tokenizer. kind: the end of its class's name."""
    from tests.support.checkpoints import make_checkpoint
    from tests.support.encoders import FAMILIES, make_encoder

    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in tokenizer.special_tokens_map.items()
        for name in [name.removesuffix("_token")]
        if name in ("pad", "cls", "sep")
    }
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 4 * MAX_TOKENS, **ids}
    if family in FAMILIES:
        labels = {} if kind == "Model" else {"num_labels": 1}
        path = make_encoder(family, folder.parent / "made", kind, **size, **labels)
        path.rename(folder)
    else:
        bidirectional = {"use_bidirectional_attention": True} if family == "gemma3" else {}
        make_checkpoint(family, folder, **size, **bidirectional)
    tokenizer.save_pretrained(folder)


def write_embedder(name: str, folder: Path) -> None:
    """A `SentenceTransformer` of this row of `EMBEDDERS`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    row = EMBEDDERS[name]
    transformer = base_module(name, "Model", row, folder, Transformer)
    modules = [transformer, Pooling(HIDDEN_SIZE, pooling_mode=row["pooling"])]
    sizes = [HIDDEN_SIZE, 80, 40][: row.get("dense", 0) + 1]
    modules += [
        Dense(*pair, activation_function=torch.nn.Tanh() if pair[0] == HIDDEN_SIZE else None)
        for pair in itertools.pairwise(sizes)
    ]
    modules += [Normalize()] * row.get("normalize", False)
    prompts = {"prompts": PROMPTS, "default_prompt_name": "query"} if "prompts" in row else {}
    SentenceTransformer(modules=modules, device="cpu", **prompts).save_pretrained(str(folder))


def base_module(
    name: str, kind: str, row: dict[str, Any], folder: Path, module: Callable[..., Any]
) -> Any:
    """The first of a model's modules."""
    family = name.removesuffix("_dense")
    tokens = row.get("tokens", family if family in ("qwen3", "gemma3") else "bert")
    algorithm = row.get("algorithm", "wordpiece" if tokens == "bert" else "unigram")
    base = folder.with_name(f"{folder.name}-base")
    write_base(family, kind, tokenizer_of(tokens, algorithm), base)
    return module(str(base), max_seq_length=MAX_TOKENS)


def write_cross_encoder(name: str, folder: Path) -> None:
    """A `CrossEncoder` of this row of `CROSS_ENCODERS`."""
    from sentence_transformers import CrossEncoder

    kind = "ForSequenceClassification"
    model = base_module(name, kind, CROSS_ENCODERS[name], folder, lambda path, **_: path)
    CrossEncoder(model, device="cpu", max_length=MAX_TOKENS).save_pretrained(str(folder))


def write_late(name: str, folder: Path) -> None:
    """A `MultiVectorEncoder`, as ColBERT."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer

    transformer = base_module(name, "Model", EMBEDDERS[name], folder, Transformer)
    tokens = {"module_input_name": "token_embeddings"}
    dense = Dense(HIDDEN_SIZE, 32, bias=False, activation_function=torch.nn.Identity(), **tokens)
    modules = [transformer, dense, Normalize(**tokens)]
    MultiVectorEncoder(modules=modules, device="cpu").save_pretrained(str(folder))


class Library:
    """The child's end."""

    def __init__(self, _: dict[str, Any]) -> None:
        torch.set_num_threads(1)

    def about(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Call one of this class's functions with the rest of the request."""
        return {"result": getattr(self, asked.pop("call"))(**asked)}

    def write(self, kind: str, name: str, folder: str) -> None:
        """Write a checkpoint; kind: embedder, cross_encoder or late."""
        globals()[f"write_{kind}"](name, Path(folder))

    def encode(self, folder: str, texts: list[str], **options: Any) -> Any:
        """Vectors; of a text with several, all of them."""
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(folder, device="cpu")
        vectors = model.encode(texts, **options)
        return [vector.tolist() for vector in vectors]

    def encode_tokens(self, folder: str, texts: list[str]) -> Any:
        """The vectors of each text's tokens, of a model for late interaction."""
        from sentence_transformers import MultiVectorEncoder

        model = MultiVectorEncoder(folder, device="cpu")
        return [vectors.tolist() for vectors in model.encode(texts)]

    def predict(self, folder: str, pairs: list[list[str]]) -> list[float]:
        """Scores."""
        from sentence_transformers import CrossEncoder

        return list(map(float, CrossEncoder(folder, device="cpu").predict(pairs)))

    def rank(self, folder: str, query: str, documents: list[str]) -> list[int]:
        """Indices of the documents, the best first."""
        from sentence_transformers import CrossEncoder

        ranks = CrossEncoder(folder, device="cpu").rank(query, documents)
        return [rank["corpus_id"] for rank in ranks]


if __name__ == "__main__":
    answer_lines(Library, Library.answer)

"""An encoder of all-MiniLM-L6-v2's shape with random weights, in the form of
sentence-transformers."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from benchmarks.models.synthetic_tokenizer import words

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCAB_SIZE, MAX_TOKENS = 30_522, 512
MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
"""Those of sentence-transformers, and their folders."""


def write_encoder(path: Path) -> None:
    """Write its files to the folder `path`."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}
    config = BertConfig(vocab_size=VOCAB_SIZE, num_attention_heads=12, **shape)
    BertModel(config).save_pretrained(path)
    modules = [
        {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, folder) in enumerate(MODULES.items())
    ]
    pooling = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True}
    (path / "1_Pooling").mkdir()
    for file, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (path / file).write_text(json.dumps(content))
    _tokenizer().save(str(path / "tokenizer.json"))


def _tokenizer() -> Tokenizer:
    """A token for each word, between those of the beginning and the end of a text."""
    pieces = [*SPECIAL, *words(VOCAB_SIZE - len(SPECIAL))]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(piece, vocab[piece]) for piece in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    return tokenizer

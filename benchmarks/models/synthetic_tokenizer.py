"""A tokenizer for models with random weights: bytes, and a synthetic word for every further id.

Every id that a model may sample decodes to some text, and any text can be encoded.
"""

import json
from itertools import count, islice, product
from pathlib import Path
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<unk>", "<s>", "</s>")
BOS_TOKEN_ID, EOS_TOKEN_ID = 1, 2
FIRST_WORD_ID = len(SPECIAL) + 256
"""Ids below it are special tokens and bytes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def words(number: int) -> list[str]:
    """Distinct words of lower-case letters, short ones first."""
    letters = (product(ascii_lowercase, repeat=length) for length in count(1))
    return ["".join(word) for word in islice((w for some in letters for w in some), number)]


def write_tokenizer(path: Path, vocab_size: int, max_length: int) -> None:
    """Write `tokenizer.json` and its settings to the folder `path`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *alphabet, *(f"Ġ{word}" for word in words(vocab_size - FIRST_WORD_ID))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": max_length,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

"""The byte-level BPE tokenizer of the embedded model, learned from its corpus.

Any text round-trips, since every byte is a token. Digits never merge, so a number
is always read and written digit by digit.
"""

from importlib.resources import files
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tools.embedded_model.corpus import documents
from tools.embedded_model.documents import Role

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
END = "<|end|>"
"""Ends each message of a chat, as `EOS` ends each document."""


def turn_token(role: Role) -> str:
    """The token that begins a message of `role`."""
    return f"<|{role.value}|>"


TURN_TOKENS = tuple(turn_token(role) for role in Role if role.is_chat)
SPECIAL_TOKENS = (PAD, BOS, EOS, *TURN_TOKENS, END)

VOCAB_SIZE = 1024
NUM_DOCUMENTS = 20_000
"""Documents the merges are learned from; more give the same words."""

CHAT_TEMPLATE = (files("worker_service") / "embedded_model/chat_template.jinja").read_text()


def train_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer with exactly `VOCAB_SIZE` tokens; it puts `bos` before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (
        segment.text
        for document in islice(documents(seed), NUM_DOCUMENTS)
        for segment in document.segments
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)

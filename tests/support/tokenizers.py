"""Small tokenizers of the two kinds that language models use, and a model's files around them."""

import json
from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<s>", "</s>"
CORPUS = ["hello world, the quick brown fox", "naïve café 你好世界 😀👍🏽 été", "0 1 2 3 stop END"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@lru_cache
def byte_level() -> Tokenizer:
    """Byte-level BPE as in GPT-2 or Llama 3; puts `BOS` before texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens(["<tool call>", "é plain"])
    tokenizer.add_special_tokens(["<\uff5cend\uff5c>"])  # as DeepSeek writes them
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def tokens(text: str) -> list[int]:
    """A text's tokens by `byte_level`, as they stand in an answer: without `BOS`."""
    return list(byte_level().encode(text, add_special_tokens=False).ids)


def letters(text: str) -> list[int]:
    """The same with a token for each letter, so that the text comes in the smallest pieces."""
    return [byte_level().token_to_id(letter) for letter in text]


SENTENCEPIECE_DECODERS = {
    "llama": decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}


@lru_cache
def sentencepiece(decoder: str = "llama") -> Tokenizer:
    """Words with a leading ▁, and bytes for what the vocabulary lacks."""
    vocab = {"<unk>": 0, BOS: 1, EOS: 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ["▁", "▁▁", "▁hello", "hello", "▁wor", "ld", "a", "b", "▁a", ".", "你", "\ufffd"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", BOS, EOS])
    tokenizer.decoder = SENTENCEPIECE_DECODERS[decoder]
    return tokenizer


def model_files(
    tokenizer: Tokenizer | None = None, **generation_config: object
) -> dict[str, bytes]:
    """A model's files as its worker would send them."""
    files = {"generation_config.json": json.dumps(generation_config).encode()}
    if tokenizer is not None:
        config = {"bos_token": BOS, "eos_token": {"content": EOS}}
        files["tokenizer.json"] = tokenizer.to_str().encode()
        files["tokenizer_config.json"] = json.dumps(config).encode()
        files["chat_template.jinja"] = CHAT_TEMPLATE.encode()
    return files

"""A checkpoint of a model that always writes one text, whatever it is asked.

Its one layer adds nothing, so that the next token depends on the last one alone: each piece of the
text is a token of its own, and follows the one before.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

BOS, EOS, ASSISTANT = "<s>", "</s>", "<|im_start|>assistant"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
    '{# <tool_call>{"name": ..., "arguments": ...}</tool_call> #}'
)
"""As Qwen3's: the model opens its thought itself, and `enable_thinking=false` closes it."""

HIDDEN_SIZE = 256
LOGIT = 60.0
"""Of the token that follows; those of the others are far lower."""


def make_scripted_checkpoint(
    path: Path, pieces: Sequence[str], *, special: Sequence[str] = (), max_model_len: int = 2048
) -> Path:
    """Write a model to `path` that begins with the first of the pieces, which must differ, and ends
    after the last; `special`: those that are special tokens. Returns `path`."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    assert len(set(pieces)) == len(pieces), "a piece follows one other only"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, ASSISTANT, *special])
    tokenizer.add_tokens(
        [AddedToken(piece, normalized=False) for piece in pieces if piece not in special]
    )
    path.mkdir(parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab_size = tokenizer.get_vocab_size()
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_model_len,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(vocab_size, HIDDEN_SIZE, generator=generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(embeddings)
        for before, after in pairwise([ASSISTANT, *pieces, EOS]):
            row = embeddings[tokenizer.token_to_id(before)]
            direction = row / row.norm() / HIDDEN_SIZE**0.5
            model.lm_head.weight[tokenizer.token_to_id(after)] = LOGIT * direction
    model.save_pretrained(path)
    return path

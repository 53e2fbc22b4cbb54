"""What `transformers` itself makes of a checkpoint, in float32 and in float64."""

from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.float64 import Float64
from tests.support.text_models import class_of


class Oracle:
    """A checkpoint's model as the library runs it, one sequence at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.model = self._load()

    def _load(self, **options: Any) -> Any:
        from transformers import AutoConfig

        # The eager attention of Falcon adds ALiBi biases twice.
        config = AutoConfig.from_pretrained(self._path)
        attention = "sdpa" if getattr(config, "alibi", False) else "eager"
        model_class = class_of(config)
        options |= {"attn_implementation": attention, "dtype": torch.float32}
        return model_class.from_pretrained(self._path, **options).eval()

    @cached_property
    def _exact_model(self) -> Any:
        return self._load(experts_implementation="eager").double()  # others lack float64

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """A greedy continuation that no end-of-sequence token ends."""
        prompt_ids = torch.tensor([list(prompt)])
        output = self.model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def choices(self, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        """The likeliest token in place of each of an output's: the output itself if it is the
        greedy continuation, which takes a single pass to compute."""
        logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        tokens: list[int] = logits.argmax(dim=1).tolist()
        return tokens

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[num_tokens, vocab_size]."""
        logits: Tensor = self.model(torch.tensor([list(token_ids)])).logits
        return logits[0]

    @torch.inference_mode()
    def exact_logits(self, token_ids: Sequence[int]) -> Tensor:
        """The same, computed in float64."""
        with Float64():
            logits: Tensor = self._exact_model(torch.tensor([list(token_ids)])).logits
        return logits[0]


@cache
def oracle(path: Path) -> Oracle:
    """The oracle of a checkpoint, made once per process."""
    return Oracle(path)

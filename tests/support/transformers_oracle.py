"""What `transformers` itself makes of a checkpoint, in float32."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Oracle:
    """A checkpoint's model as the library runs it, one sequence at a time."""

    def __init__(self, path: Path) -> None:
        import transformers
        from transformers import AutoConfig

        # The eager attention of Falcon adds ALiBi biases twice.
        config = AutoConfig.from_pretrained(path)
        has_alibi = getattr(config, "alibi", False)
        # Not all classes are among those of AutoModelForCausalLM.
        self.model: Any = (
            getattr(transformers, config.architectures[0])
            .from_pretrained(
                path, attn_implementation="sdpa" if has_alibi else "eager", dtype=torch.float32
            )
            .eval()
        )

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
    def logits_by_token(self, token_ids: Sequence[int]) -> Tensor:
        """The same, computed one token after the other."""
        state, logits = None, []
        for token in token_ids:
            output = self.model(torch.tensor([[token]]), cache=state, use_cache=True)
            state = output.past_key_values
            logits.append(output.logits[0, -1])
        return torch.stack(logits)


@cache
def oracle(path: Path) -> Oracle:
    """The oracle of a checkpoint, made once per process."""
    return Oracle(path)

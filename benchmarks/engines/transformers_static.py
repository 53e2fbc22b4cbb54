"""`transformers`: `generate` on one left-padded batch, as long as its longest output."""

from typing import Any

import torch

from benchmarks.engines.engine import Settings
from benchmarks.measuring import json_lines

NAME = "transformers"


def described(settings: Settings) -> dict[str, Any]:
    """The settings as the child receives them."""
    return {"model": settings.model(), **settings.named("dtype", "device", "threads")}


def load(settings: dict[str, Any]) -> Any:
    """The model, ready to run."""
    from transformers import AutoModelForCausalLM

    if settings["device"] == "cpu":
        torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    # Only its length may end a sequence.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().to(settings["device"])


class Static:
    """The child's end."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._model = load(settings)

    def about(self) -> dict[str, Any]:
        """Version and settings."""
        import transformers

        return {"version": transformers.__version__, "settings": {"batch": "static"}}

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_tokens: list[int]) -> list[list[int]]:
        """Greedy tokens for each prompt; those beyond the requested number are discarded."""
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        device = self._settings["device"]
        output = self._model.generate(
            torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            do_sample=False,
            max_new_tokens=max(num_tokens),
        )
        new = output[:, longest:].tolist()
        return [tokens[:count] for tokens, count in zip(new, num_tokens, strict=True)]


if __name__ == "__main__":
    json_lines.serve(Static)

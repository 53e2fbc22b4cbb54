"""nano-vllm's `LLM`, in a child under the Python that has it. It needs a GPU."""

from typing import TYPE_CHECKING, Any

from benchmarks.measuring import json_lines

if TYPE_CHECKING:  # not to be known where nano-vllm is
    from benchmarks.engines.engine import Settings

NAME = "nano-vllm"
_WEIGHTS_AND_ACTIVATIONS_GIB = 8


def described(settings: "Settings") -> dict[str, Any]:
    """The settings as the child receives them."""
    return {"model": settings.model(), **settings.named(*settings.LIMITS, "kv_cache_gib")}


class NanoVllm:
    """The child's end."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from nanovllm import LLM

        self._settings = dict(settings)
        share = _utilization(self._settings.pop("kv_cache_gib"))
        self._settings["gpu_memory_utilization"] = share
        self._llm = LLM(self._settings.pop("model"), enforce_eager=False, **self._settings)

    def about(self) -> dict[str, Any]:
        """Version and settings."""
        from importlib import metadata

        return {"version": metadata.version("nano-vllm"), "settings": self._settings}

    def generate(self, prompts: list[list[int]], num_tokens: list[int]) -> list[list[int]]:
        """Tokens for each prompt. It refuses temperature 0; with a temperature close to 0, draws
        are almost greedy."""
        from nanovllm import SamplingParams

        params = [
            SamplingParams(temperature=0.01, ignore_eos=True, max_tokens=n) for n in num_tokens
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [output["token_ids"] for output in outputs]


def _utilization(kv_cache_gib: int) -> float:
    """The share of device memory that leaves this much for KV. It includes the memory held by
    other processes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    own = (kv_cache_gib + _WEIGHTS_AND_ACTIVATIONS_GIB) * 2**30
    return round(min(0.95, (total - free + own) / total), 3)


if __name__ == "__main__":
    json_lines.serve(NanoVllm)

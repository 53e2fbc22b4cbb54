"""`transformers`: continuous batching over a paged cache, with one manager for all runs."""

import sys
from typing import Any

from benchmarks import json_lines
from benchmarks.engines.child import ChildEngine
from benchmarks.engines.engine import Settings
from benchmarks.engines.transformers_static import describe, load

NAME = "transformers cb"
PAGE_SIZE = 256
"""Its own default."""

MAX_PAGES = 128
"""Enough for the workloads; its masks are as wide as the cache, so that a larger one would only
slow it down."""


def engine(settings: Settings) -> ChildEngine:
    """The parent's end."""
    described = describe(settings) | {
        "page_size": PAGE_SIZE,
        "num_blocks": min(MAX_PAGES, settings.kv_tokens // PAGE_SIZE),
        "max_batch_tokens": settings.max_num_batched_tokens,
        "max_requests_per_batch": settings.max_num_seqs,
    }
    log = settings.log("transformers_continuous")
    return ChildEngine(NAME, sys.executable, "transformers_continuous", described, log=log)


class Continuous:
    """The child's end."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        names = ("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch")
        self._cache = {name: settings[name] for name in names}
        self._model = load(settings)
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(**self._cache),
        )
        self._manager.warmup()
        self._manager.start()

    def about(self) -> dict[str, Any]:
        """Version and settings."""
        import transformers

        return {"version": transformers.__version__, "settings": self._cache}

    def generate(self, prompts: list[list[int]], num_tokens: list[int]) -> list[list[int]]:
        """Greedy tokens for each prompt. Prompts that share a prefix are added together, as
        `generate_batch` does."""
        order = sorted(range(len(prompts)), key=lambda index: prompts[index], reverse=True)
        names = {
            self._manager.add_request(prompts[index], max_new_tokens=num_tokens[index]): index
            for index in order
        }
        outputs: list[list[int]] = [[] for _ in prompts]
        while names:
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the generation thread has ended")
            elif result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                outputs[names.pop(result.request_id)] = result.generated_tokens
        return outputs

    def close(self) -> None:
        """End the generation thread, without which the process would not end."""
        self._manager.stop()


if __name__ == "__main__":
    json_lines.serve(Continuous).close()

"""The engines that the offline benchmark compares, behind one interface."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.workloads import Job
from pagewire_client import LLM, SamplingParams

LLAMA_160M: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
"""A Llama of about 160 million parameters."""


class Engine(Protocol):
    """Something that can run jobs; a context manager, since it may hold processes."""

    name: str

    def run(self, jobs: list[Job]) -> None:
        """Run all jobs together, greedily, each to its number of tokens."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Pagewire:
    """Frontend, core and worker as processes, driven through the public gRPC API."""

    name = "pagewire"

    def __init__(self, folder: Path, shape: dict[str, Any], dtype: str) -> None:
        config = LlamaConfig(**shape).to_dict() | {"architectures": ["LlamaForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
        self._llm = LLM(str(folder), load_format="dummy", dtype=dtype)

    def run(self, jobs: list[Job]) -> None:
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=job.num_output_tokens)
            for job in jobs
        ]
        outputs = self._llm.generate([job.prompt for job in jobs], params, use_tqdm=False)
        for output, job in zip(outputs, jobs, strict=True):
            assert len(output.outputs[0].token_ids) == job.num_output_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()


class Transformers:
    """`generate` on one left-padded batch, as long as its longest output."""

    name = "transformers"

    def __init__(self, shape: dict[str, Any], dtype: str) -> None:
        config = LlamaConfig(**shape, eos_token_id=None, pad_token_id=0)
        self._model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def run(self, jobs: list[Job]) -> None:
        longest = max(len(job.prompt) for job in jobs)
        padding = [[0] * (longest - len(job.prompt)) for job in jobs]
        tokens = torch.tensor([pad + job.prompt for pad, job in zip(padding, jobs, strict=True)])
        mask = torch.tensor(
            [[0] * len(pad) + [1] * len(job.prompt) for pad, job in zip(padding, jobs, strict=True)]
        )
        self._model.generate(
            tokens,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(job.num_output_tokens for job in jobs),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._model

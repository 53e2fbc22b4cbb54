"""Beam search as `transformers` does it, and as requests of ours ask for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pagewire.columns import pack
from pagewire.v1 import sampling_pb2
from scheduler_service.core.beam_search import BeamParams, EarlyStopping
from scheduler_service.core.request import Generation, Request
from tests.support.in_process import FRONTEND, GREEDY
from tests.support.transformers_oracle import oracle

EARLY_STOPPING: dict[Any, EarlyStopping] = {
    True: EarlyStopping.WHEN_FULL,
    False: EarlyStopping.WHEN_HOPELESS,
    "never": EarlyStopping.NEVER,
}


@dataclass(frozen=True, kw_only=True)
class BeamCase:
    """A request for beam search."""

    prompt: Sequence[int]
    width: int
    n: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: Any = False
    stops: Sequence[int] = field(default_factory=tuple)
    min_tokens: int = 0
    repetition_penalty: float = 1.0

    def request(self, handle: int, num_logprobs: int | None = None) -> Request:
        """For the core."""
        count = max(self.width + len(self.stops), num_logprobs or 0)
        params = sampling_pb2.SamplerParams(
            **GREEDY  # type: ignore[arg-type]
            | {
                "num_candidates": count,
                "repetition_penalty": self.repetition_penalty,
                "min_tokens": self.min_tokens,
                "suppressed_token_ids": pack(self.stops),
            }
        )
        return Request(
            frontend_id=FRONTEND,
            handle=handle,
            request_id=str(handle),
            model="model",
            prompt_token_ids=list(self.prompt),
            work=Generation(
                max_tokens=self.max_tokens,
                sampling=params,
                num_choices=self.n,
                stop_token_ids=frozenset(self.stops),
                wants_logprobs=num_logprobs is not None,
                beam_search=BeamParams(
                    width=self.width,
                    length_penalty=self.length_penalty,
                    early_stopping=EARLY_STOPPING[self.early_stopping],
                    num_logprobs=num_logprobs,
                ),
            ),
        )


@torch.inference_mode()
def transformers_beams(model: Path, case: BeamCase) -> list[list[int]]:
    """The output tokens of the best sequences, best first."""
    prompt = torch.tensor([list(case.prompt)])
    found = oracle(model).model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=case.max_tokens,
        min_new_tokens=case.min_tokens or None,
        do_sample=False,
        num_beams=case.width,
        num_return_sequences=case.n,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        repetition_penalty=case.repetition_penalty,
        eos_token_id=list(case.stops) or None,
        pad_token_id=0,
    )
    return [_up_to_stop(tokens, case.stops) for tokens in found[:, prompt.shape[1] :].tolist()]


def _up_to_stop(tokens: list[int], stops: Sequence[int]) -> list[int]:
    ends = [index for index, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens

"""Pagewire's own scheduler core and worker in one process, joined by function calls.

The same work without the services: no gRPC, no serialization, no other process, no frontend. Steps
are planned and launched as far ahead as by the services. Plans and results are still converted to
protobuf messages, since each side builds its columns from these.
"""

import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.engines.engine import Settings
from benchmarks.measuring import json_lines
from pagewire.v1.sampling_pb2 import SamplerParams
from scheduler_service import wire as scheduler_wire
from scheduler_service.core import Request, SchedulerConfig, SchedulerCore, WorkerGroupCapacity
from scheduler_service.core.config import CacheGroup, CacheLifetime
from scheduler_service.core.request import Generation
from service_common.version import VERSION
from worker_service.config import CacheConfig, ModelConfig, RunnerConfig
from worker_service.cpu_cores import limit_spinning
from worker_service.engine.executor import Step
from worker_service.loader import load_model
from worker_service.plan import StepResult
from worker_service.runner.torch_executor import Profiler, TorchExecutor
from worker_service.service import wire as worker_wire

NAME = "pagewire in-process"
GROUP, MODEL, FRONTEND, EPOCH = "group", "model", "frontend", 1
GREEDY = SamplerParams(top_p=1.0, repetition_penalty=1.0)


def described(settings: Settings) -> dict[str, Any]:
    """The settings as the child receives them."""
    return {
        "model": settings.model(),
        **settings.named("dtype", "device", "kv_cache_gib", *settings.LIMITS, *settings.FLAGS),
        "threads": settings.threads if settings.device == "cpu" else None,
    }


def environment() -> dict[str, str]:
    """The variables that the services' worker adds to its environment."""
    changed = dict(os.environ)
    limit_spinning(changed)
    return {name: changed[name] for name in changed.keys() - os.environ.keys()}


class InProcess:
    """The child's end."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        limits = {name: settings[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
        self._core = SchedulerCore(SchedulerConfig(**limits, **settings.get("scheduler", {})))
        self._num_requests = 0
        self._launched: deque[Step] = deque()
        self.num_steps = 0
        """Steps launched so far."""
        self.num_rows = 0
        """Rows of these steps."""
        cache = CacheConfig(
            kv_cache_memory=settings["kv_cache_gib"] * 2**30,
            kv_cache_dtype=settings.get("kv_cache_dtype", "auto"),
        )
        runner = RunnerConfig(**settings.get("runner", {}))
        executor = TorchExecutor(
            cache, Profiler(Path()), lambda: load_model(_model_config(settings)), runner=runner
        )
        facts = executor.load()
        self.executor = executor
        counts = executor.profile_blocks(**limits)
        self._runner = executor.make_runner(counts.num_gpu_blocks, counts.num_cpu_blocks, EPOCH)
        capacity = WorkerGroupCapacity(
            worker_group_id=GROUP,
            model=MODEL,
            num_gpu_blocks=counts.num_gpu_blocks,
            num_cpu_blocks=counts.num_cpu_blocks,
            cache_groups=tuple(
                CacheGroup(
                    lifetime=CacheLifetime(group.lifetime.value),
                    block_tokens=group.block_tokens,
                    span=group.span,
                    num_blocks=group.num_blocks,
                )
                for group in facts.cache_groups
            ),
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            num_speculative_tokens=facts.num_speculative_tokens,
        )
        self._core.add_worker_group(capacity, time.monotonic())

    def about(self) -> dict[str, Any]:
        """Version and settings."""
        given = {name: value for name, value in self._settings.items() if name != "model"}
        return {"version": VERSION, "settings": given}

    def generate(
        self,
        prompts: list[list[int]],
        num_tokens: list[int],
        sampling: SamplerParams = GREEDY,
        **fields: Any,
    ) -> list[list[int]]:
        """Tokens for each prompt; `fields` are those of all requests."""
        outputs: dict[int, list[int]] = {}
        for prompt, count in zip(prompts, num_tokens, strict=True):
            outputs[self.submit(prompt, count, sampling, **fields)] = []
        while self.advance(outputs):
            pass
        return list(outputs.values())

    def submit(
        self, prompt: list[int], num_tokens: int, sampling: SamplerParams = GREEDY, **fields: Any
    ) -> int:
        """Queue a request. Returns its key in the outputs of `advance`."""
        self._num_requests += 1
        request = _request(self._num_requests, prompt, num_tokens, sampling, **fields)
        self._core.submit(request, time.monotonic())
        return self._num_requests

    def advance(self, outputs: dict[int, list[int]]) -> bool:
        """Launch all steps that can be planned, then collect the oldest one and add its tokens to
        `outputs`. Returns False if nothing was left to do."""
        while (plan := self._core.schedule(GROUP, time.monotonic())) is not None:
            message = scheduler_wire.encode_plan(plan, EPOCH)
            step = self._runner.launch(worker_wire.decode_plan(message, received_us=0))
            self._launched.append(step)
            self.num_steps += 1
            self.num_rows += len(plan.seq_ids)
        if not self._launched:
            return False
        self.update(self._launched.popleft().collect())
        for outbox in self._core.pop_outboxes().values():
            for handle, token in zip(outbox.token_handles, outbox.token_ids, strict=True):
                outputs[handle].append(token)
        return True

    def update(self, result: StepResult) -> None:
        """Give the core a step's result."""
        message = worker_wire.encode_result(result)
        self._core.update(GROUP, scheduler_wire.decode_result(message), time.monotonic())


def _model_config(settings: dict[str, Any]) -> ModelConfig:
    names = ("model", "dtype", "device", "threads", "max_model_len")
    names += ("attention_backend", "batch_invariant", "quantization")
    given = {name: settings[name] for name in names if name in settings}
    return ModelConfig(**given)


def _request(
    number: int,
    prompt: list[int],
    num_tokens: int,
    sampling: SamplerParams,
    tenant: str = "",
    **fields: Any,
) -> Request:
    return Request(
        frontend_id=FRONTEND,
        handle=number,
        request_id=str(number),
        model=MODEL,
        prompt_token_ids=prompt,
        tenant=tenant,
        work=Generation(max_tokens=num_tokens, sampling=sampling, **fields),
    )


if __name__ == "__main__":
    json_lines.serve(InProcess)

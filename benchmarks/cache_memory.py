"""Memory of sequences in the cache, by what the core allocates, against arithmetic.

    python -m benchmarks.cache_memory --shape qwen3.5-0.8b --num-seqs 32 --num-tokens 4096

Arithmetic counts the bytes of keys and values of every token and of every unit of the states,
without blocks. The core serves requests that end with `--num-tokens` tokens, in a pool that holds
them twice, and answers come at once; its largest number of blocks in use counts with all their
bytes. Saved states and other cached blocks do not count, as they are evicted when memory is needed.
The most sequences that the arithmetic's bytes hold together are counted in a second run.
"""

import argparse
from collections.abc import Sequence
from itertools import chain

import torch

from benchmarks.models.checkpoints import config_of
from benchmarks.models.model_shapes import SHAPES
from scheduler_service.core import SchedulerConfig, SchedulerCore, StepResult
from scheduler_service.core.config import CacheGroup, CacheLifetime, WorkerGroupCapacity
from scheduler_service.core.request import Generation, Request
from worker_service.models.decoder_families import DECODERS
from worker_service.models.interface import ModelContext
from worker_service.models.kv_cache_spec import KVCacheSpec, LayerState

GROUP, MODEL, FRONTEND = "group", "model", "frontend"
PREFERRED_BLOCK = 64
"""Tokens per block that the attention backend of a CPU prefers."""


def cache_spec(shape: str, dtype: torch.dtype, max_model_len: int) -> KVCacheSpec:
    """What the layers of a shape keep of a sequence."""
    config = config_of(SHAPES[shape], str(dtype).removeprefix("torch."))
    settings = DECODERS[config["architectures"][0]](config)
    context = ModelContext(dtype=dtype, device=torch.device("meta"))
    mixers = [layer.attention for layer in settings.layers]
    kept = [() if part is None else part.kept(context, max_model_len) for part in mixers]
    return KVCacheSpec(layers=tuple(chain.from_iterable(kept)), dtype=dtype)


def minimal_bytes(spec: KVCacheSpec, num_tokens: int) -> int:
    """Bytes of a sequence without blocks: keys and values of all tokens, and its states."""
    size = 0
    for layer in spec.layers:
        if isinstance(layer, LayerState):
            size += sum(part.num_units * part.unit_bytes for part in layer.arrays)
        else:
            size += num_tokens * layer.num_elements(spec.dtype) * spec.dtype.itemsize
    return size


class Server:
    """A core whose only worker answers at once."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, num_seqs: int, num_tokens: int) -> None:
        block_size = spec.choose_block_size(PREFERRED_BLOCK)
        config = SchedulerConfig(max_num_seqs=num_seqs, pipeline_depth=1, watermark=0.0)
        self.core = SchedulerCore(config)
        capacity = WorkerGroupCapacity(
            worker_group_id=GROUP,
            model=MODEL,
            num_gpu_blocks=num_blocks,
            num_cpu_blocks=0,
            cache_groups=tuple(
                CacheGroup(
                    lifetime=CacheLifetime(group.lifetime.value),
                    block_tokens=group.block_tokens,
                    span=group.span,
                    num_blocks=group.num_blocks,
                )
                for group in spec.groups(block_size)
            ),
            max_model_len=num_tokens + 1,
            vocab_size=100_000,
        )
        self.core.add_worker_group(capacity, 0.0)

    def peaks(self, num_seqs: int, num_tokens: int, num_output: int) -> tuple[int, int]:
        """The most blocks in use, and the most sequences in the batch, while requests with
        different prompts are served."""
        for number in range(1, num_seqs + 1):
            work = Generation(max_tokens=num_output + 1, num_choices=1, sampling=None)
            prompt = [number, *[7] * (num_tokens - num_output - 1)]
            request = Request(
                frontend_id=FRONTEND,
                handle=number,
                request_id=str(number),
                model=MODEL,
                prompt_token_ids=prompt,
                work=work,
            )
            self.core.submit(request, 0.0)
        num_blocks = num_running = 0
        while (plan := self.core.schedule(GROUP, 0.0)) is not None:
            [status] = self.core.snapshot().worker_groups
            num_blocks = max(num_blocks, status.num_gpu_blocks - status.num_free_gpu_blocks)
            num_running = max(num_running, status.num_running_sequences)
            count = len(plan.seq_ids) if plan.output is None else sum(plan.output)
            self.core.update(GROUP, StepResult(step_id=plan.step_id, token_ids=[7] * count), 0.0)
            for outbox in self.core.pop_outboxes().values():
                assert not outbox.requests_failed
        return num_blocks, num_running


def measure(shape: str, dtype: str, num_seqs: int, num_tokens: int, num_output: int) -> str:
    """A row of the table."""
    spec = cache_spec(shape, getattr(torch, dtype), num_tokens + 1)
    block_size = spec.choose_block_size(PREFERRED_BLOCK)
    block_bytes = spec.block_bytes(block_size)
    least = num_seqs * minimal_bytes(spec, num_tokens)
    twice = 2 * num_seqs * spec.num_blocks(num_tokens, num_tokens, block_size)
    sizes = num_seqs, num_tokens, num_output
    used, _ = Server(spec, twice, num_seqs, num_tokens).peaks(*sizes)
    _, together = Server(spec, least // block_bytes, num_seqs, num_tokens).peaks(*sizes)
    cells = (
        shape,
        dtype,
        f"{block_size} tokens, {block_bytes / 2**10:.0f} KiB",
        f"{least / 2**20:.1f} MiB",
        f"{used * block_bytes / 2**20:.1f} MiB",
        f"{used * block_bytes / least:.3f}",
        f"{together} of {num_seqs}",
    )
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["qwen3.5-0.8b"], choices=list(SHAPES))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--num-seqs", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--num-output", type=int, default=128)
    args = parser.parse_args(arguments)
    print("| shape | dtype | blocks | by arithmetic | in use | ratio | together in that |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for shape in args.shape:
        for dtype in args.dtype:
            sizes = args.num_seqs, args.num_tokens, args.num_output
            print(measure(shape, dtype, *sizes), flush=True)


if __name__ == "__main__":
    main()

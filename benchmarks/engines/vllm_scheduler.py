"""vLLM's own scheduler on the queue of `scheduler_overhead`, timed step by step.

Runs under the Python that has vLLM, and does not import Pagewire: `scheduler_overhead` starts it,
writes one JSON request per line to it and reads one JSON answer per line.

A step is all that the engine core's process does for it: `Scheduler.schedule`, pickling its output
for the workers and unpickling theirs (as the multi-process executor does), `update_from_output`,
and encoding the outputs for the frontend in msgpack (as the engine core's client gets them). As in
the engine core, objects from before the first step are exempt from garbage collection.
"""

import gc
import json
import pickle
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from time import thread_time_ns
from typing import Any

import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
TOKEN_ID = 11


class Bench:
    """A scheduler with a queue of running requests, all decoding."""

    def __init__(self, asked: dict[str, int]) -> None:
        self._block_size = asked["block_size"]
        config = _config(asked)
        cache = KVCacheConfig(
            num_blocks=asked["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(
                    ["layer"],
                    FullAttentionSpec(
                        block_size=self._block_size,
                        num_kv_heads=1,
                        head_size=64,
                        dtype=torch.float32,
                    ),
                )
            ],
        )
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=self._block_size,
        )
        self._encoder = MsgpackEncoder()
        self._hash = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(self._hash)
        self._add_requests(asked)
        while self._scheduler.waiting:
            self.step()
        for _ in range(3):
            self.step()
        assert len(self._scheduler.running) == asked["num_seqs"]

    def _add_requests(self, asked: dict[str, int]) -> None:
        hasher = get_request_block_hasher(self._block_size, self._hash)
        params = SamplingParams(
            max_tokens=asked["max_tokens"], stop_token_ids=[2, 3], ignore_eos=True
        )
        for index in range(asked["num_seqs"]):
            length = asked["prompt_tokens"] + index % self._block_size
            self._scheduler.add_request(
                Request(
                    request_id=str(index),
                    prompt_token_ids=[100 + index] + [7] * (length - 1),
                    sampling_params=params,
                    pooling_params=None,
                    block_hasher=hasher,
                )
            )

    def step(self) -> tuple[float, float]:
        """One step; microseconds of the thread's time for deciding, and for serializing."""
        times = [thread_time_ns()]
        output = self._scheduler.schedule()
        times.append(thread_time_ns())
        pickle.dumps(("execute_model", (output,), {}, 0), protocol=pickle.HIGHEST_PROTOCOL)
        times.append(thread_time_ns())
        answer = self._answer(output)
        times.append(thread_time_ns())
        result = pickle.loads(answer)
        times.append(thread_time_ns())
        outputs = self._scheduler.update_from_output(output, result)
        times.append(thread_time_ns())
        for message in outputs.values():
            self._encoder.encode(message)
        times.append(thread_time_ns())
        spent = [(after - before) / 1000 for before, after in pairwise(times)]
        schedule, encode, _, decode, update, encode_outputs = spent
        return schedule + update, encode + decode + encode_outputs

    def _answer(self, output: Any) -> bytes:
        """The workers' message: a token for each request whose prompt is computed."""
        computed: list[str] = []
        sampled: list[list[int]] = []
        for request_id in output.num_scheduled_tokens:
            request = self._scheduler.requests[request_id]
            is_due = request.num_computed_tokens >= request.num_prompt_tokens
            computed.append(request_id)
            sampled.append([TOKEN_ID] if is_due else [])
        answer = ModelRunnerOutput(
            req_ids=computed,
            req_id_to_index={request_id: index for index, request_id in enumerate(computed)},
            sampled_token_ids=sampled,
        )
        return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)


def _config(asked: dict[str, int]) -> VllmConfig:
    max_model_len = asked["prompt_tokens"] + asked["block_size"] + asked["max_tokens"]
    scheduler = SchedulerConfig(
        max_num_seqs=asked["num_seqs"],
        max_num_batched_tokens=asked["max_num_batched_tokens"],
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        shape = {**SHAPE, "max_position_embeddings": max_model_len}
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        model = ModelConfig(
            model=folder, dtype="float32", skip_tokenizer_init=True, max_model_len=max_model_len
        )
        cache = CacheConfig(block_size=asked["block_size"], enable_prefix_caching=True)
        cache.num_gpu_blocks = asked["num_blocks"]
        return VllmConfig(scheduler_config=scheduler, model_config=model, cache_config=cache)


def main() -> None:
    """Answer requests until the input ends: first the version, then benches and their steps."""
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM's own messages are no answers
    bench: Bench | None = None

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer({"version": vllm.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        if "num_seqs" in asked:
            bench = None
            gc.unfreeze()
            bench = Bench(asked)
            gc.collect()
            gc.freeze()
            answer({})
        else:
            assert bench is not None
            answer([bench.step() for _ in range(asked["steps"])])


if __name__ == "__main__":
    main()

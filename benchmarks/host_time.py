"""Python time of an eager step on a GPU, measured without one.

    python -m benchmarks.host_time [--layers 32] [--decodes 256] [--chunk 512]

Tensors are on torch's `meta` device, which computes nothing, and Triton kernels pass through
Triton's launcher up to the call of the driver, which does nothing. The remaining time is that of
the host to queue a step: if it exceeds the device's, it determines the time of a step.
"""

import cProfile
import pstats
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from benchmarks.machine import ForeignLoad, save
from benchmarks.tables import script_parser
from pagewire_kernels.batch import AttentionMetadata, StepInputs
from pagewire_kernels.select import Kernels
from pagewire_kernels.triton import TritonBackend, TritonLayerKernels
from worker_service.models.interface import ModelContext
from worker_service.models.llama import LlamaModel, llama_settings
from worker_service.runner.device_rows import DeviceRows
from worker_service.runner.device_sampler import DeviceSampler, StepKernels

META = torch.device("meta")
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


class NoDevice:
    """A driver for Triton without a GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class NoKernel(CompiledKernel):  # type: ignore[misc]
    """A compiled kernel that does nothing when Triton's launchers run it."""

    name = src = packed_metadata = None

    def __init__(self) -> None:
        self.module, self.function, self._run = None, None, lambda *_: None

    def _init_handles(self) -> None:
        """Load nothing."""


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.empty((*rows.shape[:-1], len(weight)), dtype=rows.dtype, device=META)


def _new_empty(like: Tensor, size: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(size, dtype=dtype or like.dtype, device=META)


class Step:
    """An eager step of decodes and a chunk of a prompt."""

    def __init__(self, num_layers: int, num_decodes: int, chunk: int) -> None:
        from pagewire_kernels import triton as step_kernels

        settings = llama_settings(_CONFIG | {"num_hidden_layers": num_layers})
        assert settings is not None
        context = ModelContext(dtype=torch.bfloat16, device=META)
        kernels = Kernels(TritonBackend(), TritonLayerKernels())
        self._model = LlamaModel(settings, 4096, context, kernels)
        block_size, max_blocks = 16, 256
        spec = self._model.kv_cache_spec
        self._cache = torch.empty(
            1024, *spec.block_shape(block_size), dtype=spec.dtype, device=META
        )
        num_seqs, num_tokens = num_decodes + (chunk > 0), num_decodes + chunk
        rows = DeviceRows(num_seqs, max_blocks, self._model.vocab_size, META)
        found: StepKernels = step_kernels
        self._sampler = DeviceSampler(rows, found, block_size, self._model.vocab_size)

        def int32(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int32, device=META)

        by_token = [int32(num_tokens) for _ in range(4)]
        self._inputs = StepInputs(*by_token, int32(num_seqs), int32(num_seqs))
        self._query_start = int32(num_seqs + 1)
        self._num_decodes, self._longest = num_decodes, max(1, chunk)

    def launch(self) -> None:
        """Queue the forward pass."""
        prepared = self._sampler.prepare(self._inputs, 64)
        metadata = AttentionMetadata(
            query_start=self._query_start,
            context_lens=self._inputs.context_lens,
            block_tables=prepared.block_tables,
            slot_mapping=prepared.slot_mapping,
            max_query_len=self._longest,
            max_context_len=1024,
            num_decodes=self._num_decodes,
        )
        self._model.forward(prepared.token_ids, prepared.positions, self._cache, metadata)


def timed(step: Step, repeats: int) -> list[float]:
    """Processor time of each of `repeats` steps, in milliseconds, after three warm-up steps."""
    times = []
    for repeat in range(repeats + 3):
        started = time.thread_time()
        step.launch()
        if repeat >= 3:
            times.append(1e3 * (time.thread_time() - started))
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = script_parser(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--decodes", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of the step")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args(arguments)
    driver.set_active(NoDevice())
    JITFunction._do_compile = lambda self, key, _signature, device, *_: self.device_caches[device][
        0
    ].setdefault(key, NoKernel())
    # On the meta device these two run Python code, which on a GPU they do not.
    torch.nn.functional.linear = _linear
    Tensor.new_empty = _new_empty  # type: ignore[method-assign,assignment]
    foreign = ForeignLoad()
    step = Step(args.layers, args.decodes, args.chunk)
    times = timed(step, args.repeats)
    figures = {
        "layers": args.layers,
        "decodes": args.decodes,
        "chunk": args.chunk,
        "ms": round(statistics.median(times), 3),
        "least_ms": round(min(times), 3),
    }
    print(figures)
    if args.profile:
        with cProfile.Profile() as found:
            timed(step, args.repeats)
        pstats.Stats(found).sort_stats("tottime").print_stats(30)
    save("host_time", figures, foreign.cores, args.results)


if __name__ == "__main__":
    main()

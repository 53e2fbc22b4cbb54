"""Models that compute with these kernels alone, against the reference and against themselves."""

import dataclasses
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewire_kernels import triton as triton_kernels
from pagewire_kernels.quantized_weight import quantize
from pagewire_kernels.reference.backend import LayerKernels, ReferenceBackend
from pagewire_kernels.select import Kernels
from pagewire_kernels.triton import TritonBackend, TritonLayerKernels, TritonQuantizedWeight
from scheduler_service.core.config import SchedulerConfig
from tests.support.checkpoints import checkpoint, make_checkpoint
from tests.support.gpu_kernels import DEVICE, INTERPRETED, MARKS
from tests.support.in_process import InProcessEngine, InProcessWorker
from tests.support.loading import load
from tests.support.mtp_heads import mtp_checkpoint
from tests.support.paged_driver import NAN, PagedDriver
from tests.support.quantized_files import awq, bitsandbytes, fp8, integers, make_quantized
from tests.support.runners import EagerRecorder, HostEvent
from tests.support.transformers_oracle import oracle
from worker_service.config import ModelConfig
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.loader import load_model, load_mtp_head
from worker_service.loader.files.config import read_config
from worker_service.loader.loaded_model import arithmetic_of
from worker_service.loader.quantized.schemes import read_schemes
from worker_service.loader.weights.checkpoint import open_checkpoint
from worker_service.loader.weights.fill import EagerPacking, load_weights
from worker_service.models.interface import ModelContext
from worker_service.models.layers.norms import RMSNorm
from worker_service.models.linear.linear import Linear
from worker_service.models.linear.vocabulary import VocabEmbedding
from worker_service.models.mixers.mamba import Decay
from worker_service.models.native import NativeModel
from worker_service.models.registry import build_native_model
from worker_service.runner.device.cuda_graphs import CudaGraphRecorder
from worker_service.runner.device.in_flight_step import CudaEvent
from worker_service.runner.device.state import DeviceState, StateShape
from worker_service.runner.device.steps import DeviceSteps
from worker_service.runner.model_runner import ModelRunner

pytestmark = MARKS

LONG = pytest.mark.long
"""For models that take many seconds in the interpreter; their kernels have short tests."""

OURS = Kernels(TritonBackend(batch_invariant=True), TritonLayerKernels())
PLAIN = Kernels(ReferenceBackend(), LayerKernels())


def _model(folder: Path, kernels: Kernels) -> NativeModel:
    place = ModelContext(dtype=torch.float32, device=DEVICE, batch_invariant=True)
    model = build_native_model(read_config(folder), None, place, kernels)
    assert model is not None
    load_weights(model, open_checkpoint(folder))
    for module in model.modules():
        if isinstance(module, Linear) and kernels is OURS:
            module.fix_order()
        if isinstance(module, RMSNorm):
            module.add_offset()  # not by `finish_loading`, which packs weights for a CPU
        if isinstance(module, Decay):
            module.pack()
    return model


def _awq(folder: Path) -> tuple[Path, Path]:
    """As `make_quantized`."""

    def quantize(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rounded = integers(weight, 4, symmetric=False)
        return awq(rounded, 4), rounded.values

    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    return make_quantized(folder, settings, quantize)


def _fp8(folder: Path) -> tuple[Path, Path]:
    """As `make_quantized`."""
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}

    def quantize(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        grid = [-(-size // 32) for size in weight.shape]
        return fp8(weight, (32, 32), "weight_scale_inv", grid)

    return make_quantized(folder, settings, quantize)


def _nf4(folder: Path) -> tuple[Path, Path]:
    """As `make_quantized`."""
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    }
    return make_quantized(folder, settings, lambda _, weight: bitsandbytes(weight, nested=True))


def _gguf(source: str, folder: Path) -> tuple[Path, Path]:
    gguf_files = pytest.importorskip("tests.support.gguf_files")
    paths: tuple[Path, Path] = gguf_files.make_gguf(*source.split(), folder)
    return paths


DENSE_EMBEDDING = {"awq": _awq, "fp8": _fp8, "nf4": _nf4}
"""Makers of checkpoints whose embeddings are not quantized."""


def packed_model(path: Path, **options: Any) -> NativeModel:
    """With the weights of a checkpoint as they are on a GPU."""
    config = read_config(path)
    place = ModelContext(
        dtype=torch.float32, device=DEVICE, batch_invariant=True, packs_with_triton=True, **options
    )
    model = build_native_model(config, None, place, OURS)
    assert model is not None
    files = open_checkpoint(path, read_schemes(path / "config.json", config))
    load_weights(model, files, on_filled=EagerPacking(model))
    model.finish_loading()
    for linear in _linears(model):
        linear.fix_order()
    return model


def _linears(model: NativeModel) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def _is_packed(module: Linear | VocabEmbedding) -> bool:
    return module.weight is None and isinstance(module.packed, TritonQuantizedWeight)


def _driver(model: NativeModel) -> PagedDriver:
    return PagedDriver(model, device=str(DEVICE))


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen3", "opt"),
        *(pytest.param(name, marks=LONG) for name in ("mistral", "hunyuan_dense")),
        *(pytest.param(name, marks=LONG) for name in ("lfm2", "qwen3_5", "granite_hybrid")),
    ],
)
def test_a_sequence_has_the_references_logits_and_the_same_bits_in_any_batch(family: str) -> None:
    folder = checkpoint(family)
    _assert_same_in_any_batch(_model(folder, OURS), _model(folder, PLAIN))


def _launched_ahead(model: NativeModel, cache: CacheEngine, block_size: int) -> ModelRunner:
    """A runner that replays its steps, sampling included, with these kernels; in the interpreter,
    replays do the work again."""
    recorder = EagerRecorder() if INTERPRETED else CudaGraphRecorder(DEVICE)
    shape = StateShape(sizes=[1, 2, 4], mixed=[8, 16])
    state = DeviceState(model, cache, block_size, shape, recorder, kernels=triton_kernels)
    event = HostEvent if INTERPRETED else CudaEvent
    device = DeviceSteps(model, cache, state, make_event=event)
    return ModelRunner(model, cache, block_size, device=device)


class _Engine(InProcessEngine):
    """Computes with these kernels alone, over blocks that are full of NaN at first."""

    def make_worker(self, num_gpu_blocks: int, num_cpu_blocks: int) -> InProcessWorker:
        worker = InProcessWorker(
            _model(self.loaded.model_dir, OURS),
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=self.block_size,
            device=DEVICE,
            make_runner=_launched_ahead,
        )
        worker._cache.device_cache.fill_(NAN)
        return worker


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about rows of no sequence
@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_5", marks=LONG)])
def test_states_that_are_launched_ahead_give_the_references_tokens(family: str) -> None:
    draw = np.random.default_rng(4)
    prompts = [draw.integers(5, 250, size=length).tolist() for length in (19, 5, 9)]
    expected = [oracle(checkpoint(family)).generate(prompt, 8) for prompt in prompts]
    config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4)
    engine = _Engine(checkpoint(family), block_size=16, num_gpu_blocks=64, config=config)
    together = engine.generate(prompts, 8, logprobs=0)
    again = engine.generate(prompts[:1], 8, logprobs=0)
    assert [output.token_ids for output in together] == expected
    assert again[0].cached_tokens == 16, "from a saved state"
    assert again[0].logprobs == together[0].logprobs, "the same bits alone and in a batch"


def _assert_same_in_any_batch(model: NativeModel, reference: NativeModel) -> None:
    draw = np.random.default_rng(3)
    prompts = [draw.integers(5, 250, size=length).tolist() for length in (5, 21, 1)]
    batch = [(i, 0, prompt) for i, prompt in enumerate(prompts)]
    together = _driver(model).run(batch)
    for found, expected in zip(together, _driver(reference).run(batch), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    driver, prompt = _driver(model), prompts[1]
    pieces = [driver.run([(0, a, prompt[a:b])])[0] for a, b in pairwise((0, 13, 20, 21))]
    assert torch.equal(torch.cat(pieces), together[1])


@pytest.mark.parametrize(
    "source",
    [
        "awq",
        pytest.param("fp8", marks=LONG),
        pytest.param("nf4", marks=LONG),
        pytest.param("llama_tied Q4_K", marks=LONG),
        pytest.param("qwen3 IQ4_XS", marks=LONG),
    ],
)
def test_quantized_weights_stay_packed_and_give_the_logits_of_the_dequantized_ones(
    source: str, tmp_path: Path
) -> None:
    make = DENSE_EMBEDDING.get(source, partial(_gguf, source))
    path, reference = make(tmp_path)
    model = packed_model(path)
    assert model.embedding is not None
    of_layers = [linear for linear in _linears(model) if linear is not model.head]
    assert all(_is_packed(linear) for linear in of_layers)
    assert _is_packed(model.embedding) == (source not in DENSE_EMBEDDING)
    _assert_same_in_any_batch(model, _model(reference, PLAIN))


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("llama_tied", "fp8"),
        pytest.param("llama_tied", "int8", marks=LONG),
        pytest.param("gpt2", "int8", marks=LONG),
    ],
)
def test_weights_that_are_rounded_while_loading_are_packed(
    family: str, quantization: str, tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path, hidden_size=64, intermediate_size=96, head_dim=16)
    model = packed_model(path, quantization=quantization)
    assert model.embedding is not None
    assert all(_is_packed(linear) for linear in _linears(model))
    assert _is_packed(model.embedding)
    plain = _model(path, PLAIN)
    for linear in _linears(plain):
        assert linear.weight is not None
        kind = "int8" if linear is plain.head else quantization
        linear.weight.copy_(quantize(linear.weight, kind).dequantize())
    _assert_same_in_any_batch(model, plain)


@pytest.mark.gpu
def test_a_worker_keeps_quantized_weights_packed_on_its_gpu(tmp_path: Path) -> None:
    path, _ = _awq(tmp_path)
    loaded = load_model(
        ModelConfig(model=str(path), device="cuda", dtype="float16", batch_invariant=True)
    )
    assert "/packed/" in arithmetic_of(loaded)
    model = loaded.model
    assert isinstance(model, NativeModel)
    assert loaded.batch_invariant
    assert all(_is_packed(linear) for linear in _linears(model) if linear is not model.head)


@pytest.mark.parametrize("family", [pytest.param("deepseek_v3", marks=LONG), "glm4_moe"])
def test_a_head_computes_what_it_does_with_the_reference(family: str) -> None:
    """The rows before in the cache, then one row of each of two sequences."""
    target = load(mtp_checkpoint(family).path, device=str(DEVICE))
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 250, (12,), generator=draw).to(DEVICE)
    tables = (torch.arange(8, dtype=torch.int32, device=DEVICE).view(2, 4),)
    found = []
    for kernels in (OURS, PLAIN):
        head = load_mtp_head(dataclasses.replace(target, kernels=kernels))
        assert head is not None
        spec, size = head.kv_cache_spec, head.hidden_like.shape[1]
        hidden = torch.randn(12, size, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        pool = torch.zeros(8, spec.block_bytes(4), dtype=torch.uint8, device=DEVICE)
        batches = [
            spec.batch_of_ranges(part, [bounds] * 2, tables, spec.views(pool, 4), 4)
            for part, bounds in ((tokens[:10], (0, 5)), (tokens[10:], (5, 6)))
        ]
        with torch.inference_mode():
            head.write_kv(batches[0], hidden[:10])
            output, following = head(batches[1], hidden[10:])
            found.append((head.compute_logits(output), following))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-3)

"""Every GPU kernel compiles to machine code, as its launcher calls it; needs no GPU.

The interpreter takes Python that Triton's compiler does not, so that it alone proves little.
"""

import inspect
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from pagewire_kernels import triton as triton_kernels
from pagewire_kernels.batch import (
    AttentionMetadata,
    SamplingParam,
    SamplingRows,
    SamplingTables,
    StepInputs,
)
from pagewire_kernels.reference import ACTIVATIONS, Gate, Routing
from pagewire_kernels.slot_deltas import SlotDeltas
from pagewire_kernels.triton import few_rows
from pagewire_kernels.triton.attention import Launch, num_stages
from pagewire_kernels.triton.experts import TritonExperts
from tests.support.compiled import COMPILED
from tests.support.quantized_files import NF4
from tests.support.quantized_weights import random_weight
from tests.support.state_layers import Convolution, DeltaRule, Mamba1, Mamba2, Rglru

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""What a program can have there, in KiB, by compute capability times ten."""


GPUS = [GPUTarget("cuda", arch, 32) for arch in SHARED_MEMORY]
EXTREMES = {80, 89}
LONG = [pytest.mark.long]


def for_every_gpu(
    cases: Iterable[str], short: Container[str], long: Container[str] = ()
) -> pytest.MarkDecorator:
    """Cases for each GPU that can have them: one before compute capability 8.9 has no fp8 cache,
    and large latents need the shared memory of a data centre's. Long tests are those `long` on
    Hopper, and on other GPUs all but the `short` ones on one without fp8 and on one with the least
    shared memory."""

    def is_possible(case: str, gpu: GPUTarget) -> bool:
        is_large = case.endswith("large latents")
        return SHARED_MEMORY[gpu.arch] >= 160 if is_large else gpu.arch >= 89 or "fp8" not in case

    def is_short(case: str, gpu: GPUTarget) -> bool:
        return case not in long if gpu == HOPPER else case in short and gpu.arch in EXTREMES

    return pytest.mark.parametrize(
        ("case", "target"),
        [
            pytest.param(
                case,
                gpu,
                id=f"{case}-{gpu.arch}",
                marks=[] if is_short(case, gpu) else LONG,
            )
            for case in cases
            for gpu in GPUS
            if is_possible(case, gpu)
        ],
    )


WIDE_COPY = "cp.async.cg.shared.global"
"""The asynchronous copy that takes sixteen bytes and no fewer."""

CODES_AHEAD = r"async_copy_global_to_local .*tensor<[0-9x]+x!tt.ptr<i8>"
"""The asynchronous copy of codes, in Triton's representation of a kernel."""

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
FP8 = torch.float8_e4m3fn
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    FP8: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


def _compile(
    kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any], target: GPUTarget
) -> Any:
    """Machine code for a launch with these arguments, specialised as Triton does it."""
    names = set(kernel.arg_names)
    options = {key: kwargs[key] for key in OPTIONS if key in kwargs}
    named = {key: value for key, value in kwargs.items() if key in names}
    values = inspect.signature(kernel.fn).bind(*args, **named).arguments
    signature, constants, attributes = {}, {}, {}
    for parameter in kernel.params:
        value = values[parameter.name]
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or is_one:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        else:
            is_wide = isinstance(value, int) and abs(value) >= 2**31
            signature[parameter.name] = (
                "fp32" if isinstance(value, float) else "i64" if is_wide else "i32"
            )
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def _bind(
    kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any], target: GPUTarget
) -> None:
    """Bind these arguments as Triton's launcher does, in a function that it generates, in which
    some names of parameters are taken."""
    launching = {key: value for key, value in kwargs.items() if key not in ("grid", "warmup")}
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(target))
    bound, *_ = bind(*args, **launching)
    assert [*bound] == kernel.arg_names


@pytest.fixture
def target() -> GPUTarget:
    """What is compiled for."""
    return HOPPER


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, target: GPUTarget) -> list[Any]:
    """What has been launched since; launches compile and do not run."""
    compiled: list[Any] = []

    def run(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:
        _bind(kernel, args, kwargs, target)
        compiled.append(_compile(kernel, args, kwargs, target))

    # Triton finds there what it compiled from the same source before, as a rule in another run.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(COMPILED / "triton"))
    monkeypatch.setattr(JITFunction, "run", run)
    return compiled


def _metadata(num_seqs: int, query_len: int, context_len: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_start=torch.arange(num_seqs + 1, dtype=torch.int32) * query_len,
        context_lens=torch.full((num_seqs,), context_len, dtype=torch.int32),
        block_tables=torch.zeros((num_seqs, -(-context_len // 16)), dtype=torch.int32),
        slot_mapping=torch.zeros(num_seqs * query_len, dtype=torch.int64),
        max_query_len=query_len,
        max_context_len=context_len,
    )


def _bias(num_heads: int, longest: int) -> torch.Tensor:
    return torch.zeros(num_heads, 2 * longest - 1)


ATTENTION = {
    "decode": (_metadata(1, 1, 4000), torch.bfloat16, {}),
    "prefill": (_metadata(2, 300, 600), torch.bfloat16, {}),
    "decode from fp8": (_metadata(1, 1, 4000), torch.bfloat16, {"cache": FP8}),
    "float32 with all options": (
        _metadata(2, 40, 50),
        torch.float32,
        {
            "soft_cap": 5.0,
            "sliding_window": 100,
            "sinks": torch.zeros(16),
            "alibi_slopes": torch.zeros(16),
        },
    ),
    "batch-invariant prefill": (_metadata(40, 300, 4000), torch.bfloat16, {"invariant": True}),
}


def _launch(target: GPUTarget, query: torch.Tensor, *arguments: Any, **options: Any) -> Launch:
    """As it is chosen on this GPU."""
    launch = triton_kernels.choose_launch(query, *arguments, **options)
    shared = SHARED_MEMORY[target.arch] * 1024
    return replace(launch, num_stages=num_stages(shared, query.shape[2]))


def _check(launched: list[Any], target: GPUTarget) -> None:
    for kernel in launched:
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_MEMORY[target.arch] * 1024


@for_every_gpu(ATTENTION, short=("decode",))
def test_attention_compiles(case: str, target: GPUTarget, launched: list[Any]) -> None:
    metadata, dtype, options = ATTENTION[case]
    metadata, options = replace(metadata), dict(options)
    query = torch.zeros(len(metadata.slot_mapping), 16, 128, dtype=dtype)
    cache = torch.zeros(2, 1, 2, 16, 8, 128).to(options.pop("cache", dtype))
    is_invariant = options.pop("invariant", False)
    launch = _launch(target, query, 8, metadata, batch_invariant=is_invariant)
    triton_kernels.paged_attention(
        query, cache[:, 0, 0], cache[:, 0, 1], metadata, scale=0.1, launch=launch, **options
    )
    names = [kernel.metadata.name for kernel in launched]
    assert names == [
        *(["plan_splits"] if launch.num_planned else []),
        "attend",
        *(["reduce_splits"] if launch.num_planned or launch.num_splits > 1 else []),
    ]
    _check(launched, target)
    attend = launched[names.index("attend")].asm["ptx"]
    assert "mma" in attend or dtype == torch.float32
    assert WIDE_COPY in attend, "keys are loaded sixteen bytes at a time"


OTHER_SHAPES = {
    # (heads, KV heads, size of a head), type, type of the cache, tokens of each sequence, splits
    "split prefill": ((16, 8, 128), torch.bfloat16, torch.bfloat16, 300, 4),
    "prefill from fp8": ((16, 8, 128), torch.bfloat16, FP8, 300, 1),
    "split prefill from fp8": ((32, 8, 128), torch.bfloat16, FP8, 300, 4),
    "decode of float32": ((16, 8, 128), torch.float32, torch.float32, 1, 4),
    "decode, groups of eight": ((64, 8, 128), torch.float16, torch.float16, 1, 1),
    "prefill, groups of three": ((12, 4, 64), torch.bfloat16, torch.bfloat16, 300, 1),
    "decode, heads of 80": ((32, 32, 80), torch.bfloat16, torch.bfloat16, 1, 1),
    "prefill, heads of 80": ((32, 32, 80), torch.bfloat16, torch.bfloat16, 300, 1),
    "decode, heads of 256": ((8, 4, 256), torch.bfloat16, torch.bfloat16, 1, 4),
    "prefill, heads of 256": ((8, 4, 256), torch.bfloat16, torch.bfloat16, 300, 1),
    "prefill, heads of 256 from fp8": ((8, 4, 256), torch.bfloat16, FP8, 300, 1),
    "decode of float32, heads of 256": ((2, 1, 256), torch.float32, torch.float32, 1, 1),
    "prefill of float32, heads of 256": ((2, 1, 256), torch.float32, torch.float32, 300, 1),
    "decode, latents": ((16, 1, 576), torch.bfloat16, torch.bfloat16, 1, 4),
    "prefill, latents": ((16, 1, 576), torch.bfloat16, torch.bfloat16, 300, 1),
    "decode, latents of 128 heads": ((128, 1, 576), torch.bfloat16, torch.bfloat16, 1, 4),
    "prefill, latents of 128 heads": ((128, 1, 576), torch.bfloat16, torch.bfloat16, 300, 1),
    "decode, large latents": ((64, 1, 1088), torch.bfloat16, torch.bfloat16, 1, 4),
    "prefill, large latents": ((64, 1, 1088), torch.bfloat16, torch.bfloat16, 300, 1),
}


LIKE_OTHERS = (
    "prefill from fp8",
    "split prefill from fp8",
    "decode of float32",
    "decode, groups of eight",
    "prefill, heads of 80",
    "decode, heads of 256",
    "prefill, heads of 256",
    "prefill, latents",
    "prefill, large latents",
    "decode, latents of 128 heads",
)
"""What makes these large or odd makes others so, too."""


@for_every_gpu(OTHER_SHAPES, short=("split prefill",), long=LIKE_OTHERS)
def test_attention_of_any_shape_fits_into_shared_memory(
    case: str, target: GPUTarget, launched: list[Any]
) -> None:
    (num_heads, num_kv_heads, size), dtype, cache_dtype, query_len, num_splits = OTHER_SHAPES[case]
    metadata = _metadata(2, query_len, 600)
    query = torch.zeros(2 * query_len, num_heads, size, dtype=dtype)
    cache = torch.zeros(2, 1, 2, 16, num_kv_heads, size).to(cache_dtype)
    launch = replace(_launch(target, query, num_kv_heads, metadata), num_splits=num_splits)
    triton_kernels.paged_attention(
        query, cache[:, 0, 0], cache[:, 0, 1], metadata, scale=0.1, launch=launch
    )
    assert len(launched) == (3 if query_len == 1 else 1 + (num_splits > 1))
    _check(launched, target)


PACKED: dict[str, tuple[int, int, torch.dtype, dict[str, Any]]] = {
    # heads, size of a head, type, options
    "heads of 32": (12, 32, torch.bfloat16, {}),
    "heads of 64 with a window": (12, 64, torch.float16, {"window": 64}),
    "float32 with all options": (16, 128, torch.float32, {"window": 9, "bias": _bias(16, 300)}),
    "heads of 256": (4, 256, torch.bfloat16, {"bias": _bias(4, 300)}),
}


@for_every_gpu(PACKED, short=("heads of 32",), long=("heads of 64 with a window",))
def test_attention_over_texts_compiles(case: str, target: GPUTarget, launched: list[Any]) -> None:
    num_heads, size, dtype, options = PACKED[case]
    metadata = AttentionMetadata.of_texts([300, 5], torch.device("cpu"))
    rows = torch.zeros(305, 3, num_heads, size, dtype=dtype)
    triton_kernels.packed_attention(*rows.unbind(1), metadata, scale=0.1, **options)
    assert [kernel.metadata.name for kernel in launched] == ["attend_texts"]
    _check(launched, target)
    assert "mma" in launched[0].asm["ptx"] or dtype == torch.float32


TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
NF4_KIND: dict[str, Any] = {
    "bits": 4,
    "group_size": 64,
    "offsets": False,
    "scales": "float32",
    "table": NF4,
    "is_float": True,
}
QUANTIZED: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "4 bits": ({"bits": 4, "group_size": 128, "offsets": False}, torch.bfloat16),
    "4 bits of two levels, with a table": (
        {"bits": 4, "group_size": 32, "offsets": True, "scales": "units", "table": TABLE},
        torch.float16,
    ),
    "8 bits": (
        {"bits": 8, "group_size": 128, "offsets": True, "scales": "float32"},
        torch.bfloat16,
    ),
    "8 bits in small groups": ({"bits": 8, "group_size": 16, "offsets": False}, torch.float32),
    "4 bits of floats": (
        NF4_KIND,
        torch.bfloat16,
    ),
    "4 bits of exact floats": (
        NF4_KIND,
        torch.float32,
    ),
    "floats": (
        {"bits": 8, "group_size": 128, "offsets": False, "scales": "float32", "is_float": True},
        torch.bfloat16,
    ),
}


@for_every_gpu(QUANTIZED, short=("4 bits",), long=("8 bits", "4 bits of exact floats", "floats"))
def test_products_with_weights_in_fewer_bits_compile_for_every_gpu(
    case: str, target: GPUTarget, launched: list[Any]
) -> None:
    kind, dtype = QUANTIZED[case]
    weight = triton_kernels.TritonQuantizedWeight(
        random_weight(1024, 2048, **kind),
        dtype,
        torch.device("cpu"),
        batch_invariant=False,
        has_float8=target.arch >= 89,
    )
    for num_rows in (1, 40, 300):
        weight.apply(torch.zeros(num_rows, 2048, dtype=dtype), torch.zeros(1024))
    weight.gather(torch.zeros(3, dtype=torch.int64))
    assert [kernel.metadata.name for kernel in launched] == [
        *("_product", "_sum_splits", "_product", "_sum_splits", "_product", "_gather")
    ]
    _check(launched, target)
    for kernel in launched:
        if kernel.metadata.name == "_product":
            assert "mma" in kernel.asm["ptx"] or dtype == torch.float32
            assert re.search(CODES_AHEAD, kernel.asm["ttgir"]), "codes are loaded ahead"


def _write_kv(cache_dtype: torch.dtype) -> None:
    cache = torch.zeros(2, 1, 2, 16, 8, 128).to(cache_dtype)
    rows, slots = torch.zeros(3, 8, 128, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)
    triton_kernels.write_kv(rows, rows, cache[:, 0, 0], cache[:, 0, 1], slots)


def _rotate(cache_dtype: torch.dtype) -> None:
    cache = torch.zeros(2, 1, 2, 16, 8, 128).to(cache_dtype)
    rows = torch.zeros(3, 32, 128, dtype=torch.bfloat16)
    slots, table = torch.zeros(3, dtype=torch.int64), torch.zeros(9, 64, dtype=torch.bfloat16)
    weight = torch.ones(128, dtype=torch.bfloat16)
    triton_kernels.rotate_and_write_kv(
        rows[:, :16],
        rows[:, 16:24],
        rows[:, 24:],
        cache[:, 0, 0],
        cache[:, 0, 1],
        slots,
        slots,
        table,
        table,
        query_norm=weight,
        key_norm=weight,
    )


def _rotate_in_place() -> None:
    rows, positions = torch.zeros(3, 32, 64, dtype=torch.bfloat16), torch.zeros(3).long()
    table = torch.zeros(9, 32, dtype=torch.bfloat16)
    triton_kernels.rotate(rows[:, :16], rows[:, 16:], positions, table, table)


def _layers() -> None:
    rows, weight = torch.zeros(3, 1024, dtype=torch.bfloat16), torch.ones(1024)
    triton_kernels.rms_norm(rows, weight, 1e-6)
    triton_kernels.rms_norm(rows, weight, 1e-6, rows.clone())
    triton_kernels.layer_norm(rows, weight, weight, 1e-6, rows.clone())
    triton_kernels.layer_norm(rows, None, None, 1e-6)
    sums, starts = torch.zeros(1, 1024), torch.tensor([0, 3], dtype=torch.int32)
    triton_kernels.sum_rows(rows, starts, sums)
    kernels = triton_kernels.TritonLayerKernels()
    kernels.multiply_sigmoid(rows, rows)
    kernels.multiply_softplus(rows, rows)
    kernels.apply_gate(rows, Gate(limit=7.0, limits_active=True))
    kernels.sparsify(rows, 1.5)
    kernels.match_rms(rows, rows)
    kernels.mix_streams(rows, rows[:, :16].contiguous())
    kernels.correct_streams(rows, rows[:, :256], rows[:, :4].contiguous(), 1)
    gates, options = torch.zeros(3, 8), {"eps": 1e-6, "offset": 1e-6, "magnitude": 2.0}
    kernels.read_streams(rows, gates, torch.zeros(2, 8), 4, **options)
    kernels.read_streams(rows, gates[:, :4], torch.zeros(2, 4), 4, **options)
    kernels.write_streams(rows, rows[:, :256], gates[:, 4:])
    gates = torch.zeros(3, 24)
    kernels.read_streams(rows, gates, torch.zeros(2, 24), 4, **options, num_divisions=20)
    kernels.write_streams(rows, rows[:, :256], gates[:, 4:])
    for activation in ACTIVATIONS:
        triton_kernels.act_and_mul(rows, activation)
        triton_kernels.activate(rows, activation)
    triton_kernels.apply_gate(rows, Gate(limit=7.0, alpha=1.702, offset=1.0))


def _states() -> None:
    kernels, dtype = triton_kernels.TritonLayerKernels(), torch.bfloat16
    for make in (
        lambda: Convolution(dtype, channels=2048, num_units=4),
        lambda: Convolution(torch.float32, 3, 2048, activation=None, bias=False),
        lambda: Mamba1(dtype, 2048, 16, num_units=4),
        lambda: Mamba2(dtype, 8, 64, 1, 128),
        lambda: Mamba2(dtype, 8, 80, 1, 256, has_gate=False),
        lambda: Rglru(dtype, 2048, num_units=4),
        lambda: DeltaRule(dtype, 2, 8),
        lambda: DeltaRule(torch.float32, 8, 8, by_element=True),
        lambda: DeltaRule(dtype, 8, 8, by_element=True, decay_bound=-5.0),
    ):
        layer = make()
        for saves in ((), [(0, 2)]):
            layer.run(kernels, layer.states(), [(0, 0, 3), (1, 3, 4)], saves)
    rows, weight = torch.zeros(3, 8, 128, dtype=dtype), torch.ones(128)
    kernels.gated_rms_norm(rows, rows, weight, 1e-6, gates_first=False)
    kernels.gated_rms_norm(rows, rows, weight.expand(8, 128), 1e-6, gates_first=True)


def _linear() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for num_outputs in (1000, 20000):
            rows, weight = (
                torch.zeros(3, 2048, dtype=dtype),
                torch.zeros(num_outputs, 2048, dtype=dtype),
            )
            triton_kernels.linear(rows, weight, weight[:, 0].contiguous(), torch.float32)


def _experts() -> None:
    gate_up = torch.zeros(4, 64, 48, dtype=torch.bfloat16)
    down = torch.zeros(4, 48, 32, dtype=torch.bfloat16)
    experts = TritonExperts(gate_up, down, Gate(), batch_invariant=False)
    routing = Routing(num_experts=4, num_chosen=2)
    for num_rows in (1, 300):
        x, logits = torch.zeros(num_rows, 48, dtype=torch.bfloat16), torch.zeros(num_rows, 4)
        experts.apply(
            x,
            logits,
            routing,
            gate_up_bias=gate_up[..., 0].contiguous(),
            shared=x,
            shared_gate=logits[:, :1],
        )
        among_zero = Routing(num_experts=6, num_chosen=2, num_zero_experts=2)
        experts.apply(x, torch.zeros(num_rows, 6), among_zero)


def _few_rows() -> None:
    for num_rows, num_inputs in ((1, 1024), (4, 12288)):
        rows, weight = (torch.zeros(n, num_inputs, dtype=torch.bfloat16) for n in (num_rows, 1000))
        few_rows.multiply(rows, weight, None, torch.float32)
        few_rows.multiply_gated(rows, weight, weight[:, 0].contiguous(), "silu")


def _adapters() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        rows, slots = torch.zeros(3, 2048, dtype=dtype), torch.zeros(3, dtype=torch.int32)
        outputs = [slice(0, 1000), slice(1000, 1100)]
        for output_dtype in (dtype, torch.float32):
            deltas = SlotDeltas(outputs, (2, 2048), 4, 64, triton_kernels.add_deltas, rows)
            for bias in (None, rows[0, :1100]):
                deltas.add(torch.zeros(3, 1100, dtype=output_dtype), rows, slots, bias=bias)
        of_experts = SlotDeltas(outputs, (2, 2048), 4, 16, triton_kernels.add_deltas, rows, 128)
        of_experts.add(torch.zeros(3, 1100, dtype=dtype), rows, slots, slots.long())
        table = SlotDeltas(outputs[:1], (9,), 4, 8, triton_kernels.add_embedding_deltas, rows)
        table.add(torch.zeros(3, 1000, dtype=dtype), slots.long(), slots)


def _move_blocks() -> None:
    cache = torch.zeros(4, 100, dtype=torch.bfloat16)
    triton_kernels.move_blocks(cache, cache, torch.tensor([[0, 1]]))


def _sampling_rows(n: int, begin: int = 0) -> SamplingRows:
    """Columns of n rows that begin `begin` elements after a boundary."""
    column = torch.zeros(begin + n, dtype=torch.int32)[begin:]
    return SamplingRows(column, column, column, torch.zeros(1, 4749, dtype=torch.int32))


def _sampling_tables(vocab_size: int) -> SamplingTables:
    entries = torch.zeros(1, 1024, dtype=torch.int32)
    return SamplingTables(
        params=torch.zeros(1, len(SamplingParam), dtype=torch.int64),
        latest=torch.zeros(1, dtype=torch.int64),
        num_ahead=torch.zeros(1, dtype=torch.int64),
        drafts=torch.zeros(1, 15, dtype=torch.int64),
        counts=torch.zeros(1, vocab_size, dtype=torch.int32),
        edit_tokens=entries,
        edit_values=entries.float(),
        edit_ends=entries,
    )


def _sample(n: int, begin: int = 0) -> None:
    logits = torch.zeros(n, 151936)
    rows, tables = _sampling_rows(n, begin), _sampling_tables(151936)
    outcome = torch.zeros(begin + n, dtype=torch.int64)[begin:]
    sound = triton_kernels.edit(logits, rows, tables)
    triton_kernels.sample(logits, sound, rows, tables, outcome)


def _prepare(n: int, begin: int = 0, max_blocks: int = 64, block_size: int = 16) -> None:
    column = torch.zeros(begin + n, dtype=torch.int32)[begin:]
    block_tables = torch.zeros(4, 100, dtype=torch.int32)
    latest = torch.zeros(4, dtype=torch.int64)
    inputs, num_ahead = StepInputs(*[column] * 5), torch.zeros(4, dtype=torch.int64)
    tables = latest, num_ahead, torch.zeros(4, 15, dtype=torch.int64), block_tables
    triton_kernels.prepare(inputs, *tables, block_size, max_blocks)


def _accept(n: int, begin: int = 0) -> None:
    column = torch.zeros(begin + n, dtype=torch.int64)[begin:]
    triton_kernels.accept(*[column] * 5, _sampling_tables(151936))


def _sampling() -> None:
    _accept(2)
    _prepare(2)
    _prepare(2, block_size=0)
    _sample(2)
    triton_kernels.gather_logprobs(torch.zeros(2, 151936), torch.zeros(2, 21, dtype=torch.int64))


LAUNCHES: dict[str, tuple[Callable[[], None], int]] = {
    "write_kv": (lambda: _write_kv(torch.bfloat16), 1),
    "write_kv to fp8": (lambda: _write_kv(FP8), 1),
    "rotate_and_write_kv": (lambda: _rotate(torch.bfloat16), 1),
    "rotate_and_write_kv to fp8": (lambda: _rotate(FP8), 1),
    "rotate": (_rotate_in_place, 2),
    "layers": (_layers, 18 + 2 * len(ACTIVATIONS)),
    "states": (_states, 20),
    "linear": (_linear, 4),
    "few_rows": (_few_rows, 4),
    "adapters": (_adapters, 22),
    "experts": (_experts, 16),
    "move_blocks": (_move_blocks, 1),
    "sampling": (_sampling, 6),
}


@for_every_gpu(LAUNCHES, short=())
def test_a_launch_compiles(case: str, target: GPUTarget, launched: list[Any]) -> None:
    launch, num_kernels = LAUNCHES[case]
    launch()
    assert len(launched) == num_kernels
    _check(launched, target)


def test_a_step_is_compiled_once_wherever_its_columns_begin(launched: list[Any]) -> None:
    for n, begin, max_blocks in ((3, 0, 64), (3, 1, 64), (16, 0, 1), (1, 0, 33)):
        _prepare(n, begin, max_blocks)
        _sample(n, begin)
        _accept(n, begin)
    assert len({kernel.hash for kernel in launched}) == 4


def test_quotients_are_rounded_as_torch_rounds_before_they_become_fp8(launched: list[Any]) -> None:
    _write_kv(FP8)
    _rotate(FP8)
    assert all("div.rn.f32" in kernel.asm["ptx"] for kernel in launched)
    assert "div.full.f32" not in launched[0].asm["ptx"]

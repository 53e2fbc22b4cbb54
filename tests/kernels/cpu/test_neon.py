"""The kernels for Arm's NEON, cross-compiled and emulated: correct, batch-invariant, as AVX2."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu import build, linear
from pagewire_kernels.cpu.attention import NativeBackend
from pagewire_kernels.cpu.block_copy import move_blocks
from pagewire_kernels.cpu.layers import NativeLayerKernels, find_largest
from pagewire_kernels.cpu.linear import HugeMemory, NativeGatedWeight, NativeWeight
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.interface import stored_head_size
from pagewire_kernels.quantized_weight import SIGNED_TABLE, Int8Activations
from tests.support.compiled import compiled_once
from tests.support.emulated_kernels import EmulatedLibrary
from tests.support.native import native_libraries
from tests.support.packed_texts import PackedTexts
from tests.support.paged_batch import PagedSequences, Rows, Shape
from tests.support.quantized_files import NF4
from tests.support.quantized_rows import multiply_quantized_rows
from tests.support.quantized_weights import as_multiplied, random_int8_weight, random_weight

CXX, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSTEM = "/usr/aarch64-linux-gnu"
"""The C library of the cross compiler, for the emulator."""

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

pytestmark = [
    pytest.mark.skipif(
        shutil.which(CXX) is None or shutil.which(EMULATOR) is None,
        reason=f"needs {CXX} and {EMULATOR}: apt-get install g++-aarch64-linux-gnu qemu-user",
    ),
    # The first test compiles: half a minute, and more than five on a machine with a load of 30.
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def neon(tmp_path_factory: pytest.TempPathFactory) -> Library:
    options = build.INSTRUCTION_SETS_BY_MACHINE["aarch64"]["neon"]
    source = Path(__file__).parents[2] / "support/run_kernel.cpp"
    version = subprocess.check_output([CXX, "--version"], text=True)

    def make_library(path: Path) -> None:
        subprocess.run(build.command(CXX, options, path), check=True)

    def make_driver(path: Path) -> None:
        subprocess.run([CXX, "-std=c++17", "-O1", str(source), "-o", str(path)], check=True)

    library = compiled_once("neon", build.digest() + version, make_library)
    driver = compiled_once("run_kernel", source.read_text() + version, make_driver)
    memory = tmp_path_factory.mktemp("neon") / "memory"
    return EmulatedLibrary([EMULATOR, "-L", SYSTEM, str(driver)], library, memory, "neon")


@pytest.fixture(scope="module")
def avx2() -> Library:
    """The library whose bits NEON's must be."""
    found = [native for native in native_libraries() if native.instruction_set == "avx2"]
    if not found:
        pytest.skip("no AVX2 kernels on this machine")
    return found[0]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs kernels on one thread, and packs weights into little memory, all of which is copied."""
    monkeypatch.setattr(linear, "_CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(linear, "PAGE_BYTES", 1 << 12)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1), (33, 37), (100, 2049)])
def test_products(neon: Library, avx2: Library, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = _random(*shape, dtype=dtype), _random(shape[0], dtype=dtype, seed=1)
    rows = _random(13, shape[1], dtype=dtype, seed=2)
    packed = NativeWeight(weight, neon, HugeMemory())
    sums = packed.apply(rows, bias, output_dtype=torch.float32)
    exact = rows.double() @ weight.double().T + bias.double()
    scale = rows.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert ((sums - exact).abs() <= 1e-6 * scale).all()
    assert torch.equal(packed.gather(torch.tensor([shape[0] - 1, 0])), weight[[-1, 0]])
    alone = torch.cat([packed.apply(rows[i : i + 1], bias) for i in (0, 7, 12)])
    assert torch.equal(packed.apply(rows, bias)[[0, 7, 12]], alone)
    twin = NativeWeight(weight, avx2, HugeMemory())
    assert torch.equal(sums, twin.apply(rows, bias, output_dtype=torch.float32))


@each_dtype
@pytest.mark.parametrize(
    ("bits", "scales", "table", "is_float"),
    [
        (4, "float16", SIGNED_TABLE, False),
        (4, "units", SIGNED_TABLE, False),
        (4, "float32", NF4, True),
        (8, "float32", SIGNED_TABLE, False),
        (8, "float16", SIGNED_TABLE, True),
    ],
)
def test_quantized_products(
    neon: Library,
    avx2: Library,
    bits: int,
    scales: str,
    table: tuple[float, ...],
    is_float: bool,
    dtype: torch.dtype,
) -> None:
    weight = random_weight(
        70, 64, bits, 32, offsets=not is_float, scales=scales, table=table, is_float=is_float
    )
    rows = _random(5, 64, dtype=dtype)
    mine, twin = (NativeWeight(weight, native, HugeMemory(), dtype) for native in (neon, avx2))
    sums = mine.apply(rows, output_dtype=torch.float32)
    dense = as_multiplied(weight, dtype).dequantize()
    torch.testing.assert_close(sums, rows.float() @ dense.T, rtol=1e-4, atol=1e-4)
    if dtype == torch.float32 or is_float:  # AVX2 multiplies other inputs as whole numbers
        assert torch.equal(sums, twin.apply(rows, output_dtype=torch.float32))
    assert torch.equal(mine.apply(rows[:1]), mine.apply(rows)[:1])
    tokens = torch.tensor([69, 0])
    assert torch.equal(mine.gather(tokens), twin.gather(tokens))


@each_dtype
@pytest.mark.parametrize("symmetric", [True, False])
def test_products_of_quantized_rows(neon: Library, symmetric: bool, dtype: torch.dtype) -> None:
    """Whose bits are the same on all processors."""
    weight = random_int8_weight(70, 101, Int8Activations(symmetric=symmetric))
    rows = _random(5, 101, dtype=dtype) + 1
    packed = NativeWeight(weight, neon, HugeMemory(), dtype)
    expected = multiply_quantized_rows(rows, weight)
    assert torch.equal(packed.apply(rows, output_dtype=torch.float32), expected)
    assert torch.equal(packed.apply(rows[:1]), expected[:1].to(dtype))
    assert torch.equal(packed.gather(torch.tensor([69])), weight.dequantize()[69:].to(dtype))


@each_dtype
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_gated_products(neon: Library, avx2: Library, activation: str, dtype: torch.dtype) -> None:
    weight, rows = _random(2 * 19, 24, dtype=dtype), _random(7, 24, dtype=dtype, seed=1)
    mine, twin = (
        NativeGatedWeight(weight, activation, native, HugeMemory()).apply(rows)
        for native in (neon, avx2)
    )
    exact = reference.act_and_mul(rows.float() @ weight.float().T, activation)
    torch.testing.assert_close(mine.float(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(mine, twin)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({"num_heads": 12, "num_kv_heads": 1, "head_dim": 64}, {"sliding_window": 13}),
        ({"num_heads": 3, "num_kv_heads": 3, "head_dim": 39, "block_size": 5}, {"soft_cap": 3.0}),
        ({}, {"sinks": torch.tensor([0.5, -3.0, 40.0, 0.0])}),
        ({}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.0, 0.0625])}),
        ({"cache_dtype": torch.int8}, {}),
        (
            {"num_heads": 12, "head_dim": 72, "cache_dtype": torch.int8},
            {"sliding_window": 70, "sinks": torch.zeros(12)},
        ),
    ],
)
def test_attention(
    neon: Library,
    avx2: Library,
    sizes: dict[str, Any],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    def attend(library: Library, parts: list[Rows]) -> Tensor:
        backend = NativeBackend(library)
        sequences.write(backend)
        return sequences.attend(parts, backend, scale=0.3, **options)

    sequences = PagedSequences(Shape(dtype=dtype, **sizes), [140, 40, 7])
    everything = sequences.everything
    output = attend(neon, everything)
    expected = sequences.attend(everything, scale=0.3, **options)
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(attend(neon, [(0, 100, 140)]), output[100:140])
    assert torch.equal(attend(neon, [(1, 39, 40), (0, 139, 140)]), output[[179, 139]])
    assert torch.equal(attend(avx2, everything), output)


@each_dtype
@pytest.mark.parametrize("biased", [False, True])
def test_attention_of_whole_texts(
    neon: Library, avx2: Library, biased: bool, dtype: torch.dtype
) -> None:
    texts = PackedTexts([70, 3, 1], 4, 2, 40, dtype)
    options = {"window": 20, "bias": texts.random_bias(70) if biased else None}
    output = texts.attend(NativeBackend(neon), scale=0.2, **options)
    expected = texts.attend_by_torch(scale=0.2, **options)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.float(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(texts.attend(NativeBackend(avx2), scale=0.2, **options), output)


def _rotate(kernels: NativeLayerKernels, x: Tensor) -> Tensor:
    heads, (cos, sin) = x.clone().unflatten(1, (2, 19)), _random(2, 10, 7, dtype=x.dtype)
    kernels.rotate(heads[:, :1], heads[:, 1:], torch.tensor([0, 5, 2, 9, 9]), cos, sin)
    return heads


def _sum_rows(kernels: NativeLayerKernels, x: Tensor) -> Tensor:
    sums = torch.zeros(2, 38)
    kernels.sum_rows(x, torch.tensor([0, 2, 5], dtype=torch.int32), sums)
    return sums


def _activate(name: str, kernels: NativeLayerKernels, x: Tensor) -> Tensor:
    return kernels.act_and_mul(x, name)


def _read_streams(kernels: NativeLayerKernels, x: Tensor) -> Tensor:
    gates, numbers = x[:, :4].float().clone(), x[:2, 4:8].float().contiguous()
    numbers_of = {"eps": 1e-6, "offset": 0.01, "magnitude": 2.0}
    return torch.cat([kernels.read_streams(x, gates, numbers, 2, **numbers_of).float(), gates], 1)


Layer = Callable[[NativeLayerKernels, Tensor], Tensor]
LAYERS: dict[str, Layer] = {
    "embed": lambda kernels, x: kernels.embed(x, torch.tensor([2, 0, 9])),
    "embed, added": lambda kernels, x: kernels.embed(x, torch.tensor([2, 0, 9]), x[:3].clone()),
    "rotate": _rotate,
    "sum_rows": _sum_rows,
    "rms_norm": lambda kernels, x: kernels.rms_norm(x, x[0], 1e-6, x[[1, 0, 3, 2, 4]].clone()),
    "layer_norm": lambda kernels, x: kernels.layer_norm(x, x[0], x[1], 1e-6),
    "float32 weight": lambda kernels, x: kernels.rms_norm(x, x[0].float(), 1e-6),
    "scale": lambda kernels, x: kernels.scale(x.clone(), 0.3),
    "add": lambda kernels, x: kernels.add(x.clone(), x.flip(0)),
    "xielu": lambda kernels, x: kernels.xielu(x.clone(), torch.tensor([0.8, 1.3, 0.5, -1e-6])),
    "soft_cap": lambda kernels, x: kernels.soft_cap(x.clone(), 2.0),
    "sparsify": lambda kernels, x: kernels.sparsify(x.clone(), 0.7),
    "match_rms": lambda kernels, x: kernels.match_rms(x.clone(), x.flip(0)),
    "mix_streams": lambda kernels, x: kernels.mix_streams(x, x[:, :4].contiguous()),
    "correct_streams": lambda kernels, x: kernels.correct_streams(
        x.clone(), x[:, :19], x[:, :2].contiguous(), 1
    ),
    "apply_gate": lambda kernels, x: kernels.apply_gate(
        x[:, :24], reference.Gate(limit=1.0, offset=1.0)
    ),
    "read_streams": _read_streams,
    "write_streams": lambda kernels, x: kernels.write_streams(
        x.clone(), x[:, :19], x[:, :2].float()
    ),
    **{name: partial(_activate, name) for name in reference.ACTIVATIONS},
}


@each_dtype
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers(neon: Library, avx2: Library, layer: Layer, dtype: torch.dtype) -> None:
    x = _random(5, 38, dtype=dtype)
    mine, twin = (layer(NativeLayerKernels(native), x) for native in (neon, avx2))
    assert torch.equal(mine, twin)


@each_dtype
@pytest.mark.parametrize("in_int8", [False, True])
def test_rotary_embedding_and_cache_write(
    neon: Library, avx2: Library, dtype: torch.dtype, in_int8: bool
) -> None:
    cache_dtype = torch.int8 if in_int8 else dtype
    head_size = stored_head_size(36, cache_dtype)
    results = []
    for library in (neon, avx2):
        query, key = _random(5, 4, 36, dtype=dtype), _random(5, 2, 36, dtype=dtype, seed=1)
        key_cache, value_cache = caches = torch.zeros(2, 3, 4, 2, head_size, dtype=cache_dtype)
        cos, sin = _random(2, 10, 17, dtype=dtype, seed=2)
        NativeLayerKernels(library).rotate_and_write_kv(
            query,
            key,
            key.clone(),
            key_cache,
            value_cache,
            torch.tensor([3, 0, -1, 11, 7]),
            torch.tensor([0, 5, 2, 9, 9]),
            cos,
            sin,
            query_norm=key[0, 0].clone(),
            key_norm=key[0, 1].clone(),
        )
        results.append((query, caches))
    assert all(torch.equal(mine, twin) for mine, twin in zip(*results, strict=True))


def test_the_largest_logit(neon: Library) -> None:
    x = _random(3, 150, dtype=torch.float32)
    x[1, 77] = float("nan")
    places, values = find_largest(neon, x)
    assert places[[0, 2]].tolist() == x.argmax(1)[[0, 2]].tolist()
    assert torch.equal(values[[0, 2]], x.amax(1)[[0, 2]])
    assert values[1].isnan()


def test_block_copies(neon: Library) -> None:
    source, target = _random(4, 1031, dtype=torch.float32), torch.zeros(4, 1031)
    move_blocks(neon, source, target, torch.tensor([[0, 3], [2, 1]]))
    assert torch.equal(target[[3, 1]], source[[0, 2]])
    assert not target[[0, 2]].any()

"""Kernels and the sizes at which they are timed.

Bytes and operations are the minimum for the result: every input is read once, every output is
written once, and no product is computed for masked scores.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pagewire_kernels.batch import (
    AttentionMetadata,
    SamplingParam,
    SamplingRows,
    SamplingTables,
    mask_width,
)
from pagewire_kernels.cpu.adapters import DeltaPart
from pagewire_kernels.interface import AttentionBackend, AttentionNeeds, stored_head_size
from pagewire_kernels.quantized_weight import QuantizedWeight, quantize
from pagewire_kernels.reference import swap_blocks
from pagewire_kernels.select import Kernels, select_kernels
from pagewire_kernels.slot_deltas import SlotDeltas
from worker_service.config import QUANTIZATIONS
from worker_service.kv_cache.cache_engine import BlockMover, mover_for

BLOCK_TOKENS = 16
HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kernel at one size."""

    kernel: str
    size: str
    implementation: str
    dtype: str
    run: Callable[[], object]
    num_bytes: int = 0
    """Minimum number of bytes to read and write; 0 if the kernel is known to be compute-bound."""
    num_flops: int = 0
    """Operations of its matrix products; 0 if the kernel is known to be memory-bound."""
    crosses_bus: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """The device, dtype and kernels of some cases."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels

    @property
    def dtype_name(self) -> str:
        """Without `torch.`."""
        return str(self.dtype).removeprefix("torch.")

    def filled(self, *shape: int) -> Tensor:
        """A tensor of this dtype that is written to: pages that are not all map to one page of
        zeros."""
        return torch.full(shape, 0.01, dtype=self.dtype, device=self.device)


def setting(device: torch.device, dtype: torch.dtype, attention: str | None) -> Setting:
    """The setting with the kernels that a worker would select, or those of a named backend."""
    needs = AttentionNeeds(dtype=dtype, head_dim=HEAD_DIM)
    return Setting(device, dtype, select_kernels(device, needs, attention))


def all_cases(where: Setting) -> Iterator[Case]:
    """Every kernel, at sizes that fit the device."""
    yield from attention_cases(where)
    for head_dim in (32, 64):  # of MiniLM, and of BERT-base
        yield from packed_cases(where, head_dim)
    yield from cache_cases(where)
    yield from layer_cases(where)
    yield from linear_cases(where)
    if where.device.type == "cuda":
        yield sampling_case(where)
        yield from adapter_cases(where)


def adapter_cases(where: Setting) -> Iterator[Case]:
    """What adapters of rank 16 add to a product with 4096 inputs and outputs, by number of rows and
    of adapters that they have in turn."""
    from pagewire_kernels import triton  # imported only on a GPU

    size, rank, num_slots = 4096, 16, 8
    for num_rows, num_adapters in ((1, 1), (64, 8), (4096, 1)):
        x, y = where.filled(num_rows, size), where.filled(num_rows, size)
        outputs, a_shape = [slice(0, size)], (1, size)
        deltas = SlotDeltas(outputs, a_shape, num_slots, rank, triton.add_deltas, x)
        part = DeltaPart(torch.ones(rank, size), torch.ones(size, rank), 1.0, 0)
        for slot in range(num_slots):
            deltas.fill(slot, deltas.pack([part]))
        slots = torch.arange(num_rows, dtype=torch.int32, device=where.device) % num_adapters
        num_numbers = x.numel() + 2 * y.numel() + num_adapters * 2 * rank * size
        yield Case(
            kernel="adapters",
            size=f"{num_rows} rows, {num_adapters} adapters",
            implementation="triton",
            dtype=where.dtype_name,
            run=partial(deltas.add, y, x, slots),
            num_bytes=num_numbers * where.dtype.itemsize,
        )


def attention_cases(where: Setting) -> Iterator[Case]:
    """Decodes by number of sequences and context length, then prefills by number of sequences, new
    tokens and context length; on a CPU also with an int8 cache."""
    is_gpu = where.device.type == "cuda"
    decodes = [(1, 4096), (64, 2048), (256, 1024)] if is_gpu else [(1, 2048), (32, 512)]
    for num_seqs, context in decodes:
        yield attention_case(where, num_seqs, 1, context)
    if is_gpu:
        yield attention_case(where, 64, 1, 1024, longest=100_000)
    else:
        for cache_dtype in (where.dtype, torch.int8):
            yield attention_case(where, 16, 1, 2000, cache_dtype=cache_dtype)
        yield attention_case(where, 1, 1024, 1024, cache_dtype=torch.int8)
    prefills = [(8, 2048, 2048)] if is_gpu else [(1, 1024, 1024), (4, 1024, 1024), (1, 32, 544)]
    for num_seqs, query_len, context in prefills:
        yield attention_case(where, num_seqs, query_len, context)


def attention_case(
    where: Setting,
    num_seqs: int,
    query_len: int,
    context: int,
    heads: int = 16,
    kv_heads: int = 8,
    cache_dtype: torch.dtype | None = None,
    longest: int | None = None,
) -> Case:
    """Attention of the last `query_len` tokens of each sequence over `context` tokens, in randomly
    ordered blocks.

    longest: context length of the first sequence, if it differs.
    """
    backend: AttentionBackend = where.kernels.attention
    block_size = max(BLOCK_TOKENS, backend.abilities.block_multiple)
    lengths = [longest or context] + [context] * (num_seqs - 1)
    num_blocks, metadata = scattered_batch(lengths, query_len, block_size, where.device)
    stored = cache_dtype or where.dtype
    head_size = stored_head_size(HEAD_DIM, stored)
    shape = (num_blocks, 1, 2, block_size, kv_heads, head_size)
    cache = torch.ones(shape, dtype=stored, device=where.device)
    if stored == torch.int8:
        cache[..., HEAD_DIM:] = torch.tensor([0.01]).view(torch.int8)  # the scale
    query = where.filled(num_seqs * query_len, heads, HEAD_DIM)
    pairs = num_seqs * query_len * (2 * context - query_len + 1) // 2
    is_decode = query_len == 1
    length = context if query_len in (1, context) else f"{query_len} of {context}"
    if longest:
        length = f"{context}, one {longest}"
    return Case(
        kernel="paged decode" if is_decode else "paged prefill",
        size=f"{num_seqs} x {length}, {heads}/{kv_heads} heads of {HEAD_DIM}"
        + (", int8 cache" if stored == torch.int8 else ""),
        implementation=type(backend).__name__,
        dtype=where.dtype_name,
        run=lambda: backend.paged_attention(
            query, cache[:, 0, 0], cache[:, 0, 1], metadata, scale=HEAD_DIM**-0.5
        ),
        num_bytes=sum(lengths) * 2 * kv_heads * head_size * stored.itemsize if is_decode else 0,
        num_flops=0 if is_decode else 4 * HEAD_DIM * heads * pairs,
    )


def packed_cases(where: Setting, head_dim: int) -> Iterator[Case]:
    """Attention over 32 texts of 10 to 256 tokens without a cache, and torch's of one after the
    other."""
    heads, draw = 12, torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 257, (32,), generator=draw).tolist()
    metadata = AttentionMetadata.of_texts(lengths, where.device)
    rows = where.filled(sum(lengths), 3, heads, head_dim).unbind(1)
    backend, scale = where.kernels.attention, head_dim**-0.5

    def by_torch() -> None:
        for text in zip(
            *(part.transpose(0, 1)[None].split(lengths, dim=2) for part in rows), strict=True
        ):
            torch.nn.functional.scaled_dot_product_attention(*text, scale=scale)

    for name, run in (
        (type(backend).__name__, lambda: backend.packed_attention(*rows, metadata, scale=scale)),
        ("torch", by_torch),
    ):
        yield Case(
            kernel="packed attention",
            size=f"{len(lengths)} texts of 10 to 256, {heads} heads of {head_dim}",
            implementation=name,
            dtype=where.dtype_name,
            run=run,
            num_flops=4 * head_dim * heads * sum(length**2 for length in lengths),
        )


def scattered_batch(
    lengths: Sequence[int], query_len: int, block_size: int, device: torch.device
) -> tuple[int, AttentionMetadata]:
    """Return the number of blocks, and a batch of sequences with randomly ordered blocks."""
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    tables = pad_sequence(order.split(counts), batch_first=True, padding_value=-1)
    ranges = [(length - query_len, length) for length in lengths]
    return sum(counts), AttentionMetadata.of_ranges(ranges, tables.to(device), block_size)


def cache_cases(where: Setting) -> Iterator[Case]:
    """Writes of keys and values; copies of scattered blocks of 64 KiB."""
    backend, kv_heads = where.kernels.attention, 8
    num_rows = 8192 if where.device.type == "cuda" else 1024
    cache = where.filled(num_rows // BLOCK_TOKENS, 1, 2, BLOCK_TOKENS, kv_heads, HEAD_DIM)
    keys, values = (where.filled(num_rows, kv_heads, HEAD_DIM) for _ in range(2))
    slots = torch.randperm(num_rows, device=where.device)
    yield Case(
        kernel="write keys and values",
        size=f"{num_rows} rows",
        implementation=type(backend).__name__,
        dtype=where.dtype_name,
        run=lambda: backend.write_kv(keys, values, cache[:, 0, 0], cache[:, 0, 1], slots),
        num_bytes=4 * keys.nbytes,
    )
    yield from move_cases(where)


def move_cases(where: Setting) -> Iterator[Case]:
    """Copies within the device's cache, and swaps out to the host's and back, by a kernel and by
    memory copies."""
    is_gpu = where.device.type == "cuda"
    num_blocks, block_bytes = (8192, 2**16) if is_gpu else (1024, 2**16)
    shape = (num_blocks, block_bytes // where.dtype.itemsize)
    draw = torch.Generator().manual_seed(0)
    halves = torch.randperm(num_blocks, generator=draw).view(-1, 2).int().numpy()
    cache = where.filled(*shape)
    host = torch.full(shape, 0.01, dtype=where.dtype, pin_memory=is_gpu)
    ways = [
        ("copy blocks", cache, cache),
        ("swap blocks out", cache, host),
        ("swap blocks in", host, cache),
    ]
    movers = {"fastest": mover_for(where.device), "copies": BlockMover(swap_blocks, 1)}
    for kernel, source, target in ways:
        crosses_bus = is_gpu and source is not target
        for name, mover in movers.items():
            yield Case(
                kernel=kernel,
                size=f"{len(halves)} x 64 KiB, scattered",
                implementation=name,
                dtype=where.dtype_name,
                run=lambda mover=mover, source=source, target=target: (
                    mover.swap(  # type: ignore[misc]
                        source, target, halves
                    )
                    if source is not target
                    else mover.copy(source, halves)
                ),
                num_bytes=(1 if crosses_bus else 2) * len(halves) * block_bytes,
                crosses_bus=crosses_bus,
            )


def layer_cases(where: Setting) -> Iterator[Case]:
    """Norm with residual, rotation with cache write, gated activation."""
    kernels, size, inner = where.kernels.layers, 4096, 12288
    num_rows = 4096 if where.device.type == "cuda" else 512
    element, name = where.dtype.itemsize, where.kernels.layers.name
    x, residual, weight = (
        where.filled(num_rows, size),
        where.filled(num_rows, size),
        where.filled(size),
    )
    gate_up = where.filled(num_rows, 2 * inner)
    heads, kv_heads = 32, 8
    qkv = where.filled(num_rows, heads + 2 * kv_heads, HEAD_DIM)
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    cache = where.filled(num_rows // BLOCK_TOKENS, 1, 2, BLOCK_TOKENS, kv_heads, HEAD_DIM)
    place = torch.arange(num_rows, device=where.device)
    table, norm = where.filled(num_rows, HEAD_DIM // 2), where.filled(HEAD_DIM)

    def rotate() -> None:
        kernels.rotate_and_write_kv(
            query,
            key,
            value,
            cache[:, 0, 0],
            cache[:, 0, 1],
            place,
            place,
            table,
            table,
            query_norm=norm,
            key_norm=norm,
        )

    for kernel, run, elements in (
        ("norm with residual", lambda: kernels.rms_norm(x, weight, 1e-6, residual), 4 * size),
        ("gated activation", lambda: kernels.act_and_mul(gate_up, "silu"), 3 * inner),
        ("rotate and write", rotate, (2 * heads + 4 * kv_heads) * HEAD_DIM),
    ):
        yield Case(
            kernel=kernel,
            size=f"{num_rows} rows",
            implementation=name,
            dtype=where.dtype_name,
            run=run,  # type: ignore[arg-type]
            num_bytes=num_rows * elements * element,
        )


def linear_cases(where: Setting) -> Iterator[Case]:
    """Products of a weight of 4096 x 4096 (1024 x 3072 on a CPU) with few, some and many rows."""
    is_gpu = where.device.type == "cuda"
    num_inputs, num_outputs = (4096, 4096) if is_gpu else (1024, 3072)
    weight = where.filled(num_outputs, num_inputs)
    products = _gpu_products if is_gpu else _cpu_products
    for name, num_bytes, product in products(where, weight):
        for num_rows in (1, 64, 4096 if is_gpu else 512):
            if name == "few rows" and num_rows > 1:
                continue
            rows = where.filled(num_rows, num_inputs)
            yield Case(
                kernel="linear",
                size=f"{num_rows} rows, {num_inputs} to {num_outputs}",
                implementation=name,
                dtype=where.dtype_name,
                run=lambda product=product, rows=rows: product(rows),  # type: ignore[misc]
                num_bytes=num_bytes,
                num_flops=2 * num_rows * num_inputs * num_outputs,
            )


Product = tuple[str, int, Callable[[Tensor], Tensor]]
"""An implementation, the bytes of the weight, and the function."""


def _rounded(weight: Tensor) -> dict[str, QuantizedWeight]:
    """A weight in fewer bits."""
    rounded = {name: quantize(weight.cpu(), name) for name in QUANTIZATIONS}
    floats = tuple(torch.linspace(-1.0, 1.0, 16).tolist())
    rounded["nf4"] = replace(rounded["int4"], table=floats, is_float=True, offsets=None)
    return rounded


def _gpu_products(where: Setting, weight: Tensor) -> Iterator[Product]:
    from pagewire_kernels.triton import TritonQuantizedWeight, few_rows, linear

    yield "torch", weight.nbytes, lambda rows: torch.nn.functional.linear(rows, weight)
    yield "batch-invariant", weight.nbytes, lambda rows: linear(rows, weight)
    if few_rows.can_multiply(weight):
        yield "few rows", weight.nbytes, lambda rows: few_rows.multiply(rows, weight)
    for name, packed in _rounded(weight).items():
        if packed.activations is not None:  # for CPUs alone
            continue
        quantized = TritonQuantizedWeight(packed, where.dtype, where.device, batch_invariant=False)
        yield name, quantized.num_bytes, quantized.apply


_BEYOND_CACHES = 2**27
"""Bytes of the weights that take turns on a CPU: like the layers of a model, more than its caches
hold."""


def _cpu_products(where: Setting, weight: Tensor) -> Iterator[Product]:
    from worker_service.models.linear.packing import can_pack, pack

    dense = cycle([weight.clone() for _ in range(_BEYOND_CACHES // weight.nbytes)])
    yield "torch", weight.nbytes, lambda rows: torch.nn.functional.linear(rows, next(dense))
    if not can_pack(where.dtype, where.device):
        return
    stored_as: dict[str, Tensor | QuantizedWeight] = {"native": weight, **_rounded(weight)}
    for name, stored in stored_as.items():
        num_bytes = pack(stored, where.dtype).num_bytes
        turns = cycle([pack(stored, where.dtype) for _ in range(_BEYOND_CACHES // num_bytes)])
        yield name, num_bytes, lambda rows, turns=turns: next(turns).apply(rows)


def sampling_case(where: Setting) -> Case:
    """Sampling with temperature, top-k and top-p over a large vocabulary; at minimum, each logit is
    read once."""
    from pagewire_kernels.triton import edit, sample

    num_rows, vocab_size = 256, 151936
    draw = torch.Generator(where.device).manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=draw, device=where.device)

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=where.device)

    tables = SamplingTables(
        params=zeros(num_rows, len(SamplingParam), dtype=torch.int64),
        latest=zeros(num_rows, dtype=torch.int64),
        num_ahead=zeros(num_rows, dtype=torch.int64),
        drafts=zeros(num_rows, 0, dtype=torch.int64),
        counts=zeros(1, vocab_size),
        edit_tokens=zeros(num_rows, 1),
        edit_values=zeros(num_rows, 1, dtype=torch.float32),
        edit_ends=zeros(num_rows, 1),
    )
    tables.params[:, SamplingParam.TOP_K] = 50
    tables.params[:, SamplingParam.SEED] = torch.arange(num_rows)
    reals = tables.params.view(torch.float64)
    reals[:, SamplingParam.TEMPERATURE], reals[:, SamplingParam.TOP_P] = 0.8, 0.95
    row_ids = torch.arange(num_rows, dtype=torch.int32, device=where.device)
    rows = SamplingRows(
        row_ids=row_ids,
        positions=row_ids,
        mask_rows=torch.full_like(row_ids, -1),
        bitmask=zeros(1, mask_width(vocab_size)),
    )
    outcome = zeros(num_rows, dtype=torch.int64)

    def run() -> None:
        sample(logits, edit(logits, rows, tables), rows, tables, outcome)

    return Case(
        kernel="sample",
        size=f"{num_rows} x {vocab_size}",
        implementation="triton",
        dtype="float32",
        run=run,
        num_bytes=logits.nbytes,
    )

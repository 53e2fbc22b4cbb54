"""A recorded program computes what its operations compute one by one, bit for bit."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, StepBatch
from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.attention import NativeBackend
from pagewire_kernels.cpu.layers import NativeLayerKernels
from pagewire_kernels.cpu.linear import HugeMemory, NativeWeight
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import Program, record
from pagewire_kernels.cpu.recorded_model import RecordedModel
from pagewire_kernels.cpu.threads import NotRecordable
from tests.support.native import native_libraries

LIBRARIES = native_libraries()
SIZE, HEADS, KV_HEADS, HEAD_DIM = 96, 4, 1, 16
NUM_TOKENS = 200

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="no compiled kernels for this processor")


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.instruction_set)
def library(request: pytest.FixtureRequest) -> Library:
    found: Library = request.param
    return found


@pytest.fixture(autouse=True)
def _same_number_of_threads_after() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class Layers:
    """A few layers of every operation; the last one's rows are the result."""

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        self.kernels = NativeLayerKernels(library)
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(NUM_TOKENS, SIZE, generator=generator).to(dtype)
        head = torch.randn(NUM_TOKENS, SIZE // 2, generator=generator).to(dtype)
        self.head_weight = NativeWeight(head, library, HugeMemory())
        self.weights = torch.rand(6, SIZE, generator=generator).to(dtype)
        angles = torch.rand(50, HEAD_DIM // 2, generator=generator)
        self.tables = angles.cos().to(dtype), angles.sin().to(dtype)

    def embed(self, batch: StepBatch) -> Tensor:
        return self.kernels.embed(self.table, batch.token_ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self.head_weight.apply(hidden, output_dtype=torch.float32)

    def embed_by_torch(self, batch: StepBatch) -> Tensor:
        return self.table[batch.token_ids]

    def __call__(self, x: Tensor, batch: StepBatch) -> Tensor:
        update = None
        for layer in range(3):
            weight = self.weights[layer]
            rows = x if update is None else update
            normed = self.kernels.rms_norm(rows, weight, 1e-5, None if update is None else x)
            heads = normed.view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
            self.kernels.rotate_and_write_kv(
                *heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1),
                *batch.caches[layer],
                batch.attention[0].slot_mapping,
                batch.positions,
                *self.tables,
            )
            normed = self.kernels.activate(normed, "gelu_tanh")
            update = self.kernels.layer_norm(normed, weight, self.weights[layer + 3], 1e-5, x)
        assert update is not None
        return self.kernels.act_and_mul(update, "silu")


def _no_head(hidden: Tensor) -> Tensor:
    """Nothing that a program could hold."""
    return hidden * 2


def _batch(
    num_rows: int, seed: int, cache: Tensor | None = None, sampled: Tensor | None = None
) -> StepBatch:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(8 * 4, generator=generator)[: min(num_rows, 32)]
    column = torch.zeros(1, dtype=torch.int32)
    metadata = AttentionMetadata(
        query_start=column,
        context_lens=column,
        block_tables=column[None],
        slot_mapping=torch.cat([slots, torch.full((num_rows - len(slots),), -1)]),
        max_query_len=1,
        max_context_len=1,
    )
    positions = torch.randint(50, (num_rows,), generator=generator)
    cache = _cache(torch.float32) if cache is None else cache
    return StepBatch(
        token_ids=torch.randint(NUM_TOKENS, (num_rows,), generator=generator),
        positions=positions,
        attention=(metadata,),
        caches=[(cache[:, layer, 0], cache[:, layer, 1]) for layer in range(3)],
        sampled=sampled,
    )


def _cache(dtype: torch.dtype) -> Tensor:
    return torch.zeros(8, 3, 2, 4, KV_HEADS, HEAD_DIM, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_threads", "left_out"), [(1, None), (5, None), (2, "embedding"), (2, "head")]
)
def test_a_program_gives_the_same_bits_and_the_same_cache(
    library: Library, dtype: torch.dtype, num_threads: int, left_out: str | None
) -> None:
    torch.set_num_threads(num_threads)
    layers, calls = Layers(library, dtype), []

    def counted(x: Tensor, batch: StepBatch) -> Tensor:
        calls.append(x.shape[0])
        return layers(x, batch)

    embed = layers.embed_by_torch if left_out == "embedding" else layers.embed
    head = _no_head if left_out == "head" else layers.head
    recorded = RecordedModel(embed, counted, head, library)
    expected_cache, cache = _cache(dtype), _cache(dtype)
    for step, num_rows in enumerate([3, 1, 64, 65, 7, 700, 2]):  # grows twice
        sampled = torch.arange(step % 2, num_rows, 5)
        with torch.inference_mode():
            batch = _batch(num_rows, step, cache, sampled)
            computed = recorded(batch)
            x = layers.table[batch.token_ids]
            expected = layers(x, _batch(num_rows, step, expected_cache))
            logits = layers.head(expected[sampled])
        assert computed.hidden.shape == (num_rows, SIZE // 2)
        assert torch.equal(computed.hidden, expected), num_rows
        assert torch.equal(cache, expected_cache)
        assert (computed.head is None) == (left_out == "head")
        if computed.head is not None:
            assert torch.equal(computed.head.logits, logits)
            assert computed.head.best.tolist() == logits.numpy().argmax(axis=1).tolist()
            assert torch.equal(computed.head.largest, logits.amax(dim=1))
    assert set(calls) == {64, 128, 1024}, "a program computes every batch"


class Encoder:
    """A layer of every operation of a model without a cache."""

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        self.kernels, self.attention = NativeLayerKernels(library), NativeBackend(library)
        draw = torch.Generator().manual_seed(0)
        self.tables = torch.randn(3, NUM_TOKENS, SIZE, generator=draw).to(dtype)
        qkv = torch.randn(3 * SIZE, SIZE, generator=draw).to(dtype) / 10
        self.qkv = NativeWeight(qkv, library, HugeMemory())
        angles = torch.rand(NUM_TOKENS, HEAD_DIM // 2, generator=draw)
        self.angles = angles.cos().to(dtype), angles.sin().to(dtype)

    def embed(self, batch: StepBatch) -> Tensor:
        words, positions, types = self.tables
        assert batch.token_types is not None
        x = self.kernels.embed(words, batch.token_ids)
        self.kernels.embed(positions[2:], batch.positions, x)
        return self.kernels.embed(types, batch.token_types, x)

    def __call__(self, x: Tensor, batch: StepBatch) -> Tensor:
        query, key, value = self.qkv.apply(x).unflatten(1, (3, -1, HEAD_DIM)).unbind(1)
        self.kernels.rotate(query, key, batch.positions, *self.angles)
        attended = self.attention.packed_attention(
            query, key, value, batch.attention[0], scale=0.25, window=40
        )
        return self.kernels.layer_norm(attended.flatten(1), None, None, 1e-5, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_of_a_model_without_cache_and_head_gives_the_same_bits(
    library: Library, dtype: torch.dtype
) -> None:
    torch.set_num_threads(2)
    encoder, calls = Encoder(library, dtype), []

    def counted(x: Tensor, batch: StepBatch) -> Tensor:
        calls.append(len(x))
        return encoder(x, batch)

    recorded = RecordedModel(encoder.embed, counted, None, library)
    for lengths in ([10], [3, 1, 90, 1], [5] * 30, [2]):
        num_rows = sum(lengths)
        batch = StepBatch(
            token_ids=torch.randint(NUM_TOKENS, (num_rows,)),
            positions=torch.cat([torch.arange(length) for length in lengths]),
            token_types=torch.randint(2, (num_rows,)),
            attention=(AttentionMetadata.of_texts(lengths, torch.device("cpu")),),
            caches=(),
        )
        with torch.inference_mode():
            computed = recorded(batch)
            assert torch.equal(computed.hidden, encoder(encoder.embed(batch), batch))
        assert computed.head is None
    assert set(calls) == {64, 128, 256}, "a program computes every batch"


def test_another_cache_is_written_to_once_it_is_given(library: Library) -> None:
    layers = Layers(library, torch.float32)
    recorded = RecordedModel(layers.embed, layers, _no_head, library)
    caches = [_cache(torch.float32) for _ in range(2)]
    for cache in caches:
        recorded(_batch(5, 0, cache))
    assert caches[0].any()
    assert torch.equal(*caches)


def test_a_program_keeps_room_for_the_largest_batches_there_were(library: Library) -> None:
    """Many rows of which few are sampled from, and few rows that all are, come in turns."""
    layers, calls = Layers(library, torch.float32), []

    def counted(x: Tensor, batch: StepBatch) -> Tensor:
        calls.append(x.shape[0])
        return layers(x, batch)

    recorded = RecordedModel(layers.embed, counted, layers.head, library)
    cache = _cache(torch.float32)
    for num_rows, num_sampled in [(500, 2), (100, 100), (500, 2), (100, 100)]:
        computed = recorded(_batch(num_rows, 0, cache, torch.arange(num_sampled)))
        assert computed.head is not None
        assert len(computed.head.logits) == num_sampled
    assert calls == [512, 512]


def test_memory_is_used_again_by_later_layers(library: Library) -> None:
    """One buffer each for the rows, a norm's result and an update, however many layers."""
    sizes = []
    for num_layers in (2, 20):
        kernels, program = NativeLayerKernels(library), Program(library, 64)
        weight = torch.ones(SIZE)
        with record(program):
            x = program.buffers.take((64, SIZE), torch.float32)
            for _ in range(num_layers):
                x = kernels.rms_norm(x, weight, 1e-5)
        assert program.num_steps == num_layers
        sizes.append(program.buffers.num_bytes)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "compute", [lambda x: x + 1, lambda x: x.clone(), lambda x: x.mul_(2), lambda x: torch.zeros(3)]
)
def test_what_torch_would_compute_is_refused_while_recording(compute: object) -> None:
    program = Program(LIBRARIES[0], 4)
    x = torch.ones(4, 3)
    with pytest.raises(NotRecordable, match="aten"), record(program):
        compute(x)  # type: ignore[operator]


def test_views_may_be_taken_while_recording() -> None:
    x = torch.arange(12).view(4, 3)
    with record(Program(LIBRARIES[0], 4)), torch.inference_mode():
        first, _ = x.unflatten(1, (3, 1)).split([1, 2], dim=1)
        second = x.t()[1:].unbind(0)[0].unsqueeze(0).flatten()
    assert first.flatten().tolist() == [0, 3, 6, 9]
    assert second.tolist() == [1, 4, 7, 10]


def test_a_kernel_that_is_run_by_itself_is_refused_while_recording() -> None:
    with pytest.raises(NotRecordable), record(Program(LIBRARIES[0], 4)):
        threads.run(LIBRARIES[0].kernel("activate_float32"), 0, 1)


def test_rows_that_are_not_the_steps_are_refused_while_recording() -> None:
    kernels, program = NativeLayerKernels(LIBRARIES[0]), Program(LIBRARIES[0], 4)
    rows = program.buffers.take((4, 8), torch.float32)
    with pytest.raises(NotRecordable, match="2 rows"), record(program):
        kernels.activate(rows[:2], "relu")


def test_layers_that_compute_otherwise_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    own = Layers(LIBRARIES[0], torch.float32)
    layers = RecordedModel(own.embed, lambda x, *others: x * 2, _no_head, LIBRARIES[0])
    batch = _batch(3, 0)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            computed = layers(batch)
            assert torch.equal(computed.hidden, own.table[batch.token_ids] * 2)
    assert [record.message for record in caplog.records] == [
        "layers run eagerly, not as a recorded program: they use the operation aten.mul.Tensor"
    ]


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_a_program_does_not_depend_on_how_many_threads_come(num_threads: int) -> None:
    """Called here by threads of our own, since OpenMP may bring fewer than asked for."""
    kernels, program = NativeLayerKernels(LIBRARIES[0]), Program(LIBRARIES[0], 512)
    weight = torch.ones(SIZE)
    with record(program):
        first = x = program.buffers.take((512, SIZE), torch.float32)
        for _ in range(50):
            x = kernels.rms_norm(x, weight, 1e-5)
    rows = torch.randn(512, SIZE)
    expected = rows
    for _ in range(50):
        expected = kernels.rms_norm(expected, weight, 1e-5)
    pool = threads.ThreadPool(8)
    for _ in range(20):
        first.copy_(rows)
        program.run(num_threads, pool.run)
        assert torch.equal(x, expected)
    pool.close()

"""The floor of a workload: its ideal steps, their bytes and operations."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engines.roofline import Row, Step, ideal_steps
from benchmarks.engines.workloads import Job
from benchmarks.models.model_shapes import SHAPES, Shape

SHAPE = Shape(
    name="s",
    model_type="llama",
    vocab_size=10,
    hidden_size=8,
    intermediate_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position_embeddings=64,
    tied=False,
)
LAYERS = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 6)
OUTPUT = 8 * 10


def job(first: int, length: int, outputs: int) -> Job:
    return Job(prompt=list(range(first, first + length)), num_output_tokens=outputs)


def test_one_request_is_a_prefill_and_its_decodes() -> None:
    steps = list(ideal_steps([job(0, 5, 3)], 100))
    assert [step.rows for step in steps] == [
        [Row(num_tokens=5, context=5, samples=True)],
        [Row(num_tokens=1, context=6, samples=True)],
        [Row(num_tokens=1, context=7, samples=True)],
    ]


def test_prompts_fill_what_decodes_leave_of_the_budget() -> None:
    steps = list(ideal_steps([job(0, 3, 2), job(10, 6, 1)], 4))
    assert [[(row.num_tokens, row.samples) for row in step.rows] for step in steps] == [
        [(3, True), (1, False)],
        [(1, True), (3, False)],
        [(2, True)],
    ]


def test_a_shared_prefix_is_computed_and_read_once() -> None:
    shared = list(range(6))
    jobs = [Job(prompt=[*shared, 50 + i], num_output_tokens=1) for i in range(3)]
    (step,) = ideal_steps(jobs, 100)
    assert step.num_tokens == 7 + 1 + 1
    assert step.shared == 6
    # Six tokens in common, one of its own each; as many written as computed.
    kv_tokens = 6 + 3 + 9
    expected = (LAYERS + OUTPUT) * 2 + kv_tokens * SHAPE.kv_bytes("bfloat16")
    assert step.num_bytes(SHAPE, "bfloat16") == expected


def test_a_prompt_in_pieces_takes_as_many_operations_as_in_one() -> None:
    def flops(budget: int) -> int:
        return sum(step.num_flops(SHAPE) for step in ideal_steps([job(0, 9, 1)], budget))

    assert flops(2) == flops(9)
    linear = 2 * (LAYERS * 9 + OUTPUT)
    attention = 4 * 2 * 2 * 4 * sum(range(1, 10))
    assert flops(9) == linear + attention


def test_a_format_has_bits_of_layers_and_of_the_head() -> None:
    step = Step(rows=[Row(num_tokens=1, context=1, samples=True)], shared=0)
    kv = 2 * SHAPE.kv_bytes("bfloat16")
    gguf = int(LAYERS * 5 / 8 + OUTPUT * 8.5 / 8) + kv
    assert step.num_bytes(SHAPE.quantized("q4_1"), "bfloat16") == gguf
    assert step.num_bytes(SHAPE.quantized("w8a8"), "bfloat16") == LAYERS + OUTPUT * 2 + kv
    assert SHAPE.quantized("w8a8").dense() == SHAPE


@pytest.mark.parametrize("name", [name for name in SHAPES if not SHAPES[name].tied])
def test_the_weights_of_a_shape_are_those_of_its_model(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        config = AutoConfig.for_model(shape.model_type, **shape.config())
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(
        values.numel()
        for part, values in model.named_parameters()
        if values.dim() > 1 and not part.endswith("bias")
    )
    of_layers = matrices - 2 * shape.output_weights
    assert shape.weights_read(10**6) == of_layers
    chosen = (shape.num_experts - shape.experts_per_token) * 3 * shape.intermediate_size
    unused = chosen * shape.hidden_size * (shape.num_layers - shape.num_dense_layers)
    assert shape.layer_weights == of_layers - unused


def test_latents_are_counted_once_for_all_heads() -> None:
    shape = SHAPES["mla-moe-0.4b"]
    assert shape.kv_values == 12 * (256 + 32)
    assert shape.attention_products == 12 * 12 * (64 + 32 + 64)

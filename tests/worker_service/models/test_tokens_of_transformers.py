"""Every family's tokens are those of `transformers`, however they are computed."""

from functools import cache

import pytest
import torch

from tests.support.cases import each_with_one_of
from tests.support.checkpoints import (
    MAX_POSITIONS,
    NATIVE_FAMILIES,
    TRANSFORMERS_FAMILIES,
    VOCAB_SIZE,
    checkpoint,
)
from tests.support.loading import load
from tests.support.paged_driver import PagedDriver
from tests.support.transformers_oracle import Oracle, oracle
from worker_service.loader import LoadedModel
from worker_service.models.native import NativeModel
from worker_service.models.transformers_backend.model import TransformersModel

FAMILIES = NATIVE_FAMILIES + TRANSFORMERS_FAMILIES
PROMPT_LENGTHS = (1, 2, 5, 9, 17, 26, 33, 40)
NUM_TOKENS = 8
LOGITS_TOLERANCE = 1e-4
DELTA_NETS = ("qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid", "lara_mini")
"""Which transformers computes in chunks of 64 tokens, with larger errors of rounding than token by
token, as here. Queries and keys of length 1 magnify errors in these small heads."""

STORED_BUFFERS = ("correction_bias", "expert_bias", "act_fn.beta", "act_fn.eps")
"""Which are parameters here."""


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def _loaded(family: str, dtype: str = "float32") -> LoadedModel:
    return load(checkpoint(family), dtype=dtype)


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


@cache
def _continued(family: str) -> list[list[int]]:
    """Greedy continuations of all prompts in one batch."""
    return PagedDriver(_loaded(family).model).generate(_prompts(), NUM_TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_continues_as_transformers_does(family: str) -> None:
    continued, reference = _continued(family), oracle(checkpoint(family))
    for prompt, tokens in zip(_prompts(), continued, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert tokens == reference.choices(prompt, tokens)
    # Guards the test itself: a model that repeats one token would agree with any other such.
    assert len({token for tokens in continued for token in tokens}) > len(PROMPT_LENGTHS)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_other_blocks_change_no_token(family: str) -> None:
    driver = PagedDriver(_loaded(family).model, block_size=16, seed=3)
    assert driver.generate(_prompts(), NUM_TOKENS, chunk=7) == _continued(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    tokens = _prompts()[-1]
    (logits,) = PagedDriver(_loaded(family).model).run([(0, 0, tokens)])
    reference = oracle(checkpoint(family))
    is_delta_net = family.startswith(DELTA_NETS)
    expected = reference.exact_logits(tokens) if is_delta_net else reference.logits(tokens)
    assert logits.dtype == torch.float32
    tolerance = (2 if is_delta_net else 1) * LOGITS_TOLERANCE
    torch.testing.assert_close(logits.to(expected), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith(DELTA_NETS)])
def test_delta_nets_are_at_least_as_exact_as_in_transformers(family: str) -> None:
    reference, generator = oracle(checkpoint(family)), torch.Generator().manual_seed(7)
    driver = PagedDriver(_loaded(family).model, max_tokens=MAX_POSITIONS)
    ours, theirs = [], []
    for i, length in enumerate((40, 80, 130, MAX_POSITIONS)):
        tokens = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        exact = reference.exact_logits(tokens).log_softmax(1)
        ours.append(driver.run([(i, 0, tokens)])[0].double().log_softmax(1) - exact)
        theirs.append(reference.logits(tokens).double().log_softmax(1) - exact)
    assert torch.cat(ours).norm() <= torch.cat(theirs).norm()
    assert torch.cat(ours).square().mean().sqrt() < 1e-5


@pytest.mark.parametrize(
    ("family", "dtype"), each_with_one_of(FAMILIES, ("float32",), ("bfloat16",))
)
def test_a_rows_logits_are_bitwise_the_same_in_any_batch(family: str, dtype: str) -> None:
    loaded = _loaded(family, dtype)
    assert loaded.batch_invariant
    prompts = _prompts()
    together = PagedDriver(loaded.model).run([(i, 0, p) for i, p in enumerate(prompts)])
    for i, cuts in ((0, [1]), (3, range(1, 10)), (7, [13, 38, 39, 40])):
        alone, rows, start = PagedDriver(loaded.model), [], 0
        for end in cuts:
            rows += alone.run([(i, start, prompts[i][start:end])])
            start = end
        assert torch.equal(torch.cat(rows), together[i])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_the_number_of_threads_changes_no_bit(family: str) -> None:
    prompts = _prompts()
    batch = [(i, 0, prompt) for i, prompt in enumerate(prompts)]
    expected = PagedDriver(_loaded(family).model).run(batch)
    torch.set_num_threads(2)  # put back by the fixture above
    again = PagedDriver(_loaded(family).model).run(batch)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_dynamic_rotary_scaling_follows_a_sequence_past_the_trained_length() -> None:
    path = checkpoint("llama_dynamic")  # trained on 64 positions, stretched to 256
    prompts = [prompt + prompt[:20] for prompt in _prompts()[-3:]]
    expected = [Oracle(path).generate(prompt, 30) for prompt in prompts]
    assert max(len(prompt) for prompt in prompts) + 30 > 64 + 20
    assert PagedDriver(_loaded("llama_dynamic").model).generate(prompts, 30) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_native_or_run_through_transformers_as_intended(family: str) -> None:
    kind = NativeModel if family in NATIVE_FAMILIES else TransformersModel
    assert isinstance(_loaded(family).model, kind)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_those_of_the_checkpoint(family: str) -> None:
    model, reference = _loaded(family).model, oracle(checkpoint(family)).model
    assert model.architecture == type(reference).__name__
    assert model.vocab_size == VOCAB_SIZE
    biases = (buffer for name, buffer in reference.named_buffers() if name.endswith(STORED_BUFFERS))
    num_parameters = reference.num_parameters() + sum(bias.numel() for bias in biases)
    indexers = (p for name, p in reference.named_parameters() if ".indexer." in name)
    num_parameters -= sum(parameter.numel() for parameter in indexers)  # which are not used
    if num_zero := getattr(reference.config, "zero_expert_num", 0):
        of_zero = (p[-num_zero:] for name, p in reference.named_parameters() if "gate_up" in name)
        num_parameters -= sum(weight.numel() for weight in of_zero)  # neither are these
    if isinstance(model, NativeModel):
        scalars = (name for name, _ in reference.named_buffers() if name.endswith("layer_scalar"))
        num_parameters += sum(1 for _ in scalars)
    assert model.num_parameters == num_parameters
    layers = model.layers if isinstance(model, NativeModel) else model.kv_cache_spec.layers
    config = reference.config  # whose number of layers is that of attentions in LongCat-Flash
    assert len(layers) == getattr(config, "num_layers", config.num_hidden_layers)


@pytest.mark.parametrize("num_rows", [1, 2, 16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_any_number_of_decodes_gives_the_same_bits(family: str, num_rows: int) -> None:
    model = _loaded(family).model
    tokens = torch.arange(70).tolist()
    expected = PagedDriver(model, max_seqs=70, max_tokens=8).run(
        [(i, 0, [token]) for i, token in enumerate(tokens)]
    )
    some = PagedDriver(model, max_seqs=70, max_tokens=8).run(
        [(i, 0, [token]) for i, token in enumerate(tokens[:num_rows])]
    )
    assert all(torch.equal(a, b) for a, b in zip(some, expected, strict=False))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_bfloat16_stays_near_float32(family: str) -> None:
    path = checkpoint(family)
    model = load(path, dtype="bfloat16").model
    tokens = _prompts()[-1]
    (logits,) = PagedDriver(model).run([(0, 0, tokens)])
    expected = oracle(path).logits(tokens)
    error = (logits - expected).norm() / expected.norm()
    assert error < 0.1


def test_a_soft_cap_bounds_the_logits() -> None:
    logits = _loaded("gemma2").model.compute_logits(torch.randn(3, 64) * 100)
    assert logits.abs().max() <= 7.0  # that of the checkpoint
    assert logits.abs().max() > 6.0

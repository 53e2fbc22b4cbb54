"""Sequences with prompt adapters get the tokens of PEFT, and the same bits in any batch."""

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.lora import PeftAdapter, make_prompt
from tests.support.transformers_oracle import oracle
from tests.support.worker_driver import Row
from tests.worker_service.adapters.test_launched_ahead import ahead
from tests.worker_service.adapters.test_lora import (
    NUM_TOKENS,
    TOLERANCE,
    TOLERANCES,
    Steps,
    _folder,
    adapters,
    assert_core_equals_peft,
    base_of,
    executor,
    prompt,
)
from worker_service.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE
from worker_service.errors import BadAdapter, InvalidPlan
from worker_service.runner.torch_executor import TorchExecutor

FAMILIES = (
    *("llama", "gpt2", "opt", "opt_350m", "gemma", "granite", "bloom", "mixtral", "deepseek_v2"),
    "minicpm3",
)
OF_SEVERAL_GROUPS = ("gemma2", "gemma3", "granite_hybrid", "bamba", "qwen3_next")
"""Families with windows or states."""

SIZES = (1, 6, 20)

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def prompts(family: str) -> list[PeftAdapter]:
    folder = _folder()
    return [
        make_prompt(
            base_of(family), folder / f"{family}-prompt-{n}", num_tokens=n, is_encoded=n == 6
        )
        for n in SIZES
    ]


def generate(
    here: TorchExecutor, chosen: Sequence[tuple[bytes | None, int]], chunk: int = 1000
) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and log probabilities, by token, of the prompts 0, 1, ... with these adapters, each
    behind a number of virtual tokens. chunk: most tokens of a row."""
    steps, left = Steps(here), []
    for i, (digest, num_virtual) in enumerate(chosen):
        token_ids = [0] * num_virtual + prompt(i)
        steps.add(i + 1, token_ids, digest)
        left.append(len(token_ids))
    found: list[tuple[list[int], list[np.ndarray]]] = [([], []) for _ in chosen]
    while any(len(tokens) < NUM_TOKENS for tokens, _ in found):
        rows, sampling = [], []
        for i, (tokens, _) in enumerate(found):
            if len(tokens) == NUM_TOKENS:
                continue
            count = min(chunk, left[i]) or 1
            left[i] = max(0, left[i] - count)
            if left[i] == 0:
                sampling.append((i, len(rows)))
            rows.append(Row(i + 1, count, sample=left[i] == 0))
        result = steps.run(rows)
        for token, (i, row) in zip(result.token_ids, sampling, strict=True):
            entry = result.logprobs[row]
            found[i][0].append(int(token))
            found[i][1].append(entry.logprobs[1:][np.argsort(entry.token_ids[1:])])
    return [(tokens, np.array(logprobs)) for tokens, logprobs in found]


def load(here: TorchExecutor, family: str) -> list[tuple[bytes | None, int]]:
    """The prompts of a family, by size, and no adapter."""
    found = [here.adapters.load(str(made.folder)) for made in prompts(family)]
    assert [info.num_virtual_tokens for info in found] == [*SIZES]
    return [*((info.digest, info.num_virtual_tokens) for info in found), (None, 0)]


MIX = [0, 3, 1, 2, 0, 3]


def assert_equal_to_peft(here: TorchExecutor, family: str, chunk: int) -> None:
    loaded, changed = load(here, family), set()
    found = generate(here, [loaded[which] for which in MIX], chunk)
    for i, (which, (tokens, logprobs)) in enumerate(zip(MIX, found, strict=True)):
        assert len(tokens) == NUM_TOKENS
        plain = oracle(base_of(family)).choices(prompt(i), tokens)
        if which == 3:
            assert tokens == plain
            continue
        expected, expected_logprobs = prompts(family)[which].choices(prompt(i), tokens)
        assert tokens == expected
        if tokens != plain:
            changed.add(which)
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=TOLERANCE, rtol=0)
    assert changed, "no adapter changes anything"


@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_peft_in_a_mixed_batch(family: str, chunk: int) -> None:
    assert_equal_to_peft(executor(family), family, chunk)


@pytest.mark.parametrize("family", OF_SEVERAL_GROUPS)
def test_tokens_are_those_of_peft_beside_windows_and_states(family: str) -> None:
    chosen = [None if which == 3 else which for which in MIX]
    before = [0 if which is None else SIZES[which] for which in chosen]
    tolerance = TOLERANCES.get(family, TOLERANCE)
    assert_core_equals_peft(base_of(family), prompts(family), chosen, before, tolerance)


@pytest.mark.parametrize("family", ["llama", "gpt2", "granite"])
def test_tokens_of_steps_launched_ahead_are_those_of_peft(family: str) -> None:
    here = ahead(family, max_loras=3)
    assert_equal_to_peft(here, family, 5)
    assert here.num_recorded > 0


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_a_row_has_the_same_bits_alone_and_beside_other_adapters(options: dict[str, str]) -> None:
    here = executor("llama", max_loras=5, **options)
    loaded = load(here, "llama")
    lora = (here.adapters.load(str(adapters("llama")[0].folder)).digest, 0)
    kinds = [*loaded, lora]
    alone = {kind: generate(here, [kind] * 4) for kind in kinds}
    for mix in ([0, 4, 3, 1], [1, 2, 4, 3], [3, 0, 0, 2]):
        for chunk in (7, 1000):
            chosen = [kinds[which] for which in mix]
            for i, (tokens, logprobs) in enumerate(generate(here, chosen, chunk)):
                expected = alone[chosen[i]][i]
                assert tokens == expected[0]
                assert logprobs.tobytes() == expected[1].tobytes()


def test_prompt_tokens_have_the_log_probabilities_of_peft() -> None:
    here, made, tokens = executor("llama"), prompts("llama")[1], prompt(4)
    info, steps = here.adapters.load(str(made.folder)), Steps(here)
    start = info.num_virtual_tokens
    steps.add(1, [0] * start + tokens, info.digest, prompt_logprobs=0)
    result = steps.run([Row(1, start + len(tokens))])
    logits = made.logits(tokens)
    expected = logits.log_softmax(-1)[start:-1][torch.arange(len(tokens) - 1), tokens[1:]]
    found = result.prompt_logprobs[0].logprobs[start:, 0]
    np.testing.assert_allclose(found, expected.numpy(), atol=TOLERANCE, rtol=0)


def test_virtual_tokens_are_not_penalized() -> None:
    """Their ids have no meaning, even that of the token that would be sampled."""
    here, made = executor("llama"), prompts("llama")[1]
    info = here.adapters.load(str(made.folder))
    [first, *_], _ = made.generate(prompt(2), 1)
    assert first not in prompt(2)
    steps = Steps(here)
    token_ids = [first] * info.num_virtual_tokens + prompt(2)
    steps.add(1, token_ids, info.digest, repetition_penalty=100.0)
    assert steps.run([Row(1, len(token_ids))]).token_ids.tolist() == [first]


def test_a_prompt_travels_to_another_worker_and_must_be_in_the_tokens() -> None:
    here, there = executor("llama"), executor("llama")
    info = here.adapters.load(str(prompts("llama")[1].folder))
    assert there.adapters.add(bytearray().join(here.adapters.chunks(info.digest))) == info
    assert (info.rank, info.targets, info.num_virtual_tokens) == (0, (), 6)
    [(tokens, _)] = generate(there, [(info.digest, 6)])
    assert len(tokens) == NUM_TOKENS
    assert tokens == prompts("llama")[1].choices(prompt(0), tokens)[0]
    expected = r"new_sequences\[0\].num_prompt_tokens: expected more than the 6 virtual tokens"
    with pytest.raises(InvalidPlan, match=expected):
        generate(there, [(info.digest, 3)])


def edited(folder: Path, **settings: object) -> Path:
    """A prompt of Llama with other settings."""
    shutil.copytree(prompts("llama")[1].folder, folder)
    found = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(found | settings))
    return folder


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("peft_type", "PREFIX_TUNING", "peft_type: expected one of LORA, PROMPT_TUNING, P_TUNING"),
        ("peft_type", "MULTITASK_PROMPT_TUNING", "got 'MULTITASK_PROMPT_TUNING'"),
        ("peft_type", "IA3", "got 'IA3'"),
        ("modules_to_save", ["lm_head"], r"modules_to_save: expected none.*\['lm_head'\]"),
        ("num_transformer_submodules", 2, "num_transformer_submodules: expected 1"),
        ("num_virtual_tokens", 5, r"expected the shape \[5, 64\], got \[6, 64\]"),
        ("a_setting_of_tomorrow", 1, "a_setting_of_tomorrow: expected none"),
    ],
)
def test_settings_that_are_not_computed_are_refused(
    tmp_path: Path, name: str, value: object, message: str
) -> None:
    with pytest.raises(BadAdapter, match=message):
        executor("llama").adapters.load(str(edited(tmp_path / "edited", **{name: value})))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((6, 32), "token_dim: expected 64, got 32"),
        ((4096, 64), "num_virtual_tokens: expected fewer than the [0-9]+ tokens of a sequence"),
        ((0, 64), r"prompt_embeddings: expected the shape \[0, 64\]"),
    ],
)
def test_prompts_of_another_size_are_refused(
    tmp_path: Path, shape: tuple[int, int], message: str
) -> None:
    num_tokens, width = shape
    folder = edited(tmp_path / "edited", num_virtual_tokens=num_tokens, token_dim=width)
    save_file({"prompt_embeddings": torch.zeros(shape)}, folder / WEIGHTS_FILE)
    with pytest.raises(BadAdapter, match=message):
        executor("llama").adapters.load(str(folder))


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder, here = edited(tmp_path / "edited"), executor("llama")
    save_file({"prompt_embeddings": torch.full((6, 64), torch.nan)}, folder / WEIGHTS_FILE)
    with pytest.raises(BadAdapter, match="prompt_embeddings: expected finite numbers"):
        here.adapters.load(str(folder))
    save_file({"other": torch.zeros(6, 64)}, folder / WEIGHTS_FILE)
    with pytest.raises(BadAdapter, match="expected only prompt_embeddings, got other"):
        here.adapters.load(str(folder))


@pytest.mark.parametrize(("family", "name"), [("gemma4", "Gemma4"), ("falcon_h1", "FalconH1")])
def test_models_whose_tokens_cannot_be_replaced_refuse_prompts(family: str, name: str) -> None:
    """Layers embed tokens, or PEFT embeds them otherwise than the model."""
    with pytest.raises(BadAdapter, match=f"peft_type: expected LORA, since tokens of {name}"):
        executor(family).adapters.load(str(prompts("llama")[1].folder))

"""`LLM` with the real services and a tiny model of random weights."""

import asyncio
import gc
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest

from pagewire_client import LLM, AsyncLLM, RequestOutput, SamplingParams, errors
from tests.support.checkpoints import MAX_POSITIONS, checkpoint

FLAGS: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_cache_memory": "16MiB"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=200, ignore_eos=True, n=2)


def quiet(llm: LLM, *args: Any) -> list[RequestOutput]:
    return llm.generate(*args, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def services_of(pid: int) -> list[psutil.Process]:
    """The services among a process's children."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # what other tests started may be about to go
            if "_service" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(checkpoint("llama")), **FLAGS) as model:
        yield model


def test_prompts_of_every_kind_are_answered_in_order(llm: LLM) -> None:
    prompts = ["Hello", [72, 101], {"prompt": "x"}, {"prompt_token_ids": [5]}]
    outputs = quiet(llm, prompts, GREEDY)
    assert [output.prompt for output in outputs] == ["Hello", None, "x", None]
    assert outputs[1].prompt_token_ids == [72, 101]
    assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)


def test_beams_and_the_best_of_many_come_as_answers(llm: LLM) -> None:
    beams = SamplingParams(beam_width=4, n=3, length_penalty=0.0, max_tokens=6, ignore_eos=True)
    best = SamplingParams(best_of=4, n=2, seed=3, max_tokens=6, logprobs=0, ignore_eos=True)
    [found], [sampled] = quiet(llm, "Hello", beams), quiet(llm, "Hello", best)
    assert len({str(choice.token_ids) for choice in found.outputs}) == 3
    assert all(choice.finish_reason == "length" for choice in found.outputs)
    assert len(sampled.outputs) == 2
    scores = [choice.cumulative_logprob for choice in sampled.outputs]
    assert scores == sorted(scores, reverse=True)


def test_an_answer_is_the_same_alone_and_among_many(llm: LLM) -> None:
    alone = quiet(llm, "Hello", SAMPLED)
    among = quiet(llm, ["Hello", *(f"prompt {number}" for number in range(15))], SAMPLED)
    assert tokens(among)[0] == tokens(alone)[0]
    assert len({str(choices) for choices in tokens(among)}) == 16


def test_an_answer_is_as_probable_as_when_it_was_generated(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    (output,) = quiet(llm, "Hello", params)
    (choice,) = output.outputs
    found = llm.logprobs([choice.token_ids, "other"], context="Hello", use_tqdm=False)
    assert found[0].token_ids == choice.token_ids
    assert found[0].logprob == pytest.approx(choice.cumulative_logprob, abs=1e-4)
    assert found[1].token_ids == llm.tokenize("other", add_special_tokens=False)
    (whole,) = llm.logprobs("Hello", use_tqdm=False)
    assert whole.token_ids == llm.tokenize("Hello")
    assert whole.logprobs[0] is None


async def test_an_asyncio_client_may_have_private_services() -> None:
    before = {process.pid for process in services_of(os.getpid())}
    async with AsyncLLM("simulated", simulate=True).with_options(timeout=60) as llm:
        ours = [process for process in services_of(os.getpid()) if process.pid not in before]
        assert len(ours) == 3
        gc.collect()
        answers = await asyncio.gather(*(llm.generate([5, 6, 7], GREEDY) for _ in range(3)))
        assert (await llm.stream([5, 6, 7], GREEDY).final()).outputs == answers[0].outputs
        assert len(tokens(answers)[0][0]) == 12
    assert not any(process.is_running() for process in ours)


def test_a_chat_is_rendered_with_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == llm.tokenize("<user>Hi\n<assistant>")
    tools = [{"type": "function", "function": {"name": "add"}}]
    (same,) = llm.chat(messages, GREEDY, tools=tools, use_tqdm=False)
    assert same.prompt_token_ids == output.prompt_token_ids, "its template has no place for tools"
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert tokens(two) == tokens([output, output])


def test_the_tokenizer_has_the_names_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Hello there")
    assert ids == llm.tokenize("Hello there")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello there"
    messages: Any = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages) == llm.tokenize(messages)
    assert "<user>Hi" in str(tokenizer.apply_chat_template(messages, tokenize=False))


def test_what_vllm_has_and_this_lacks_is_named(llm: LLM) -> None:
    unknown: Any = llm
    with pytest.raises(AttributeError, match=r"no attribute 'sleep': vLLM's; there is none; close"):
        unknown.sleep()
    with pytest.raises(AttributeError, match=r"'LLM' object has no attribute 'other'$"):
        unknown.other()


def test_the_progress_bar_tells_tokens_per_second(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [[], [10**6], "x" * (MAX_POSITIONS + 1)])
def test_a_bad_prompt_raises_and_the_model_goes_on(llm: LLM, bad: Any) -> None:
    with pytest.raises((errors.InvalidArgument, errors.FailedPrecondition)):
        quiet(llm, ["good", {"prompt_token_ids": bad} if isinstance(bad, list) else bad], GREEDY)
    assert quiet(llm, "good", GREEDY)[0].finished


@pytest.mark.parametrize(
    "victim", ["scheduler_service frontend", "scheduler_service scheduler", "worker_service"]
)
def test_a_service_that_is_killed_changes_no_token(llm: LLM, victim: str) -> None:
    prompts = [f"prompt {number}" for number in range(8)]
    undisturbed = quiet(llm, prompts, SAMPLED)
    (process,) = [
        child for child in services_of(os.getpid()) if victim in " ".join(child.cmdline())
    ]
    started = time.monotonic()
    killer = Timer(0.2, process.kill)
    killer.start()
    outputs = quiet(llm, prompts * 4, SAMPLED)
    killer.join()
    assert not process.is_running(), f"killed {time.monotonic() - started:.1f} s into the batch"
    assert [output.outputs for output in outputs] == [output.outputs for output in undisturbed * 4]
    assert {output.usage.completion_tokens for output in outputs if output.usage} == {400}


def test_closing_ends_the_services() -> None:
    before = {process.pid for process in services_of(os.getpid())}
    with LLM("simulated", simulate=True) as llm:
        ours = [process for process in services_of(os.getpid()) if process.pid not in before]
        assert len(ours) == 3
    assert not any(process.is_running() for process in ours)
    llm.close()


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        ("/no/such/model", {}, "/no/such/model"),
        ("tiny", {"max_num_seqs": 0}, "--max-num-seqs: expected 1"),
    ],
)
def test_a_service_that_cannot_start_says_why(
    model: str, flags: dict[str, Any], words: str
) -> None:
    before = {process.pid for process in services_of(os.getpid())}
    path = str(checkpoint("llama")) if model == "tiny" else model
    with pytest.raises(errors.LocalServiceError, match=words):
        LLM(path, **(FLAGS | flags))
    assert {process.pid for process in services_of(os.getpid())} == before


def test_an_unknown_flag_is_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="tensor_paralel_size"):
        LLM(str(Path("x")), tensor_paralel_size=2)

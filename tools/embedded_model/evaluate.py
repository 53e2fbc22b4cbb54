"""Measures the stored model: greedy answers to questions whose answers are known.

    python -m tools.embedded_model.evaluate worker_service/embedded_model

The weights are computed with in float32, whatever type they are stored in. An answer
counts as right only if it is exactly the expected text and the model ends it itself.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple

import torch
import typer
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.embedded_model import arithmetic, lessons, stories
from tools.embedded_model.documents import Exchange, article

BATCH_SIZE = 256
MAX_STORY_TOKENS = 300
SEED = 1
NUM_SAMPLES = 300
"""Questions asked of each kind that has too many to ask them all."""

STORY_REQUESTS = (
    "Tell me a story about a cat.",
    "Please tell me a short story about a robot and a bear.",
    "Write a story about a lost kite.",
)


class Question(NamedTuple):
    """A prompt as the model reads it, without `bos`, and the answer it should give."""

    prompt: str
    answer: str


class EmbeddedModel:
    """The stored model and tokenizer, answering greedily."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(directory)
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def chat_question(self, exchange: Exchange, system: str | None = None) -> Question:
        """An exchange as a question in chat form."""
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": exchange.question})
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return Question(str(prompt).removeprefix(self.tokenizer.bos_token), exchange.answer)

    @torch.inference_mode()
    def complete(self, prompts: list[str], max_new_tokens: int = 100) -> list[str | None]:
        """The text after each prompt, or None where the model did not end it."""
        texts: list[str | None] = []
        for start in range(0, len(prompts), BATCH_SIZE):
            inputs = self.tokenizer(
                prompts[start : start + BATCH_SIZE],
                padding=True,
                return_tensors="pt",
                return_token_type_ids=False,
            )
            outputs = self.model.generate(**inputs, max_new_tokens=max_new_tokens)
            texts += [self._ended_text(row) for row in outputs[:, inputs.input_ids.shape[1] :]]
        return texts

    def _ended_text(self, token_ids: torch.Tensor) -> str | None:
        stops = torch.tensor(self.model.generation_config.eos_token_id)
        if not torch.isin(token_ids, stops).any():
            return None
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def accuracy(self, questions: list[Question]) -> float:
        """Share of questions that the model answers exactly."""
        answers = self.complete([question.prompt for question in questions])
        pairs = zip(questions, answers, strict=True)
        return sum(question.answer == answer for question, answer in pairs) / len(questions)


def plain_sums(pairs: list[arithmetic.Pair]) -> list[Question]:
    """Sums as text to be continued."""
    return [Question(f"{a} + {b} =", f" {a + b}\n") for a, b in pairs]


def question_sets(model: EmbeddedModel) -> Iterator[tuple[str, list[Question]]]:
    """All kinds of questions by name; sums are only of pairs that the corpus never holds."""
    rng = Random(SEED)
    held_out = list(arithmetic.held_out_pairs())

    def ask(exchanges: list[Exchange]) -> list[Question]:
        return [model.chat_question(exchange) for exchange in exchanges]

    sums = [
        Exchange(rng.choice(arithmetic.QUESTIONS).format(a=a, b=b), f"{a} + {b} = {a + b}.")
        for a, b in held_out
    ]
    yield "addition, plain", plain_sums(held_out)
    yield "addition, chat", ask(sums)
    system = "You are a helpful assistant."
    yield "addition, chat with system", [model.chat_question(s, system) for s in sums]
    yield "counting", ask([lessons.ask_count(rng) for _ in range(NUM_SAMPLES)])
    days = lessons.after_and_before(lessons.DAYS, "day")
    months = lessons.after_and_before(lessons.MONTHS, "month")
    yield "days and months", ask([*days, *months])
    yield "copying words", ask([lessons.ask_copy(rng) for _ in range(NUM_SAMPLES)])
    reversals = [Exchange(f"Reverse the word {w}.", w[::-1]) for w in lessons.WORDS]
    yield "reversing a word", ask(reversals)
    order = [lessons.ask_reverse_order(rng) for _ in range(NUM_SAMPLES)]
    yield "reversing the order of words", ask(order)
    yield "small facts", ask([lessons.ask_fact(rng) for _ in range(NUM_SAMPLES)])


def is_coherent(story: str | None, hero: str) -> bool:
    """Whether a story ends, introduces `hero` and then stays with at most two characters."""
    if story is None or not story.startswith("Once upon a time"):
        return False
    words = set(re.findall(r"\w+", story))
    num_names = sum(name in words for names in stories.NAMES.values() for name in names)
    return num_names <= 2 and hero in story.split(". ")[0]


def story_coherence(model: EmbeddedModel) -> tuple[int, int]:
    """How many stories about each hero and name are coherent, and how many there are."""
    wishes = [
        (hero, f"Tell me a story about {article(hero)} named {name}.")
        for hero in stories.ANIMALS
        for names in stories.NAMES.values()
        for name in names
    ]
    prompts = [model.chat_question(Exchange(wish, "")).prompt for _, wish in wishes]
    answers = model.complete(prompts, MAX_STORY_TOKENS)
    coherent = [is_coherent(s, hero) for s, (hero, _) in zip(answers, wishes, strict=True)]
    return sum(coherent), len(coherent)


def main(
    directory: Annotated[Path, typer.Argument(help="Folder of the stored model.")],
    compute_dtype: Annotated[str, typer.Option(help="Type to compute in.")] = "float32",
) -> None:
    """Print the accuracy on each kind of question, and some stories."""
    model = EmbeddedModel(directory, getattr(torch, compute_dtype))
    for name, questions in question_sets(model):
        typer.echo(f"{name}: {model.accuracy(questions):.1%} of {len(questions)}")
    num_coherent, num_stories = story_coherence(model)
    typer.echo(f"coherent stories: {num_coherent / num_stories:.1%} of {num_stories}")
    requests = [model.chat_question(Exchange(text, "")).prompt for text in STORY_REQUESTS]
    for text, story in zip(STORY_REQUESTS, model.complete(requests, MAX_STORY_TOKENS), strict=True):
        typer.echo(f"\n> {text}\n{story}")


if __name__ == "__main__":
    typer.run(main)

"""Requests of every kind whose answers no disturbance may change, drawn by number."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from pagewire_client import SamplingParams
from pagewire_client.requests import Prompt

MODEL_LEN = 1024
"""Of the embedded model, prompt and output together."""
EMBEDDER = "embedder"
"""The name by which the embedded model's vectors are served."""
FIRST_TOKEN_ID, END_TOKEN_ID = 7, 1000
"""Ordinary tokens of the embedded model."""

OPENINGS = (
    "Once upon a time",
    "One day, a little girl named Lily found a needle in her room.",
    "Tom and Jane are friends. One day, Jane goes to Tom's house.",
    "There was a big, red ball in the park, and nobody knew whose it was.",
    "The old dog looked at the moon and said:",
)
STOPS = (" the", " and", ".", "!", " was so", " day", " happy", "\n")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request as it is made of the client library."""

    number: int
    kinds: tuple[str, ...]
    """What is asked for, for the report."""
    prompt: Prompt
    params: SamplingParams
    adapter: str | None = None

    def __str__(self) -> str:
        given = {name: value for name, value in asdict(self.params).items() if value is not None}
        return f"request {self.number} ({', '.join(self.kinds)}) {given}"


def draw_asks(seed: int, count: int, num_adapters: int = 0) -> list[Ask]:
    """`count` different requests; the same for the same seed, but for the adapters that they
    name."""
    asks = [_draw_ask(Random(f"{seed} {number}"), number) for number in range(count)]
    return [_with_adapter(ask, num_adapters) for ask in asks]


def adapter_names(num_adapters: int) -> list[str]:
    """Names of the adapters that requests name."""
    return [f"adapter-{number}" for number in range(num_adapters)]


def _with_adapter(ask: Ask, num_adapters: int) -> Ask:
    """A request that names one of the adapters, or none, by turns within its kind."""
    turn = ask.number // len(CHOOSING) % (num_adapters + 1)
    if turn == num_adapters:
        return ask
    return replace(ask, adapter=adapter_names(num_adapters)[turn], kinds=(*ask.kinds, "adapter"))


def draw_texts(seed: int, count: int) -> list[str]:
    """`count` texts of 1 to 120 words, some of which share a beginning."""
    draw = Random(f"{seed} texts")
    words = sorted({word for opening in OPENINGS for word in opening.split()})
    starts = ["", "", *OPENINGS]
    lengths = [draw.choice((draw.randint(1, 12), draw.randint(1, 120))) for _ in range(count)]
    return [f"{draw.choice(starts)} {' '.join(draw.choices(words, k=k))}" for k in lengths]


def _draw_ask(draw: Random, number: int) -> Ask:
    """Every way to choose tokens comes by turns; what goes with it is drawn."""
    name, choose = list(CHOOSING.items())[number % len(CHOOSING)]
    prompt_kind, prompt, num_prompt_tokens = _draw_prompt(draw)
    params = choose(draw)
    # Beam searches return nothing before their end: they restart after a loss, and would never end.
    most = 60 if name in ("beam search", "best_of") else draw.choice((60, 150, 300, 450))
    params["max_tokens"] = min(draw.randint(most // 2, most), MODEL_LEN - num_prompt_tokens)
    kinds = [name, prompt_kind]
    for extra, (share, add) in EXTRAS.items():
        if draw.random() < share and not any({kind, extra} in IMPOSSIBLE for kind in kinds):
            params |= add(draw)
            kinds.append(extra)
    params = {"ignore_eos": True, "seed": draw.getrandbits(53)} | params
    if "min_tokens" in params:
        params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
    return Ask(number=number, kinds=tuple(kinds), prompt=prompt, params=SamplingParams(**params))


def _draw_prompt(draw: Random) -> tuple[str, Prompt, int]:
    """What kind of prompt, the prompt, and how many tokens it has at most."""
    kind = draw.choice(("text", "text", "token ids", "long token ids", "chat"))
    if kind == "text":
        return kind, draw.choice(OPENINGS), 64
    if kind == "chat":
        turns = [{"role": "user", "content": text} for text in draw.sample(OPENINGS, 2)]
        turns.insert(1, {"role": "assistant", "content": "Yes."})
        return kind, turns, 192
    length = draw.randint(200, 500) if kind == "long token ids" else draw.randint(1, 40)
    return kind, _token_ids(draw, length), length


def _token_ids(draw: Random, count: int) -> list[int]:
    return [draw.randrange(FIRST_TOKEN_ID, END_TOKEN_ID) for _ in range(count)]


def _greedy(draw: Random) -> dict[str, Any]:
    return {"temperature": 0.0}


def _seeded(draw: Random) -> dict[str, Any]:
    return {
        "temperature": draw.choice((0.5, 0.9, 1.3)),
        "top_p": draw.choice((1.0, 0.9)),
        "top_k": draw.choice((0, 5, 50)),
        "min_p": draw.choice((0.0, 0.02)),
    }


def _penalised(draw: Random) -> dict[str, Any]:
    return (draw.choice((_greedy, _seeded)))(draw) | {
        "repetition_penalty": draw.choice((1.0, 1.1, 1.3)),
        "presence_penalty": draw.choice((0.0, 0.6)),
        "frequency_penalty": draw.choice((0.2, 0.7)),
    }


def _several(draw: Random) -> dict[str, Any]:
    return _seeded(draw) | {"n": draw.choice((2, 3, 3))}


def _best(draw: Random) -> dict[str, Any]:
    return _seeded(draw) | {"n": 2, "best_of": draw.choice((3, 4))}


def _beams(draw: Random) -> dict[str, Any]:
    width = draw.choice((2, 3, 4))
    return {
        "beam_width": width,
        "n": draw.randint(1, width),
        "length_penalty": draw.choice((0.0, 1.0, 1.5)),
        "early_stopping": draw.choice((True, False, "never")),
        "ignore_eos": draw.random() < 0.5,
    }


STRUCTURED: tuple[tuple[str, Any], ...] = (
    ("regex", "[A-Za-z ,.!?\"']{20,900}"),
    ("json_schema", {"type": "array", "items": {"type": "integer"}, "minItems": 40}),
    (
        "json_schema",
        {"type": "object", "additionalProperties": {"type": "string", "maxLength": 40}},
    ),
    ("grammar", 'start: "(" start ")" | start " and " start | /[a-z]{2,9}/'),
    ("choice", ["yes", "no, never", "that depends on what you mean by a little bear"]),
)
"""What an answer must match: much that goes on, and some that soon ends."""

CHOOSING: dict[str, Callable[[Random], dict[str, Any]]] = {
    "greedy": _greedy,
    "seeded": _seeded,
    "penalties": _penalised,
    "n": _several,
    "best_of": _best,
    "beam search": _beams,
}
"""The ways to choose tokens."""

EXTRAS: dict[str, tuple[float, Callable[[Random], dict[str, Any]]]] = {
    "logprobs": (0.5, lambda draw: {"logprobs": draw.choice((0, 1, 4))}),
    "prompt logprobs": (0.2, lambda draw: {"prompt_logprobs": draw.choice((0, 2))}),
    "stop strings": (
        0.2,
        lambda draw: {
            "stop": draw.sample(STOPS, 2),
            "include_stop_str_in_output": draw.random() < 0.3,
            "min_tokens": draw.randint(0, 120),
        },
    ),
    "stop tokens": (
        0.2,
        lambda draw: {
            "stop_token_ids": _token_ids(draw, 20),
            "min_tokens": draw.randint(0, 120),
        },
    ),
    "end of sequence": (0.2, lambda draw: {"ignore_eos": False}),
    "logit bias": (
        0.15,
        lambda draw: {
            "logit_bias": {token: draw.choice((-4.0, 2.0)) for token in _token_ids(draw, 5)}
        },
    ),
    "bad words": (0.15, lambda draw: {"bad_words": draw.sample(STOPS[:2] + STOPS[4:7], 2)}),
    "structured output": (0.25, lambda draw: dict([draw.choice(STRUCTURED)])),
    "special tokens": (0.1, lambda draw: {"skip_special_tokens": False}),
}
"""What may go with any of them: how often, and the parameters."""

IMPOSSIBLE = (
    {"beam search", "stop strings"},  # which nobody sees before the beams are complete: refused
    {"bad words", "structured output"},  # all that may follow may be bad: fails undisturbed too
    {"stop tokens", "structured output"},  # the same: such a token must not stand in the middle
)
"""What does not go together."""

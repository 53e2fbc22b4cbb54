"""Short questions with one right answer: counting, days, months, words, small facts.

`lessons.json` has their words.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tools.embedded_model.documents import Document, Exchange, article, pick_some, plain

_DATA = json.loads(Path(__file__).with_name("lessons.json").read_text())
DAYS: list[str] = _DATA["days"]
MONTHS: list[str] = _DATA["months"]
WORDS: list[str] = _DATA["words"]

MAX_COUNT_STEPS = 20


def count_between(first: int, last: int) -> str:
    """The numbers from `first` to `last`, up or down, with commas between them."""
    step = 1 if last >= first else -1
    return ", ".join(str(number) for number in range(first, last + step, step))


def _count_bounds(rng: Random) -> tuple[int, int]:
    low = rng.choice((rng.randint(0, 10), rng.randint(0, 95)))
    steps = rng.randint(1, rng.choice((MAX_COUNT_STEPS // 3, MAX_COUNT_STEPS)))
    return low, min(low + steps, 100)


def ask_count(rng: Random) -> Exchange:
    """Counting up, or less often down."""
    low, high = _count_bounds(rng)
    if rng.random() < 0.25:
        return Exchange(f"Count down from {high} to {low}.", count_between(high, low) + ".")
    opening = rng.choice(("Count", "Count", "Please count"))
    return Exchange(f"{opening} from {low} to {high}.", count_between(low, high) + ".")


def plain_count(rng: Random) -> Document:
    """Counting up, without turns."""
    low, high = _count_bounds(rng)
    return plain(f"Count from {low} to {high}:", f" {count_between(low, high)}\n")


def ask_neighbour_number(rng: Random) -> Exchange:
    """The number after or before another."""
    number = rng.randint(1, 99)
    if rng.random() < 0.5:
        return Exchange(f"What number comes after {number}?", f"{number + 1} comes after {number}.")
    return Exchange(f"What number comes before {number}?", f"{number - 1} comes before {number}.")


def ask_larger(rng: Random) -> Exchange:
    """Which of two numbers is larger."""
    a, b = rng.sample(range(100), 2)
    return Exchange(f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}.")


def after_and_before(names: Sequence[str], unit: str) -> list[Exchange]:
    """The successor and predecessor of each of `names`, which form a circle."""
    exchanges = []
    for index, name in enumerate(names):
        following = names[(index + 1) % len(names)]
        exchanges.append(
            Exchange(f"What {unit} comes after {name}?", f"{following} comes after {name}.")
        )
        exchanges.append(
            Exchange(f"What {unit} comes before {following}?", f"{name} comes before {following}.")
        )
    return exchanges


def _calendar() -> tuple[Exchange, ...]:
    days = ", ".join(DAYS[:-1]) + f" and {DAYS[-1]}"
    months = ", ".join(MONTHS[:-1]) + f" and {MONTHS[-1]}"
    exchanges = [
        Exchange("Name the days of the week.", f"{days}."),
        Exchange("What are the days of the week?", f"The days of the week are {days}."),
        Exchange("How many days are in a week?", "There are seven days in a week."),
        Exchange("Name the months of the year.", f"{months}."),
        Exchange("What are the months of the year?", f"The months of the year are {months}."),
        Exchange("How many months are in a year?", "There are twelve months in a year."),
    ]
    for ordinal, month in zip(_DATA["ordinals"], MONTHS, strict=True):
        exchanges.append(
            Exchange(
                f"What is the {ordinal} month of the year?",
                f"{month} is the {ordinal} month of the year.",
            )
        )
    return (*exchanges, *after_and_before(DAYS, "day"), *after_and_before(MONTHS, "month"))


CALENDAR = _calendar()


def ask_calendar(rng: Random) -> Exchange:
    """A question about days or months."""
    return rng.choice(CALENDAR)


def plain_calendar(rng: Random) -> Document:
    """The successor of a day or month, or the whole list, without turns of a chat."""
    if rng.random() < 0.2:
        names, title = rng.choice(((DAYS, "Days of the week"), (MONTHS, "Months of the year")))
        return plain(f"{title}:", f" {', '.join(names)}\n")
    names, unit = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    index = rng.randrange(len(names))
    return plain(f"The {unit} after {names[index]} is", f" {names[(index + 1) % len(names)]}.\n")


def ask_copy(rng: Random) -> Exchange:
    """Repeating one to six words."""
    words = " ".join(pick_some(rng, WORDS, 1, 6))
    question = rng.choice(("Say {}.", "Repeat: {}", "Repeat after me: {}", "Copy these words: {}"))
    return Exchange(question.format(words), words)


def plain_copy(rng: Random) -> Document:
    """Repeating words, without turns."""
    words = " ".join(pick_some(rng, WORDS, 1, 6))
    return plain(f"Copy: {words}\nCopy:", f" {words}\n")


def ask_reverse_word(rng: Random) -> Exchange:
    """A word spelled from its end."""
    word = rng.choice(WORDS)
    question = rng.choice(("Reverse the word {}.", "Spell {} backwards."))
    return Exchange(question.format(word), word[::-1])


def plain_reverse_word(rng: Random) -> Document:
    """A word spelled from its end, without turns."""
    word = rng.choice(WORDS)
    return plain(f"The word {word} reversed is", f" {word[::-1]}\n")


def ask_reverse_order(rng: Random) -> Exchange:
    """Two to five words, last one first."""
    words = pick_some(rng, WORDS, 2, 5)
    return Exchange(f"Reverse the order: {' '.join(words)}", " ".join(reversed(words)))


def ask_fact(rng: Random) -> Exchange:
    """A sound, a colour, an opposite, a number word, or the first letter of a word."""
    return rng.choice((_ask_sound, _ask_colour, _ask_opposite, _ask_number_word, _ask_letter))(rng)


def _ask_sound(rng: Random) -> Exchange:
    animal, sound = rng.choice(list(_DATA["sounds"].items()))
    return Exchange(
        f"What sound does {article(animal)} make?", f"{article(animal).capitalize()} says {sound}."
    )


def _ask_colour(rng: Random) -> Exchange:
    thing, colour = rng.choice(list(_DATA["colours"].items()))
    return Exchange(f"What colour is {thing}?", f"{thing[0].upper()}{thing[1:]} is {colour}.")


def _ask_opposite(rng: Random) -> Exchange:
    word, opposite = rng.choice(list(_DATA["opposites"].items()))
    if rng.random() < 0.5:
        word, opposite = opposite, word
    return Exchange(f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}.")


def _ask_number_word(rng: Random) -> Exchange:
    number = rng.randrange(len(_DATA["number_words"]))
    return Exchange(f"Write {number} as a word.", f"{_DATA['number_words'][number]}")


def _ask_letter(rng: Random) -> Exchange:
    word = rng.choice(WORDS)
    return Exchange(
        f"What is the first letter of {word}?", f"The first letter of {word} is {word[0]}."
    )


def ask_small_talk(rng: Random) -> Exchange:
    """Greetings and questions about the model."""
    return Exchange(*rng.choice(_DATA["small_talk"]))

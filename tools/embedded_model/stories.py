"""Short stories with a beginning, a middle and an end, and plain descriptive sentences.

`stories.json` has the words and the plots. A plot is a list of beats; each beat offers several
wordings with named slots, and one cast of characters and things fills the slots of the whole story.
"""

import json
from pathlib import Path
from random import Random

from tools.embedded_model.documents import Document, Exchange, article, plain

DATA = json.loads(Path(__file__).with_name("stories.json").read_text())

ANIMALS: list[str] = DATA["animals"]
NAMES: dict[str, list[str]] = DATA["names"]
"""Names by pronoun."""
PLOTS: dict[str, list[list[str]]] = DATA["plots"]
CHILD_SHARE = 0.15
"""Share of stories whose hero is a child and not an animal."""


def _cast(rng: Random) -> dict[str, str]:
    """Fillers for every slot of a story."""
    subject = rng.choice(tuple(NAMES))
    he, him, his = DATA["pronouns"][subject]
    hero, friend_kind = rng.sample(ANIMALS, 2)
    if rng.random() < CHILD_SHARE:
        hero = DATA["children"][subject]
    name = rng.choice(NAMES[subject])
    friend = rng.choice([other for names in NAMES.values() for other in names if other != name])
    colour, colour2 = rng.sample(DATA["colours"], 2)
    trait = rng.choice(DATA["traits"])
    return {
        "hero": hero,
        "a_hero": article(hero),
        "name": name,
        "friend_kind": friend_kind,
        "a_friend_kind": article(friend_kind),
        "friend": friend,
        "he": he,
        "him": him,
        "his": his,
        "He": he.capitalize(),
        "His": his.capitalize(),
        "trait": trait,
        "a_trait": article(trait),
        "place": rng.choice(DATA["places"]),
        "spot": rng.choice(DATA["spots"]),
        "thing": rng.choice(DATA["things"]),
        "colour": colour,
        "colour2": colour2,
        "food": rng.choice(DATA["foods"]),
        "weather": rng.choice(DATA["weather"]),
    }


def _tell(rng: Random, plot: str, cast: dict[str, str]) -> str:
    beats = (DATA["beginning"], *PLOTS[plot])
    return " ".join(rng.choice(beat).format(**cast) for beat in beats)


def ask_story(rng: Random) -> Exchange:
    """A wish for a story, often with its hero or subject, and the story."""
    cast = _cast(rng)
    plot = rng.choice(tuple(PLOTS))
    topics = (
        cast["a_hero"],
        cast["a_hero"],
        f"{cast['a_hero']} named {cast['name']}",
        f"{cast['a_hero']} and {cast['a_friend_kind']}",
        plot.format(**cast),
        plot.format(**cast),
    )
    if rng.random() < 0.15:
        request = rng.choice(DATA["open_requests"])
    else:
        request = rng.choice(DATA["requests"]).format(topic=rng.choice(topics))
    return Exchange(request, _tell(rng, plot, cast))


def plain_story(rng: Random) -> Document:
    """A story without turns."""
    return plain("", ask_story(rng).answer + "\n")


def plain_sentences(rng: Random) -> Document:
    """A few unconnected sentences about the same cast."""
    cast = _cast(rng)
    sentences = rng.sample(DATA["sentences"], rng.randint(2, 5))
    return plain("", " ".join(sentence.format(**cast) for sentence in sentences) + "\n")

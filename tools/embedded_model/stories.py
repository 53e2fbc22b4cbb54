"""Short stories with a beginning, a middle and an end, and plain descriptive sentences.

A plot is a tuple of beats; each beat offers several wordings with named slots, and
one cast of characters and things fills the slots of the whole story.
"""

from random import Random

from tools.embedded_model.documents import Document, Exchange, article, plain

ANIMALS = (
    *("cat", "dog", "rabbit", "mouse", "bear", "fox", "duck", "frog", "bird", "horse"),
    *("turtle", "pig", "lion", "owl", "robot", "dragon"),
)
CHILDREN = {"he": "boy", "she": "girl"}
CHILD_SHARE = 0.15
"""Share of stories whose hero is a child and not an animal."""
NAMES = {
    "he": ("Tom", "Sam", "Ben", "Max", "Leo", "Tim", "Finn", "Jack"),
    "she": ("Mia", "Lily", "Anna", "Nora", "Ella", "Lucy", "Rosie", "Daisy"),
}
PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}
TRAITS = ("small", "kind", "brave", "happy", "curious", "clever", "young", "gentle", "funny")
PLACES = ("forest", "garden", "village", "park", "town", "valley", "meadow")
SPOTS = ("old tree", "big rock", "wooden bridge", "little pond", "tall fence", "red door")
THINGS = ("ball", "hat", "kite", "boat", "drum", "book", "scarf", "lamp", "bell", "cup")
COLOURS = ("red", "blue", "green", "yellow", "white", "golden")
FOODS = ("cake", "bread", "soup", "honey", "cheese", "jam", "rice")
WEATHER = ("sunny", "windy", "cold", "warm", "quiet", "bright")

BEGINNING = (
    "Once upon a time there was {a_trait} {hero} named {name}. {He} lived in a {place}.",
    "Once upon a time {a_trait} {hero} lived in a {place}. {His} name was {name}.",
    "Once upon a time, in a {place}, there lived {a_hero} named {name}. {name} was very {trait}.",
)
MEETING = (
    "There {he} met {a_friend_kind} named {friend}.",
    "Soon {a_friend_kind} came along. It was {friend}, a good friend of {name}.",
    "Then {a_friend_kind} named {friend} came by.",
)

PLOTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "a lost {thing}": (
        (
            "{name} had a {colour} {thing} and loved it very much.",
            "The best thing {he} had was a {colour} {thing}.",
        ),
        (
            "One {weather} day the {thing} was gone. {name} looked everywhere and felt sad.",
            "One {weather} morning {name} could not find the {thing}. {He} began to cry.",
        ),
        MEETING,
        (
            '"What is wrong?" asked {friend}. "I lost my {thing}," said {name}.',
            '"Why are you sad?" asked {friend}. "My {thing} is gone," said {name}.',
        ),
        (
            "They looked together, and at last they saw the {thing} behind the {spot}.",
            "They walked all day, and then {friend} found the {thing} under the {spot}.",
        ),
        (
            '"Thank you!" said {name}. From that day on they were the best of friends.',
            "{name} was so happy that {he} gave {friend} a big hug. Then they went home.",
        ),
    ),
    "sharing {food}": (
        (
            "One {weather} day {name} made some {food}. It smelled very good.",
            "One {weather} day {name} found some {food} near the {spot}.",
        ),
        MEETING,
        (
            '"I am so hungry," said {friend}. "May I have some {food}?"',
            "{friend} had nothing to eat and looked very hungry.",
        ),
        (
            "{name} thought about it. {He} wanted all the {food}, but {he} was kind.",
            "At first {name} did not want to share. Then {he} saw how sad {friend} was.",
        ),
        (
            '"Here, take half," said {name}. They sat by the {spot} and ate together.',
            '"Let us eat together," said {name}. They sat down and ate all the {food}.',
        ),
        (
            "{name} learned that {food} tastes better with a friend.",
            "The next day {friend} came back with a {colour} {thing} as a gift for {name}.",
        ),
    ),
    "a storm": (
        (
            "One night there was a big storm. The wind was loud and the rain was cold.",
            "One evening dark clouds came over the {place}. Soon it began to rain.",
        ),
        (
            '{name} was afraid and hid under {his} bed. "I do not like the wind," {he} said.',
            "{name} heard a loud noise and jumped. {He} lit a small {colour} lamp.",
        ),
        (
            "Then {he} heard a voice outside. It was {friend} the {friend_kind}, cold and wet.",
            "There was a knock at the door. {friend} the {friend_kind} stood there, very wet.",
        ),
        (
            '"Come in!" said {name}. {He} gave {friend} some warm {food}.',
            '"You must be cold," said {name}. "Come in and have some {food}."',
        ),
        (
            "They told each other stories until the storm was over.",
            "They sang songs all night, and {name} was not afraid any more.",
        ),
        (
            "In the morning the sun came out, and they played in the {place}.",
            "When the sun came up, the whole {place} was clean and bright.",
        ),
    ),
    "a race": (
        (
            "{name} wanted to be the fastest in the {place}.",
            "Every day {name} ran from the {spot} to the river and back.",
        ),
        MEETING,
        (
            '"I can run faster than you," said {friend}. "Let us race!" said {name}.',
            '"Do you want to race?" asked {friend}. "Yes!" said {name}.',
        ),
        (
            "They ran past the {spot}. Then {friend} fell down and hurt a foot.",
            "{name} was in front. But then {friend} fell over a stone.",
        ),
        (
            "{name} stopped and went back to help. They walked to the end side by side.",
            '"Are you all right?" asked {name}. {He} helped {friend} to stand up.',
        ),
        (
            '"You did not win, but you are a true friend," said {friend}. {name} smiled.',
            "Nobody won the race, but they had {food} together and laughed.",
        ),
    ),
    "a treasure map": (
        (
            "One {weather} day {name} found an old map in a {colour} box.",
            "One {weather} day an old map fell out of a {colour} book.",
        ),
        (
            '"There is a treasure in the {place}!" said {name}. {He} took a bag and ran outside.',
            "The map showed a way to a treasure. {name} could not wait to find it.",
        ),
        (
            "{friend} the {friend_kind} came too. They walked past the {spot}.",
            "On the way {he} met {friend} the {friend_kind}, and they went on together.",
        ),
        (
            "They dug a deep hole and found a big box. Inside there was a {colour2} {thing}.",
            "Under a stone there was a box. In the box they found a {colour2} {thing}.",
        ),
        (
            '"It is not gold, but I like it," said {friend}. "Me too," said {name}.',
            '"This is the best treasure of all," said {name}.',
        ),
        (
            "They took turns with the {thing} and played until the sun went down.",
            "They brought it home and showed it to everyone in the {place}.",
        ),
    ),
    "learning to swim": (
        (
            "{name} wanted to swim, but {he} was afraid of the water.",
            "All the others could swim, but {name} could not.",
        ),
        (
            "One {weather} day {he} sat by the lake and watched the waves.",
            "Every day {he} sat by the river and looked at the water.",
        ),
        MEETING,
        (
            '"I can teach you," said {friend}. "First put one foot in the water."',
            '"Do not be afraid," said {friend}. "I will help you."',
        ),
        (
            "{name} tried and tried. At first it was hard, but {he} did not stop.",
            "{name} took a deep breath and jumped in. It was cold, but it was fun.",
        ),
        (
            "At the end of the day {name} could swim. {He} was very proud.",
            '"Look, I can swim!" said {name}. {friend} clapped and laughed.',
        ),
    ),
    "a birthday": (
        (
            "It was a {weather} day, and it was the birthday of {name}.",
            "One {weather} morning {name} woke up early. It was {his} birthday!",
        ),
        (
            "But nobody came to say hello. {name} was sad and walked to the {spot}.",
            "{He} went to see {friend} the {friend_kind}, but nobody was at home.",
        ),
        (
            '"Did they all forget me?" {he} thought.',
            '"I think nobody knows that it is my birthday," {he} said.',
        ),
        (
            'Then {he} opened the door. "Surprise!" said {friend} and all the others.',
            'When {he} came home, all {his} friends were there. "Happy birthday!" they said.',
        ),
        (
            "There was {food} for everyone, and {friend} gave {him} a {colour} {thing}.",
            "They gave {him} a {colour} {thing} and some {food}.",
        ),
        (
            "It was the best birthday ever.",
            "They danced and sang until it was dark. {name} went to bed with a smile.",
        ),
    ),
    "a flower": (
        (
            "One {weather} day {name} found a {colour} seed near the {spot}.",
            "One {weather} morning {friend} the {friend_kind} gave {name} a {colour} seed.",
        ),
        (
            "{He} put it into the ground and gave it water every day.",
            "{name} wanted to see a flower, so {he} put it into the ground.",
        ),
        (
            "But nothing came up. {name} waited and waited.",
            "Many days went by, and there was no flower.",
        ),
        (
            '"You must be patient," said {friend} the {friend_kind}. "It needs time and sun."',
            '"Do not stop," said {friend} the {friend_kind}. "It is still asleep."',
        ),
        (
            "At last a green leaf came out of the ground, and then a big {colour2} flower.",
            "Then, one warm morning, there was a beautiful {colour2} flower.",
        ),
        (
            "{name} was very proud and showed the flower to all {his} friends.",
            "{name} and {friend} danced around the flower, and the whole {place} smelled sweet.",
        ),
    ),
    "a fallen star": (
        (
            "One night {name} looked at the sky and saw a star fall down.",
            "One quiet night a small star fell from the sky.",
        ),
        (
            "{He} ran to the {spot} and found the star in the grass. It was crying.",
            "{name} found the star near the {spot}. Its light was very weak.",
        ),
        (
            '"I want to go home," said the star. "I will help you," said {name}.',
            '"Can you help me?" asked the star. "Yes, I can," said {name}.',
        ),
        (
            "{He} asked {friend} the {friend_kind}, who had a very long rope.",
            "{He} put the star on a {colour} kite and called {friend} the {friend_kind}.",
        ),
        (
            "Together they climbed the highest hill and threw the star up into the sky.",
            "They waited for the wind, and the star flew up and up.",
        ),
        (
            "Now, every night, the star shines over the {place} and {name} waves to it.",
            '"Thank you!" said the star. It still shines over the {place} every night.',
        ),
    ),
}

REQUESTS = (
    "Tell me a story about {topic}.",
    "Tell me a story about {topic}.",
    "Please tell me a short story about {topic}.",
    "Write a story about {topic}.",
)
OPEN_REQUESTS = ("Tell me a story.", "Please tell me a short story.", "Write a short story.")

SENTENCES = (
    "The {colour} {thing} is in the {place}.",
    "The {colour} {thing} is near the {spot}.",
    "{name} is {a_trait} {hero}.",
    "{name} likes {food} and plays in the {place}.",
    "{name} has a {colour} {thing}.",
    "The {hero} sees a {colour} {thing} near the {spot}.",
    "It is a {weather} day in the {place}.",
    "{name} and {friend} eat {food} together.",
    "The {trait} {hero} sleeps under the {spot}.",
    '"I like your {thing}," says {friend}.',
)


def _cast(rng: Random) -> dict[str, str]:
    """Fillers for every slot of a story."""
    subject = rng.choice(tuple(NAMES))
    he, him, his = PRONOUNS[subject]
    hero, friend_kind = rng.sample(ANIMALS, 2)
    if rng.random() < CHILD_SHARE:
        hero = CHILDREN[subject]
    name = rng.choice(NAMES[subject])
    friend = rng.choice([other for names in NAMES.values() for other in names if other != name])
    colour, colour2 = rng.sample(COLOURS, 2)
    trait = rng.choice(TRAITS)
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
        "place": rng.choice(PLACES),
        "spot": rng.choice(SPOTS),
        "thing": rng.choice(THINGS),
        "colour": colour,
        "colour2": colour2,
        "food": rng.choice(FOODS),
        "weather": rng.choice(WEATHER),
    }


def _tell(rng: Random, plot: str, cast: dict[str, str]) -> str:
    beats = (BEGINNING, *PLOTS[plot])
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
        request = rng.choice(OPEN_REQUESTS)
    else:
        request = rng.choice(REQUESTS).format(topic=rng.choice(topics))
    return Exchange(request, _tell(rng, plot, cast))


def plain_story(rng: Random) -> Document:
    """A story without turns."""
    return plain("", ask_story(rng).answer + "\n")


def plain_sentences(rng: Random) -> Document:
    """A few unconnected sentences about the same cast."""
    cast = _cast(rng)
    sentences = rng.sample(SENTENCES, rng.randint(2, 5))
    return plain("", " ".join(sentence.format(**cast) for sentence in sentences) + "\n")

"""Prompts of `benchmarks.speculation`, by their names in its tables.

`COPY` are requests to edit, correct, convert or quote texts of 140 to 280 tokens, which SmolLM2
135M (bfloat16, greedily) answers by copying: at least 60% of its output tokens continue an n-gram
of the prompt, in the measure of `speculation.copied`. Of 41 requests that were tried 16 are of that
kind; these are ten of them, at most three of a text. The others it answers in words or code of its
own: most about code, and all that ask for JSON. Those of `JSON` are therefore answered within a
schema, as extraction usually is, and not chosen; the quotes are what they copy. `CHAT` and `FREE`
were written before they were measured, and none of them was left out.
"""

HARBOUR = (
    "The harbour master kept two clocks on his desk. One showed the hour of the town, by which"
    " the ferries left and the bakers rose; the other had stopped on the evening of the great"
    " storm, at ten minutes to nine, and nobody was allowed to wind it. Years later, when the new"
    " breakwater was built, the engineers found his notes: every wave of that night, its height"
    " and its time, written down in pencil until the paper was wet."
)

ARTICLE = (
    "The town council of Brightwater voted on Monday to rebuild the old railway bridge over the"
    " river Lorne. The bridge, which opened in 1891, has been closed to traffic since a flood"
    " damaged two of its pillars last spring. Engineers from the county inspected it in June and"
    " found that the stone arches are still sound, but that the iron deck has rusted beyond"
    " repair. The new deck will be made of steel and will carry a footpath, a cycle lane and a"
    " single track for the tourist train that runs between Brightwater and Hollow Hill on summer"
    " weekends. The work is expected to cost 4.2 million pounds and to take eighteen months. Half"
    " of the money comes from a national fund for historic buildings, and the rest from the"
    " council and from donations. Margaret Ellis, who leads the group of volunteers that has"
    ' looked after the line for thirty years, said that she was delighted. "My grandfather drove'
    ' the first engine across this bridge," she added, "and I hope that my grandchildren will'
    ' ride across it again." Not everybody agreed. Councillor Peter Marsh argued that the money'
    " should be spent on the road through the village, which floods every winter, and asked for a"
    " new vote in March."
)

LETTER = (
    "Dear Ms Alvarez,\n\nThank you for your order of 14 February. We regret that the oak table"
    " that you chose is out of stock, and that our workshop in Leeds does not expect to finish"
    " the next one before the end of April. We can offer you one of three solutions. You may wait"
    " for the oak table, and we will deliver it free of charge. You may choose the same table in"
    " ash, which is ready now and costs 60 pounds less. Or you may cancel the order, and we will"
    " return your deposit of 150 pounds within five working days.\n\nThe six chairs from the same"
    " order are in our warehouse. They can be delivered on any weekday between 8 am and 4 pm."
    " Please let us know which day suits you, and whether somebody will be at home to sign for"
    " them. If the delivery has to go to another address, please send us the name of the street,"
    " the number and a telephone number for the driver.\n\nWe apologise for the delay and thank"
    " you for your patience.\n\nYours sincerely,\nThomas Okafor\nCustomer Service, Northfield"
    " Furniture"
)

MINUTES = (
    "Minutes of the project meeting of 9 May. Present: Sofia Lind, Marco Rossi, Priya Nair and"
    " Jonas Weber. Sofia reported that the new warehouse software has been installed at two of"
    " the five sites and that the staff there have been trained. Marco said that the scanners for"
    " the third site have arrived, but that four of them do not charge and have been sent back."
    " Priya presented the results of the survey: 82 percent of the staff find the software easier"
    " to use than the old one, and 11 percent asked for a version in Polish. The group agreed to"
    " order the translation by the end of May. Jonas reminded everybody that the licence of the"
    " old software ends on 31 July and that all sites must have changed by then. The next meeting"
    " is on 23 May at 10 o'clock in room 4. Marco will bring the plan for the last two sites, and"
    " Priya will write to the managers."
)

MANUAL = (
    "# Filter pump FP-20\n\n## Before first use\n\nRemove all packaging and check that the pump"
    " is not damaged. Place the pump on a level surface, at least two metres from the edge of the"
    " pool. Never run the pump without water. Connect the inlet hose to the lower connector and"
    " the outlet hose to the upper connector, and tighten both clamps by hand.\n\n## Cleaning the"
    " filter\n\nClean the filter once a week, or when the pressure gauge shows more than 0.8 bar."
    " Switch off the pump and unplug it. Close both valves. Turn the lid to the left and lift it"
    " off. Take out the cartridge, rinse it with a garden hose, and let it dry. Replace the"
    " cartridge after three months. Put the lid back on, turn it to the right until it clicks,"
    " open both valves, and switch on the pump.\n\n## Winter\n\nDrain the pump before the first"
    " frost. Disconnect both hoses, remove the cartridge, and store the pump in a dry room."
)

CODE = '''class Account:
    """A bank account with a history of its transactions."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        """Add money to the account."""
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        """Take money from the account."""
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("balance is too low")
        self.balance -= amount
        self.history.append(("withdraw", amount))

    def transfer(self, other, amount):
        """Move money to another account."""
        self.withdraw(amount)
        other.deposit(amount)

    def report(self):
        """Print all transactions."""
        for kind, amount in self.history:
            print(kind, amount)
'''

PEOPLE = (
    "name,age,city,occupation\nAda Byron,36,London,mathematician\nAlan"
    " Turing,41,Wilmslow,computer scientist\nGrace Hopper,85,Arlington,admiral\nEdsger"
    " Dijkstra,72,Nuenen,professor\nBarbara Liskov,84,Cambridge,professor\nDonald"
    " Knuth,86,Stanford,author\nRadia Perlman,72,Redmond,network engineer\nKen"
    " Thompson,81,Mountain View,programmer"
)

COPY = {
    "article: replace a word": f"Copy this text and replace 'bridge' by 'tunnel':\n\n{ARTICLE}",
    "article: paragraphs": (
        f"Divide this text into paragraphs, without changing the words:\n\n{ARTICLE}"
    ),
    "article: quote": (
        f"{ARTICLE}\n\nQuote the sentences of this text that say how much the work costs and who"
        " pays for it."
    ),
    "letter: other name": (
        "Write this letter again, but to Mr Schneider instead of Ms Alvarez, and change nothing"
        f" else:\n\n{LETTER}"
    ),
    "letter: proofread": f"Proofread this letter and print the final version:\n\n{LETTER}",
    "letter: shorten": f"Remove the last paragraph of this letter:\n\n{LETTER}",
    "minutes: grammar": f"Correct the grammar of this text:\n\n{MINUTES}",
    "manual: rename": f"Copy this manual and replace 'FP-20' by 'FP-30':\n\n{MANUAL}",
    "code: message": (
        'Change the error message "balance is too low" to "not enough money" and print the whole'
        f" code:\n\n```python\n{CODE}```"
    ),
    "table: Markdown": f"Convert this CSV to a Markdown table:\n\n{PEOPLE}",
}

JSON = {
    name: (
        "Extract the facts of this text as a list of JSON objects, each with a topic and a quote"
        f" from the text:\n\n{text}"
    )
    for name, text in (
        ("article", ARTICLE),
        ("letter", LETTER),
        ("minutes", MINUTES),
        ("manual", MANUAL),
        ("table", PEOPLE),
    )
}
JSON_SCHEMA = """{
  "type": "array",
  "items": {
    "type": "object",
    "properties": {"topic": {"type": "string"}, "quote": {"type": "string"}},
    "required": ["topic", "quote"],
    "additionalProperties": false
  }
}"""

CHAT = (
    "What is photosynthesis? Explain it to a child.",
    "Give me five tips for a job interview.",
    "Write a Python function that reverses a linked list, and explain it.",
    "How do I boil an egg?",
    "What should I see in Rome in two days?",
    "Compare electric cars with petrol cars: what speaks for each?",
    "Write a polite e-mail to my landlord about a broken heating.",
    "Give me a workout plan for a week.",
    "Why is the sky blue?",
    "Suggest names for a small bakery, and say why each fits.",
)

FREE = {
    "story": "Once upon a time, in a village by the sea,",
    "novel": HARBOUR,
    "history": "In 1969, the Apollo 11",
}

"""Result of a run, and what must not occur in it."""

from collections import Counter
from dataclasses import dataclass, field

MAX_EXAMPLES = 5


@dataclass
class Outcome:
    """Answers by kind, and harm: those that no caller should be able to cause."""

    num_requests: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    harm: list[str] = field(default_factory=list)
    """Examples: a bug's status, a call without an end, a line in a log."""

    def note(self, answer: str) -> None:
        """One more answer."""
        self.num_requests += 1
        self.answers[answer] += 1

    def blame(self, what: str) -> None:
        """Record harm; the first few are kept."""
        if len(self.harm) < MAX_EXAMPLES:
            self.harm.append(what[:2000])

    def __str__(self) -> str:
        answers = ", ".join(f"{name} {count}" for name, count in self.answers.most_common())
        return f"{self.num_requests} requests: {answers}"

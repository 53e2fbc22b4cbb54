"""A sequence as the simulated worker knows it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from worker_service.simulated.model import START, History, extend


@dataclass(kw_only=True, slots=True, eq=False)
class SimulatedSequence:
    """Tokens, their histories and where their KV lies.

    Invariants: one history per token; num_checked <= num_computed <= len(tokens).
    """

    seq_id: int
    num_prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)
    """What the slot of each position must hold."""

    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose KV is in the blocks."""

    num_checked: int = 0
    """Tokens whose slots have been found to hold this sequence's own KV. A slot cannot change
    unnoticed while a sequence holds its block, so none is looked at twice."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Some tokens more."""
        history = self.histories[-1] if self.histories else START
        for token in tokens:
            history = extend(history, token)
            self.tokens.append(token)
            self.histories.append(history)

"""The frontends as the core sees them: who gets which news, and what their numbers mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_service.core.engine_outputs import Outbox

if TYPE_CHECKING:
    from scheduler_service.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class Frontend:
    """One attached frontend."""

    frontend_id: str
    outbox: Outbox = field(default_factory=Outbox)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    """Sequences of its live requests by handle, ended ones included."""

    def take_outbox(self) -> Outbox:
        """The news so far; later ones go to a fresh outbox."""
        outbox, self.outbox = self.outbox, Outbox()
        return outbox

"""What a core returns or raises, in the words of a recording.

The recorder and the replay both use this, so that what they compare is made alike.
"""

import json
from typing import Any

from scheduler_service.core import StepPlan
from scheduler_service.replay.codec import Codec
from scheduler_service.replay.recording import NEWS, Chain

to_text = json.JSONEncoder(separators=(",", ":")).encode
"""Compact JSON in ASCII."""


class Outcomes:
    """Follows one core's plans and news; owns their chains."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._plans = Chain()
        self._news = Chain()

    def of_plan(self, plan: StepPlan) -> str:
        """The chain's value with this plan."""
        return self._plans.add(self._codec.encode(StepPlan, plan))

    def of_news(self, news: NEWS) -> str:
        """The chain's value with these news."""
        return self._news.add(self._codec.encode(NEWS, news))

    def of_error(self, error: Exception) -> Any:
        """Class and message of an error."""
        return self._codec.encode(Exception, error)

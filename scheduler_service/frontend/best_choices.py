"""Which of a request's candidates its client gets, once all have ended."""

from collections.abc import Sequence

from scheduler_service.frontend.input.processor import SettledRequest
from scheduler_service.frontend.output.choice_stream import ChoiceStream


def best_choices(candidates: Sequence[ChoiceStream], request: SettledRequest) -> list[ChoiceStream]:
    """The candidates to return, best first, less what a resumed request's client has of them.

    Those of `best_of` are ranked by the sum of their tokens' log probabilities, the first among
    equals. Raises InvalidArgument if the client cannot have what it says from this request.
    """
    returned = list(candidates)
    if request.is_ranked:
        returned.sort(key=lambda choice: choice.cumulative_logprob, reverse=True)
        del returned[request.num_returned :]
    for position, resumed in enumerate(request.resume):
        returned[resumed.index].skip(resumed, f"resume[{position}]")
    return returned

"""One choice of an open request: its tokens, text and end, as far as they were not read yet."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagewire.columns import pack
from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.input.processor import ResolvedRequest
from scheduler_service.frontend.output.logprobs import token_logprobs
from scheduler_service.frontend.output.stop_strings import StopMatcher

_FIRST_FLOAT = struct.Struct("<f")

_YET_TO_COME = 1 << 62
"""Stands for the number of a token that has yet to come."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a choice ended."""

    reason: inference_pb.FinishReason.ValueType
    stop_string: str | None = None
    stop_token_id: int | None = None


class ChoiceStream:
    """Tokens, message and end of one choice.

    Tokens count up to the one that completes a stop string, or up to the end that the core reports;
    later ones are dropped. A stop string may end within a token: that token counts, and the text of
    `token_ids` is then longer than the text that was sent.

    A stop or end-of-sequence token is one of the tokens; its text is included only on request.
    """

    def __init__(self, index: int, request: ResolvedRequest) -> None:
        self.index = index
        self.token_ids: list[int] = []
        """All tokens that count, those of a resumed stream included."""
        self._is_reasoning = bytearray()
        """By token: whether the text up to it ends inside the model's reasoning."""
        self.cumulative_logprob = 0.0
        self.finish: Finish | None = None
        self._request = request
        self._detokenizer = request.make_detokenizer()
        self._matcher = (
            StopMatcher(request.stop, include_stop=request.include_stop) if request.stop else None
        )
        self.received_token_ids: list[int] = []
        """Tokens that the core has sent and `advance` has not processed, which may be appended."""
        self.received_logprobs: list[scheduler_pb.ChoiceLogprobs] = []
        """Log probabilities of the same tokens, in their order."""
        self._received_finish: Finish | None = None
        self._message = request.make_message(index)
        self._logprobs: list[scheduler_pb.ChoiceLogprobs] = []
        """Log probabilities of the tokens not sent yet."""
        self._num_sent = 0
        self._finish_sent = False

    # From the core.

    def receive_finish(self, finished: scheduler_pb.ChoiceFinished) -> None:
        """Record that the core has ended the choice."""
        token = finished.stop_token_id if finished.HasField("stop_token_id") else None
        reported = token if token in self._request.reported_stop_token_ids else None
        self._received_finish = Finish(finished.reason, stop_token_id=reported)

    def advance(self) -> bool:
        """Process what was received; True if a stop string ended the choice before the core did."""
        token_ids, self.received_token_ids = self.received_token_ids, []
        logprobs, self.received_logprobs = self.received_logprobs, []
        if self.finish is not None:
            return False
        num_before = len(self.token_ids)
        self._accept_tokens(token_ids)
        if self._request.has_logprobs:
            self._accept_logprobs(logprobs[: len(self.token_ids) - num_before])
        if self.finish is None and self._received_finish is not None:
            self._end(self._received_finish)
            return False
        return self.finish is not None and self._received_finish is None

    def restore(self, resumed: inference_pb.ResumedChoice, field: str) -> None:
        """Start from what a client already has; `field` names it in errors.

        Raises InvalidArgument if the request cannot have produced such a choice.
        """
        self._accept_tokens(resumed.token_ids)
        self._end_if_complete()
        if len(self.token_ids) < len(resumed.token_ids):
            raise InvalidArgument(
                f"{field}.token_ids", f"the choice ends after {len(self.token_ids)} of them"
            )
        self.cumulative_logprob = resumed.cumulative_logprob
        self._mark_sent(resumed, field)

    def skip(self, resumed: inference_pb.ResumedChoice, field: str) -> None:
        """Omit what a client already has of this choice, which has ended and of which nothing has
        been taken; `field` names it in errors.

        Raises InvalidArgument if the choice does not begin with it.
        """
        num_received = len(resumed.token_ids)
        if self.token_ids[:num_received] != list(resumed.token_ids):
            raise InvalidArgument(f"{field}.token_ids", "expected tokens of this very request")
        self._logprobs = self._logprobs[num_received:]
        self._mark_sent(resumed, field)

    def _mark_sent(self, resumed: inference_pb.ResumedChoice, field: str) -> None:
        """Mark the output that the client already has as sent."""
        self._message.skip(resumed, field)
        self._num_sent = len(resumed.token_ids)

    def _accept_tokens(self, token_ids: Iterable[int]) -> None:
        request = self._request
        for token_id in token_ids:
            if self.finish is not None or self._is_complete():
                return
            self.token_ids.append(token_id)
            self._message.num_tokens = len(self.token_ids)
            if token_id in request.stop_token_ids and not request.include_stop:
                self._is_reasoning.append(False)
                continue
            self._show(self._detokenizer.push(token_id))
            self._is_reasoning.append(self._message.in_reasoning)
            if self.finish is not None:
                self._message.finish()

    def _show(self, text: str) -> None:
        """Pass text on as far as stop strings allow; a match ends the choice. They are looked for
        in what follows the reasoning, without the space between them."""
        matcher = self._matcher
        if matcher is None:
            if text:
                self._message.push(text)
            return
        message, may_stop = self._message, len(self.token_ids) > self._request.min_tokens
        # Where a thought begins and ends is known only after each character.
        for piece in text if message.may_think else (text,):
            is_space = message.follows_thought and not matcher.is_holding and piece.isspace()
            if is_space or message.in_reasoning:
                message.push(matcher.flush() + piece)
            elif shown := matcher.push(piece, may_stop=may_stop):
                message.push(shown)
            if matcher.matched is not None:
                self.finish = Finish(inference_pb.FINISH_REASON_STOP, stop_string=matcher.matched)
                return

    def _is_complete(self) -> bool:
        """Whether the choice must end after the tokens so far."""
        if len(self.token_ids) >= self._request.max_tokens:
            return True
        return bool(self.token_ids) and self.token_ids[-1] in self._request.stop_token_ids

    def _end_if_complete(self) -> None:
        """End a restored choice that had ended when its stream broke."""
        if self.finish is not None or not self._is_complete():
            return
        last = self.token_ids[-1]
        if last in self._request.stop_token_ids:
            reported = last if last in self._request.reported_stop_token_ids else None
            self._end(Finish(inference_pb.FINISH_REASON_STOP, stop_token_id=reported))
        else:
            self._end(Finish(inference_pb.FINISH_REASON_LENGTH))

    def _end(self, finish: Finish) -> None:
        """End with the core's reason, unless the last of the text completes a stop string."""
        self._show(self._detokenizer.flush())
        if self.finish is None:
            if self._matcher is not None and (rest := self._matcher.flush()):
                self._message.push(rest)
            self.finish = finish
        self._message.finish()

    def _accept_logprobs(self, entries: list[scheduler_pb.ChoiceLogprobs]) -> None:
        if self._request.num_logprobs is not None:
            self._logprobs += entries
        for entry in entries:
            self.cumulative_logprob += _FIRST_FLOAT.unpack_from(entry.logprobs)[0]

    # To the core, after a reconnect.

    def generated(self) -> scheduler_pb.GeneratedTokens:
        """The state that the core needs in order to continue."""
        return scheduler_pb.GeneratedTokens(
            choice_index=self.index,
            token_ids=pack(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            finished=self.finish is not None,
        )

    # To the client.

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens of the model's reasoning."""
        return sum(self._is_reasoning)

    @property
    def has_output(self) -> bool:
        """Whether `take` would return anything new."""
        return bool(
            len(self.token_ids) > self._num_sent
            or self._message.has_pending
            or (self.finish is not None and not self._finish_sent)
        )

    def take(self, max_tokens: int, index: int) -> list[inference_pb.ChoiceDelta]:
        """Remove at most `max_tokens` new tokens; the message and the finish come with the last of
        them. With log probabilities, tokens of the reasoning, of text and of calls come in deltas
        of their own, each with its part of the message. `index` is the client's number of the
        choice."""
        until = min(len(self.token_ids), self._num_sent + max_tokens)
        if self._request.num_logprobs is None:
            deltas = [self._delta(until, index)]
            if until == len(self.token_ids):
                deltas = self._message.write(deltas[0])
        else:
            deltas = []
            for end in self._ends(until):
                deltas += self._message.write(self._delta(end, index), end)
        if until == len(self.token_ids) and self.finish is not None:
            self._write_finish(deltas[-1], self.finish)
        return deltas

    def _ends(self, until: int) -> list[int]:
        """Where the new tokens up to `until` divide, so that the same tokens come with a text
        however many are sent at once: those with which it came, and those before them with which
        nothing came."""
        events = self._message.events()
        if self.finish is not None and events:  # the last tokens come with nothing
            events[-1] = len(self.token_ids), events[-1][1]
        following = iter(events)
        labels: list[tuple[bool, int]] = []
        number, is_text = 0, False
        for position in range(self._num_sent, until):
            while number <= position:
                number, is_text = next(following, (_YET_TO_COME, False))
            labels.append((bool(self._is_reasoning[position]), 0 if is_text else number))
        changes = (i for i in range(1, len(labels)) if labels[i] != labels[i - 1])
        return [*(self._num_sent + i for i in changes), until]

    def _delta(self, until: int, index: int) -> inference_pb.ChoiceDelta:
        """The new tokens up to `until`, which are then sent."""
        new = self.token_ids[self._num_sent : until]
        delta = inference_pb.ChoiceDelta(index=index, token_ids=new)
        if self._request.num_logprobs is not None:
            entries, self._logprobs = self._logprobs[: len(new)], self._logprobs[len(new) :]
            delta.logprobs.extend(
                token_logprobs(entry, self._request.token_text) for entry in entries
            )
        delta.reasoning_tokens = sum(self._is_reasoning[self._num_sent : until])
        self._num_sent = until
        return delta

    def _write_finish(self, delta: inference_pb.ChoiceDelta, finish: Finish) -> None:
        self._finish_sent = True
        delta.finish_reason = finish.reason
        if finish.stop_string is not None:
            delta.stop_string = finish.stop_string
        elif finish.stop_token_id is not None:
            delta.stop_token_id = finish.stop_token_id
        if self._request.num_logprobs is not None:
            delta.cumulative_logprob = self.cumulative_logprob


def best_choices(
    candidates: Sequence[ChoiceStream], request: ResolvedRequest
) -> list[ChoiceStream]:
    """The candidates to return, best first, without what a resumed request's client already has.

    Candidates of `best_of` are ranked by the sum of their tokens' log probabilities; equal ones
    keep their order. Raises InvalidArgument if this request cannot have produced what the client
    has.
    """
    returned = list(candidates)
    if request.is_ranked:
        returned.sort(key=lambda choice: choice.cumulative_logprob, reverse=True)
        del returned[request.num_returned :]
    for position, resumed in enumerate(request.resume):
        returned[resumed.index].skip(resumed, f"resume[{position}]")
    return returned

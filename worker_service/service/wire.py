"""Decodes protobuf messages to plans and encodes results, in one place.

Columns are views of the message's bytes, never copied. Errors that the message alone shows are
refused here as `InvalidPlan`; contradictions to the worker's state are refused where that state is.
"""

from collections.abc import Iterable
from dataclasses import asdict, fields

import numpy as np
import numpy.typing as npt

from pagewire.v1 import model_pb2, plan_pb2, sampling_pb2
from pagewire.validation import find_violation
from worker_service.array_types import Int32Array
from worker_service.engine.executor import ModelFacts
from worker_service.errors import InvalidPlan
from worker_service.plan import (
    ROW_ERROR_MESSAGES,
    Candidates,
    Constraint,
    ConstraintKind,
    NewSequence,
    PromptLogprobs,
    RowErrorReason,
    SamplerParams,
    StepPlan,
    StepResult,
    StepTimings,
    Thought,
    TokenLogprobs,
)

_NUMBERS = tuple(
    each.name for each in fields(SamplerParams) if isinstance(each.default, int | float)
)
"""Sampling parameters that the message has under the same name."""

_TIMINGS = tuple(each.name for each in fields(StepTimings))

_ROW_ERROR_REASONS = {
    RowErrorReason.NON_FINITE_LOGITS: plan_pb2.ROW_ERROR_REASON_NON_FINITE_LOGITS,
    RowErrorReason.NO_CANDIDATES: plan_pb2.ROW_ERROR_REASON_NO_CANDIDATES,
    RowErrorReason.CONSTRAINT: plan_pb2.ROW_ERROR_REASON_CONSTRAINT,
}


def decode_plan(message: plan_pb2.StepPlan, received_us: int) -> StepPlan:
    """The plan in a message. Raises InvalidPlan naming the field."""
    seq_ids = _column(message.seq_ids, "seq_ids")
    num_rows = len(seq_ids)
    return StepPlan(
        epoch=message.epoch,
        step_id=message.step_id,
        forget_seq_ids=_column(message.forget_seq_ids, "forget_seq_ids"),
        swap_out=_column(message.swap_out, "swap_out", 2),
        swap_in=_column(message.swap_in, "swap_in", 2),
        copy=_column(message.copy, "copy", 2),
        new_sequences=tuple(
            _decode_new_sequence(new, f"new_sequences[{index}]")
            for index, new in enumerate(message.new_sequences)
        ),
        block_updates=_column(message.block_updates, "block_updates", 3),
        seq_ids=seq_ids,
        num_tokens=_decode_num_tokens(message.num_tokens, num_rows),
        sample=_decode_sample(message.sample, num_rows),
        appended_tokens=_column(message.appended_tokens, "appended_tokens", 2),
        lookahead=_decode_lookahead(message.lookahead, num_rows),
        received_us=received_us,
        max_results_together=message.max_results_together,
    )


def encode_result(result: StepResult) -> plan_pb2.StepResult:
    """The message for a result."""
    timings = result.timings
    return plan_pb2.StepResult(
        epoch=result.epoch,
        step_id=result.step_id,
        token_ids=_bytes(result.token_ids, "<i4"),
        logprobs=[
            plan_pb2.RowLogprobs(row=row, sampled_rank=entry.rank, **_columns(entry))
            for row, first in result.logprobs.items()
            for entry in (first, *result.kept_logprobs.get(row, ()))
        ],
        prompt_logprobs=[
            plan_pb2.RowPromptLogprobs(
                row=row,
                start=entry.start,
                width=entry.token_ids.shape[1],
                ranks=_bytes(entry.ranks, "<i4"),
                **_columns(entry),
            )
            for row, entry in result.prompt_logprobs.items()
        ],
        candidates=[
            plan_pb2.RowCandidates(row=row, **_columns(entry))
            for row, entry in result.candidates.items()
        ],
        errors=[
            plan_pb2.RowError(
                row=row, reason=_ROW_ERROR_REASONS[reason], message=ROW_ERROR_MESSAGES[reason]
            )
            for row, reason in result.errors.items()
        ],
        num_sampled=b"" if result.num_sampled is None else bytes(result.num_sampled.tolist()),
        num_drafts=b"" if result.num_drafts is None else bytes(result.num_drafts.tolist()),
        timings=plan_pb2.StepTimings(**{name: getattr(timings, name) for name in _TIMINGS}),
    )


def encode_model_info(
    facts: ModelFacts, name: str, aliases: Iterable[str] = ()
) -> model_pb2.ModelInfo:
    """The model's properties for the core and the frontends."""
    values = asdict(facts)
    values["eos_token_ids"] = _bytes(np.asarray(facts.eos_token_ids), "<i4")
    for of_worker in ("device", "attention_backend", "num_speculative_tokens"):
        del values[of_worker]
    return model_pb2.ModelInfo(name=name, aliases=aliases, **values)


def _decode_new_sequence(message: plan_pb2.NewSequence, path: str) -> NewSequence:
    return NewSequence(
        seq_id=message.seq_id,
        choice_index=message.choice_index,
        token_ids=_column(message.token_ids, f"{path}.token_ids"),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=_column(message.block_ids, f"{path}.block_ids"),
        sampling=_decode_sampling(message.sampling, f"{path}.sampling"),
        parent_seq_id=message.parent_seq_id if message.HasField("parent_seq_id") else None,
        prompt_logprobs_start=message.prompt_logprobs_start,
        traceparent=message.traceparent,
        tenant=message.tenant,
    )


def _decode_sampling(message: sampling_pb2.SamplerParams, path: str) -> SamplerParams:
    if (violation := find_violation(message)) is not None:
        raise InvalidPlan(f"{path}.{violation.path}", violation.expected)
    return SamplerParams(
        **{name: getattr(message, name) for name in _NUMBERS},
        bias_token_ids=np.array([bias.token_id for bias in message.logit_bias], np.int32),
        bias_values=np.array([bias.bias for bias in message.logit_bias], np.float32),
        suppressed_token_ids=_decode_suppressed(message, path),
        bad_words=_decode_bad_words(message.bad_words, path),
        num_logprobs=_decode_count(message, "logprobs"),
        num_prompt_logprobs=_decode_count(message, "prompt_logprobs"),
        num_candidates=_decode_count(message, "num_candidates"),
        constraint=_decode_constraint(message, path),
    )


def _decode_suppressed(message: sampling_pb2.SamplerParams, path: str) -> Int32Array:
    """Empty with a constraint, which has its own end tokens."""
    suppressed = _column(message.suppressed_token_ids, f"{path}.suppressed_token_ids")
    return suppressed[:0] if message.HasField("constraint") else suppressed


def _decode_bad_words(
    words: Iterable[sampling_pb2.TokenSequence], path: str
) -> tuple[tuple[int, ...], ...]:
    decoded = []
    for index, word in enumerate(words):
        ids = _column(word.token_ids, f"{path}.bad_words[{index}].token_ids")
        if len(ids) == 0:
            raise InvalidPlan(f"{path}.bad_words[{index}].token_ids", "expected at least one token")
        decoded.append(tuple(ids.tolist()))
    return tuple(decoded)


def _decode_count(message: sampling_pb2.SamplerParams, name: str) -> int | None:
    return getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]


def _decode_constraint(message: sampling_pb2.SamplerParams, path: str) -> Constraint | None:
    if not message.HasField("constraint"):
        return None
    path, constraint = f"{path}.constraint", message.constraint
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidPlan(path, "expected one of json_schema, regex, grammar and choice")
    is_choice = kind == "choice"
    texts = constraint.choice.choices if is_choice else [getattr(constraint, kind)]
    return Constraint(
        kind=ConstraintKind(kind),
        texts=tuple(texts),
        end_token_ids=_column(constraint.end_token_ids, f"{path}.end_token_ids"),
        last_token_ids=_column(constraint.last_token_ids, f"{path}.last_token_ids"),
        thought=_decode_thought(constraint.thought) if constraint.HasField("thought") else None,
    )


def _decode_thought(message: sampling_pb2.Thought) -> Thought:
    return Thought(message.start, tuple(message.ends), tuple(message.other_starts))


def _decode_num_tokens(data: bytes, num_rows: int) -> Int32Array:
    if not data:
        return np.ones(num_rows, np.int32)
    num_tokens = _column(data, "num_tokens")
    if len(num_tokens) != num_rows:
        problem = f"expected {num_rows} numbers, one per row, or none, got {len(num_tokens)}"
        raise InvalidPlan("num_tokens", problem)
    if num_tokens.min() < 0:
        raise InvalidPlan("num_tokens", "expected no negative numbers")
    return num_tokens


def _decode_sample(data: bytes, num_rows: int) -> npt.NDArray[np.bool_]:
    if not data:
        return np.ones(num_rows, np.bool_)
    if len(data) != num_rows:
        problem = f"expected {num_rows} bytes, one per row, or none, got {len(data)}"
        raise InvalidPlan("sample", problem)
    return np.frombuffer(data, np.uint8) != 0


def _decode_lookahead(data: bytes, num_rows: int) -> Int32Array | None:
    if not data:
        return None
    if len(data) != num_rows:
        problem = f"expected {num_rows} bytes, one per row, or none, got {len(data)}"
        raise InvalidPlan("lookahead", problem)
    return np.frombuffer(data, np.uint8).astype(np.int32)


def _column(data: bytes, path: str, width: int = 1) -> Int32Array:
    """The int32 column in `data`; a matrix of `width` columns where that is not one."""
    if len(data) % (4 * width):
        problem = f"expected a multiple of {4 * width} bytes, got {len(data)}"
        raise InvalidPlan(path, problem)
    column = np.frombuffer(data, "<i4")
    return column if width == 1 else column.reshape(-1, width)


def _columns(entry: TokenLogprobs | PromptLogprobs | Candidates) -> dict[str, bytes]:
    return {
        "token_ids": _bytes(entry.token_ids, "<i4"),
        "logprobs": _bytes(entry.logprobs, "<f4"),
    }


def _bytes(values: npt.NDArray[np.generic], dtype: str) -> bytes:
    return values.astype(dtype, copy=False).tobytes()

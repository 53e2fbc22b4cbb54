"""From a request's parameters to what a worker is told."""

from collections.abc import Iterable

from pagewire.v1 import sampling_pb2
from scheduler_service.columns import to_column


def texts_of(params: sampling_pb2.SamplingParams) -> list[str]:
    """What the output must match, as texts: all of a choice, else one."""
    kind = params.WhichOneof("structured_output")
    assert kind is not None, "asked for"
    return list(params.choice.choices) if kind == "choice" else [getattr(params, kind)]


def constraint_of(
    params: sampling_pb2.SamplingParams,
    *,
    end_token_ids: Iterable[int],
    last_token_ids: Iterable[int],
) -> sampling_pb2.Constraint:
    """What a worker is told where structured output is asked for."""
    kind = params.WhichOneof("structured_output")
    assert kind is not None, "asked for"
    constraint = sampling_pb2.Constraint(
        end_token_ids=to_column(sorted(end_token_ids)),
        last_token_ids=to_column(sorted(last_token_ids)),
    )
    if kind == "choice":
        constraint.choice.CopyFrom(params.choice)
    else:
        setattr(constraint, kind, getattr(params, kind))
    return constraint

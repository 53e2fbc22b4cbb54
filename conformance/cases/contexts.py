"""Contexts: what KV depends on besides tokens, by a digest of its content."""

from typing import Any

import grpc

from conformance.assertions import expect_true
from conformance.case import case, refusal_case
from conformance.generation import Generation, first_difference
from conformance.sequence import ADAPTER, MEDIA, SALT, part
from conformance.step_call import Refusal
from conformance.step_stream import StepStream
from conformance.worker import Worker
from pagewire.v1 import context_pb2

NUM_PROMPTS = 3
UNKNOWN_KIND = 9
"""No kind of part."""


def generated(worker: Worker, context: context_pb2.ContextPart) -> list[Generation] | Refusal:
    """What some prompts generate in a context; the status if the worker refuses it."""
    try:
        prompts = map(worker.prompt, range(NUM_PROMPTS))
        return [worker.alone(prompt, 3, context=(context,)) for prompt in prompts]
    except grpc.RpcError as error:
        return Refusal(error.code(), error.details() or "")


def expect_refusal(found: list[Generation] | Refusal, what: str) -> None:
    """Fail unless a context was refused, by its name."""
    expect_true(isinstance(found, Refusal), f"expected {what} to be refused, it was computed")
    assert isinstance(found, Refusal)
    found.expect(grpc.StatusCode.INVALID_ARGUMENT, "context")


@case("context", "Identifies its content, never a name of it")
def adapters_and_media_are_distinguished_by_their_digests_or_refused(worker: Worker) -> None:
    for kind in (ADAPTER, MEDIA):
        first, other = (generated(worker, part(kind, content, 3)) for content in ("one", "another"))
        if isinstance(first, Refusal) or isinstance(other, Refusal):
            expect_refusal(other, "a part of a kind that the worker cannot compute")
            continue
        pairs = zip(first, other, strict=True)
        exact = worker.info.model.batch_invariant
        differences = [first_difference(a, b, exact=exact) for a, b in pairs]
        name = context_pb2.ContextKind.Name(kind)
        expect_true(any(differences), f"two parts of the kind {name} give the same tokens")


@case("context", "Identifies its content, never a name of it: 32 bytes.")
def a_digest_of_31_bytes_is_refused(worker: Worker) -> None:
    for kind in (SALT, ADAPTER, MEDIA):
        short = context_pb2.ContextPart(kind=kind, digest=bytes(31), length=3)
        expect_refusal(generated(worker, short), "a digest of 31 bytes")


@case("context", "What it is.")
def a_part_of_an_unknown_kind_is_refused(worker: Worker) -> None:
    kinds: tuple[Any, ...] = (context_pb2.CONTEXT_KIND_UNSPECIFIED, UNKNOWN_KIND)
    for kind in kinds:
        found = generated(worker, context_pb2.ContextPart(kind=kind, digest=bytes(32)))
        expect_refusal(found, f"a part of the kind {kind}")


@refusal_case("plan", "Empty in a fork, which has its parent's context.", "context")
def a_context_of_a_fork_is_refused(worker: Worker, stream: StepStream) -> None:
    parent = stream.prefilled(worker.prompt(1))
    plan = stream.plan(parent, stream.fork(parent).row(1))
    plan.new_sequences[0].context.append(part(SALT, "a tenant"))
    stream.send_plan(plan)

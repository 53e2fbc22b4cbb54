"""What the KV of a request's tokens depends on besides its tokens.

A request has a list of parts, and its tenant may add one. They are in the keys of the prefix cache
and in every introduction of a sequence to a worker.
"""

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

DIGEST_BYTES = 32
_FIELDS = struct.Struct(f"<BII{DIGEST_BYTES}s")


class ContextKind(IntEnum):
    """What a part is; numbers as in `context.proto`."""

    SALT = 1
    """Who may share KV."""
    ADAPTER = 2
    MEDIA = 3


@dataclass(frozen=True, slots=True, order=True)
class ContextPart:
    """One thing that KV depends on."""

    kind: ContextKind
    digest: bytes
    """Of its content: 32 bytes."""
    start: int = 0
    """Position of the first token that it affects."""
    length: int = 0
    """Number of tokens that it spans; 0: all from `start` on."""

    def packed(self) -> bytes:
        """All fields, in a constant number of bytes."""
        return _FIELDS.pack(self.kind, self.start, self.length, self.digest)


Context: TypeAlias = tuple[ContextPart, ...]


def num_source_tokens(context: Context) -> int:
    """Tokens of a request's media, which are those of its *source* where a model attends to the
    output of an encoder."""
    return sum(part.length for part in context if part.kind is ContextKind.MEDIA)


def adapter_of(context: Context) -> bytes | None:
    """The digest of the adapter whose weights are added to the model's; None without one."""
    return next((part.digest for part in context if part.kind is ContextKind.ADAPTER), None)


def tenant_context(name: str) -> Context:
    """The salt of a tenant: no client's salt has its digest, because those have another domain."""
    digest = hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES, person=b"tenant").digest()
    return (ContextPart(ContextKind.SALT, digest),)

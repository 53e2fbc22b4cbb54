"""Moves blocks of KV between workers: a fetch of one worker copies what another one has leased.

    source: plan with a lease ─▶ LeaseTable ◀─ ReadBlocks ─┐
                                                           │ digests, bytes or addresses
    target: plan with a fetch ─▶ Transfers ─▶ Fetch ───────┘─▶ ArrivingBlocks ─▶ result

| module | what it has |
| --- | --- |
| `memory` | `BlockMemory`, which both ends need of a worker's caches, and the digest of a block |
| `leases` | `LeaseTable`, which blocks may be read; `LeasedBlocks` reads them for one reader |
| `transport` | what a source answers, and `ArrivingBlocks`, which writes it to the targets |
| `process_memory` | reads the memory of another process of the same machine |
| `transfers` | `Fetch`, on a thread of its own; `Transfers`, all of one stream of plans |

Promises: a block arrives with the bytes that it had at the source while it was leased, or the fetch
fails; after a fetch has ended, and after its stream has, nothing writes to its targets.

Nothing here depends on gRPC or torch: `worker_service/service/block_connection.py` has the calls,
`worker_service/kv_cache/block_memory.py` the caches of a model.
"""

"""The worker as a gRPC service.

servicer.py       the `WorkerService` rpcs, and exceptions as gRPC statuses
wire.py           protobuf messages to plans and results to messages; nothing else does that
block_connection.py   `ReadBlocks` between workers: what a source answers, the calls of a fetch
adapters.py       the table of adapters that the core sets
registration.py   membership: registers with the core and sends heartbeats
tasks.py          waiting for the first of several events
lifecycle.py      the process from start to end: listen, load, register, serve, drain, stop
metrics.py        every Prometheus metric of a worker
"""

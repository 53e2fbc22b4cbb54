"""Version 1 of the contract on the wire.

The `.proto` files here are the contract and its documentation; the `*_pb2*` modules are generated
from them by `make protos`, checked in, and never edited.

| file | holds |
| --- | --- |
| `inference_service.proto` | what clients call on a frontend |
| `scheduler_service.proto` | what frontends and workers call on the scheduler core |
| `worker_service.proto` | what the core calls on a worker |
| `plan.proto` | the hot path: step plans and step results |
| `sampling.proto`, `model.proto`, `status.proto` | what the services share |
"""

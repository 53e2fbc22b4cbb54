"""The worker: executes step plans with one device, or as one rank of a group that shares a model.

A worker knows tokens, blocks and positions; requests, users, queues and text belong to the
scheduler. The modules of this folder hold what all packages share: plans and results as numpy
columns (`plan.py`, `array_types.py`), cache groups (`cache_groups.py`), what is pooled
(`pooling_facts.py`), names in multimodal models (`text_part.py`), settings (`config.py`),
errors (`errors.py`), addresses (`address.py`), the cores of the CPU (`cpu_cores.py`), how far a
load is (`load_progress.py`), and copies to the device (`pinned_memory.py`). A package imports only
these and the packages listed above it:

| package | holds |
| --- | --- |
| `adapters/` | the adapters of sequences, on the host |
| `distributed/` | a model's layout over ranks, their communicator, an epoch's rendezvous |
| `models/` | decoder-only models over a KV cache; `models/transformers_backend/`: all others |
| `structured/` | bitmasks of the tokens that a constraint allows |
| `sampling/` | from logits to one token per row, on the host |
| `block_transfer/` | leases and fetches: blocks that move between workers |
| `engine/` | epochs, step streams and the model thread, over the `Executor` protocol |
| `kv_cache/` | the KV cache on the device and the host, and how many blocks fit |
| `loader/` | from a model's name to weights on the device |
| `gguf/` | what is read of GGUF files without torch |
| `runner/` | from a plan to its result: batch, forward pass, sampling, CUDA graphs, ranks |
| `simulated/` | an executor without a model, which checks every plan (`--simulate`) |
| `service/` | gRPC: the servicer, registration, the worker's process, metrics |
| `launcher/` | command-line flags; starting the ranks of a group |

One plan, from message to result:

| step | where |
| --- | --- |
| its message arrives and is decoded | `service/servicer.py`, `service/wire.py` |
| epoch and step number are checked, the plan is queued | `engine/step_stream.py` |
| leases and fetches of blocks begin and end | `block_transfer/transfers.py` |
| sequences are forgotten, blocks swapped and copied | `kv_cache/cache_engine.py` |
| new sequences and blocks are added | `runner/state/sequence_table.py` |
| rows are checked, inputs flattened | `runner/batch/step_rows.py`, `runner/batch/inputs.py` |
| the model computes, one token per sampling row is chosen | `runner/host/steps.py` |
| - on a GPU, without waiting | `runner/device/steps.py`, `runner/device/cuda_graphs.py` |
| - with several ranks, in micro-batches | `runner/batch/micro_batches.py` |
| the result is encoded and sent | `service/wire.py`, `service/servicer.py` |

Promises to the core:

- Plans are executed in order, one result each; the next starts as soon as the previous is done.
- An invalid plan ends its stream with an error that names the field; the process stays healthy.
- A row with non-finite logits fails alone; the rest of the batch continues.
- A sampled token depends on weights, tokens, parameters, seed and position only. On a CPU this is
  exact to the bit, whatever else is in the batch and however the context was computed.
- A greater epoch takes over at once. Weights are loaded once and stay.

Two threads: the event loop communicates, the model thread computes (`engine/executor.py`, with
a third that collects results and wakes the loop). Inputs raise the exceptions of `errors.py`, which
`service/servicer.py` turns into gRPC statuses.
"""

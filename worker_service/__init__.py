"""The worker: one device, its weights and its KV memory.

A worker executes step plans. It knows tokens, blocks and positions; requests, users, queues and
text are the scheduler's affair. What one plan goes through:

| step | where |
| --- | --- |
| a message arrives; its plan is decoded | `servicer.py`, `wire.py` |
| epoch and step number are checked, the plan is queued for the model thread | `step_stream.py` |
| sequences are forgotten, blocks swapped and copied | `sequence_state.py`, `cache_engine.py` |
| new sequences and blocks are taken in, rows checked | `sequence_state.py`, `batch.py` |
| inputs are laid end to end and computed | `batch.py`, `model_runner.py`, `models/` |
| one token per sampling row is picked, and remembered for the next step | `sampler/` |
| the result goes back | `wire.py`, `servicer.py` |

Around it: `loader/` brings a checkpoint into memory, `memory.py` finds out how many blocks fit,
`model_executor.py` drives both, `engine.py` holds the epoch, `step_summary.py` counts,
`registration.py` keeps the core informed, `lifecycle.py` is the process from start to end,
`command_line/` its flags and `__main__.py` the command.

`parallel/` joins the ranks that hold one copy of a model together, and starts them on one machine
(`--tensor-parallel-size`, `--pipeline-parallel-size`); a worker alone goes through none of it.

The engine knows what executes plans by the protocols of `executor.py` only. `simulation/`
implements them, too: it computes nothing, checks every plan, and needs no torch (`--simulate`).

Promises to the core:

- Plans are executed in their order, one result each, the next as soon as the last is done.
- A plan that is wrong ends its stream with an error that names the field; the process stays
  healthy.
- A row whose numbers are broken fails alone; the batch goes on.
- A sampled token depends on weights, tokens, parameters, seed and position only. On a CPU that is
  exact to the bit, whatever else is in the batch and however the context was computed.
- A greater epoch takes over at once. Weights are loaded once and stay.

Two threads: the event loop talks, the model thread computes (`model_thread.py`, with a third that
wakes the loop for it). Inputs raise the exceptions of `errors.py`, which `status_codes.py` turns
into gRPC statuses.
"""

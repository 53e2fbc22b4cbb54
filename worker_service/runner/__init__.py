"""From a plan to its result, in folders that form layers: each imports only those above it.

| folder | holds |
| --- | --- |
| `state/` | the sequences of an epoch: tokens, block tables, progress, tokens to come |
| `batch/` | a step: its rows, the inputs of its forward pass, its outcome |
| `drafting/` | speculative decoding: drafters, and how many drafts a row computes |
| `host/` | steps that are computed at once, on a CPU or where a GPU cannot launch them |
| `device/` | steps that are launched on a GPU without waiting for it |

`model_runner.py` is one step, from its plan to its result; `torch_executor.py` loads the model,
allocates the KV cache and makes the runner of an epoch. `model_adapters.py` loads adapters, and
`model_options.py` refuses options that do not suit the model.
"""

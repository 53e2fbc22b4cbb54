"""From a plan to its result.

| file | holds |
| --- | --- |
| `model_executor.py` | loads the model, allocates the KV cache, makes the runner of an epoch |
| `model_runner.py` | one step on a CPU: cache operations, forward pass, sampling |
| `sequence_table.py` | tokens, block tables and progress of all sequences, as columns |
| `batch.py` | a step's rows, and the flattened inputs of the forward pass |
| `device_runner.py` | the GPU's runner: launches steps without waiting for the device |
| `device_rows.py` | block tables, sampling parameters and last tokens in device memory |
| `device_state.py` | device rows, sampler and graphs, which outlive an epoch |
| `device_sampler.py` | the sampler whose tokens stay on the device, with counts for penalties |
| `cuda_graphs.py` | decode steps captured once and replayed, by padded batch size |
| `rank_runner.py` | a rank's part of a step: micro-batches through the stages of a pipeline |
| `pending_tokens.py` | tokens sampled on the device, or by another rank, not yet known here |

The device runner runs on a CPU too, where the device is done as soon as work is queued: tests prove
there that launching ahead, padding and replaying change no token.
"""

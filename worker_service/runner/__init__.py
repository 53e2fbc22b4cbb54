"""From a plan to its result.

| file | holds |
| --- | --- |
| `model_executor.py` | loads the model, allocates the KV cache, makes the runner of an epoch |
| `model_runner.py` | one step: cache operations, forward pass, sampling |
| `sequence_state.py` | the sequences of an epoch: their table, pending tokens and constraints |
| `sequence_table.py` | tokens, block tables and progress of all sequences, as columns |
| `batch.py` | a step's rows, and the flattened inputs of the forward pass |
| `draft_model.py` | guesses of a second, smaller model |
| `eagle_drafter.py` | guesses of a head that reads the model's hidden states (EAGLE-3) |
| `drafter.py` | what drafters have in common, and the search of a sequence's own tokens |
| `suffix_drafter.py` | guesses from recent outputs of the same tenant, too |
| `speculation.py` | drafts: how many a row computes, and which of them are kept |
| `forward.py` | the forward pass of a step that the host computes |
| `step_outcome.py` | tokens, log probabilities and failures of a step by row |
| `micro_batches.py` | parts of a step, computed one after the other by the stages of a pipeline |
| `device_steps.py` | launches a GPU's steps without waiting for the device |
| `in_flight_step.py` | a launched step, until the host has its result |
| `device_rows.py` | block tables, how sequences are sampled, and last tokens, in device memory |
| `device_state.py` | device rows, sampler and graphs, which outlive an epoch |
| `device_sampler.py` | prepares inputs and samples on the device, where tokens stay |
| `cuda_graphs.py` | decode steps captured once and replayed, by padded batch size |

`DeviceSteps` works on a CPU too, where work is done as soon as it is queued: tests prove there that
launching ahead, padding and replaying change no token.
"""

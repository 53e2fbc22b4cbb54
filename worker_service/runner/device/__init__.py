"""Steps on a GPU, which are launched without waiting for it.

| file | holds |
| --- | --- |
| `rows.py` | block tables, sampling parameters and latest tokens, in device memory |
| `sampler.py` | prepares inputs and samples on the device, where tokens stay |
| `cuda_graphs.py` | steps captured once and replayed, by padded batch size |
| `state.py` | rows, sampler and graphs, which outlive an epoch |
| `eager.py` | the forward pass, operation by operation |
| `drafts.py` | drafts from a head, on the device of the rank that samples |
| `draft_passes.py` | passes of the head, and their graphs |
| `columns.py` | what a step sends to the device |
| `reports.py` | what rows report besides tokens: log probabilities, candidates |
| `in_flight_step.py` | a launched step, until the host has its result |
| `buffers.py` | its host memory |
| `steps.py` | launches steps |

All of it works on a CPU too, where work is done as soon as it is queued: tests prove there that
launching ahead, padding and replaying change no token.
"""

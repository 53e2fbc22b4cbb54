"""The host's sampler: from a step's logits to one token per row.

| file | holds |
| --- | --- |
| `sampler.py` | the order of operations, greedy choice, failed rows |
| `sampling_table.py` | parameters of all sequences, as columns |
| `logit_edits.py` | bad words, biases, penalties, and constraints' bitmasks |
| `draw.py` | min-p, top-k, top-p, and the draw |
| `logprobs.py` | log probabilities and ranks, of prompts too; candidates where the core chooses |

The outcome of a row depends only on its own logits, parameters and tokens; on the CPU it is bitwise
independent of the rest of the batch. No function keeps state between steps; the state of a sequence
is in `SamplingTable`. On a GPU, `runner/device/sampler.py` samples, with the edits of this package.
"""

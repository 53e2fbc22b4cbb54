"""The host's sampler: from a step's logits to one token per row.

| file | holds |
| --- | --- |
| `sampler.py` | the order of operations, greedy choice, failed rows |
| `logit_edits.py` | bad words, biases, penalties, and constraints' bitmasks |
| `draw.py` | min-p, top-k, top-p, and the draw |
| `logprobs.py` | log probabilities and ranks, of prompts too; candidates where the core chooses |

A row's outcome depends on its own logits, parameters and tokens only: bitwise, on the CPU, whatever
else is in the batch. No function keeps state between steps; a sequence's state is in
`SamplingTable`. On a GPU `runner/device_sampler.py` samples, with the edits of this package.
"""

"""Structured output: which tokens a constraint allows after a sequence's output.

| file | holds |
| --- | --- |
| `vocabulary.py` | the text of each token, from the model's tokenizer.json |
| `grammars.py` | constraints as llguidance grammars, compiled once and shared by sequences |
| `masks.py` | each sequence's matcher, and a step's bitmasks, computed during the forward pass |

What is allowed is a pure function of the constraint and the output tokens (`sampling.proto`,
`Constraint`). A matcher only caches that function's state: it is rebuilt from the tokens wherever
there is none, after a preemption, a loss or a fork.

Constraints themselves are in `worker_service/sampling_params.py`. This package needs llguidance
when it compiles a grammar; nothing in it needs torch.
"""

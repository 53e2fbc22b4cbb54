"""Structured output: which tokens a constraint allows after a sequence's output.

| file | holds |
| --- | --- |
| `grammars.py` | texts of tokens; constraints as llguidance grammars, compiled once and shared |
| `thoughts.py` | which tokens begin, continue and end the thought before a constrained text |
| `masks.py` | each sequence's matcher, and a step's bitmasks, computed during the forward pass |

What is allowed is a pure function of the constraint and the output tokens (`sampling.proto`,
`Constraint`). A matcher only caches that function's state: it is rebuilt from the tokens wherever
there is none, after a preemption, a loss or a fork.

Constraints themselves are in `worker_service/plan.py`. This package needs llguidance
when it compiles a grammar; nothing in it needs torch.
"""

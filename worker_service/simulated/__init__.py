"""A worker without a model: it checks every plan, and picks tokens by hashing.

It stands behind the same engine, servicer and registration as the real one, so it speaks the whole
worker protocol, but it needs neither torch nor weights. It is there to try the scheduler with, to
load it at scales that no machine's models reach, and to find plans that break the contract.

| file | holds |
| --- | --- |
| `executor.py` | what the engine drives: facts of the model, sizes of the caches, runners |
| `runner.py` | one step: move blocks, take in sequences, read, write, wait, sample |
| `memory.py` | the memory model: what is in which slot, and what may be done with which block |
| `sequence.py`, `table.py` | sequences, and what plans may say of them |
| `rows.py` | the rules of a step's rows |
| `tokens.py`, `logprobs.py` | the simulated model: histories, next tokens, log probabilities |
| `sampler.py`, `draw.py` | which token is chosen, by the same rules as for a real model |
| `cost.py`, `config.py` | how long a step takes; all settings |

A plan that breaks a rule ends its stream with `InvalidPlan`, which names the field and says what
was wrong. A token is a function of the tokens before it, its parameters, choice and position alone,
and chosen by the rules of sampling.proto.
"""

"""An executor without a model: it checks every plan, and derives tokens from hashes.

It uses the same engine, servicer and registration as the real executor and implements the whole
worker protocol, but needs neither torch nor weights. It serves to test the scheduler, also at
scales that no machine's models reach, and to find plans that break the contract. It deliberately
shares no code with `runner/` and `sampling/`, as it judges them.

| file | holds |
| --- | --- |
| `executor.py` | the engine's executor; a step: move blocks, add sequences, check, sample, wait |
| `memory_model.py` | what is in which KV slot, and what may be done with which block |
| `block_memory.py` | the content of a block as bytes, for other simulated workers |
| `sequences.py` | sequences and the rows of a step, checked against the rules of `plan.proto` |
| `model.py` | the simulated model: histories, next tokens, log probabilities; its sampler |
| `adapters.py` | adapters: the files of a folder, which are not interpreted |

A plan that breaks a rule ends its stream with `InvalidPlan`, which names the field and the
problem. A token is a function of the tokens before it, its parameters, choice and position alone,
and chosen by the rules of sampling.proto. `SimulationConfig` is in `worker_service/config.py`.
"""

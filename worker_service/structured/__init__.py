"""Structured output: which tokens a constraint allows after a sequence's output.

| file | holds |
| --- | --- |
| `constraint.py` | what an output must match, as the wire tells it |
| `lark.py` | the same as one grammar in llguidance's Lark dialect |
| `vocabulary.py` | the text of each token, from the model's tokenizer.json |
| `grammars.py` | compiled constraints, shared by the sequences that have them |
| `matching.py` | how far one sequence has come |
| `masks.py` | a step's bitmasks, computed beside the forward pass |

What is allowed is a pure function of the constraint and the output tokens (`sampling.proto`,
`Constraint`). A matcher here is that function's memory and nothing more: it is made anew from the
tokens wherever there is none, after a preemption, a loss or a fork.

`constraint.py` is imported by the wire; all else needs llguidance, and nothing needs torch.
"""

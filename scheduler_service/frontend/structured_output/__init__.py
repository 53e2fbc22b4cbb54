"""Structured output at the edge: what a client asks for is refused here or nowhere.

| file | holds |
| --- | --- |
| `constraint.py` | from a request's parameters to what a worker is told |
| `lark.py` | a constraint as one grammar, as workers compile it |
| `keywords.py` | which JSON schema keywords are supported |
| `problems.py` | what is wrong with a constraint, and where |
| `sandbox.py` | a process that tries constraints out, each in a fork with little time and memory |
| `framing.py` | how that process is spoken to |
| `checker.py` | asks that process, and remembers |

A grammar of a few lines can take a compiler minutes or gigabytes, or overflow its stack. So nothing
of a client's is compiled in the frontend's own process.
"""

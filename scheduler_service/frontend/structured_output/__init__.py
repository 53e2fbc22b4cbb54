"""Structured output: constraints are checked here, before a request is accepted.

| file | holds |
| --- | --- |
| `constraint.py` | constraints as workers get them, and `ConstraintChecker`, which caches answers |
| `sandbox.py` | a process that compiles constraints, each in a fork with little time and memory |
| `sandbox_process.py` | that process as its frontend sees it |
| `schemas.py` | clients' JSON schemas before they become constraints: closed, and moved |
| `framing.py` | messages to and from that process |
| `problems.py` | what is wrong with a constraint, and where; the JSON schema keywords supported |

A grammar of a few lines can take a compiler minutes or gigabytes, or overflow its stack. So no
client's grammar is compiled in the frontend's own process.
"""

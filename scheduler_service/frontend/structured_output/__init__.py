"""Structured output: constraints are checked here, before a request is accepted.

| file | holds |
| --- | --- |
| `constraint.py` | constraints as workers get them, and `ConstraintChecker`, which caches answers |
| `sandbox.py` | compiles constraints, each in a process with little time and memory |
| `schemas.py` | clients' JSON schemas before they become constraints: closed, and moved |
| `problems.py` | what is wrong with a constraint, and where; the JSON schema keywords supported |

A grammar of a few lines can take a compiler minutes or gigabytes, or overflow its stack. So no
client's grammar is compiled in the frontend's own process.
"""

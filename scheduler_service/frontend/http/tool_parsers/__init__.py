"""Calls of functions in what a model writes, found while it writes.

Every family of models has its own way to write a call. A parser takes the text piece by piece and
gives events: text for the reader, the start of a call, pieces of its arguments. Text is held back
only as long as it may turn out to belong to a call, and what looks like one and is none is given as
text.

- `hermes`: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen and many more).
- `llama`: the answer is `{"name": …, "parameters": {…}}` (Llama 3).
- `mistral`: `[TOOL_CALLS]` and a list of calls, or a name and its arguments.
- `constrained`: what a schema made of the answer, where a call was required.
"""

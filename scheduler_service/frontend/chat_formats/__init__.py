"""Chat formats: thoughts and tool calls in a model's output, found while it is streamed.

Every family of models marks the parts of its answers in its own way. A parser gets the text piece
by piece and returns events: content, reasoning, the start of a call, pieces of its arguments. Text
is held back only as long as it may turn out to belong to a call; text that looks like a call and is
none is content.

- `formats`: the formats, and which one a model uses.
- `events`: the events, and the interface of parsers.
- `partial_json`: a call that is written as JSON, as it is streamed.
- `hermes`: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen and many more).
- `llama`: the answer is `{"name": …, "parameters": {…}}` (Llama 3).
- `mistral`: `[TOOL_CALLS]` and a list of calls, or a name and its arguments.
- `constrained`: output that follows a JSON schema, where a call was required.
"""

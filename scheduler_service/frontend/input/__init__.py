"""The input processor: from a client's request to the tokens and parameters that the core gets.

| module | holds |
| --- | --- |
| `message_limits` | limits on the size of serialized messages, checked before they are parsed |
| `validation` | every field's range, and which fields exclude each other |
| `chat` | conversations: checked, and rendered to the text of a prompt |
| `tool_choice` | required tool calls, and how the answer to a conversation is read |
| `processor` | a request with its prompt as token ids and every default resolved, for the core |
"""

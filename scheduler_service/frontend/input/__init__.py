"""The input processor: from a client's request to the tokens and parameters that the core gets.

| module | holds |
| --- | --- |
| `message_limits` | limits on the size of serialized messages, checked before they are parsed |
| `validation` | every field's range, and which fields exclude each other |
| `prompt` | prompts as token ids: given, tokenized, or rendered from a chat |
| `tokenizer`, `chat_template` | a model's tokenizer and its chat template |
| `processor` | a request with every default resolved, as it is submitted to the core |
"""

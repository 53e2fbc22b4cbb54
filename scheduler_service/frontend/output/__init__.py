"""The output processor: from the core's tokens to responses.

| module | holds |
| --- | --- |
| `request_stream` | one open request and its choices: their outputs, merged until they are read |
| `message` | the reasoning, the content and the tool calls in a choice's text |
| `detokenizer` | text from tokens, incrementally |
| `stop_strings` | stop strings that span pieces of text |
| `logprobs` | log probabilities as responses carry them |
"""

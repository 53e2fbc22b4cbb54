"""The output processor: from tokens to text, calls and log probabilities.

| module | holds |
| --- | --- |
| `message` | the reasoning, the content and the tool calls in a choice's text |
| `detokenizer` | text from tokens, incrementally |
| `stop_strings` | stop strings that span pieces of text |
| `logprobs` | log probabilities as responses carry them |
"""

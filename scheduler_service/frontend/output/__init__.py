"""The output processor: from the core's tokens to responses.

| module | holds |
| --- | --- |
| `request_stream` | one open request: the outputs of its choices, merged until they are read |
| `choice_stream` | one choice: its tokens, text and finish reason |
| `detokenizer` | text from tokens, incrementally |
| `stop_strings` | stop strings that span pieces of text |
| `logprobs` | log probabilities as responses carry them |
"""

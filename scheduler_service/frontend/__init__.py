"""A frontend: clients and text on one side, the scheduler core and tokens on the other.

    client ──Generate──▶ servicer ─▶ request_manager ─▶ input/ ──▶ core_client ──Attach──▶ core
    client ◀─responses── servicer ◀────────────────── requests/ ◀─ core_client ◀─tokens─── core

| module | holds |
| --- | --- |
| `server`, `config`, `cli` | composition and shutdown, configuration, the command line |
| `servicer` | `InferenceService` over gRPC |
| `http/` | the same over HTTP: OpenAI's API, metrics, the dashboard |
| `auth` | API keys, and what each allows |
| `request_manager` | the open requests: attempts, deadlines, cancellation |
| `capacity` | how many requests may be open, and whether new ones are accepted |
| `multiplexer` | several requests in one call |
| `pooling/` | calls for vectors, scores, ranks and labels of many texts |
| `input/` | validation, tokenization, defaults: a request as the core gets it |
| `structured_output/` | checks of constraints on the output |
| `chat_formats/` | thoughts and tool calls in a model's output |
| `models/` | the models that can be used: tokenizers, chat templates, defaults |
| `output/` | detokenization, stop strings, log probabilities |
| `requests/` | an open request: its submission to cores, and its responses |
| `adapter_service` | operators' calls that load and unload adapters |
| `core_client` | the one stream to the core |
| `metrics`, `timings` | what is measured |

On the way in, a request is validated, waits for its model and its files, has its constraint
checked, is tokenized and resolved: no default is left open, a seed and an id are drawn once.
`core_client` numbers it and submits it on the one stream to the core.

On the way out, `core_client` hands each token to its `ChoiceStream`, which detokenizes it, looks
for stop strings and keeps what was not read yet. `RequestStream` merges that into one response
whenever its reader is ready for one. If only the best of all candidates are wanted, it holds
everything back until all have ended.

A frontend owns the open client streams, and no state that outlives them. Its promises:

- **To clients.** Text is never taken back and never half a character. A stream ends with OK only
  after every choice's finish reason and the usage; everything else is an error with details.
  Cancelling, a deadline or an abort reaches the core at once, whether or not the client reads. A
  slow reader costs no more memory than its tokens.
- **To the core.** Requests come complete and in range. At most one message is in flight; the next
  one carries everything that was added meanwhile. What the core does not know after a loss is
  submitted again with its generated tokens, so that a request's tokens are the same as without the
  loss.
- **To operators.** NOT_SERVING until a model can be served. On SIGTERM no new request is accepted,
  open ones may finish within the grace period, the rest end as UNAVAILABLE.

The event loop does everything but the checks and the text work of large requests, which run in
threads and hold the interpreter's lock for a few milliseconds at a time; messages that could not
be parsed as quickly are refused unparsed. No module here knows about blocks or workers.
"""

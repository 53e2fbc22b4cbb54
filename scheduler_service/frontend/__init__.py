"""A frontend: clients and text on one side, the scheduler core and tokens on the other.

    client ──Generate──▶ servicer ─▶ open_requests ─▶ settled ─▶ core_link ──Attach──▶ core
    client ◀─responses── servicer ◀─ request_stream ◀─ choice_stream ◀─ core_link ◀─tokens── core

Going in, a request is checked (`validation`), waits for its model and its files (`model_assets`),
has its constraint tried out, if it has one (`structured/`), is tokenized (`tokenizer`,
`chat_prompt`) and settled: no default is left open, a seed and an id are drawn once (`settled`,
`generation_defaults`). `core_link` numbers it and puts it on the one stream to the core.

Coming back, `core_link` hands each token to its `choice_stream`, which makes text of it
(`detokenizer`), looks for stop strings (`stop_strings`) and keeps what was not read yet.
`request_stream` merges that into one response whenever its reader is ready for one: `servicer` for
a single call, `many` for a stream of many requests. Where only the best of all candidates are
wanted, it holds everything back until all have ended (`best_choices`).

`http/` is the same for HTTP clients, by OpenAI's interface: it makes the messages that gRPC clients
send, and words the responses as theirs expect.

A frontend owns the open client streams and nothing else that would be missed. Its promises:

- **To clients.** Text is never taken back and never half a character. A stream ends with OK only
  after every choice's finish reason and the usage; everything else is an error with details.
  Cancelling, a deadline or an abort reaches the core at once, whether or not anybody reads. A slow
  reader costs no more memory than its tokens.
- **To the core.** Requests come complete and in range. At most one message is under way, with all
  that there was to say when it left. What the core does not know after a loss is submitted again
  with its generated tokens, so that a request's tokens are the same as without the loss.
- **To operators.** NOT_SERVING until a model can be served. On SIGTERM nothing new is taken, what
  is open may finish within the grace period, the rest ends as UNAVAILABLE.

The event loop does everything but the text work on large requests, which goes to threads (the
tokenizers library lets go of the interpreter's lock). Nothing here knows blocks or workers.
"""

"""The conformance kit: checks over the wire whether a worker implements the contract.

    python -m conformance 127.0.0.1:7620

The kit acts as the core towards any implementation of `WorkerService`, in any language. It
uses `pagewire.v1` and nothing else of the project, because it judges: what it implements again,
such as the sampler, is independent on purpose. Each case is a sentence, proves a promise that it
cites from the .proto files, and prints one line. docs/writing-a-worker.md explains them.

| module | holds |
| --- | --- |
| `__main__` | the command line |
| `case`, `cases` | the definition of a case; the cases, a module for each topic |
| `runner` | runs the cases; report lines and a JUnit file |
| `assertions` | how a case fails or is skipped |
| `worker` | the worker under test: its facts, new epochs, reference outputs |
| `step_stream` | one epoch's step stream: plans go out, results come back |
| `step_call`, `step_result` | its call and how that ends; results, decoded |
| `block_tables` | the blocks of the stream's sequences |
| `sequence` | the kit's copy of a sequence; rows of plans |
| `generation` | sampled tokens with log probabilities, and the comparison of two generations |
| `sampling_oracle` | the expected token for a distribution, parameters and a draw |
| `structured_output` | the tokens that a constraint allows |
| `cache_groups` | which tokens a token sees, by cache group |
| `vocabulary` | the bytes of each token, from tokenizer.json |
| `registration_server` | the core's side of a registration |
| `credentials` | cluster tokens and certificates |

How it can judge without knowing the model: a token depends on all tokens before it. So whatever
is done to a sequence's blocks (chunks, forks, copies, swaps, a borrowed prefix, recomputation)
must lead to the tokens and log probabilities of the same sequence left alone, and the blocks of
another sequence must not. The reported log probabilities determine what the sampler must choose.
"""

"""Does a worker keep the contract? A kit that asks it, over the wire.

    python -m conformance 127.0.0.1:7620

The kit plays the core's part against any implementation of `WorkerService`, in any language. It
knows `pagewire.v1` and nothing else of the project. Each case is a sentence, proves a promise that
it cites from the .proto files, and prints one line. docs/writing-a-worker.md explains them.

    __main__.py     the command line
    case.py         what a case is, and how it fails or is skipped
    cases/          the cases, a file for each topic
    worker.py       the worker under test: its facts, new epochs, reference outputs
    session.py      one epoch's step stream: plans go out, results come back
    sequence.py     what the kit remembers of a sequence; rows
    generation.py   tokens with their log probabilities, and when two of them are the same
    sampler.py      which token a distribution, parameters and a draw lead to
    constrained.py  which tokens a constraint allows
    language.py     texts of which it is easy to say what may become one of them
    token_texts.py  the text of each token, from tokenizer.json
    desk.py         the core's side of a registration
    runner.py, report.py   one case after another; lines and a JUnit file
    columns.py      int32 columns

How it can judge without knowing the model: a token depends on all tokens before it. So whatever
is done to a sequence's blocks (chunks, forks, copies, swaps, a borrowed prefix, recomputation)
must lead to the tokens and log probabilities of the same sequence left alone, and the blocks of
another sequence must not. What the sampler does follows from the log probabilities reported.
"""

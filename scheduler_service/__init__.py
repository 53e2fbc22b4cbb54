"""The scheduling side of Pagewire: frontends, and the core that decides what runs where.

    client ──▶ frontend ──Attach──▶ scheduler core ──ExecuteSteps──▶ worker
               text │ tokens        queues │ blocks │ plans

Two roles, one package, two commands: `python -m scheduler_service frontend` and `… scheduler`.

`frontend/`      owns open client streams: validates, renders chats, tokenizes, submits to the core,
                 detokenizes, matches stop strings, streams. Knows no blocks and no workers, and
                 keeps no state that a client could not bring along to another frontend.
`core/`          the scheduler core itself, a plain object: queues, sequence groups, block managers.
                 `schedule` and `update` are functions of its state; it reads no clock and waits
                 for nothing, so any run can be replayed.
`core_service/`  the core's edges: frontends' streams, the worker registry, the links to workers.
`replay/`        records the calls that a core gets, and replays them exactly.

Both roles share, each in one place:

`wire.py`            the core's dataclasses as protobuf messages and back
`columns.py`         columns of integers, as they travel
`attempts.py`        which of two attempts at one request is served
`errors.py`          what can go wrong, in our own words
`status_codes.py`    the same as gRPC statuses with details, and back
`service_runner.py`  a gRPC server with signals and an orderly end
`tasks.py`           running coroutines until the first one ends
`command_line.py`    logging, one-line errors, exit codes

What the worker needs as well, such as servers, addresses and credentials, is in `service_common`.

What others may rely on: nothing here imports torch or touches a model's weights. All state of the
core is soft: workers register again, frontends submit again with the tokens they have. A request
ends by its own tokens, its client's cancellation, its deadline, or an explicit error; never by
silence.
"""

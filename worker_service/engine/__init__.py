"""The engine: epochs, step streams and the model thread, whatever executes the plans.

    engine.py         what is loaded, which epoch holds, who may send plans
    executor.py       the protocols `Executor` and `Runner`, of a model or the simulation
    step_stream.py    one `ExecuteSteps` stream: plans in, results out, in order
    model_thread.py   the thread that launches steps, and the one that collects them
    step_stats.py     counts of steps, for metrics and the log
    tracing.py        spans of requests

Nothing here imports torch or protobuf.
"""

"""The engine: epochs, step streams and the model thread, over any executor of plans.

    engine.py         the loaded model, the current epoch, and the stream that may send plans
    executor.py       the protocols `Executor` and `Runner`
    step_stream.py    one `ExecuteSteps` stream: plans in, results out, in order
    model_thread.py   the thread that launches steps, and the one that collects them
    step_stats.py     counts of steps, for metrics and the log
    tracing.py        spans of requests

Nothing here imports torch or protobuf.
"""

"""The engine: epochs, step streams and the model thread, over any executor of plans.

    engine.py         the loaded model, the current epoch, and the stream that may send plans
    executor.py       the protocols `Executor` and `Runner`, and the threads that call them
    step_stream.py    one `ExecuteSteps` stream: plans in, results out, in order
    cached_blocks.py  records of what is in the caches, kept for the next core
    step_stats.py     counts of steps, for metrics and the log
    tracing.py        spans of requests

Nothing here imports torch or protobuf.
"""

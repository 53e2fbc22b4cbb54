"""The engine: epochs, step streams and the model thread, over any executor of plans.

    engine.py         the current epoch, its caches, and the stream that may send plans
    model_host.py     the loaded model, and the thread that computes it
    executor.py       the protocols `Executor` and `Runner`, and the threads that call them
    step_stream.py    one `ExecuteSteps` stream: plans in, results out, in order
    cached_blocks.py  records of what is in the caches, kept for the next core
    step_stats.py     counts of steps, for metrics and the log
    tracing.py        spans of requests

Nothing here imports torch or protobuf.
"""

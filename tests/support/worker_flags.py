"""Flags of workers with the embedded model, or another tiny one."""

SMALL_CACHE = ("--kv-cache-memory", "64MiB")
"""Room for 32 sequences of full length. By default there is room for 256 of them, and a worker
allocates all of it, 512 MiB in float32, which takes a second of CPU time. `Cluster` gives it to
every worker, before a test's own flags."""

FLOAT32 = ("--dtype", "float32")

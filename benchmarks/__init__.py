"""Scripts that measure; each prints its figures beside a peer's or a limit's from the same run.

| script | measures |
| --- | --- |
| `offline` | tokens per second of whole workloads, through the services, against `transformers` |
| `scheduler_overhead` | the core's CPU time per step |
| `frontend` | a frontend's CPU time per streamed token |
"""

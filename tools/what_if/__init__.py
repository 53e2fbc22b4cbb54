"""What-if replay: the requests of a recording under other policies or configurations.

Runs in virtual time, on the real scheduler core. Step times are predicted by a model fitted to the
recorded ones.

    python -m tools.what_if trace.jsonl.gz --with max_num_seqs=4

| module | holds |
| --- | --- |
| `trace` | the load of a recording, whatever the scheduler made of it; outcomes of requests |
| `cost_model` | step times, fitted to recorded steps |
| `simulation` | a trace on a core, in virtual time |
| `comparison` | configurations, and the latencies under each |
| `report` | tables |

See docs/replay.md.
"""

"""Load on a running deployment, and its latencies and throughput.

| module | holds |
| --- | --- |
| `workload` | prompts, lengths and arrival times, the same ones for the same seed |
| `load_generator` | sends each request to a `Target` when it is due, and records token times |
| `summary` | percentiles, rates and goodput of many `Record`s |

Contains neither servers nor printing: the generator loads any server that has a `Target`.
"""

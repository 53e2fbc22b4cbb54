"""Benchmarks; each prints its figures next to a peer's or a limit's from the same run.

| script | measures |
| --- | --- |
| `offline` | tokens per second of whole workloads, through the services, against other engines |
| `online` | latencies and goodput at increasing request rates, against vLLM's server |
| `startup` | time from launch to first token, and peak memory, against vLLM's |
| `scheduler_overhead` | the core's CPU time per step, against its budgets and vLLM's scheduler |
| `frontend` | a frontend's CPU time per streamed token |
| `embeddings` | vectors of texts, against libraries that make them |
| `kernels` | kernels against the ceilings, products with fewer bits among them |
| `speculation` | decoding with drafts against decoding without |
| `recovery` | time from the death of a process to the next token of its streams |
| `gpu_day` | stages for a short time on a GPU machine, with `tune_attention` |

`report` copies results into docs/benchmarks.md.
"""

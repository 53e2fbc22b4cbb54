"""Benchmarks; each prints its figures next to a peer's or a limit's from the same run.

| script | measures |
| --- | --- |
| `scheduler_overhead` | the core's CPU time per step, against its budgets and vLLM's scheduler |
| `recording` | what `--record` adds to that |
| `fairness` | effect of a flooding tenant on others, and shares by weight, in simulated time |
| `pipelining` | a device's idle time between steps, by pipeline depth |
| `wire` | sizes of plans and results, time to encode and decode them, round trips |
| `endurance` | the memory that finished requests leave behind in every service |
| `scaling_out` | whether requests notice that workers come and go |
| `frontend` | a frontend's CPU time per streamed token |
| `online` | latencies and goodput as requests arrive faster and faster, against `vllm serve` |
| `offline` | tokens per second of whole workloads, through the services, against other engines |
| `quantized_weights` | time of products with weights in fewer bits, against dense ones |
| `gguf_decode` | tokens per second from a GGUF file, in process, against llama.cpp |
| `startup` | time from launch to first token, and peak memory, against vLLM's |

`report` copies results into docs/benchmarks.md, and draws the pictures there.
"""

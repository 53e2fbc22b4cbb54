"""Benchmarks; each prints its figures next to a peer's or a limit's from the same run.

| script | measures |
| --- | --- |
| `scheduler_overhead` | the core's CPU time per step, against its budgets and vLLM's scheduler |
| `recording` | the CPU time that `--record` adds to a step |
| `frontend` | a frontend's CPU time per streamed token |
| `online` | latencies and goodput at increasing request rates, against `vllm serve` |
| `offline` | tokens per second of whole workloads, through the services, against other engines |
| `quantized_weights` | time of matrix products with quantized weights, against dense ones |
| `gguf_decode` | tokens per second from a GGUF file, in process, against llama.cpp |
| `startup` | time from launch to first token, and peak memory, against vLLM's |

`report` copies results into docs/benchmarks.md.
"""

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
| `saved_states` | what it costs to save the states of recurrent layers |
| `adapters` | throughput with LoRA adapters, against none, and vLLM and llama.cpp with the same |
| `recovery` | time from the death of a process to the next token of its streams |
| `moving` | pauses, and tokens computed again, when requests change their worker or core |
| `prefill_stall` | gaps of a stream while a long prompt is computed |
| `cache_memory` | memory of sequences in the cache, against arithmetic |
| `gpu_day` | stages for a short time on a GPU machine, with `tune_attention` |

`report` copies results into docs/benchmarks.md. `measuring/` has what the scripts measure with,
`models/` the checkpoints that they load, `engines/` the engines that they compare.
"""

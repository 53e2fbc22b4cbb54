"""The engines that benchmarks compare, each behind the same interface.

| module | engine | runs in |
| --- | --- | --- |
| `pagewire` | Pagewire through its services | three processes of its own, over gRPC |
| `in_process` | Pagewire's scheduler core and worker joined by function calls | a child |
| `transformers_static` | `generate` on one padded batch | a child |
| `vllm` | vLLM's offline `LLM` | a child under the Python that has it |
| `over_http` | Pagewire or vLLM as the server that its users start | its processes, over HTTP |
| `nano_vllm` | nano-vllm's `LLM` | a child under the Python that has it |
| `llama_cpp` | `llama-server` | its own process, over HTTP |

`engine` is the interface, `child` the parent's end of engines in child processes, and `choice`
creates the engines that are requested and installed, which `interleaved_runs` lets take turns at
`workloads`; `comparison` makes rows of what they reach beside each other, and beside the floor of
`roofline`. `servers` starts those that `openai_target` calls. `embedders` is the child's end of
libraries that make vectors, `vllm_scheduler` that of vLLM's scheduler alone.
"""

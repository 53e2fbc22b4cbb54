"""The services' flags, and which service takes which.

`LLM` takes them as keyword arguments, `pagewire serve` as options; both pass on what was given
and leave defaults, environment variables and checks to the service.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire_cli import vllm_flags


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag; `--max-model-len` has the name `max_model_len`."""

    name: str
    kind: Any
    """`list[str]`: the option may be repeated."""
    service: str
    """The service that takes it, or `all`."""
    help: str
    negatable: bool = False
    """A switch that also has a `--no-…` form."""
    short: str = ""
    """Another name of the option."""

    def is_for(self, service: str) -> bool:
        """Whether a service takes it."""
        return self.service in (service, "all")

    @property
    def option(self) -> str:
        """The option on a command line."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """Raise ValueError if the flag is a number and `value` is none."""
        try:
            if self.kind in (int, float) and value is not None:
                self.kind(value)
        except (TypeError, ValueError):
            kind = "whole number" if self.kind is int else "number"
            raise ValueError(f"{self.name}: expected a {kind}, got {value!r}") from None

    def arguments(self, value: Any) -> list[str]:
        """The command-line arguments for `value`."""
        if self.kind is not bool:
            values = [value] if isinstance(value, str) or self.kind != list[str] else value
            return [argument for item in values for argument in (self.option, str(item))]
        if value:
            return [self.option]
        return ["--no-" + self.option[2:]] if self.negatable else []


FLAGS = (
    Flag("revision", str, "worker", "Branch, tag or commit of a model on the hub."),
    Flag("served_model_name", list[str], "worker", "Name of the model for clients; repeatable."),
    Flag("device", str, "worker", "auto, cpu, cuda or cuda:N."),
    Flag("dtype", str, "worker", "auto, float32 (float), bfloat16, or on GPUs float16 (half)."),
    Flag("max_model_len", str, "worker", "Most tokens of prompt and output together, as 8k."),
    Flag("block_size", int, "worker", "Tokens per KV block."),
    Flag("kv_cache_memory", str, "worker", "Memory for the KV cache, such as 4GiB."),
    Flag("swap_space", str, "worker", "Host memory for swapped blocks, such as 4GiB."),
    Flag("gpu_memory_utilization", float, "worker", "Share of the GPU's memory to use."),
    Flag("load_format", str, "worker", "safetensors, or dummy for random weights."),
    Flag("runner", str, "worker", "auto, generate, or pooling: vectors, scores.", short="--task"),
    Flag("pooler_config", str, "worker", "How the model pools, as vLLM's JSON object."),
    Flag("classifier_tokens", str, "worker", "Tokens that are labels, as no,yes for a score."),
    Flag("pair_template", str, "worker", "Jinja template (or its file) for a scored pair."),
    Flag(
        "quantization",
        str,
        "worker",
        "int8, int4 or fp8, or on CPUs w8a8, to round weights.",
        short="-q",
    ),
    Flag("reasoning_parser", str, "worker", "How reasoning is marked: auto, none or a format."),
    Flag("tool_call_parser", str, "worker", "How calls are marked: auto, none or a format."),
    Flag("quantization_cache", str, "worker", "Folder that keeps rounded weights (int8, int4)."),
    Flag("tensor_parallel_size", int, "worker", "Ranks that share each layer.", short="-tp"),
    Flag("pipeline_parallel_size", int, "worker", "Stages of the layers.", short="-pp"),
    Flag("attention_backend", str, "worker", "Attention kernels to use."),
    Flag("kv_cache_dtype", str, "worker", "auto; fp8 (GPUs) or int8 (CPUs) for a byte each."),
    Flag("batch_invariant", bool, "worker", "Make tokens independent of the batch, on GPUs too."),
    Flag("symmetric_memory", bool, "worker", "Add small sums in NCCL's symmetric memory (GPUs)."),
    Flag("cuda_graphs", bool, "worker", "Capture steps as CUDA graphs at start (GPUs).", True),
    Flag("max_graph_batch_size", int, "worker", "Largest batch of decodes captured."),
    Flag("max_graph_tokens", int, "worker", "Largest batch with prompts captured, in tokens."),
    Flag("speculative", str, "worker", "Draft tokens by ngram, suffix, draft or eagle (CPUs)."),
    Flag("speculative_model", str, "worker", "The model that drafts, or the head (draft, eagle)."),
    Flag("num_speculative_tokens", int, "worker", "Most drafts added to a sequence's step."),
    Flag("compile", bool, "worker", "Compile the model's layers by torch.compile (GPUs)."),
    Flag("enable_lora", bool, "worker", "Serve LoRA adapters of the model."),
    Flag("max_loras", int, "worker", "Adapters in one step; requests for others wait."),
    Flag("max_cpu_loras", int, "worker", "Adapters held on the host."),
    Flag("max_lora_rank", int, "worker", "Maximum rank of an adapter."),
    Flag("lora_modules", list[str], "worker", "Adapter to load, NAME=PATH or JSON; repeatable."),
    Flag("role", str, "worker", "prefill, decode or both."),
    Flag("threads", int, "worker", "CPU threads of one worker."),
    Flag("cpu_affinity", str, "worker", "CPUs to pin one worker's threads to, as 0,2-5."),
    Flag("trust_remote_code", bool, "worker", "Run code that comes with the model."),
    Flag("simulate", bool, "worker", "Simulate a worker: check plans, generate random tokens."),
    Flag("simulate_gpu_blocks", int, "worker", "KV blocks on the simulated device."),
    Flag("simulate_cpu_blocks", int, "worker", "KV blocks on the simulated host."),
    Flag("simulate_cache_groups", str, "worker", "Simulated groups, as growing:64,state:4."),
    Flag("simulate_labels", int, "worker", "Labels of the simulated model."),
    Flag("simulate_vocab_size", int, "worker", "Vocabulary size of the simulated model."),
    Flag("simulate_eos_token_id", int, "worker", "End-of-sequence token of the simulated model."),
    Flag("simulate_step_us", float, "worker", "Microseconds per simulated step."),
    Flag("simulate_token_us", float, "worker", "Microseconds per token of a row beyond its first."),
    Flag("simulate_sequence_us", float, "worker", "Microseconds per row."),
    Flag("simulate_block_us", float, "worker", "Microseconds per swapped block."),
    Flag("max_num_seqs", int, "scheduler", "Most sequences in a batch."),
    Flag("max_num_batched_tokens", str, "scheduler", "Most tokens computed in one step, as 8k."),
    Flag("enable_chunked_prefill", bool, "scheduler", "Compute long prompts in chunks.", True),
    Flag("enable_prefix_caching", bool, "scheduler", "Reuse blocks of shared prefixes.", True),
    Flag("preemption_mode", str, "scheduler", "auto, swap or recompute."),
    Flag("move_kv", str, "scheduler", "Copy KV between workers: auto, always or never."),
    Flag("watermark", float, "scheduler", "Share of blocks kept free when admitting."),
    Flag("pipeline_depth", int, "scheduler", "Steps planned ahead."),
    Flag("max_results", int, "scheduler", "Most steps that travel in one message."),
    Flag("max_step_ms", float, "scheduler", "Longest step with prompts and decodes on a CPU."),
    Flag("max_speculative_seqs", int, "scheduler", "Most decoding sequences with drafts."),
    Flag("lease_ms", int, "scheduler", "Silence after which a worker counts as lost."),
    Flag("step_timeout", float, "scheduler", "Most seconds of any step; 0 disables the limit."),
    Flag("first_step_timeout", float, "scheduler", "Most seconds of the first steps of a size."),
    Flag("step_timeout_factor", float, "scheduler", "Most times its expected time a step takes."),
    Flag("max_queue_requests", int, "scheduler", "Most waiting requests."),
    Flag("max_queue_tokens", str, "scheduler", "Most prompt tokens of waiting requests."),
    Flag("policy", str, "scheduler", "Scheduling policy: fcfs, priority or fair."),
    Flag("tenants", str, "scheduler", "File of tenants' weights and limits."),
    Flag("isolate_tenants", bool, "scheduler", "Share no KV blocks between tenants.", True),
    Flag("max_worker_losses", int, "scheduler", "Crashes alone after which a request fails."),
    Flag("max_outgrown_wait", float, "scheduler", "Seconds large requests wait for a worker."),
    Flag("record", str, "scheduler", "File to record the schedule to, prompts included."),
    Flag("record_plans", bool, "scheduler", "Record whole plans, not only hashes."),
    Flag("allow_runtime_lora_updating", bool, "frontend", "Let operators change adapters."),
    Flag("api_keys", str, "frontend", "File of API keys."),
    Flag("tls_cert", str, "frontend", "Certificate for clients (PEM)."),
    Flag("tls_key", str, "frontend", "That certificate's key (PEM)."),
    Flag("tls_client_ca", str, "frontend", "Authority of clients' certificates (PEM)."),
    Flag("http_allowed_hosts", list[str], "frontend", "Name for HTTP clients; repeatable."),
    Flag("max_connections", int, "frontend", "Most connections of clients per frontend."),
    Flag("max_concurrent_requests", int, "frontend", "Most open requests per frontend."),
    Flag("max_tenant_requests", int, "frontend", "Most open requests of one tenant or call."),
    Flag("sse_keep_alive", float, "frontend", "Seconds of silence before a comment in a stream."),
    Flag("default_timeout", float, "frontend", "Seconds for requests without a deadline."),
    Flag("cluster_token_file", str, "all", "File of the token that the services send each other."),
    Flag("cluster_ca", str, "all", "Authority of the services' certificates (PEM)."),
    Flag("cluster_cert", str, "all", "The services' certificate (PEM)."),
    Flag("cluster_key", str, "all", "That certificate's key (PEM)."),
    Flag("otlp_endpoint", str, "all", "URL of the OTLP collector for spans of requests."),
    Flag("log_level", str, "all", "debug, info, warning or error."),
    Flag("log_format", str, "all", "text, or json for one object per line."),
    Flag("grace_period", float, "all", "Seconds to finish requests at shutdown."),
)


def check_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without switches of vLLM that are always on. Raises TypeError for other unknown
    flags, which it explains together."""
    flags = {flag.name: flag for flag in FLAGS}
    options = [flag.option for flag in FLAGS]
    accepted, lines = {}, ["unknown engine flags:"]
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if name in flags:
            flags[name].check(value)
            accepted[name] = value
        elif not (value and vllm_flags.is_always_on(option)):
            line = vllm_flags.explain(option, options, spell=_as_argument)
            lines.append(line.replace(option, name, 1))
    if len(lines) > 1:
        raise TypeError("\n".join(lines))
    return accepted


def _as_argument(option: str) -> str:
    """An option as a keyword argument of `LLM`; one that `LLM` lacks is returned unchanged."""
    names = {flag.option: flag.name for flag in FLAGS} | {"--workers": "num_workers"}
    if option.startswith("--no-"):
        return f"{names['--' + option.removeprefix('--no-')]}=False"
    return names.get(option, option)


def arguments(service: str, values: Mapping[str, Any]) -> list[str]:
    """Arguments for `service`: those of its flags that have a value other than None."""
    return [
        argument
        for flag in FLAGS
        if flag.is_for(service) and values.get(flag.name) is not None
        for argument in flag.arguments(values[flag.name])
    ]

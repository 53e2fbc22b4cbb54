"""The worker's settings: one frozen dataclass per concern, built once from the command line.

The docstrings of most fields are the help texts of their flags; `launcher/flags.py` derives those.
Nothing here imports torch.
"""

import json
import re
import uuid
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

from service_common.chat_parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from service_common.cluster import NO_CLUSTER, ClusterConfig
from service_common.durations import MAX_SECONDS
from worker_service.address import TcpAddress, parse
from worker_service.cache_groups import CacheGroup, CacheLifetime
from worker_service.cpu_cores import ALL_CORES, CpuShare
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidOption, ModelNotFound

MAX_THREADS = 4096
"""More cores than machines have. The compute libraries end the process by a signal where the system
refuses them threads."""


_SURROGATES = re.compile("[\ud800-\udfff]")
"""In command lines and variables: bytes that are not of the locale's encoding."""


def _expect(condition: bool, flag: str, expected: str, got: object) -> None:
    if not condition:
        raise InvalidOption(f"{flag}: expected {expected}, got {got}")


def _expect_one_of(values: tuple[str, ...], flag: str, got: str) -> None:
    _expect(got in values, flag, f"one of {', '.join(values)}", repr(got))


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """The duration of a simulated step: a sum of costs per step, row, token beyond a row's first,
    and swapped block. Swaps come first.

    All costs are in microseconds. If all are zero, a step takes only the time to check its plan.
    """

    step_us: float = 0.0
    """Microseconds per simulated step, independent of its rows."""

    token_us: float = 0.0
    """Microseconds per token of a row beyond its first, which only prefills have."""

    sequence_us: float = 0.0
    """Microseconds per row of a simulated step."""

    block_us: float = 0.0
    """Microseconds per block that is swapped out or in."""

    def __post_init__(self) -> None:
        for name in ("step_us", "token_us", "sequence_us", "block_us"):
            got = getattr(self, name)
            _expect(0.0 <= got < float("inf"), f"simulate_{name}", "0 or more", got)

    def swap_us(self, num_blocks: int) -> float:
        """Time to swap `num_blocks` blocks, out and in together."""
        return num_blocks * self.block_us

    def compute_us(self, num_rows: int, num_tokens: int) -> float:
        """Time of `num_rows` rows that compute `num_tokens` tokens together."""
        num_more_tokens = max(num_tokens - num_rows, 0)
        return self.step_us + num_rows * self.sequence_us + num_more_tokens * self.token_us


DEFAULT_MAX_MODEL_LEN = 32768
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationConfig:
    """A simulated model's properties, the cache sizes and the cost of steps."""

    model: str = "simulated"
    """The name under which the model is served by default."""

    vocab_size: int = 32000
    """Size of the simulated vocabulary."""

    eos_token_id: int = 2
    """Token that ends a simulated sequence."""

    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    """Maximum number of tokens of prompt and output together."""

    num_gpu_blocks: int = 4096
    """Simulated KV blocks on the device."""

    num_cpu_blocks: int = 4096
    """Simulated KV blocks on the host."""

    cache_groups: str = ""
    """The simulated model's cache groups, such as growing:64,window:64:512,state:4,fixed:64. What
    follows a lifetime are the tokens per block, and those of a window or a chunk; or the number of
    blocks of a state. Default: one growing group. none: it keeps nothing, and only pools."""

    num_labels: int = 3
    """Labels that the simulated model has a logit for; 1: the score of two texts."""

    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        limits = (
            ("max_model_len", self.max_model_len, 1),
            ("simulate_gpu_blocks", self.num_gpu_blocks, 1),
            ("simulate_cpu_blocks", self.num_cpu_blocks, 0),
            ("simulate_labels", self.num_labels, 0),
        )
        for flag, got, minimum in limits:
            _expect(got >= minimum, flag, f"at least {minimum}", got)
        self.groups(1)
        size, end = self.vocab_size, self.eos_token_id
        _expect(1 <= size <= 2**31, "simulate_vocab_size", "1 to 2^31", size)
        _expect(0 <= end < size, "simulate_eos_token_id", f"a token id below {size}", end)

    def groups(self, block_size: int) -> tuple[CacheGroup, ...]:
        """The cache groups; `block_size`: tokens per block where none are named."""
        if self.cache_groups == "none":
            return ()
        if not self.cache_groups:
            return (CacheGroup(block_tokens=block_size),)
        return tuple(map(_cache_group, self.cache_groups.split(",")))


_GROUP_FIELDS = {
    CacheLifetime.GROWING: ("block_tokens",),
    CacheLifetime.WINDOW: ("block_tokens", "span"),
    CacheLifetime.CHUNK: ("block_tokens", "span"),
    CacheLifetime.STATE: ("num_blocks",),
    CacheLifetime.FIXED: ("block_tokens",),
}


def _cache_group(text: str) -> CacheGroup:
    """A group as the flag describes it. Raises InvalidOption."""
    name, *numbers = text.strip().split(":")
    names = {lifetime.value: lifetime for lifetime in _GROUP_FIELDS}
    flag = "simulate_cache_groups"
    _expect(name in names, flag, f"one of {', '.join(names)}, or none alone", repr(name))
    fields = _GROUP_FIELDS[names[name]]
    is_right = len(numbers) == len(fields) and all(n.isdecimal() and int(n) for n in numbers)
    _expect(is_right, flag, ":".join((name, *fields)) + " with numbers of at least 1", repr(text))
    return CacheGroup(lifetime=names[name], **dict(zip(fields, map(int, numbers), strict=True)))


DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("safetensors", "dummy")
QUANTIZATIONS = ("int8", "int4", "fp8", "w8a8")
CHECKPOINT_METHODS = {
    name: name
    for name in ("awq", "gptq", "compressed-tensors", "fp8", "modelopt", "bitsandbytes", "gguf")
} | {  # by vLLM's kernels for them
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
}
"""Methods of quantized checkpoints that the user may name, by vLLM's words for them."""
RUNNERS = ("auto", "generate", "pooling")
GENERATION_CONFIGS = ("auto", "none")
ATTENTION_BACKENDS = ("flash", "triton", "cpu", "reference")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model to load, its numbers and its device."""

    model: str = "embedded"
    """Checkpoint directory, GGUF file, Hugging Face hub id (`owner/name`; of a GGUF file
    `owner/name:TYPE`), or `embedded`."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    dtype: str = "auto"
    """auto, float32, bfloat16, or on GPUs float16."""

    load_format: str = "safetensors"
    """safetensors, or dummy for random weights."""

    runner: str = "auto"
    """What the model does: generate, or pooling for vectors, scores and labels; auto: pooling if
    its files or its architecture say so."""

    quantization: str | None = None
    """Round the weights of linear layers to int8, int4 or fp8 while they are loaded, or on CPUs to
    w8a8, which is int8 with inputs in int8, too; or the method of a quantized checkpoint, such as
    awq, which is only checked."""

    quantization_cache: str | None = None
    """Write rounded weights to this folder, once, and read them at later starts."""

    pooler_config: str | None = None
    """How the model pools, where its files do not say so: a JSON object with vLLM's keys, such as
    {"pooling_type": "MEAN", "normalize": false}."""

    classifier_tokens: str | None = None
    """Tokens of a generator's vocabulary that are the labels of a classifier, such as
    high,medium,low; of two, such as no,yes, the score is the probability of the second."""

    pair_template: str | None = None
    """Jinja template of the text for a query and a document, or a file with it."""

    chat_template: str | None = None
    """Jinja template of chats, or a file with it, in place of the model's own."""

    default_chat_template_kwargs: str | None = None
    """Variables of the chat template that requests need not set: a JSON object, such as
    {"enable_thinking": false}."""

    hf_overrides: str | None = None
    """Keys that replace those of the model's config.json: a JSON object, such as
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}."""

    generation_config: str = "auto"
    """auto: requests have the defaults of the model's generation_config.json; none: they do
    not."""

    override_generation_config: str | None = None
    """Defaults of requests in place of the model's: a JSON object, such as
    {"temperature": 0.6, "max_new_tokens": 512}."""

    max_model_len: int | None = None
    """Maximum number of tokens of prompt and output together."""

    attention_backend: str | None = None
    """flash, triton, cpu or reference."""

    batch_invariant: bool = False
    """Make tokens independent of the rest of the batch on a GPU, too; slower."""

    # Not measured: no machine with two GPUs has been at hand.
    symmetric_memory: bool = False
    """Add small partial sums of several GPUs in NCCL's symmetric memory. Requires torch 2.13."""

    threads: int | None = None
    """CPU threads for the model."""

    cpus: tuple[int, ...] | None = None
    """The CPUs that the model's threads are pinned to, one each; None lets the system place
    them."""

    cpu_share: CpuShare = ALL_CORES
    """The part of the machine's cores for this process, on a CPU and without `threads`."""

    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint."""

    local_rank: int = 0
    """Place among the ranks on this machine: which GPU `auto` and `cuda` take."""

    layout: Layout = field(default_factory=Layout)
    """The part of the model to load."""

    def __post_init__(self) -> None:
        _expect(bool(self.model), "model", "a directory or a hub id", "an empty string")
        _expect_one_of(DTYPES, "dtype", self.dtype)
        _expect_one_of(LOAD_FORMATS, "load_format", self.load_format)
        _expect_one_of(RUNNERS, "runner", self.runner)
        _expect_one_of(GENERATION_CONFIGS, "generation_config", self.generation_config)
        for name in ("pooler_config", "classifier_tokens", "pair_template"):
            got = getattr(self, name)
            is_used = got is None or self.runner != "generate"
            _expect(is_used, name, "none with --runner generate", got)
        if self.quantization is not None:
            _expect(
                self.quantization in (*QUANTIZATIONS, *CHECKPOINT_METHODS),
                "quantization",
                f"{', '.join(QUANTIZATIONS)} to round a dense checkpoint, or the method of a"
                f" quantized one, found without the flag: {', '.join(CHECKPOINT_METHODS)}",
                repr(self.quantization),
            )
        if self.attention_backend is not None:
            _expect_one_of(ATTENTION_BACKENDS, "attention_backend", self.attention_backend)
        _expect(
            self.quantization_cache is None or self.quantization is not None,
            "quantization_cache",
            "none without --quantization",
            self.quantization_cache,
        )
        # Sums must be added alike in batches of all sizes, and only small ones fit.
        _expect(
            not (self.symmetric_memory and self.batch_invariant),
            "symmetric_memory",
            "none with --batch-invariant",
            "both",
        )
        for name in ("max_model_len", "threads"):
            got = getattr(self, name)
            _expect(got is None or got >= 1, name, "at least 1", got)
        most = f"at most {MAX_THREADS}"
        _expect((self.threads or 0) <= MAX_THREADS, "threads", most, self.threads)
        if self.cpus is not None:
            count = len(self.cpus)
            expected = f"at most the {count} of --cpu-affinity"
            _expect((self.threads or 0) <= count, "threads", expected, self.threads)


EMBEDDED = "embedded"
"""The name of the model that is shipped with the package."""


def local_model(model: str) -> Path | None:
    """The checkpoint directory or GGUF file that `model` names; None if it may be a hub id.

    Raises ModelNotFound for another file, a directory without a checkpoint, and a path that does
    not exist.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            files = ", ".join(file.name for file in sorted(path.glob("*.gguf"))[:3])
            hint = f"; name one of its files as the model: {files}" if files else ""
            raise ModelNotFound(f"{path} is a directory, but holds no config.json{hint}")
        return path
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path
    if path.exists():
        raise ModelNotFound(f"{path} is a file; expected a checkpoint's directory or a *.gguf file")
    if model.startswith(("/", ".", "~")) or ("/" not in model and model != EMBEDDED):
        raise ModelNotFound(
            f"{model}: no such directory or file, and not of a hub id's form owner/name"
        )
    return None


DEFAULT_LISTEN = "127.0.0.1:7620"
KV_CACHE_DTYPES = ("auto", "fp8", "int8")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """Size and shape of the paged KV cache."""

    block_size: int | None = None
    """Tokens per KV block, of the cache group with most: a multiple of 16, or 1, 2, 4 or 8."""

    # fp8 is e4m3, with a scale per layer; int8 has one per token and head.
    kv_cache_dtype: str = "auto"
    """auto; fp8 (GPUs) or int8 (CPUs) for keys and values in a byte each."""

    # Both in bytes. None: `kv_cache/memory_budget.py` decides.
    kv_cache_memory: int | None = None
    """Memory for KV blocks, such as 4GiB."""

    swap_space: int | None = None
    """Host memory for swapped blocks."""

    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory to fill."""

    def __post_init__(self) -> None:
        size, share = self.block_size, self.gpu_memory_utilization
        is_size = size is None or (size > 0 and (size in (1, 2, 4, 8) or size % 16 == 0))
        _expect(is_size, "block_size", "a multiple of 16, or 1, 2, 4 or 8", size)
        _expect_one_of(KV_CACHE_DTYPES, "kv_cache_dtype", self.kv_cache_dtype)
        _expect(0.0 < share <= 1.0, "gpu_memory_utilization", "above 0 to 1", share)
        memory, swap = self.kv_cache_memory, self.swap_space
        _expect(memory is None or memory >= 1, "kv_cache_memory", "at least 1 byte", memory)
        _expect(swap is None or swap >= 0, "swap_space", "0 bytes or more", swap)


DRAFTERS = ("ngram", "suffix", "draft", "eagle", "mtp")
DEFAULT_SPECULATIVE_TOKENS = 15
"""With the last token 16, which AMX tiles compute in hardly more time than one."""

MAX_SPECULATIVE_TOKENS = 254
"""A result has one byte for the tokens of a row, which are one more if all drafts are right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerConfig:
    """How steps are computed."""

    # Not with stages of a pipeline, which wait for each other on the host, nor with attention that
    # waits for the device.
    cuda_graphs: bool = True
    """On a GPU, capture steps as CUDA graphs at start and replay them."""

    max_graph_batch_size: int = 512
    """Largest batch of decodes captured."""

    # Larger ones take a GPU longer than the host needs to queue them.
    max_graph_tokens: int = 1024
    """Largest batch with chunks of prompts captured, in tokens; 0 captures none."""

    # Takes long at start and gives up batch invariance.
    compile: bool = False
    """On a GPU, put layers through torch.compile."""

    speculative: str | None = None
    """Draft tokens and verify several in one step, without changing the output: ngram takes drafts
    from what followed the same tokens earlier in the prompt or output, suffix also from recent
    outputs of the same tenant, draft from a second, smaller model, eagle from a head that was
    trained for the model (EAGLE-3), mtp from the one in the model's own checkpoint. Not
    with stages of a pipeline on GPUs."""

    speculative_model: str | None = None
    """The model of `--speculative draft`, or the head of `--speculative eagle`: checkpoint
    directory or hub id, with the vocabulary of `--model`. Loaded with the flags of `--model`."""

    num_speculative_tokens: int | None = None
    """Maximum number of drafts added to a sequence's step."""

    def __post_init__(self) -> None:
        size = self.max_graph_batch_size
        _expect(size >= 1, "max_graph_batch_size", "at least 1", size)
        tokens = self.max_graph_tokens
        _expect(tokens >= 0, "max_graph_tokens", "0 or more", tokens)
        if self.speculative is not None:
            _expect_one_of(DRAFTERS, "speculative", self.speculative)
        named, needs_model = self.speculative_model, self.speculative in ("draft", "eagle")
        expected = (
            f"a directory or a hub id, which --speculative {self.speculative} requires"
            if needs_model
            else "--speculative draft or eagle with it"
        )
        _expect(bool(named) if needs_model else named is None, "speculative_model", expected, named)
        count = self.num_speculative_tokens
        if count is not None:
            has_drafter = self.speculative is not None
            _expect(has_drafter, "num_speculative_tokens", "--speculative with it", count)
            in_range = 1 <= count <= MAX_SPECULATIVE_TOKENS
            _expect(in_range, "num_speculative_tokens", f"1 to {MAX_SPECULATIVE_TOKENS}", count)

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts of a row; 0 without speculation."""
        if self.speculative is None:
            return 0
        return self.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS

    @property
    def drafts_by_layers(self) -> bool:
        """Whether drafts come from layers, with keys and values of their own."""
        return self.speculative == "draft" or self.has_draft_head

    @property
    def has_draft_head(self) -> bool:
        """Whether drafts come from a head, which reads the model's hidden states."""
        return self.speculative in ("eagle", "mtp")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterModule:
    """An adapter that is loaded when the worker starts."""

    name: str
    path: str
    base_model_name: str | None = None
    """The model that it must be of; None: the worker's."""

    @classmethod
    def parse(cls, text: str) -> "AdapterModule":
        """`NAME=PATH`, or vLLM's JSON object of name and path. Raises InvalidOption."""
        expected = "NAME=PATH, or a JSON object of name, path and base_model_name"
        if not text.lstrip().startswith("{"):
            name, _, path = text.partition("=")
            _expect(bool(name and path), "lora_modules", expected, repr(text))
            return cls(name=name, path=path)
        try:
            values = json.loads(text)
        except ValueError:
            values = {}
        is_valid = {"name", "path"} <= values.keys() <= {"name", "path", "base_model_name"}
        is_valid = is_valid and all(isinstance(text, str) and text for text in values.values())
        _expect(is_valid, "lora_modules", expected, repr(text))
        return cls(**values)


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
"""What the core allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """LoRA adapters."""

    enable_lora: bool = False
    """Serve LoRA adapters of the model."""

    max_loras: int = 1
    """Adapters in one step; requests for further ones wait."""

    max_cpu_loras: int = 64
    """Adapters held on the host, at least --max-loras."""

    max_lora_rank: int = 16
    """Maximum rank of an adapter."""

    lora_modules: list[str] = field(default_factory=list)
    """Adapter to load at the start; may be repeated. NAME=PATH, or a JSON object of name, path and
    base_model_name."""

    def __post_init__(self) -> None:
        for name in ("max_loras", "max_lora_rank"):
            got = getattr(self, name)
            _expect(got >= 1, name, "at least 1", got)
        at_least = f"at least {self.max_loras}, --max-loras"
        _expect(self.max_cpu_loras >= self.max_loras, "max_cpu_loras", at_least, self.max_cpu_loras)
        names = [module.name for module in self.modules]
        _expect(len(set(names)) == len(names), "lora_modules", "each name once", names)
        for name in names:
            expected = "names of 1 to 128 characters of [A-Za-z0-9._:/-]"
            is_valid = _ADAPTER_NAME.fullmatch(name) is not None
            _expect(is_valid, "lora_modules", expected, repr(name))
        if not self.enable_lora:
            for other in fields(self):
                make, got = other.default_factory, getattr(self, other.name)
                default = other.default if make is MISSING else make()
                _expect(got == default, other.name, "none without --enable-lora", got)

    @property
    def modules(self) -> list[AdapterModule]:
        """The adapters to load at the start."""
        return [AdapterModule.parse(text) for text in self.lora_modules]


ROLES = ("both", "prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """The worker's addresses, and the core with which it registers."""

    listen: str = DEFAULT_LISTEN
    """`HOST:PORT` or `unix:PATH`; port 0 takes a free one."""

    advertise: str | None = None
    """Address at which the core connects to this worker."""

    core: str | None = None
    """Address of the scheduler core to register with; without it, only serve."""

    health_listen: str | None = None
    """Additional address for health checks, without TLS or credentials."""

    cluster: ClusterConfig = NO_CLUSTER
    """Credentials between the services of the deployment."""

    metrics: str | None = None
    """HOST:PORT of /metrics for Prometheus. None: no metrics."""

    otlp_endpoint: str | None = None
    """Address to which spans of requests are exported (OTLP over gRPC), such as
    http://127.0.0.1:4317; by default taken from OpenTelemetry's environment variables."""

    role: str = "both"
    """What the worker is for: prefill (requests go to others with their KV once their prompts are
    computed), decode (what follows), or both."""

    group_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The worker group this worker belongs to."""

    worker_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique per process."""

    def __post_init__(self) -> None:
        _expect_one_of(ROLES, "role", self.role)
        if self.core is not None:
            parse(self.core, "core")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """The ranks that hold one copy of a model together, and where they meet."""

    layout: Layout = field(default_factory=Layout)

    distributed_init: str | None = None
    """`HOST:PORT` at which rank 0 keeps the ranks' store. Needed with several ranks."""

    def __post_init__(self) -> None:
        if self.layout.world_size == 1:
            return
        where = self.distributed_init
        if where is None:
            raise InvalidOption(
                "distributed_init: expected HOST:PORT of rank 0, since there are"
                f" {self.layout.world_size} ranks"
            )
        is_tcp = isinstance(parse(where, "distributed_init"), TcpAddress)
        _expect(is_tcp, "distributed_init", "HOST:PORT", repr(where))

    @property
    def store_address(self) -> TcpAddress | None:
        """Address of the ranks' store; None with one rank."""
        if self.layout.world_size == 1 or self.distributed_init is None:
            return None
        address = parse(self.distributed_init, "distributed_init")
        assert isinstance(address, TcpAddress), "checked above"
        return address


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """All settings of one worker process."""

    model: ModelConfig | SimulationConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    group: GroupConfig = field(default_factory=GroupConfig)

    served_model_name: list[str] = field(default_factory=list)
    """Name by which clients request the model; may be repeated for further names. Responses contain
    the first."""

    reasoning_parser: str = "auto"
    """How frontends find the model's reasoning in its answers: auto recognizes the format, none
    leaves reasoning in the text; or the name of a format."""

    tool_call_parser: str = "auto"
    """The same for tool calls."""

    grace_period_s: float = 30.0
    """Seconds after SIGTERM in which sequences move to other workers, or else finish."""

    profile_dir: str | None = None
    """Directory for profiler traces. Unset: for each trace a new one in the directory for temporary
    files."""

    def __post_init__(self) -> None:
        grace = self.grace_period_s
        in_range = 0 <= grace <= MAX_SECONDS
        _expect(in_range, "grace_period", f"0 to {MAX_SECONDS} seconds", f"{grace:g}")
        names = self.served_model_name
        _expect(all(names), "served_model_name", "names that are not empty", names)
        is_text = not any(map(_SURROGATES.search, [self.model_name, *names]))
        _expect(is_text, "served_model_name", "Unicode text", names or [self.model_name])
        _expect_one_of(REASONING_PARSERS, "reasoning_parser", self.reasoning_parser)
        _expect_one_of(TOOL_CALL_PARSERS, "tool_call_parser", self.tool_call_parser)

    @property
    def model_name(self) -> str:
        """The name in responses: the first of `served_model_name`, or the value of `model`."""
        return self.served_model_name[0] if self.served_model_name else self.model.model

    @property
    def model_aliases(self) -> list[str]:
        """Further names that clients may use."""
        return [name for name in dict.fromkeys(self.served_model_name) if name != self.model_name]

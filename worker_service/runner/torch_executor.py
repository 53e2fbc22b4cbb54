"""The engine's executor of a model on a device, with `torch.compile` and torch's profiler."""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker_service.config import AdapterConfig, CacheConfig, RunnerConfig
from worker_service.distributed.communicator import Rendezvous
from worker_service.engine.executor import BlockCounts, ModelFacts, WorkKind
from worker_service.errors import CaptureFailed, DeviceLost, InvalidOption, OutOfOrder
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.kv_cache.memory_budget import (
    WARM_UP_TOKENS,
    SyntheticBatches,
    available_host_memory,
    profile_blocks,
    sample_on_host,
)
from worker_service.loader import (
    LoadedModel,
    load_draft_model,
    load_eagle_head,
    load_mtp_head,
)
from worker_service.loader.loaded_model import arithmetic_of, describe_cache, release_windows
from worker_service.models.adapters import AdapterSlots, require_adaptable
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.models.interface import Model
from worker_service.runner.batch.pooling import Pooling
from worker_service.runner.batch.step_messages import StepMessages
from worker_service.runner.device.cuda_graphs import (
    CudaGraphRecorder,
    GraphRecorder,
    graph_sizes,
    mixed_sizes,
)
from worker_service.runner.device.drafts import DeviceHeadDrafter
from worker_service.runner.device.in_flight_step import CudaEvent, DeviceEvent
from worker_service.runner.device.sampler import sample_padding, step_kernels
from worker_service.runner.device.state import DeviceState, StateShape
from worker_service.runner.device.steps import DeviceSteps
from worker_service.runner.drafting.draft_model import DraftModel
from worker_service.runner.drafting.draft_states import DraftStates, num_draft_blocks
from worker_service.runner.drafting.drafter import Drafter
from worker_service.runner.drafting.head_drafter import HeadDrafter
from worker_service.runner.drafting.rank_drafts import RankDrafts
from worker_service.runner.drafting.speculation import DraftLengths, Speculation
from worker_service.runner.drafting.suffix_drafter import SuffixDrafter
from worker_service.runner.model_adapters import ModelAdapters
from worker_service.runner.model_options import check_compile, check_speculation, compile_layers
from worker_service.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from worker_service.structured.grammars import Grammars

logger = logging.getLogger(__name__)


class Profiler:
    """Torch's profiler, one trace at a time; started and stopped on the thread to be traced.

    directory: where traces are written; None: in a new one each, among the temporary files.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._running: torch.profiler.profile | None = None

    def start(self) -> None:
        """Begin a trace. Raises OutOfOrder if one is running."""
        if self._running is not None:
            raise OutOfOrder("a profile is running already")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=activities)
        self._running.start()

    def stop(self) -> str:
        """End the trace and write it, for chrome://tracing. Returns the file's path."""
        if self._running is None:
            raise OutOfOrder("no profile is running")
        running, self._running = self._running, None
        running.stop()
        directory = self._directory or Path(tempfile.mkdtemp(prefix="pagewire-profile-"))
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"pagewire-worker-{time.strftime('%Y%m%d-%H%M%S')}.json"
        running.export_chrome_trace(str(path))
        return str(path)


class TorchExecutor:
    """Implements `worker_service.engine.executor.Executor` with torch."""

    def __init__(
        self,
        config: CacheConfig,
        profiler: Profiler,
        load: Callable[[], LoadedModel],
        rendezvous: Rendezvous | None = None,
        runner: RunnerConfig | None = None,
        draft_lengths: DraftLengths | None = None,
        adapters: AdapterConfig | None = None,
    ) -> None:
        """rendezvous: where the ranks join, if several share the model. draft_lengths: chooses
        numbers of drafts; None: from measurements, which outlast an epoch."""
        self._config = config
        self._profiler = profiler
        self._load = load
        self._runner = runner or RunnerConfig()
        self._rendezvous = rendezvous
        self._adapter_config = adapters or AdapterConfig()
        self.adapters = ModelAdapters(self._adapter_config)
        self._loaded: LoadedModel | None = None
        self._draft: Model | DraftHead | None = None
        self._draft_lengths = draft_lengths or DraftLengths()
        self._grammars: Grammars | None = None
        """None where the model's tokenizer cannot give its tokens' texts."""
        self._cache: CacheEngine | None = None
        self._state: DeviceState | None = None
        """State on the device; only on a GPU, unless stages of a pipeline share the model."""
        self._max_num_seqs = self._runner.max_graph_batch_size
        self._max_num_batched_tokens = self._runner.max_graph_tokens

    def load(self) -> ModelFacts:
        """Load the model; raises what the loader raises."""
        if self._runner.compile and self._adapter_config.enable_lora:
            raise InvalidOption("enable_lora: cannot be combined with --compile")
        if self._rendezvous is not None:
            self._rendezvous.open()
        self._loaded = self._load()
        if self._loaded.pooler is None:
            self._grammars = _grammars_of(self._loaded)
        if self._runner.compile:
            check_compile(self._loaded)
            compile_layers(self._loaded.model, self._device)
            self._loaded = replace(self._loaded, batch_invariant=False)
        if self._runner.speculative is not None:
            check_speculation(self._loaded, self._runner)
        self._draft, model = self._load_draft(self._loaded), self._loaded.model
        if self._draft is not None:
            model.kv_cache_spec = model.kv_cache_spec.with_drafts(self._draft.kv_cache_spec)
        if self._runner.drafts_by_layers and self._loaded.communicator.layout.world_size > 1:
            model.kv_cache_spec = replace(model.kv_cache_spec, has_shared_drafts=True)
        if self.adapters.store is not None:
            adaptable = require_adaptable(model)
            limits = self._adapter_config.max_loras, self._adapter_config.max_lora_rank
            adaptable.adapters = slots = AdapterSlots(adaptable, self.adapters.store, *limits)
            self.adapters.serve(self._loaded, slots)
        self._loaded = release_windows(self._loaded, self._config)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        return self._facts(self._loaded)

    def _load_draft(self, loaded: LoadedModel) -> Model | DraftHead | None:
        """The draft model or head, if this rank has one."""
        if self._runner.speculative == "mtp":
            return load_mtp_head(loaded)
        name = self._runner.speculative_model
        if name is not None and self._runner.speculative == "eagle":
            return load_eagle_head(name, loaded, self._config)
        if name is not None and loaded.communicator.layout.samples:
            return load_draft_model(name, loaded, self._config)
        return None

    def _facts(self, loaded: LoadedModel) -> ModelFacts:
        model, pooler, layout = loaded.model, loaded.pooler, describe_cache(loaded)
        logger.info("kv cache groups layout=%s", layout)
        return ModelFacts(
            architecture=model.architecture,
            fingerprint=loaded.fingerprint,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            bos_token_id=loaded.bos_token_id,
            dtype=loaded.config.dtype,
            cache_groups=model.kv_cache_spec.groups(loaded.block_size),
            block_bytes=model.kv_cache_spec.block_bytes(loaded.block_size),
            num_parameters=model.num_parameters,
            batch_invariant=loaded.batch_invariant,
            structured_output=self._grammars is not None,
            uses_cuda_graphs=self._uses_cuda_graphs,
            num_speculative_tokens=self._runner.max_drafts,
            device=loaded.config.device,
            attention_backend=loaded.config.attention_backend or "",
            arithmetic=arithmetic_of(loaded),
            weights=loaded.weights,
            cache_layout=layout,
            work_kinds=(WorkKind.GENERATION if pooler is None else WorkKind.POOLING,),
            pooling=None if pooler is None else pooler.pooling,
            whole_prompt=not model.kv_cache_spec.layers,
        )

    def profile_blocks(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> BlockCounts:
        """How many KV blocks fit in memory together with the largest batch."""
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        shape, size = self._state_shape, self.loaded.block_size
        sample = self._sample_padding if self._has_device_steps else sample_on_host
        if self._draft is not None and not isinstance(self._draft, DraftHead):
            SyntheticBatches(self._draft, size, self._device).run(2, WARM_UP_TOKENS)
        counts = profile_blocks(
            SyntheticBatches(
                self.loaded.model,
                size,
                self._device,
                sample,
                generates=self.loaded.pooler is None,
                with_adapters=self._device.type != "cpu" and self.adapters.slots is not None,
            ),
            self._config,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            cache=self._cache,
            num_ranks=self.loaded.communicator.layout.world_size,
            num_graphs=shape.num_graphs,
            largest_graph=shape.largest,
            later_bytes=self._state_bytes(shape)
            + self.loaded.communicator.bytes_to_allocate(self._device),
        )
        of_drafts = self._num_draft_blocks(counts.num_gpu_blocks)
        return replace(counts, num_gpu_blocks=counts.num_gpu_blocks - of_drafts)

    def _num_draft_blocks(self, num_gpu_blocks: int) -> int:
        groups = self.loaded.model.kv_cache_spec.groups(self.loaded.block_size)
        return num_draft_blocks(groups, num_gpu_blocks, self._runner.max_drafts)

    def _sample_padding(self, logits: Tensor) -> None:
        sample_padding(logits, step_kernels(self._device))

    def make_runner(self, num_gpu_blocks: int, num_cpu_blocks: int, epoch: int) -> ModelRunner:
        """A runner over the present caches if they have these sizes, else over new ones."""
        if self._rendezvous is not None:
            self._state = None  # its graphs use the communicator of an epoch
            communicator, settings = self.loaded.communicator, self._group_settings()
            communicator.join(self._rendezvous, epoch, self._device, settings)
        of_drafts = self._num_draft_blocks(num_gpu_blocks)
        sizes = num_gpu_blocks, num_cpu_blocks, of_drafts
        if self._cache is None or not self._cache.fits(*sizes):
            # Free the old caches first, as both would not fit.
            if self._cache is not None:
                self._cache.close()
            self._cache = self._state = None
            self._cache = CacheEngine(
                self.loaded.model.kv_cache_spec,
                block_size=self.loaded.block_size,
                num_gpu_blocks=num_gpu_blocks,
                num_cpu_blocks=num_cpu_blocks,
                num_draft_blocks=of_drafts,
                device=self._device,
            )
            self._cache.populate(available_host_memory)
        speculation = None
        if max_drafts := self._runner.max_drafts:
            drafter, lengths = self._make_drafter(self._cache), self._draft_lengths
            is_on_host, layout = not self._has_device_steps, self.loaded.communicator.layout
            ranks = None
            if not is_on_host and layout.world_size > 1:
                ranks = RankDrafts(StepMessages(self.loaded.communicator))
            groups = self.loaded.model.kv_cache_spec.groups(self.loaded.block_size)
            speculation = Speculation(
                drafter,
                lengths,
                max_drafts,
                edits_see_drafts=is_on_host,
                states=DraftStates(self._cache, groups) if of_drafts else None,
                ranks=ranks,
            )
        return ModelRunner(
            self.loaded.model,
            self._cache,
            self.loaded.block_size,
            self._grammars,
            pooling=self._pooling,
            communicator=None if self._rendezvous is None else self.loaded.communicator,
            device=self._make_device_steps(self._cache, speculation),
            speculation=speculation,
            adapters=self.adapters.store,
        )

    @property
    def _pooling(self) -> Pooling | None:
        pooler = self.loaded.pooler
        return None if pooler is None else Pooling(pooler, self.loaded.kernels.layers.sum_rows)

    def _group_settings(self) -> str:
        """What ranks must have in common to launch the same collectives."""
        if not self._has_device_steps:
            return ""
        shape = self._state_shape
        size, tokens = (max(sizes, default=0) for sizes in (shape.sizes, shape.mixed))
        graphs = f"max_graph_batch_size={size} max_graph_tokens={tokens}"
        drafts = f"speculative={self._runner.speculative} max_drafts={self._runner.max_drafts}"
        return f"max_num_seqs={shape.num_seqs} {graphs} {drafts}"

    def _make_drafter(self, cache: CacheEngine) -> Drafter | None:
        """On the rank that samples; the others receive its drafts."""
        if not self.loaded.communicator.layout.samples:
            return None
        if self._runner.speculative == "ngram":
            return SuffixDrafter(history_tokens=0)
        if self._runner.speculative == "suffix":
            return SuffixDrafter()
        if isinstance(self._draft, DraftHead):
            make = DeviceHeadDrafter if self._has_device_steps else HeadDrafter
            return make(self._draft, cache.draft_caches)
        return None if self._draft is None else DraftModel(self._draft, cache.draft_caches)

    def _make_device_steps(
        self, cache: CacheEngine, speculation: Speculation | None
    ) -> DeviceSteps | None:
        """Launches steps ahead on a GPU; None elsewhere."""
        if not self._has_device_steps:
            return None
        if self._state is None or self._state.shape.num_seqs < self._max_num_seqs:
            self._state = None  # frees its memory first
            self._state = self._make_state(cache)
        check = None if self._rendezvous is None else self.loaded.communicator.joined.check
        model, pooling = self.loaded.model, self._pooling
        state, event, slots = self._state, self._make_event, self.adapters.slots
        return DeviceSteps(model, cache, state, event, check, pooling, slots, speculation)

    def _state_bytes(self, shape: StateShape) -> int:
        """Memory that a GPU's state of sequences will need beyond the present one's."""
        if not self._has_device_steps:
            return 0
        model = self.loaded.model, self.loaded.block_size
        held = 0
        if self._state is not None:
            held = replace(shape, num_seqs=self._state.shape.num_seqs).num_bytes(*model)
        return shape.num_bytes(*model) - held

    def _make_state(self, cache: CacheEngine) -> DeviceState:
        shape, communicator = self._state_shape, self.loaded.communicator
        try:
            return DeviceState(
                self.loaded.model,
                cache,
                self.loaded.block_size,
                shape,
                self._make_recorder() if shape.sizes else None,
                None if self._rendezvous is None else communicator,
                head=self._draft if isinstance(self._draft, DraftHead) else None,
            )
        except CaptureFailed:
            if self._rendezvous is not None:
                communicator.joined.check()  # another rank may have been the reason
            raise

    def _make_recorder(self) -> GraphRecorder:
        return CudaGraphRecorder(self._device)

    def _make_event(self) -> DeviceEvent:
        return CudaEvent()

    @property
    def _has_device_steps(self) -> bool:
        has_stages = self.loaded.communicator.layout.pipeline_parallel_size > 1
        return self._device.type != "cpu" and not has_stages

    @property
    def _uses_cuda_graphs(self) -> bool:
        return (
            self._runner.cuda_graphs
            and self.loaded.pooler is None
            and self._has_device_steps
            and all(backend.abilities.cuda_graphs for backend in self.loaded.kernels.backends)
        )

    @property
    def _state_shape(self) -> StateShape:
        """What the state of sequences on the device has room for."""
        # All ranks have drafts of a head, even if they receive them.
        max_drafts = self._runner.max_drafts if self._runner.has_draft_head else 0
        if not self._uses_cuda_graphs:
            return StateShape(num_seqs=self._max_num_seqs, max_drafts=max_drafts)
        num_places = self._max_num_seqs * (1 + self._runner.max_drafts)
        return StateShape(
            num_seqs=self._max_num_seqs,
            sizes=graph_sizes(min(self._runner.max_graph_batch_size, num_places)),
            mixed=mixed_sizes(min(self._runner.max_graph_tokens, self._max_num_batched_tokens)),
            with_adapters=self.adapters.slots is not None,
            max_drafts=max_drafts,
        )

    def check_device(self) -> None:
        """Wait for the device. Raises DeviceLost if the GPU's context is broken, for example by an
        access to an invalid address: then every later call of this process fails."""
        if self._loaded is None or self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise DeviceLost(f"{self._device} is lost to this process: {reason}") from None

    def interrupt(self, epoch: int) -> None:
        """Make waits for other ranks raise GroupBroken, also those of epochs up to `epoch` that
        have not begun. May be called on any thread."""
        if self._loaded is not None:
            self._loaded.communicator.interrupt(epoch)

    def assets(self) -> Iterator[tuple[str, bytes]]:
        """The checkpoint's files that frontends need."""
        return iter(self.loaded.assets.items())

    def start_profile(self) -> None:
        """Begin a trace of this thread."""
        self._profiler.start()

    def stop_profile(self) -> str:
        """End the trace. Returns the path of its file."""
        return self._profiler.stop()

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model."""
        assert self._loaded is not None, "load() comes first"
        return self._loaded

    @property
    def _device(self) -> torch.device:
        return torch.device(self.loaded.config.device)


def _grammars_of(loaded: LoadedModel) -> "Grammars | None":
    """Grammars of structured output; None without a readable tokenizer or without llguidance."""
    if "tokenizer.json" not in loaded.assets:
        logger.warning(
            "no tokenizer.json, only token ids can be prompts model=%s", loaded.model_dir
        )
    if loaded.tokenizer is None:
        return None
    if find_spec("llguidance") is None:
        logger.warning("no structured output error=llguidance is not installed")
        return None
    from worker_service.structured.grammars import Grammars, special_texts, token_texts

    tokenizer, size = loaded.tokenizer, loaded.model.vocab_size
    return Grammars(
        size, lambda: token_texts(tokenizer(), size), lambda: special_texts(tokenizer())
    )

"""The base of all native models: construction, forward pass, weights and packing."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import ClassVar, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from pagewire_kernels.batch import (
    AttentionMetadata,
    LayerCaches,
    LayerMemory,
    LayerStates,
    RowAdapters,
    StepBatch,
    have_adapters,
)
from pagewire_kernels.interface import Computed
from pagewire_kernels.select import ForwardFn, Kernels
from worker_service.distributed.layout import Layout, Shard
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.models.layers.norms import LayerNorm, RMSNorm, norm_targets
from worker_service.models.layers.paged_attention import PagedAttention
from worker_service.models.layers.rotary import RotaryTable, RotaryTables
from worker_service.models.linear.linear import Linear
from worker_service.models.linear.packing import Packable
from worker_service.models.linear.vocabulary import VocabEmbedding, VocabHead
from worker_service.models.pooling import head_context
from worker_service.plan import PoolingHead
from worker_service.pooling_facts import PoolingFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings(ABC):
    """Shape of a native model, as far as all of them have it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    embedding_size: int
    """Width of the token embedding and of the head's inputs; usually the hidden size."""

    num_layers: int
    max_model_len: int
    """The longest sequence that the model's positions allow."""

    tie_word_embeddings: bool
    num_embeddings: int | None = None
    """Rows of the token embedding, if there are more of them than of the LM head, such as those of
    images; these are no tokens of `vocab_size`."""

    has_head_bias: bool = False
    """Whether the LM head has a bias."""

    num_labels: int = 0
    """Labels of which the model computes logits instead of those of tokens; 0: none."""

    label_layer: str = "score"
    """The name of the layer that computes these."""

    has_label_bias: bool = False
    """Whether that layer has a bias."""

    @property
    @abstractmethod
    def activations(self) -> set[str]:
        """The names in `config.json` of the activations of all MLPs."""

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the model."""
        layout.layer_range(self.num_layers)


class LayerInputs(NamedTuple):
    """What a layer reads of a step besides hidden states."""

    positions: Tensor
    """int64 [num_tokens]."""

    memory: LayerMemory
    """What the layer keeps; empty if it keeps nothing."""

    metadata: AttentionMetadata
    """Of the cache group of `memory`."""

    embedding: Tensor | None = None
    """[num_tokens, size], the embedding that the layer has of its own, or that of tokens; None: it
    has none."""

    further: "tuple[LayerInputs, ...]" = ()
    """Of the other parts of a layer that keeps several things, in the order of
    `decoder.MixerSpec.kept`."""

    @property
    def caches(self) -> LayerCaches:
        """Keys and values of a layer that keeps them."""
        return cast(LayerCaches, self.memory)

    @property
    def states(self) -> LayerStates:
        """The parts of the state of a layer that has one."""
        return cast(LayerStates, self.memory)


class MixerPlace(NamedTuple):
    """The layer for which a `decoder.MixerSpec` builds its part."""

    inputs: int
    """Width of the rows that the part gets."""

    size: int
    """Width of the rows that it makes."""

    context: ModelContext
    kernels: Kernels
    rotary: RotaryTable | None
    """The table of `decoder.MixerSpec.rotary`."""

    shared: dict[int, nn.Module]
    """Modules of earlier layers of this rank that later ones use, too, by numbers of their own."""


class NativeLayer(nn.Module, ABC):
    """A layer of a native model, over a residual stream."""

    num_kept: int = 1
    """Entries of the cache specification that are the layer's."""

    @abstractmethod
    def forward(
        self, residual: Tensor, x: Tensor | None, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer.

        residual: [num_tokens, hidden_size], the residual stream, which is overwritten; x: output of
        the previous layer if it has not been added to `residual` yet. Returns both for the next
        layer.
        """

    @abstractmethod
    def weight_targets(self, name: str) -> Iterator[WeightTarget]:
        """Destinations of the checkpoint's tensors of the layer called `name`."""


class ActivatesAdapters(Protocol):
    """What the layers of a model add for some rows; see `models/adapters.py`."""

    def activate(self, batch: StepBatch) -> bool:
        """Let the layers compute the adapters of a batch in the next forward pass.

        Returns whether a program recorded with adapters lacks some of them.
        """
        ...

    def activate_head(self, adapters: RowAdapters, num_rows: int) -> None:
        """Let the LM head compute adapters of the present step, by rows of its inputs."""
        ...

    def put_prompts(self, x: Tensor, batch: StepBatch) -> Tensor:
        """The embeddings `x` of the present step's tokens, [num_tokens, embedding_size], where
        those of virtual tokens are their adapters'."""
        ...

    def deactivate(self) -> None:
        """Let the layers compute no adapters."""
        ...


class _Program:
    """A forward pass that is recorded when it first runs, where the kernels can do that."""

    def __init__(self, run: ForwardFn) -> None:
        self.run = run
        self.captured: dict[int, list[Tensor]] = {}
        """As `NativeModel._captured`; buffers of the program if it is recorded."""


@runtime_checkable
class HasTargets(Protocol):
    """A part of a layer that has tensors of a checkpoint, such as `Linear`."""

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destinations of the tensors of modules with these names. transposed: whether the
        checkpoint stores weights as [in_features, out_features]."""
        ...


def part_targets(
    layer: nn.Module, names: Mapping[str, str], prefix: str, *, transposed: bool = False
) -> Iterator[WeightTarget]:
    """Destinations of the checkpoint's tensors of a layer's parts.

    names: of the tensors by the path of attributes, those of stacked layers separated by spaces;
    an attribute that is None has no tensors; prefix: of all names that do not begin with `model.`,
    as those of tensors that layers share do; transposed: see `HasTargets`.
    """
    for path, stored in names.items():
        part = attrgetter(path)(layer)
        full_names = [
            name if name.startswith("model.") else f"{prefix}{name}" for name in stored.split()
        ]
        if isinstance(part, RMSNorm | LayerNorm):
            yield from norm_targets(full_names[0], part)
        elif part is not None:
            assert isinstance(part, HasTargets), path
            yield from part.targets(*full_names, transposed=transposed)


class LoadableModule(nn.Module, ABC):
    """A module whose weights are filled from the tensors of a checkpoint."""

    optional_names: re.Pattern[str]
    """Canonical names that a checkpoint may hold without a target for them, because the model
    computes the same without these tensors."""

    unused_names: re.Pattern[str] = re.compile(r"(?!)")
    """Canonical names that a checkpoint may hold for other uses of the model, which are logged."""

    head_names: re.Pattern[str] = re.compile(r"(?!)")
    """Those of them that are a draft head's, which `--speculative mtp` reads."""

    architecture: str

    def __init__(self, architecture: str, context: ModelContext) -> None:
        super().__init__()
        self.architecture = architecture
        self.dequantized = context.dequantized
        self._needs_fixed_products = context.needs_fixed_products

    @abstractmethod
    def weight_targets(self) -> Iterator[WeightTarget]:
        """Destinations of the tensors of a checkpoint; all must be filled."""

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """The canonical name of the checkpoint's tensor `name`."""
        return name

    def finish_loading(self) -> None:
        """Prepare the weights for the device. To be called once, when all targets are filled."""
        for module in self.modules():
            if isinstance(module, Packable):
                module.pack()
            if isinstance(module, Linear) and self._needs_fixed_products:
                module.fix_order()
            if isinstance(module, RMSNorm | LayerNorm):
                module.add_offset()


class NativeModel(LoadableModule):
    """A native model: written for Pagewire, not run through `transformers`.

    Subclasses add their layers and other modules. A rank of several builds only the layers of its
    pipeline stage, and its shard of each.
    """

    optional_names: re.Pattern[str] = re.compile(r"lm_head\.weight")
    """The weight of the LM head, which a checkpoint may hold although it is tied to the embedding.
    If it differs from that, the model is built with a head of its own."""

    generates: ClassVar[bool] = True
    """Whether there is an LM head, and a cache."""

    embedding_name: ClassVar[str]
    layers_name: ClassVar[str]
    norm_name: str
    """Canonical names of the embedding's weight, of the list of layers, and of the final norm."""

    num_parameters: int
    """Number of parameters of all ranks, tied ones counted once. Known once loading is finished."""

    embedding: VocabEmbedding | None
    """None on later stages."""

    head: VocabHead | None
    """None on earlier stages."""

    norm: RMSNorm | LayerNorm | None
    """Applied before the head."""

    score: Linear | None
    """Logits of labels; None without labels, and on earlier stages."""

    default_pooling: PoolingFacts = PoolingFacts(normalize=True)
    """How the model makes vectors where no file says it."""

    pooling: PoolingFacts

    names_elsewhere: frozenset[str] = frozenset()
    """Modules of other stages' layers that the checkpoint names as those of another layer."""

    virtual_token_size: int | None = None
    """Width of the embeddings that adapters may have in place of those of tokens; None: they may
    have none."""

    virtual_token_scale: float = 1.0
    """The factor of these embeddings."""

    def __init__(
        self, settings: ModelSettings, max_model_len: int, context: ModelContext, kernels: Kernels
    ) -> None:
        super().__init__(settings.architecture, context)
        s, layout = settings, context.communicator.layout
        self.communicator = context.communicator
        self.vocab_size = s.vocab_size
        self.hidden_size = s.hidden_size
        self.max_model_len = max_model_len
        self.rotary_tables = RotaryTables(max_model_len, context)
        self._is_tied = s.tie_word_embeddings
        self._label_layer = s.label_layer
        self.num_layers = s.num_layers
        """Number of layers of all stages."""
        s.require_shards(layout)
        self._layer_range = layout.layer_range(s.num_layers)
        self.kv_cache_spec = self._cache_spec(s, max_model_len, context)
        self.embedding = self.head = self.norm = self.score = None
        if layout.is_first_stage:
            self.embedding = VocabEmbedding(
                s.num_embeddings or s.vocab_size, s.embedding_size, context, kernels.layers
            )
        if layout.is_last_stage and s.num_labels:
            of_labels = [Shard.full(s.num_labels)]
            inputs, in_float32 = Shard.full(s.hidden_size), head_context(context)
            self.score = Linear(inputs, of_labels, bias=s.has_label_bias, context=in_float32)
        if layout.is_last_stage and context.generates and self.generates:
            tied_to = self.embedding if s.tie_word_embeddings else None
            self.head = VocabHead(
                s.vocab_size, s.embedding_size, context, tied_to, bias=s.has_head_bias
            )
        self.layers = nn.ModuleList()
        self._kernels = kernels
        self._program, self._program_with_adapters = self._prepare(), self._prepare()
        self._captured_layers: tuple[int, ...] = ()
        self._captured: dict[int, list[Tensor]] = {}
        """By layer of this stage, the summands of its input, which `run_layers` captured."""
        self.adapters: ActivatesAdapters | None = None
        """None if no sequence has an adapter."""
        self.packs_with_triton = context.packs_with_triton
        self.hidden_like = context.empty(0)
        """An empty tensor of the dtype and on the device of hidden states."""
        self._received_width = s.hidden_size
        """Columns of what the previous stage sends, without captured hidden states."""
        self._received_like = context.empty(s.hidden_size)

    @abstractmethod
    def _cache_spec(
        self, settings: ModelSettings, max_model_len: int, context: ModelContext
    ) -> KVCacheSpec:
        """What layers keep of a sequence."""

    def _prepare(self) -> _Program | None:
        if self.communicator.layout.world_size > 1:
            return None
        head = None if self.head is None else self._apply_head
        return _Program(self._kernels.prepare(self.embed, self.run_layers, head))

    def named_layers(self) -> Iterator[tuple[str, NativeLayer]]:
        """(canonical name, layer) of this rank's layers."""
        for i, layer in zip(self._layer_range, self.layers, strict=True):
            assert isinstance(layer, NativeLayer)
            yield f"{self.layers_name}.{i}", layer

    def weight_targets(self) -> Iterator[WeightTarget]:
        """Destinations of the checkpoint's tensors; a tied head of a later stage is filled from the
        embedding's tensor."""
        if self.embedding is not None:
            yield self.embedding.table_target(self.embedding_name)
        if self.head is not None and not (self._is_tied and self.embedding is not None):
            yield self.head.table_target(self.head_name)
        if self.head is not None:
            yield from self.head.bias_targets("lm_head.bias")
        for name, layer in self.named_layers():
            yield from layer.weight_targets(name)
        if self.norm is not None:
            yield from norm_targets(self.norm_name, self.norm)
        if self.score is not None:
            yield from self.score.targets(self._label_layer)

    @property
    def head_name(self) -> str:
        """Canonical name of the head's weight."""
        return self.embedding_name if self._is_tied else "lm_head.weight"

    def kv_scale_holders(self) -> Iterable[tuple[str, PagedAttention]]:
        """(canonical name, attention) of this rank's layers for whose keys and values a checkpoint
        may hold scales."""
        return ()

    def capture(self, layers: Sequence[int]) -> None:
        """Capture the inputs of these layers in every forward pass, in `Computed.captured`. The
        number of layers stands for the last hidden states, which the LM head gets.

        Of several ranks, the one that samples returns them, the first rank of the last stage;
        earlier stages send them together with their output.
        """
        layout = self.communicator.layout
        if layout.tensor_rank > 0:
            return
        self._captured_layers = tuple(layers)
        num_earlier = sum(layer < self._layer_range.start for layer in set(layers))
        width = self._received_width + num_earlier * self.hidden_size
        self._received_like = self._received_like.new_empty(width)
        self._program, self._program_with_adapters = self._prepare(), self._prepare()

    @abstractmethod
    def embed(self, batch: StepBatch) -> Tensor:
        """Compute the input of the first layer: [num_tokens, hidden_size]."""

    def run_layers(self, residual: Tensor, batch: StepBatch) -> Tensor:
        """Run this rank's layers. Returns the input of the LM head, or of the next stage.

        residual: [num_tokens, hidden_size], the residual stream, which is overwritten.
        """
        x = None
        self._captured = {}
        layers = zip(self._layer_range, self.layers, self.layer_inputs(batch), strict=True)
        for index, layer, inputs in layers:
            if index in self._captured_layers:
                parts = (residual,) if x is None else (residual, x)
                self._captured[index] = [self._kernels.layers.copy(part) for part in parts]
            residual, x = layer(residual, x, inputs)
        x = self.finish(residual, x)
        if self.num_layers in self._captured_layers and self.communicator.layout.is_last_stage:
            self._captured[self.num_layers] = [x]
        return x

    def finish(self, residual: Tensor, x: Tensor | None) -> Tensor:
        """The input of the LM head, or of the next stage, after the layers; see `NativeLayer`."""
        if self.norm is not None:
            return self.norm(residual, x)
        return residual if x is None else residual.add_(x)

    def layer_inputs(self, batch: StepBatch) -> Iterator[LayerInputs]:
        """What each of this rank's layers reads of a step."""
        entries = zip(batch.caches, self.kv_cache_spec.group_of, strict=True)
        parts = (LayerInputs(batch.positions, kept, batch.attention[g]) for kept, g in entries)
        for _, layer in self.named_layers():
            first, *further = [*islice(parts, layer.num_kept)] or [
                LayerInputs(batch.positions, (), batch.attention[0])
            ]
            yield first._replace(further=tuple(further))

    def forward(self, batch: StepBatch) -> Tensor:
        """Compute the last hidden states of all rows, [num_tokens, hidden_size]; see
        `interface.Model`.

        A pipeline stage receives the output of the previous stage and sends its own to the next,
        each together with the hidden states captured so far.
        """
        return self.forward_to_logits(replace(batch, sampled=None)).hidden

    @torch.inference_mode()
    def forward_to_logits(self, batch: StepBatch) -> Computed:
        """As `forward`, with logits of `batch.sampled` if the LM head is part of the recorded
        program."""
        self.rotary_tables.fill(batch.positions)
        if not have_adapters(batch.adapters) or self.adapters is None:
            # A draft model ignores them.
            return self._forward(batch, self._program)
        if self.adapters.activate(batch):
            self._program_with_adapters = self._prepare()
        try:  # programs embed tokens
            program = None if batch.has_virtual_tokens else self._program_with_adapters
            return self._forward(batch, program)
        finally:
            self.adapters.deactivate()

    def _forward(self, batch: StepBatch, program: _Program | None) -> Computed:
        """Run a program, or if there is none, the layers operation by operation."""
        if program is None:
            return self._forward_eagerly(batch)
        if not self._captured_layers:
            return program.run(batch)
        self._captured = program.captured
        computed = program.run(batch)
        program.captured = self._captured
        return computed._replace(captured=self._all_captured((), batch.token_ids.shape[0]))

    def _forward_eagerly(self, batch: StepBatch) -> Computed:
        """Run this rank's layers, operation by operation."""
        token_ids, positions = batch.token_ids, batch.positions
        layout = self.communicator.layout
        earlier: Sequence[Tensor] = ()
        if layout.is_first_stage:
            x = self.embed(batch)
        else:
            received = self.communicator.receive(token_ids, positions, like=self._received_like)
            x, captured = received.tensor_split([self._received_width], dim=1)
            earlier = captured.split(self.hidden_size, dim=1) if captured.shape[1] else ()
        x = self.run_layers(x.contiguous(), batch)
        if layout.is_last_stage:
            return Computed(x, captured=self._all_captured(earlier, len(x)))
        self.communicator.send_hidden(torch.cat([x, *earlier, *self._own_captured(len(x))], dim=1))
        return Computed(x)

    def _own_captured(self, num_rows: int) -> list[Tensor]:
        """The captured inputs of this stage's layers, in the order of layers."""
        parts = (self._captured[layer] for layer in sorted(self._captured))
        return [torch.stack([part[:num_rows] for part in of_rank]).sum(0) for of_rank in parts]

    def _all_captured(self, earlier: Sequence[Tensor], num_rows: int) -> tuple[Tensor, ...]:
        """The captured inputs of the layers of all stages, in the order of `capture`'s argument."""
        found = [*earlier, *self._own_captured(num_rows)]
        by_layer = dict(zip(sorted(set(self._captured_layers)), found, strict=True))
        return tuple(by_layer[layer] for layer in self._captured_layers)

    @torch.inference_mode()
    def compute_logits(self, hidden_states: Tensor, adapters: RowAdapters = ()) -> Tensor:
        """Compute the logits of some rows, see `interface.Model`: float32 [num_rows, vocab_size].

        A stage without the LM head returns the hidden states, which trial runs compare.
        """
        if self.head is None:
            return hidden_states.float()
        if not have_adapters(adapters) or self.adapters is None:
            return self._apply_head(hidden_states)
        self.adapters.activate_head(adapters, len(hidden_states))
        try:
            return self._apply_head(hidden_states)
        finally:
            self.adapters.deactivate()

    @torch.inference_mode()
    def pool(self, pooled: Tensor, head: PoolingHead) -> Tensor:
        """See `interface.Pools`: the logits of labels, or the hidden states themselves."""
        if head is PoolingHead.UNSPECIFIED:
            return pooled
        assert self.score is not None, "it has labels"
        return self.score(pooled)

    def _apply_head(self, hidden_states: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(hidden_states)

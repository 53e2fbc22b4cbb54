"""A `transformers` model that implements `interface.Model`, with paged attention."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from pagewire_kernels.batch import LayerCaches, RowAdapters, StepBatch, have_adapters
from pagewire_kernels.reference import activate
from pagewire_kernels.select import Kernels
from worker_service.errors import UnsupportedModel
from worker_service.models.interface import ModelContext
from worker_service.models.kv_cache_spec import KVCacheSpec, LayerKV
from worker_service.models.linear.additions import AdaptableLayer
from worker_service.models.linear.packing import PackedWeight, can_pack, pack
from worker_service.models.native import ActivatesAdapters
from worker_service.models.pooling import POOLING_TYPE, facts_of
from worker_service.models.transformers_backend.packed import PackedLinear, Tables
from worker_service.models.transformers_backend.plain_linear import PlainLinear
from worker_service.plan import PoolingHead
from worker_service.pooling_facts import PoolingFacts

NAME = "pagewire"
"""The name under which the attention function is registered."""

_STATE = "pagewire_state"

_NO_POSITIONS = 1e-3
"""The largest difference between equal tokens, of their norm, of a model without positions."""

_NUMBER = re.compile(r"\.\d+(?=\.)")
"""Of a layer, or of an expert in it, which may get some of the rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """One layer's call, as a trial run recorded it."""

    layer: int
    num_kv_heads: int
    head_dim: int
    """Elements of the larger ones of keys and values."""

    dtype: torch.dtype
    sliding_window: int | None
    is_causal: bool
    unknown_arguments: tuple[str, ...]
    """Arguments with unsupported values."""

    rows: Tensor
    """The queries and keys of each token, [num_tokens, size]."""


@dataclass(slots=True)
class AttentionState:
    """The state that one model's attention function reads; set at each step."""

    kernels: Kernels
    groups: tuple[int, ...] = ()
    """The cache group of each layer."""

    batch: StepBatch | None = None
    calls: list[AttentionCall] = field(default_factory=list)
    """Filled while there is no batch: a trial run."""


def attach(model: nn.Module, state: AttentionState) -> None:
    """Set `state` on all modules of `model`, and register the attention function.

    No mask function is registered: the kernel knows to which positions a row attends, and
    `transformers` would read positions on the host to prepare a mask.
    """
    AttentionInterface.register(NAME, attention_forward)
    module: Any
    for module in model.modules():
        setattr(module, _STATE, state)


# Arguments that do not affect the result: keys and queries contain positions already, and the
# others are for other implementations.
_IDLE_ARGUMENTS = frozenset(
    {
        "cache_position",
        "cache_positions",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Write keys and values to the cache, and attend over it.

    query: [1, num_heads, num_tokens, head_dim]; key, value: [1, num_kv_heads, num_tokens,
    head_dim], where those of values may have another size. Returns [1, num_tokens, num_heads, size
    of values], and None instead of weights.
    """
    state: AttentionState = getattr(module, _STATE)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if state.batch is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        of_cache = [] if causal else [("softcap", softcap), ("s_aux", s_aux)]
        unknown = [
            name
            for name, given in [("attention_mask", attention_mask), *of_cache, *others.items()]
            if name not in _IDLE_ARGUMENTS and given is not None and given is not False
        ]
        state.calls.append(
            AttentionCall(
                layer=layer,
                num_kv_heads=key.shape[1],
                head_dim=max(key.shape[3], value.shape[3]),
                dtype=key.dtype,
                sliding_window=sliding_window,
                is_causal=bool(causal),
                unknown_arguments=tuple(sorted(unknown)),
                rows=torch.cat([part[0].transpose(0, 1).flatten(1) for part in (query, key)], 1),
            )
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    backend = state.kernels.attention_of(sliding_window)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    value_dim = value.shape[3]
    query, key, value = _of_one_size(query, key, value)
    if not state.groups:  # no cache: a row sees its text, or fewer than a window's tokens each way
        output = backend.packed_attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            state.batch.attention[0],
            scale=scale,
            window=None if sliding_window is None else sliding_window - 1,
        )
        return output[None, :, :, :value_dim], None
    caches = cast(LayerCaches, state.batch.caches[layer])
    metadata = state.batch.attention[state.groups[layer]]
    backend.write_kv(
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        *caches,
        metadata.slot_mapping,
    )
    output = backend.paged_attention(
        query[0].transpose(0, 1),
        *caches,
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    return output[None, :, :, :value_dim], None


def _of_one_size(*parts: Tensor) -> list[Tensor]:
    """The same heads, with zeros behind smaller ones: the cache has one size of them."""
    size = max(part.shape[3] for part in parts)
    missing = [size - part.shape[3] for part in parts]
    return [
        nn.functional.pad(part, (0, count)) if count else part
        for part, count in zip(parts, missing, strict=True)
    ]


def cache_spec(
    architecture: str, config: Any, calls: list[AttentionCall], max_model_len: int
) -> KVCacheSpec:
    """The KV of each layer; none if tokens see those that follow. Raises UnsupportedModel if its
    attention is not supported.

    config: the model's `transformers` configuration, that of the text part.
    """
    for feature in _obstacles(config, calls):
        raise UnsupportedModel(f"{architecture} cannot be served: {feature}")
    if not calls[0].is_causal:
        return KVCacheSpec(layers=(), dtype=calls[0].dtype)
    layers = []
    for call in sorted(calls, key=lambda call: call.layer):
        window = call.sliding_window
        window = window if window is not None and window < max_model_len else None
        layers.append(
            LayerKV(num_kv_heads=call.num_kv_heads, head_dim=call.head_dim, window=window)
        )
    return KVCacheSpec(layers=tuple(layers), dtype=calls[0].dtype)


def _obstacles(config: Any, calls: list[AttentionCall]) -> Iterator[str]:
    num_layers = int(config.num_hidden_layers)
    if sorted(call.layer for call in calls) != list(range(num_layers)):
        yield "not every layer attends once through transformers' attention interface"
    if len({call.dtype for call in calls}) > 1:
        yield "its layers differ in the dtype of keys"
    if len({call.is_causal for call in calls}) > 1:
        yield "the attention of some layers is not causal"
    unknown = sorted({name for call in calls for name in call.unknown_arguments})
    if unknown:
        yield f"its attention takes {', '.join(unknown)}"
    kinds = getattr(config, "layer_types", None)
    for call in calls:
        if kinds and kinds[call.layer] == "sliding_attention" and call.sliding_window is None:
            yield "its sliding window is not passed to the attention interface"


class InvariantOps(TorchFunctionMode):
    """A context in which the torch functions called by a model are batch-invariant.

    On CPUs `linear` chooses its kernel by the number of rows, and `silu`, `sigmoid` and `gelu`
    compute the remainder of their vector loops by another formula (see
    `pagewire_kernels.reference.layers`). Linear modules and experts are replaced by packed ones
    (`packed.py`); this replaces functions, such as the product of a router, and reads rows of
    packed embeddings. On GPUs only linear layers are replaced.
    """

    def __init__(self, device_type: str, tables: Tables | None = None) -> None:
        super().__init__()
        self._tables = tables or {}
        self._packed: dict[Tensor, PackedWeight] = {}  # by the parameter itself
        self._functions: dict[Any, Callable[..., Tensor]] = {nn.functional.linear: _triton_linear}
        if device_type == "cpu":
            self._functions = {
                nn.functional.linear: self._packed_linear,
                nn.functional.embedding: self._embedding,
                nn.functional.silu: _silu,
                nn.functional.gelu: _gelu,
                torch.sigmoid: _sigmoid,
                Tensor.sigmoid: _sigmoid,
            }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._functions.get(func, func)(*args, **(kwargs or {}))

    def _packed_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Use a packed weight if `weight` is a parameter; a view has no lasting identity."""
        packable = isinstance(weight, nn.Parameter) and can_pack(weight.dtype, weight.device)
        if not packable or input.dtype != weight.dtype:
            return nn.functional.linear(input, weight, bias)
        if weight not in self._packed:
            self._packed[weight] = pack(weight.detach())
        rows = input.reshape(-1, weight.shape[1])
        output = self._packed[weight].apply(rows, bias)
        return output.view(*input.shape[:-1], weight.shape[0])

    def _embedding(self, input: Tensor, weight: Tensor, *others: Any, **options: Any) -> Tensor:
        table = self._tables.get(weight)
        if table is None:
            return nn.functional.embedding(input, weight, *others, **options)
        return table.gather(input.flatten()).view(*input.shape, -1)


def _triton_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from pagewire_kernels.triton import linear  # imported only if it is used

    rows = linear(input.reshape(-1, weight.shape[1]), weight, bias)
    return rows.view(*input.shape[:-1], weight.shape[0])


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    return activate(input, "silu")


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    return activate(input, "gelu_tanh" if approximate == "tanh" else "gelu")


def _sigmoid(input: Tensor) -> Tensor:
    wide = input.float()
    return torch.exp(-wide).add_(1).reciprocal_().to(input.dtype)


class TransformersModel:
    """A `transformers` model over a paged cache; see `interface.Model`."""

    virtual_token_size: int | None = None
    """Its tokens cannot be replaced by embeddings."""

    def __init__(
        self,
        causal_lm: Any,
        state: AttentionState,
        architecture: str,
        max_model_len: int,
        context: ModelContext,
        num_parameters: int,
        tables: Tables,
    ) -> None:
        self.architecture = architecture
        self.max_model_len = max_model_len
        config = causal_lm.config.get_text_config()
        # The LM head of Apertus 1.5 may have fewer tokens than its embedding.
        self.vocab_size = int(getattr(config, "output_vocab_size", None) or config.vocab_size)
        self.num_parameters = num_parameters
        size, default = config.hidden_size, PoolingFacts(normalize=True)
        stored = {POOLING_TYPE: getattr(config, POOLING_TYPE, None)}
        self.pooling = facts_of(architecture, stored, size, default)
        attach(causal_lm, state)
        self._state = state
        self.num_layers = int(config.num_hidden_layers)
        self.adapters: ActivatesAdapters | None = None
        """None if no sequence has an adapter."""
        adaptable = _adaptable_layers(causal_lm, context)
        self.adaptable_layers = [*adaptable.values()]
        """The linear layers whose rows are those of the step, and the LM head."""
        self.head = adaptable.get(causal_lm.get_output_embeddings())
        self._decoder = getattr(causal_lm, causal_lm.base_model_prefix)
        self._head = _head_alone(causal_lm) if context.generates else None
        self._ops: AbstractContextManager[Any] = nullcontext()
        if context.device.type == "cpu" or context.needs_fixed_products:
            self._ops = InvariantOps(context.device.type, tables)
        self.kv_cache_spec = self._trial_spec(config, context)
        self._state.calls = []  # of no further use

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Last hidden states of all rows, [num_tokens, hidden_size]."""
        self._state.batch, self._state.groups = batch, self.kv_cache_spec.group_of
        adapters = self.adapters if have_adapters(batch.adapters) else None
        if adapters is not None:
            adapters.activate(batch)
        try:
            return self._run(batch.token_ids, batch.positions)
        finally:
            self._state.batch = None
            if adapters is not None:
                adapters.deactivate()

    @torch.inference_mode()
    def compute_logits(self, hidden_states: Tensor, adapters: RowAdapters = ()) -> Tensor:
        """Logits of the model's own head: float32 [num_rows, vocab_size].

        A model that pools returns the hidden states, which trial runs compare.
        """
        if self._head is None:
            return hidden_states.float()
        active = self.adapters if have_adapters(adapters) else None
        if active is not None:
            active.activate_head(adapters, len(hidden_states))
        try:
            with self._ops:
                output = self._head(inputs_embeds=hidden_states.unsqueeze(0), use_cache=False)
        finally:
            if active is not None:
                active.deactivate()
        logits: Tensor = output.logits
        return logits[0].float()

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """PEFT names modules as the library does."""
        return name

    def pool(self, pooled: Tensor, head: PoolingHead) -> Tensor:
        """See `interface.Pools`: these models have no labels."""
        return pooled

    def _run(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        with self._ops:
            output = self._decoder(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    @torch.inference_mode()
    def _trial_spec(self, config: Any, context: ModelContext) -> KVCacheSpec:
        """Run two tokens without a cache, and derive the cache's shape from the attention calls."""
        padding = getattr(config, "pad_token_id", None)  # which has no position in some models
        tokens = torch.full((2,), int(padding == 0), dtype=torch.int64, device=context.device)
        calls: list[AttentionCall] = []
        self._state.calls = calls
        try:
            hidden = self._run(tokens, torch.arange(2, device=context.device))
        except Exception as error:  # a model's own code may raise anything
            raise UnsupportedModel(
                f"{self.architecture} cannot be served: a trial run failed with"
                f" {type(error).__name__}: {error}"
            ) from error
        if hidden.isnan().any():
            raise UnsupportedModel(
                f"{self.architecture} cannot be served: its code reads weights of linear layers"
                " itself, which are packed"
            )
        spec = cache_spec(self.architecture, config, calls, self.max_model_len)
        self._require_given_positions(tokens)
        if context.generates:
            self._require_plain_positions(tokens, hidden)
        if context.generates and not spec.layers:
            raise UnsupportedModel(
                f"{self.architecture} cannot be served: its attention is not causal"
            )
        return spec if context.cache_dtype is None else replace(spec, dtype=context.cache_dtype)

    def _require_given_positions(self, tokens: Tensor) -> None:
        """Raise UnsupportedModel if the model numbers positions by the place of a row in the step:
        the rows of two equal tokens must follow their positions. tokens: these two."""
        rows = []
        for positions in ((0, 1), (1, 0)):
            calls: list[AttentionCall] = []
            self._state.calls = calls
            hidden = self._run(tokens, torch.tensor(positions, device=tokens.device))
            rows.append(torch.cat([hidden, *(call.rows for call in calls)], 1).float())
        (first, second), (other, _) = rows
        difference = (first - second).norm()
        if difference > _NO_POSITIONS * first.norm() and (second - other).norm() > difference / 2:
            raise UnsupportedModel(
                f"{self.architecture} cannot be served: it does not use the positions that it is"
                " given"
            )

    def _require_plain_positions(self, tokens: Tensor, hidden: Tensor) -> None:
        """Raise UnsupportedModel unless the model numbers positions from 0 on, as RoBERTa does not.
        hidden: of these tokens with such positions."""
        with self._ops:
            output = self._decoder(input_ids=tokens.unsqueeze(0), use_cache=False)
        if not torch.equal(output.last_hidden_state[0], hidden):
            raise UnsupportedModel(
                f"{self.architecture} cannot be served: its positions are not 0, 1, 2, …"
            )


def _adaptable_layers(causal_lm: nn.Module, context: ModelContext) -> dict[Any, AdaptableLayer]:
    """The linear layers whose rows are those of the step, and the LM head, by their modules."""
    layers: dict[Any, AdaptableLayer] = {}
    for name, module in causal_lm.named_modules():
        if len(_NUMBER.findall(name)) > 1:
            continue
        if isinstance(module, PackedLinear):
            module.name = name
            layers[module] = module
        elif type(module) is nn.Linear:
            layers[module] = PlainLinear(module, name, context)
    return layers


@dataclass
class _DecoderOutput(MoeModelOutputWithPast):
    """Every field that a head reads from its decoder's output."""

    cross_attentions: Any = None
    shared_kv_states: Any = None


class _PassThrough(nn.Module):
    """Replaces the decoder; returns its input, the hidden states."""

    @property
    def decoder(self) -> "_PassThrough":
        """The part of it that some models call instead, such as OPT."""
        return self

    def forward(self, *absent: None, inputs_embeds: Tensor, **others: Any) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=inputs_embeds)


def _head_alone(causal_lm: Any) -> nn.Module:
    """The model without its decoder: its own code computes logits from hidden states, with any
    scales and caps that it has."""
    head: nn.Module = copy.copy(causal_lm)
    head._modules = dict(causal_lm._modules)
    head._modules[causal_lm.base_model_prefix] = _PassThrough()
    return head

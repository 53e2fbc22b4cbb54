"""A layer of a decoder: attention and a feed-forward part, composed from specifications."""

from collections.abc import Iterator

from torch import Tensor, nn

from pagewire_kernels.select import Kernels
from worker_service.models.decoder.altup import AltUp
from worker_service.models.decoder.hyper import HyperConnection
from worker_service.models.decoder.per_layer import LayerScalar, PerLayerGate
from worker_service.models.decoder.specs import LayerSpec, Mixer, NormPlace
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.layers.gated_norm import GatedRMSNorm
from worker_service.models.layers.norms import LayerNorm, RMSNorm
from worker_service.models.layers.rotary import RotaryTable
from worker_service.models.native import LayerInputs, MixerPlace, NativeLayer, part_targets


class DecoderLayer(NativeLayer):
    """Attention, and what follows it, with their norms."""

    def __init__(
        self,
        spec: LayerSpec,
        size: int,
        context: ModelContext,
        kernels: Kernels,
        rotary: RotaryTable | None,
        *,
        attention_inputs: int | None = None,
        is_transposed: bool = False,
        shared: dict[int, nn.Module] | None = None,
    ) -> None:
        """size: of the hidden states; rotary: the table of `spec.attention.rotary`;
        attention_inputs: width of the inputs of attention, None for the size; is_transposed: see
        `DecoderSettings`; shared: see `MixerPlace`, None for a layer that shares nothing."""
        super().__init__()
        place, mixer, feed_forward = spec.norm_place, spec.attention, spec.feed_forward

        def norm(name: str, is_there: bool) -> RMSNorm | LayerNorm | None:
            if is_there and f"{name}.narrow" in spec.names:
                return GatedRMSNorm(spec.norm, size, context, kernels.layers)
            own = spec.output_norm if name.endswith("_output_norm") else None
            return (own or spec.norm).build(size, context, kernels) if is_there else None

        is_shared = spec.is_parallel and "feed_forward_norm" not in spec.names
        has_norm = feed_forward is not None and spec.norms_feed_forward and not is_shared
        has_attention_norm = mixer is not None and spec.norms_attention
        self.attention_norm = norm(
            "attention_norm", place is not NormPlace.AFTER and has_attention_norm
        )
        self.feed_forward_norm = norm(
            "feed_forward_norm", place is not NormPlace.AFTER and has_norm
        )
        has_output_norms = place in (NormPlace.AROUND, NormPlace.AFTER)
        self.attention_output_norm = norm("attention_output_norm", has_output_norms)
        self.feed_forward_output_norm = norm(
            "feed_forward_output_norm", has_output_norms or "feed_forward_output_norm" in spec.names
        )
        self.attention: Mixer | None = None
        if mixer is not None:
            inputs = attention_inputs or size
            parts = {} if shared is None else shared
            self.attention = mixer.build(MixerPlace(inputs, size, context, kernels, rotary, parts))
        self.feed_forward: nn.Module | None = None
        if feed_forward is not None:
            self.feed_forward = feed_forward.build(size, context, kernels)
        self.per_layer: PerLayerGate | None = None
        if spec.per_layer is not None:
            self.per_layer = PerLayerGate(spec.per_layer, size, context, kernels.layers)
        self.scalar = LayerScalar(context, kernels.layers) if spec.has_scalar else None
        self.altup: AltUp | None = None
        if spec.altup is not None:
            self.altup = AltUp(spec.altup, size, context, kernels.layers)
        self.attention_streams: HyperConnection | None = None
        self.feed_forward_streams: HyperConnection | None = None
        if spec.hyper_connections is not None:
            self.attention_streams, self.feed_forward_streams = (
                HyperConnection(spec.hyper_connections, size, context, kernels.layers)
                for _ in range(2)
            )
        self.second: DecoderLayer | None = None
        if spec.second is not None:
            self.second = DecoderLayer(spec.second, size, context, kernels, rotary)
        self.shortcut: nn.Module | None = None
        if spec.shortcut is not None:
            self.shortcut = spec.shortcut.build(size, context, kernels)
        self._spec, self._kernels = spec, kernels.layers
        self._is_transposed = is_transposed
        self.num_kept = sum(len(mixer.kept(context, 1)) for mixer in spec.mixers)

    def forward(
        self, residual: Tensor, x: Tensor | None, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor | None]:
        if self.altup is not None:
            return self._alternate(self.altup, residual, inputs), None
        if self.attention_streams is not None:
            return self._run_on_streams(self.attention_streams, residual, inputs), None
        if self.attention is None or self.feed_forward is None:
            return residual, self._part(residual, x, inputs)
        if self._spec.norm_place is NormPlace.AFTER_SUM:
            assert x is None, "a norm of the sum leaves nothing to be added"
            residual = self._normed(self.attention_norm, residual, self.attention(residual, inputs))
            x = self.feed_forward(residual)
            return self._normed(self.feed_forward_norm, residual, x), None
        x = self._normed(self.attention_norm, residual, x)
        if self.second is not None:
            return self._run_both(self.second, residual, x, inputs)
        if not self._spec.is_parallel:
            return self._finish(residual, self.attend_and_mix(x, residual, inputs), inputs)
        mixed = x if self.feed_forward_norm is None else self.feed_forward_norm(residual)
        attended = self.attention(x, inputs)
        return residual, self._kernels.add(attended, self.feed_forward(mixed))

    def _alternate(self, altup: AltUp, streams: Tensor, inputs: LayerInputs) -> Tensor:
        """The streams after the layer: [num_tokens, num_streams * size]."""
        assert self.attention is not None, "the layer has both parts"
        assert self.feed_forward is not None, "as above"
        assert self.per_layer is not None, "it has an embedding"
        assert inputs.embedding is not None, "as above"
        streams = altup.predict(streams)
        active = altup.active_of(streams)
        normed = self._normed(self.attention_norm, active, None)
        attended = self._output(self.attention(normed, inputs), self.attention_output_norm)
        joined = altup.join(attended, active, normed)
        x = self.feed_forward(self._normed(self.feed_forward_norm, joined, None))
        x = self._kernels.add(joined, self._output(x, self.feed_forward_output_norm))
        gating = altup.correct(streams, x)
        altup.add_to_others(streams, self.per_layer(gating, inputs.embedding))
        return streams

    def _run_on_streams(
        self, connection: HyperConnection, streams: Tensor, inputs: LayerInputs
    ) -> Tensor:
        """Run a layer that reads and writes several streams, [num_tokens, num_streams * size],
        which are overwritten and returned. connection: that of attention."""
        assert self.attention is not None, "the layer has both parts"
        assert self.feed_forward is not None, "as above"
        assert self.feed_forward_streams is not None, "as above"
        x, gates = connection.read(streams)
        x = self.attention(self._normed(self.attention_norm, x, None), inputs)
        connection.write(streams, self._output(x, self.attention_output_norm), gates)
        x, gates = self.feed_forward_streams.read(streams)
        x = self.feed_forward(self._normed(self.feed_forward_norm, x, None))
        x = self._output(x, self.feed_forward_output_norm)
        self.feed_forward_streams.write(streams, x, gates)
        return streams

    def _run_both(
        self, second: "DecoderLayer", residual: Tensor, x: Tensor, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Run a layer with a second one, and a shortcut; x: normed, as attention gets it."""
        assert self.attention is not None, "the layer has all parts"
        assert self.feed_forward is not None, "as above"
        assert self.shortcut is not None, "as above"
        x = self._normed(self.feed_forward_norm, residual, self.attention(x, inputs))
        skipped = self.shortcut(x)
        residual, x = second(residual, self.feed_forward(x), inputs.further[0])
        return residual, self._kernels.add(x, skipped)

    def _finish(
        self, residual: Tensor, x: Tensor, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor | None]:
        """What follows both parts in a layer with an embedding of its own, or a factor."""
        if self.per_layer is not None:
            assert inputs.embedding is not None
            residual = self._kernels.add(residual, x)
            x = self.per_layer(residual, inputs.embedding)
        if self.scalar is None:
            return residual, x
        return self.scalar(self._kernels.add(residual, x)), None

    def _part(self, residual: Tensor, x: Tensor | None, inputs: LayerInputs) -> Tensor:
        """What the only part of the layer adds to the residual stream."""
        if self.attention is not None:
            normed = self._normed(self.attention_norm, residual, x)
            return self._output(self.attention(normed, inputs), self.attention_output_norm)
        assert self.feed_forward is not None, "a layer has a part"
        normed = self._normed(self.feed_forward_norm, residual, x)
        return self._output(self.feed_forward(normed), self.feed_forward_output_norm)

    def attend_and_mix(self, x: Tensor, residual: Tensor, inputs: LayerInputs) -> Tensor:
        """Add the attention output for `x`, which is normed, to `residual`, then return the output
        of the feed-forward part."""
        assert self.attention is not None, "the layer has both parts"
        assert self.feed_forward is not None, "as above"
        x = self._output(self.attention(x, inputs), self.attention_output_norm)
        x = self.feed_forward(self._normed(self.feed_forward_norm, residual, x))
        return self._output(x, self.feed_forward_output_norm)

    def _normed(
        self, norm: RMSNorm | LayerNorm | None, residual: Tensor, x: Tensor | None
    ) -> Tensor:
        """Add x, if given, to the residual stream in place. Returns the norm of the sum, or the sum
        itself without a norm."""
        if norm is not None:
            normed: Tensor = norm(residual, x)
            return normed
        return residual if x is None else self._kernels.add(residual, x)

    def _output(self, x: Tensor, norm: RMSNorm | LayerNorm | None) -> Tensor:
        """What is added to the residual stream for the output of a part."""
        x = x if norm is None else norm(x)
        multiplier = self._spec.residual_multiplier
        return x if multiplier == 1.0 else self._kernels.scale(x, multiplier)

    def weight_targets(self, name: str) -> Iterator[WeightTarget]:
        return part_targets(self, self._spec.names, f"{name}.", transposed=self._is_transposed)

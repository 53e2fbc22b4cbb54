"""Rotary position embeddings, and their scaling to longer contexts."""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker_service.cpu_cores import num_usable_cores
from worker_service.errors import BadCheckpoint, UnsupportedModel
from worker_service.models.interface import ModelContext

_ANGLES_AT_ONCE = 1 << 15
"""Numbers of a rotary table that are computed at once: few enough that torch converts them on one
thread, and that their temporaries, which are allocated once, stay in a core's cache."""

_ROWS_AT_ONCE = 1 << 13
"""Positions by which the tables of a CPU grow: tens of milliseconds."""

MAX_POSITIONS = 1 << 24
"""The most positions of a sequence: float32, in which angles are computed, holds no more integers
exactly."""

PROPORTIONAL = "proportional"
"""The scaling type in which a part of the frequencies is 0, and the others are those of the full
size of a head."""

SCALING_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", PROPORTIONAL)
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Numbers among the parameters of scaling types."""

QUERY_SCALING = "llama_4_scaling_beta"
"""The parameter in `config.json` by which queries are scaled with their positions."""

QUERY_OFFSET = "query_position_offset"
"""The parameter that is added to these positions, which no `config.json` has; 0 without it."""

TABLE_FACTOR = "table_factor"
"""The parameter that multiplies cosines and sines whatever the scaling type, as that of GGUF files
does; no `config.json` has it."""

NO_ROTATION = "none"
"""The scaling type of an embedding that rotates nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RotarySettings:
    """The rotary embedding of a model, from its `config.json`."""

    rotary_dim: int
    """Elements of a head that are rotated."""

    theta: float
    scaling_type: str
    max_position_embeddings: int
    """Positions in `config.json`: those of the trained context, or of the extended one."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Other parameters of the scaling type, by their names in `transformers`."""

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], rotary_dim: int, default_theta: float = 10000.0
    ) -> "RotarySettings":
        """Read `rope_scaling`, or `rope_parameters`, and the keys that may be beside them, in the
        order of precedence of `transformers`. If each type of layer has parameters of its own, the
        scaling type is `nested`. Raises UnsupportedModel for a number that is missing or cannot be,
        and BadCheckpoint for a parameter of another kind."""
        outer = ("partial_rotary_factor", "rope_theta", "original_max_position_embeddings")
        found = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(found, Mapping):
            raise BadCheckpoint(f"config.json: rope_parameters: expected an object, got {found!r}")
        merged = {**{key: config.get(key) for key in outer}, **found}
        merged[outer[2]] = config.get(outer[2]) or merged[outer[2]]
        parameters = {key: value for key, value in merged.items() if value is not None}
        scaling_type = parameters.get("rope_type") or parameters.get("type") or "default"
        if any(isinstance(value, Mapping) for value in found.values()):
            scaling_type = "nested"
        for key in _REQUIRED.get(scaling_type, ()):
            if not _is_above(0, parameters.get(key)):
                raise UnsupportedModel(
                    f"config.json: {key}: expected a positive number, which rope_type"
                    f" {scaling_type} needs, got {parameters.get(key)!r}"
                )
        least = 1 if scaling_type == "yarn" else 0  # YaRN divides by its logarithm
        theta = parameters.get("rope_theta") or default_theta
        if not _is_above(least, theta):
            raise BadCheckpoint(
                f"config.json: rope_theta: expected a number above {least}, got {theta!r}"
            )
        return cls(
            rotary_dim=rotary_dim,
            theta=float(theta),
            scaling_type=scaling_type,
            max_position_embeddings=int(config["max_position_embeddings"]),
            parameters=parameters,
        )

    def original_length(self) -> int:
        """Positions of the trained context, before it was extended."""
        return int(
            self.parameters.get("original_max_position_embeddings") or self.max_position_embeddings
        )

    def max_model_len(self) -> int:
        """The number of positions after scaling."""
        if self.scaling_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * float(self.parameters["factor"]))
        if self.scaling_type == "yarn":
            stretched = int(self.original_length() * float(self.parameters["factor"]))
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings


def _is_above(limit: float, value: Any) -> bool:
    """Whether a value of `config.json` is a finite number above a limit."""
    return type(value) in (int, float) and limit < value < math.inf


def halves_order(num_heads: int, head_dim: int, first: int, rotated: int) -> Tensor:
    """The order of the rows of heads in which the elements of a head that are rotated against each
    other are those of two halves, where the weights rotate neighbours: int64 [num_heads *
    head_dim]. first, rotated: the first element that is rotated, and how many are."""
    rows = torch.arange(head_dim)
    before, pairs, after = rows.tensor_split([first, first + rotated])
    head = torch.cat([before, pairs[0::2], pairs[1::2], after])
    return (torch.arange(num_heads)[:, None] * head_dim + head).flatten()


class RotaryTable:
    """Cosines and sines of all positions up to a length, [num_positions, rotary_dim // 2], for the
    rotary position embedding (RoPE, Su et al. 2021) and its scaling to longer contexts.

    Each row is computed once, so that angles are the same in every batch. Frequencies depend only
    on the position, never on the batch or the current length of the sequence, because cached keys
    cannot be rotated again. On a CPU a row is computed, and takes memory, when a sequence first
    comes near it (`fill`), for models have millions of positions of which few are used; the
    addresses, which recorded programs hold, stay. On a GPU, where the host does not know the
    positions of a step, all rows are computed at once.

    The table must have the same bits in every process, so that a sequence that moves between
    workers continues exactly. Therefore it is computed by numpy, in float64: torch uses functions
    of MKL whose results depend on how threads share the work (`loader/device.py`).
    """

    def __init__(
        self,
        settings: RotarySettings,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._num_positions, self._num_filled = num_positions, 0
        self._frequencies = _frequencies(settings, num_positions)
        self._factor = _attention_factor(settings, num_positions)
        shape = num_positions, settings.rotary_dim // 2
        self.scales_queries = bool(settings.parameters.get(QUERY_SCALING))
        """Whether queries have tables of their own, which scale them by their positions, too."""

        self.cos, self.sin, *of_queries = (
            torch.empty(shape, dtype=dtype, device=device)
            for _ in range(4 if self.scales_queries else 2)
        )
        self.query_cos, self.query_sin = of_queries or (self.cos, self.sin)
        self._scales: list[Tensor] = []
        """Those of `query_scales`."""
        self.fill(_ROWS_AT_ONCE if device.type == "cpu" else num_positions)

    @property
    def is_filled(self) -> bool:
        """Whether all rows are computed."""
        return self._num_filled == self._num_positions

    def fill(self, num_positions: int) -> None:
        """Compute the rows of the first positions, if they are not computed yet."""
        first = self._num_filled
        if num_positions <= first:
            return
        num_chunks = -(-num_positions // _ROWS_AT_ONCE)
        self._num_filled = min(num_chunks * _ROWS_AT_ONCE, self._num_positions)
        if self.cos.is_meta:
            return
        starts = range(first, self._num_filled, _ROWS_AT_ONCE)
        if len(starts) == 1:
            self._fill_rows(first)
            return
        with ThreadPoolExecutor(min(len(starts), num_usable_cores())) as threads:
            for _ in threads.map(self._fill_rows, starts):
                pass

    @torch.inference_mode()
    def _fill_rows(self, start: int) -> None:
        rows = slice(start, min(start + _ROWS_AT_ONCE, self._num_filled))
        angles = _angles(self._settings, self._frequencies, rows)
        self._fill_table(self.cos[rows], angles, np.cos)
        self._fill_table(self.sin[rows], angles, np.sin)
        if self.scales_queries:
            scales = _query_scales(self._settings, rows)
            self._fill_table(self.query_cos[rows], angles, np.cos, scales)
            self._fill_table(self.query_sin[rows], angles, np.sin, scales)
            for target in self._scales:
                target[rows] = scales.to(self.cos)[:, None]

    def _fill_table(
        self,
        table: Tensor,
        angles: Tensor,
        function: Callable[..., Any],
        scales: Tensor | None = None,
    ) -> None:
        step = _ANGLES_AT_ONCE // max(1, angles.shape[1]) or 1
        buffer = np.empty((step, angles.shape[1]))
        for first in range(0, len(angles), step):
            rows = slice(first, first + step)
            part = buffer[: len(angles[rows])]
            part[:] = angles[rows].numpy()
            function(part, out=part)
            part *= self._factor
            if scales is not None:
                part *= scales[rows, None].numpy()
            table[rows] = torch.from_numpy(part).to(table.dtype)

    @cached_property
    def identity(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the same positions that rotate nothing: [num_positions, 1] each."""
        ones = torch.ones_like(self.cos[:, :1])
        return ones, torch.zeros_like(ones)

    def query_scales(self, size: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the same positions that rotate nothing, and scale all elements of
        queries, seen as heads of this many: [num_positions, size // 2] each."""
        shape, filled = (self._num_positions, size // 2), slice(self._num_filled)
        scales = self.cos.new_empty(shape)
        scales[filled] = _query_scales(self._settings, filled).to(self.cos)[:, None]
        self._scales.append(scales)
        return scales, self.cos.new_zeros(shape)


def _query_scales(settings: RotarySettings, rows: slice) -> Tensor:
    """The factors by which Llama 4 and Ministral 3 scale queries, which grow with the multiples of
    the trained length before them (Nakanishi 2025): float64 [len(rows)]."""
    beta = float(settings.parameters[QUERY_SCALING])
    offset = settings.parameters.get(QUERY_OFFSET, 0)
    positions = np.arange(rows.start or 0, rows.stop) + offset
    multiples = np.floor(positions / settings.original_length())
    return torch.from_numpy(1 + beta * np.log1p(multiples))


def _angles(settings: RotarySettings, frequencies: Tensor, rows: slice) -> Tensor:
    """float32 [len(rows), rotary_dim // 2]."""
    positions = torch.arange(rows.start, rows.stop, dtype=torch.float32)
    if settings.scaling_type == "dynamic":
        return positions[:, None] * _dynamic_frequencies(settings, rows)
    return positions[:, None] * frequencies


def _frequencies(settings: RotarySettings, num_positions: int) -> Tensor:
    """Frequencies of sequences of up to `num_positions`; those of dynamic scaling differ between
    positions. float32 [rotary_dim // 2]."""
    if settings.scaling_type == NO_ROTATION:
        return torch.zeros(settings.rotary_dim // 2)
    frequencies = _plain_frequencies(settings.theta, settings.rotary_dim)
    if settings.scaling_type == PROPORTIONAL:
        share = float(settings.parameters.get("partial_rotary_factor", 1.0))
        frequencies[int(share * settings.rotary_dim // 2) :] = 0.0
        return frequencies / float(settings.parameters.get("factor", 1.0))
    if settings.scaling_type == "linear":
        return frequencies / float(settings.parameters["factor"])
    if settings.scaling_type == "llama3":
        return _llama3_frequencies(settings, frequencies)
    if settings.scaling_type == "yarn":
        return _yarn_frequencies(settings)
    if settings.scaling_type == "longrope":
        return _long_frequencies(settings, num_positions)
    return frequencies


def _powers(rotary_dim: int) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim


def _plain_frequencies(theta: float, rotary_dim: int) -> Tensor:
    return 1.0 / (theta ** _powers(rotary_dim))


def _dynamic_frequencies(settings: RotarySettings, rows: slice) -> Tensor:
    """Frequencies per position, those of a sequence that ends there: [len(rows), ...].

    Dynamic NTK scaling raises the base with the length of the sequence. `transformers` uses the
    length at each forward pass: the length at which a token was decoded, or that of the prompt that
    contains it. The former, used here, is a function of the position; with the latter, the KV of a
    sequence would change when it is recomputed. Both give the same tokens for prompts within the
    trained length.
    """
    trained, factor = settings.max_position_embeddings, float(settings.parameters["factor"])
    dim = settings.rotary_dim
    lengths = np.arange(rows.start + 1, rows.stop + 1).clip(min=trained).astype(np.float64)
    bases = settings.theta * (factor * lengths / trained - (factor - 1)) ** (dim / (dim - 2))
    # By numpy, see `RotaryTable`.
    return torch.from_numpy(1.0 / bases[:, None] ** _powers(dim).double().numpy()).float()


def _llama3_frequencies(settings: RotarySettings, frequencies: Tensor) -> Tensor:
    """Llama 3.1: stretch long wavelengths, keep short ones, and interpolate between."""
    factor = float(settings.parameters["factor"])
    low = float(settings.parameters["low_freq_factor"])
    high = float(settings.parameters["high_freq_factor"])
    length = settings.original_length()
    wavelengths = 2 * math.pi / frequencies
    smooth = (length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    stretched = torch.where(wavelengths > length / low, frequencies / factor, blended)
    return torch.where(wavelengths < length / high, frequencies, stretched)


def _yarn_frequencies(settings: RotarySettings) -> Tensor:
    """YaRN (Peng et al. 2023): keep dimensions that rotate often within the trained length,
    interpolate those that rotate less than once, and blend between."""
    parameters, dim = settings.parameters, settings.rotary_dim
    extrapolated = _plain_frequencies(settings.theta, dim)
    interpolated = extrapolated / float(parameters["factor"])

    def dim_of(rotations: float) -> float:
        turns = settings.original_length() / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(settings.theta))

    low = dim_of(float(parameters.get("beta_fast") or 32))
    high = dim_of(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return interpolated * ramp + extrapolated * (1 - ramp)


def _long_frequencies(settings: RotarySettings, num_positions: int) -> Tensor:
    """LongRoPE (Ding et al. 2024): frequencies are divided by factors, the short ones if all
    positions are within the trained length, otherwise the long ones.

    `transformers` chooses at each forward pass by the longest sequence in the batch, which would
    make the tokens of a request depend on another's.
    """
    kind = "long_factor" if num_positions > settings.original_length() else "short_factor"
    factors, dim = settings.parameters.get(kind), settings.rotary_dim
    if not isinstance(factors, list) or len(factors) != dim // 2:
        raise UnsupportedModel(
            f"config.json: {kind}: expected {dim // 2} numbers, one per rotated pair, got {factors}"
        )
    return 1.0 / (torch.tensor(factors) * settings.theta ** _powers(dim))


def _attention_factor(settings: RotarySettings, num_positions: int) -> float:
    """What cosines and sines are multiplied by, and queries and keys with them."""
    factor = _temperature_factor(settings, num_positions)
    return factor * float(settings.parameters.get(TABLE_FACTOR, 1.0))


def _temperature_factor(settings: RotarySettings, num_positions: int) -> float:
    """The correction of the softmax temperature of YaRN and LongRoPE; otherwise 1. Phi-MoE has one
    for the long, and one for the short frequencies."""
    if settings.scaling_type not in ("yarn", "longrope"):
        return 1.0
    parameters = settings.parameters
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if settings.scaling_type == "longrope":
        trained = settings.original_length()
        kind = "long_mscale" if num_positions > trained else "short_mscale"
        if parameters.get(kind) is not None:
            return float(parameters[kind])
        factor = float(parameters.get("factor") or settings.max_position_embeddings / trained)
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    factor = float(parameters["factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(float(parameters["mscale"])) / scale(float(parameters["mscale_all_dim"]))
    return scale(1.0)


class RotaryTables:
    """The tables of cosines and sines of a model, one for layers of equal settings."""

    def __init__(self, num_positions: int, context: ModelContext) -> None:
        self._num_positions, self._context = num_positions, context
        self._found: list[tuple[RotarySettings, RotaryTable]] = []

    def table(self, settings: RotarySettings | None) -> RotaryTable | None:
        """The table of these settings; None without any."""
        if settings is None:
            return None
        for known, table in self._found:
            if known == settings:
                return table
        dtype, device = self._context.dtype, self._context.device
        table = RotaryTable(settings, self._num_positions, dtype, device)
        self._found.append((settings, table))
        return table

    def fill(self, positions: Tensor) -> None:
        """Compute the rows of these positions, int64 [num_tokens], where that is done on demand.
        To be called before each forward pass."""
        if len(positions) and not all(table.is_filled for _, table in self._found):
            num_positions = int(positions.max()) + 1
            for _, table in self._found:
                table.fill(num_positions)

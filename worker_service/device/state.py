"""What a device keeps of sequences and recordings, over one cache."""

import logging
from collections.abc import Iterable

import torch

from worker_service.cache_engine import CacheEngine
from worker_service.device.graphs import DecodeGraphs, Recorder
from worker_service.device.sampler import DeviceSampler, sampling_kernels
from worker_service.device.slots import DeviceSlots, initial_slots
from worker_service.models.interface import Model

logger = logging.getLogger(__name__)


class DeviceState:
    """What a device keeps from epoch to epoch, over one cache: the tensors by slot, the sampler and
    the recordings that refer to them."""

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        block_size: int,
        recorder: Recorder | None = None,
        sizes: list[int] | None = None,
        num_slots: int | None = None,
    ) -> None:
        """recorder: makes recordings of decode steps of these padded sizes; None makes none.
        num_slots: sequences to make room for at first; None takes enough for most."""
        self._model = model
        self._kv_cache = cache.device_cache
        self._max_blocks = -(-model.max_model_len // block_size)
        self._recorder = recorder
        self._sizes = sizes or []
        self._make(num_slots or initial_slots(self._max_blocks))

    def grow(self, num_slots: int, used: Iterable[int]) -> None:
        """Make room for more sequences. Those in the used slots come to the device once more; the
        host must know all of their tokens."""
        logger.warning("making room for more sequences num_slots=%d", num_slots)
        self._make(num_slots)
        for slot in used:
            self.slots.note_new(slot)

    def _make(self, num_slots: int) -> None:
        device = self._kv_cache.device
        self.graphs: DecodeGraphs | None = None
        self.slots = DeviceSlots(num_slots, self._max_blocks, device)
        self.sampler = DeviceSampler(self.slots, sampling_kernels(device))
        if self._recorder is not None and self._sizes:
            self.graphs = self._record(self._recorder)

    @torch.inference_mode()
    def _record(self, recorder: Recorder) -> DecodeGraphs | None:
        graphs = DecodeGraphs(self._model, self._kv_cache, self.slots, self.sampler, self._sizes)
        try:
            graphs.record(recorder)
        except RuntimeError as error:
            # A model from elsewhere may wait for the device in the middle of a step.
            reason = str(error).splitlines()[0]
            logger.warning("decode steps cannot be recorded, going on without error=%s", reason)
            return None
        return graphs

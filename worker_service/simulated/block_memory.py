"""The contents of the memory model as bytes, for transfers between simulated workers."""

import struct

from worker_service.block_transfer.memory import CacheAddresses
from worker_service.cache_groups import CacheGroup
from worker_service.errors import LeaseDenied
from worker_service.simulated.memory_model import Content, MemoryModel

_GROUP = struct.Struct("<i")
_SLOT = struct.Struct("<?Q")
"""Whether something was written, and its history."""


class SimulatedMemory:
    """Implements `worker_service.block_transfer.memory.BlockMemory` over a memory model."""

    def __init__(self, model: MemoryModel, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self._model = model
        self.num_device_blocks, self.num_host_blocks = num_gpu_blocks, num_cpu_blocks
        num_slots = max((_num_slots(group) for group in model.groups), default=1)
        self.block_bytes = _GROUP.size + num_slots * _SLOT.size

    @property
    def addresses(self) -> CacheAddresses:
        """None: the contents are objects."""
        return CacheAddresses(device=0, host=0)

    def source(self, block: int) -> memoryview:
        """The bytes of a block, without the slots that its group does not have as zeros."""
        content = self._model.content(block)
        if content is None:
            raise LeaseDenied(f"block {block} was never written")
        data = bytearray(self.block_bytes)
        _GROUP.pack_into(data, 0, content.group)
        for index, history in enumerate(list(content.slots)):
            offset = _GROUP.size + index * _SLOT.size
            _SLOT.pack_into(data, offset, history is not None, history or 0)
        return memoryview(data)

    def target(self, block: int) -> memoryview:
        """A buffer; the block contains nothing meanwhile."""
        self._model.replace(block, None)
        return memoryview(bytearray(self.block_bytes))

    def commit(self, block: int, data: memoryview) -> None:
        """Make the block contain what the bytes say."""
        (group,) = _GROUP.unpack_from(data)
        slots = [
            history if is_written else None
            for is_written, history in _SLOT.iter_unpack(data[_GROUP.size :])
        ]
        num_slots = _num_slots(self._model.groups[group])
        self._model.replace(block, Content(group, slots[:num_slots]))


def _num_slots(group: CacheGroup) -> int:
    """Entries of a block's content: one in a group of states."""
    return group.block_tokens or 1

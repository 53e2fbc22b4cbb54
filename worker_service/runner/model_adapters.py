"""The adapters of a worker's model, of LoRA and of prompts."""

from collections.abc import Mapping

from worker_service.adapters.peft_format import ModelAdapter
from worker_service.adapters.store import AdapterLoader
from worker_service.config import AdapterConfig
from worker_service.errors import AdaptersFull, BadAdapter, NotReady
from worker_service.kv_cache.memory_budget import available_host_memory
from worker_service.loader import LoadedModel
from worker_service.loader.adapters import read_adapter
from worker_service.models.adapters import AdapterSlots

_MAX_BYTES = 1 << 32


class ModelAdapters(AdapterLoader[ModelAdapter]):
    """Reads adapters, and packs them for the layers of the loaded model."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__(config, _MAX_BYTES)
        self._loaded: LoadedModel | None = None
        self.slots: AdapterSlots | None = None
        """None until the model is loaded."""

    def serve(self, loaded: LoadedModel, slots: AdapterSlots) -> None:
        """Use the model, which is loaded now."""
        self._loaded, self.slots = loaded, slots

    @property
    def slot_changes(self) -> Mapping[str, int]:
        """Those of the model's slots."""
        return {} if self.slots is None else self.slots.changes

    def _read(self, path: str) -> ModelAdapter:
        if self._loaded is None:
            raise NotReady("the model is still loading")
        return read_adapter(path, self._loaded)

    def _of_content(self, content: bytearray) -> ModelAdapter:
        return ModelAdapter.of_content(content)

    def _prepare(self, adapter: ModelAdapter) -> None:
        if self.slots is None or self._loaded is None:
            raise NotReady("the model is still loading")
        if adapter.prompt is not None and self._loaded.pooler is not None:
            got = "the embeddings of a prompt"
            raise BadAdapter(f"peft_type: expected LORA for a model that makes vectors, got {got}")
        size, available = adapter.info.num_bytes, available_host_memory()
        if size > available:
            raise AdaptersFull(
                f"max_cpu_loras: an adapter of {size} bytes exceeds the memory of {available} bytes"
                " that is available on the host; unload one"
            )
        self.slots.prepare(adapter)

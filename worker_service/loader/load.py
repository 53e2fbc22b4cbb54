"""`load_model`."""

from worker_service.loader.config import LoadedModel, ModelConfig


def load_model(config: ModelConfig) -> LoadedModel:
    """The model `config` names, with its weights on its device."""
    raise NotImplementedError

"""From a name on the command line to a model ready to run."""

from worker_service.loader.config import LoadedModel, ModelConfig
from worker_service.loader.load import load_model

__all__ = ["LoadedModel", "ModelConfig", "load_model"]

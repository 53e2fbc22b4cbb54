"""What can go wrong in a worker, in our own words.

    WorkerError
    ├── InvalidOption      a setting is wrong, or this machine or model cannot honour it
    ├── ModelNotFound      neither a directory nor a model that can be downloaded
    ├── UnsupportedModel   the checkpoint is sound, but Pagewire cannot serve it
    └── BadCheckpoint      files are missing, damaged or do not fit the model

Nothing here knows gRPC.
"""


class WorkerError(Exception):
    """The root; the message is one line, for people."""


class InvalidOption(WorkerError):
    """A setting is wrong; the message names it and what was expected."""


class ModelNotFound(WorkerError):
    """No model at the place named."""


class UnsupportedModel(WorkerError):
    """The model needs something Pagewire does not do; the message names it."""


class BadCheckpoint(WorkerError):
    """Files of a checkpoint are missing, damaged or contradict its configuration."""

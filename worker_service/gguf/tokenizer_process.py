"""A process that makes the tokenizer's files of a GGUF file."""

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from worker_service.errors import WorkerError

logger = logging.getLogger(__name__)

Files: TypeAlias = Mapping[str, bytes]
Outcome: TypeAlias = tuple[Sequence[logging.LogRecord], Files | WorkerError | OSError]
"""What the process has logged, and the files or why there are none."""


class TokenizerProcess:
    """The process, which has begun. It ends by itself, also if nobody waits for the files."""

    def __init__(self, path: Path) -> None:
        """path: of the GGUF file."""
        self.path = path
        self._process = subprocess.Popen(
            [sys.executable, "-m", "worker_service.gguf", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def files(self) -> Files | None:
        """Wait for the files; None if the process was ended from outside. To be called once.

        Raises UnsupportedModel, BadCheckpoint, or OSError for a file that cannot be read.
        """
        output, _ = self._process.communicate()
        if self._process.returncode:
            logger.warning(
                "the process that makes the tokenizer's files has ended exit_code=%d",
                self._process.returncode,
            )
            return None
        outcome: Outcome = pickle.loads(output)
        records, made = outcome
        for record in records:
            logging.getLogger(record.name).handle(record)
        if isinstance(made, (WorkerError, OSError)):
            raise made
        return made

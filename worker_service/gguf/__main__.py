"""`python -m worker_service.gguf FILE`: writes a pickled `Outcome` to standard output."""

import gc
import logging
import os
import pickle
import sys
from pathlib import Path

from worker_service.errors import WorkerError
from worker_service.gguf.header import read_metadata
from worker_service.gguf.tokenizer import tokenizer_assets
from worker_service.gguf.tokenizer_process import Files


class _Kept(logging.Handler):
    """Keeps what is logged, for the process that started this one."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record."""
        self.records.append(record)


def _make(path: Path) -> Files | WorkerError | OSError:
    try:
        return tokenizer_assets(path, read_metadata(path))
    except (WorkerError, OSError) as error:
        return error


def main() -> None:
    """Make the files of the GGUF file that the argument names."""
    gc.disable()  # of a vocabulary nothing is freed before the end
    # The process that started this one logs what concerns the header.
    logging.getLogger("worker_service.gguf.header").propagate = False
    kept = _Kept()
    logging.getLogger().addHandler(kept)
    made = _make(Path(sys.argv[1]))
    try:
        sys.stdout.buffer.write(pickle.dumps((kept.records, made)))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        pass  # it has ended
    os._exit(0)  # without freeing all tokens one by one


if __name__ == "__main__":
    main()

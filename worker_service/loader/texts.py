"""Reading what frontends need of a model, while its weights are loaded."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

from tokenizers import Tokenizer

from worker_service.gguf.header import is_gguf
from worker_service.gguf.tokenizer import without_merges
from worker_service.loader.files.assets import read_tokenizer

logger = logging.getLogger(__name__)

Texts: TypeAlias = tuple[Mapping[str, bytes], Callable[[], Tokenizer] | None]
"""The files that frontends need, by name, and what returns the tokenizer that they describe."""


def start_reading_texts(
    model_dir: Path,
    reading: Callable[[], Iterable[tuple[str, bytes]]],
    on_files: Callable[[Mapping[str, bytes]], None],
    *,
    generates: bool,
) -> Callable[[], Texts]:
    """Read the files that frontends need by `reading`, give them to `on_files` at once, and begin
    to read their tokenizer if the model generates. Returns a function that waits for both.

    The files of a GGUF file are made while weights are read: a large vocabulary takes seconds. Its
    tokenizer, which only decodes, is read once it is needed.
    Imports of `transformers`, which other files may need, are not safe in several threads.
    """

    def make() -> Texts:
        files = dict(reading())
        on_files(files)
        return files, tokenizer_of(files)

    def tokenizer_of(files: Mapping[str, bytes]) -> Callable[[], Tokenizer] | None:
        if not generates or "tokenizer.json" not in files:
            return None
        content = files["tokenizer.json"]
        if is_gguf(model_dir):
            # The library holds Python's lock while it reads, with many merges for seconds.
            return cache(lambda: read_tokenizer(without_merges(content)))
        read = cache(partial(read_tokenizer, content))
        try:
            read()
        except ValueError as error:
            logger.warning("no structured output error=tokenizer.json: %s", error)
            return None
        return read

    if not is_gguf(model_dir):
        files = dict(reading())
        on_files(files)
        return lambda: (files, tokenizer_of(files))
    made: Future[Texts] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:  # raised where the result is wanted
            made.set_exception(error)

    threading.Thread(target=run, name="tokenizer", daemon=True).start()
    return made.result

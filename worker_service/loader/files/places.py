"""Where the files of a model are: in a directory, in this package, or on the hub, from which they
are downloaded. The same of adapters.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from glob import escape
from pathlib import Path

from worker_service.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE
from worker_service.config import EMBEDDED, local_model
from worker_service.errors import AdapterNotFound, ModelNotFound
from worker_service.gguf.header import is_gguf
from worker_service.load_progress import LoadProgress
from worker_service.loader.files.gguf_on_hub import choose_gguf, split_type

logger = logging.getLogger(__name__)

_EMBEDDED_DIR = Path(__file__).parents[2] / "embedded_model"
_WEIGHT_PATTERNS = ["*.safetensors", "*.safetensors.index.json"]
_ANSWER_TIMEOUT_S = 3.0
"""How long a start waits for the hub if it can do without: its library would try for 20 s."""
_OTHER_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


def resolve_model(
    model: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    progress: LoadProgress | None = None,
) -> Path:
    """Return the directory or GGUF file of `model`; a model of the hub is downloaded first.

    A GGUF file of the hub is `owner/name:TYPE`, or `owner/name` where there is no safetensors
    checkpoint, see `choose_gguf`. revision: of a model of the hub; weights: whether weight files
    are downloaded, too; progress: of the download. Raises ModelNotFound, which names the places
    that were searched.
    """
    found = _EMBEDDED_DIR if model == EMBEDDED else local_model(model)
    if found is not None:
        if revision is not None:
            logger.warning("revision is not used of a local model: %s model=%s", revision, model)
        return found
    hub_id, kind = split_type(model)
    _require_hub_id(hub_id)
    progress, folder = progress or LoadProgress(), None
    if not kind:
        patterns = _OTHER_PATTERNS + (_WEIGHT_PATTERNS if weights else [])
        folder = _download(model, revision, patterns, progress)
        has_weights = not weights or any(folder.glob(_WEIGHT_PATTERNS[0]))
        if has_weights and (folder / "config.json").is_file():
            return folder
    parts = _gguf_on_hub(model, revision)
    if folder is not None and not parts:
        return folder
    return _download(model, revision, [*map(escape, parts)], progress) / parts[0]


def resolve_config(model: str, revision: str | None = None) -> Path | None:
    """Like `resolve_model`, but of a model of the hub only `config.json` is downloaded.

    None if the model is in the hub's local cache, which may be older than the hub, or if it is a
    GGUF file there.
    """
    if model == EMBEDDED or local_model(model) is not None:
        return resolve_model(model)
    hub_id, kind = split_type(model)
    _require_hub_id(hub_id)
    from huggingface_hub import (
        errors,
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )

    if kind:
        _gguf_on_hub(model, revision)
        return None
    if try_to_load_from_cache(model, "config.json", revision=revision) is not None:
        return None
    if choose_gguf(model, _cached_files(model, revision)):
        return None
    with _hub_errors(model):
        try:
            # Asked once: the download repeats failures for 25 s, and hides their reason.
            get_hf_file_metadata(hf_hub_url(model, "config.json", revision=revision))
        except errors.RemoteEntryNotFoundError:
            if not _gguf_on_hub(model, revision):
                raise
            return None
        return Path(hf_hub_download(model, "config.json", revision=revision)).parent


def resolve_adapter(path: str) -> Path:
    """Return the folder or file of an adapter; one of the hub is downloaded first.

    The path of nothing that exists is returned as it is, unless it has the form of a hub id. Raises
    AdapterNotFound, which names the places that were searched.
    """
    place = Path(path).expanduser()
    if place.exists() or path.startswith(("/", ".", "~")) or "/" not in path or is_gguf(place):
        return place
    from huggingface_hub import snapshot_download

    try:
        _require_hub_id(path)
        with _hub_errors(path):
            return Path(
                snapshot_download(
                    path,
                    allow_patterns=[CONFIG_FILE, WEIGHTS_FILE],
                    local_files_only=not _answers(path, None),
                )
            )
    except ModelNotFound as error:
        raise AdapterNotFound(f"path: {error}") from error


def _require_hub_id(model: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if model.lower().endswith(".gguf"):
        raise ModelNotFound(f"{model}: no such file")
    try:
        validate_repo_id(model)
    except HFValidationError:
        raise ModelNotFound(
            f"{model}: no such directory or file, and not a hub id of the form owner/name"
        ) from None


def _download(
    model: str, revision: str | None, patterns: list[str], progress: LoadProgress
) -> Path:
    from huggingface_hub import snapshot_download

    from worker_service.loader.files.hub_progress import download_bars

    logger.info("looking for the model on the hub model=%s revision=%s", model, revision)
    hub_id, _ = split_type(model)
    with _hub_errors(model), progress.phase("downloading") as advance:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                local_files_only=not _answers_at_start(hub_id, revision),
                allow_patterns=patterns,
                tqdm_class=download_bars(advance),
            )
        )


def _gguf_on_hub(model: str, revision: str | None) -> tuple[str, ...]:
    """See `choose_gguf`; of the hub's local cache if the hub cannot be reached.

    Raises ModelNotFound also if a type is named where there is no GGUF file.
    """
    from huggingface_hub import HfApi, errors

    hub_id, kind = split_type(model)
    with _hub_errors(model):
        try:
            if not _answers_at_start(hub_id, revision):
                raise TimeoutError
            # Unlike a list of files alone, this is asked for once, see `resolve_config`.
            info = HfApi().model_info(hub_id, revision=revision)
            files = [sibling.rfilename for sibling in info.siblings or ()]
        except errors.HfHubHTTPError:
            raise
        except Exception:  # see `_hub_errors`
            files = _cached_files(hub_id, revision)
            if not files:
                raise
    parts = choose_gguf(model, files)
    if kind and not parts:
        raise ModelNotFound(f"{model}: {hub_id} is on the Hugging Face hub, but has no GGUF file")
    return parts


def _answers(hub_id: str, revision: str | None) -> bool:
    """Whether the hub is to be asked for files: not if it does not answer within seconds and there
    are some in its local cache, which a warning reports."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE or not _cached_files(hub_id, revision):
        return True
    try:
        HfApi().model_info(hub_id, revision=revision, timeout=_ANSWER_TIMEOUT_S)
    except errors.HfHubHTTPError:
        return True
    except Exception as error:  # see `_hub_errors`
        logger.warning(
            "the hub does not answer, using its local cache, which may be older or incomplete"
            " model=%s endpoint=%s error=%s",
            hub_id,
            constants.ENDPOINT,
            _cause(error),
        )
        return False
    return True


_answers_at_start = cache(_answers)
"""The same, asked once: several functions look for the same model."""


def _cached_files(hub_id: str, revision: str | None) -> list[str]:
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=[],  # the folder, whatever it lacks
                local_files_only=True,
            )
        )
    except errors.LocalEntryNotFoundError:
        return []
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Turn errors of the hub's library, and of its HTTP client, into ModelNotFound."""
    from huggingface_hub import constants, errors

    tried = f"{model}: no such directory or file, and the Hugging Face hub"
    try:
        yield
    except ModelNotFound:
        raise
    except errors.RemoteEntryNotFoundError as error:
        raise ModelNotFound(
            f"{model}: on the Hugging Face hub, but with neither a config.json nor a GGUF file"
        ) from error
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{model}: gated on the Hugging Face hub: accept its conditions there, and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:  # which it also says of private models
        status = error.response.status_code
        raise ModelNotFound(f"{tried} has none that HF_TOKEN may read (status {status})") from error
    except errors.HfHubHTTPError as error:
        raise ModelNotFound(f"{tried} refused it: {' '.join(str(error).split())}") from error
    except Exception as error:  # the HTTP client's own, which depend on the library's version
        if constants.HF_HUB_OFFLINE:
            raise ModelNotFound(
                f"{model}: no such directory or file, nor in the local cache, and HF_HUB_OFFLINE is"
                " set"
            ) from error
        raise ModelNotFound(
            f"{tried} could not be reached, nor is it in the local cache:"
            f" {constants.ENDPOINT}:"
            f" {_cause(error)}{_proxy()}"
        ) from error


def _cause(error: BaseException) -> str:
    """What the first of a chain of errors says, on one line."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(text).splitlines()[0]


def _proxy() -> str:
    names = [name for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY") if os.environ.get(name)]
    return f" (through the proxy in {names[0]})" if names else ""

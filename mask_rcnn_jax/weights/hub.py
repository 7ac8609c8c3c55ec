"""Models on a hub that speaks Hugging Face's protocol: fetched, and pushed.

The client is `huggingface_hub`, the extra "hub", by its own rules: HF_ENDPOINT names the hub,
HF_TOKEN or `hf auth login` say who asks, HF_HUB_CACHE is where files are kept, and with
HF_HUB_OFFLINE only those are taken.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import logging

from mask_rcnn_jax.terminal.safe_text import cut, one_line
from mask_rcnn_jax.version import __version__
from mask_rcnn_jax.weights.checksums import FILE_NAME as SUMS
from mask_rcnn_jax.weights.model_folder import MOST_BYTES, WEIGHTS, check

_SCHEME = re.compile("hf:/")  # a Path has one slash
_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_ADDRESS = re.compile(rf"hf://?({_NAME}/{_NAME})(?:@([A-Za-z0-9][\w./-]{{0,254}}))?", re.ASCII)
_SECONDS = 20.0  # to wait for an answer about a repository
LOGIN = "set HF_TOKEN, or run `hf auth login`"


def is_hub(source: str | os.PathLike) -> bool:
    """Whether it is an address of a hub, well formed or not."""
    return bool(_SCHEME.match(str(source)))


def parse(address: str | os.PathLike) -> tuple[str, str | None]:
    """Return "owner/name" and the revision, a branch, a tag or a commit; ValueError for others."""
    found = _ADDRESS.fullmatch(str(address))
    if not found or ".." in str(address):
        expected = "expected hf://owner/name or hf://owner/name@revision"
        raise ValueError(f"{address} names no model, {expected}")
    return found[1], found[2]


def fetch(address: str | os.PathLike) -> Path:
    """Return the folder of a model, downloaded but for what is there already, and checked.

    No file but those of `MOST_BYTES` is downloaded. A commit that is kept is taken without asking
    the hub. Without a connection, a branch or a tag is what it was when it was fetched last.

    Raises:
        ValueError: the address is none, there is no such model, or it is damaged.
        OSError: the hub cannot be reached, and nothing is kept.
    """
    repository, revision = parse(address)
    client = _client()
    api = _api(client)
    is_commit = re.fullmatch("[0-9a-f]{40}", revision or "")
    folder = _kept(api, repository, revision) if is_commit else None
    if folder is None:
        folder = _asked(client, api, f"{address}", repository, revision)
    try:
        checksum = check(folder)
    except ValueError as error:
        raise ValueError(f"{error}; delete {folder.parents[1]} to fetch it again") from error
    logging.info("%s: revision %s, SHA-256 of %s %s", address, folder.name, WEIGHTS, checksum)
    return folder


def _asked(client: Any, api: Any, address: str, repository: str, revision: str | None) -> Path:
    """Return the folder of what the hub says a revision is, or said when it could be asked."""
    try:
        with _told(client, address):
            asked = dict(files_metadata=True, timeout=_SECONDS)
            info = api.model_info(repository, revision=revision, **asked)
    except OSError as error:
        if folder := _kept(api, repository, revision):
            logging.warning("%s; the copy that is kept is taken", error)
            return folder
        cache = client.constants.HF_HUB_CACHE
        raise OSError(f"{error}; no copy of it is kept in {cache}") from error
    _check_files(address, {one.rfilename: one.size for one in info.siblings or ()})
    with _told(client, address):
        folder = _kept(api, repository, info.sha)
        if folder is None:
            logging.info("%s: fetching revision %s", address, info.sha)
            paths = [api.hf_hub_download(repository, n, revision=info.sha) for n in MOST_BYTES]
            folder = Path(paths[0]).parent
        if revision != info.sha:  # keeps what the name stands for
            api.hf_hub_download(repository, SUMS, revision=revision)
    return folder


def check_push(repository: str) -> None:
    """Raise ValueError if a push must fail: for its name, or without a token or the client."""
    if not re.fullmatch(f"{_NAME}/{_NAME}", repository, re.ASCII):
        raise ValueError(f"--push_to is {repository!r}, expected owner/name")
    if _client().get_token() is None:
        raise ValueError(f"--push_to {repository} needs a token of the hub: {LOGIN}")


def push(folder: Path, names: list[str], repository: str, *, private: bool) -> str:
    """Upload files of a folder in one commit; make the repository if there is none.

    Returns the address of the new revision. Raises ValueError, if a repository that should be
    private is public, and OSError.
    """
    client = _client()
    with _told(client, f"--push_to {repository}"):
        api = _api(client)
        api.create_repo(repository, private=private or None, exist_ok=True)
        is_public = private and not api.model_info(repository, timeout=_SECONDS).private
    if is_public:
        raise ValueError(f"--push_to {repository} is public, and --private was given")
    with _told(client, f"--push_to {repository}"):
        files = [client.CommitOperationAdd(name, str(folder / name)) for name in names]
        done = api.create_commit(repository, files, commit_message="Add the model")
    return f"hf://{repository}@{done.oid}"


def _client() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        text = "models on a hub need huggingface_hub: pip install 'mask-rcnn-jax[hub]'"
        raise ValueError(text) from error
    return huggingface_hub


def _api(client: Any) -> Any:
    return client.HfApi(library_name="mask_rcnn_jax", library_version=__version__)


def _kept(api: Any, repository: str, revision: str | None) -> Path | None:
    """Return the folder of a revision that was fetched before, if it is whole."""
    try:
        given = dict(revision=revision, local_files_only=True)
        paths = [api.hf_hub_download(repository, name, **given) for name in MOST_BYTES]
    except OSError:
        return None
    return Path(paths[0]).parent


def _check_files(address: str | os.PathLike, sizes: dict[str, int | None]) -> None:
    for name, most in MOST_BYTES.items():
        if name not in sizes:
            expected = "expected what `export --format hub` writes"
            raise ValueError(f"{address} holds no model of mask_rcnn_jax: no {name}, {expected}")
        if (size := sizes[name] or 0) > most:
            raise ValueError(f"{address}: {name} has {size:,} bytes, expected at most {most:,}")


@contextmanager
def _told(client: Any, what: str) -> Iterator[None]:
    """Make one line of an error of the client's: ValueError for an answer, OSError for none."""
    errors, progress = client.errors, client.utils
    is_left = progress.are_progress_bars_disabled() or sys.stderr.isatty()
    is_left = is_left or "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ
    try:
        if not is_left:  # a log has lines alone
            progress.disable_progress_bars()
        yield
    except errors.GatedRepoError as error:
        text = f"its owner asks for terms to be accepted on its page, and for a login: {LOGIN}"
        raise ValueError(f"{what}: {text}") from error
    except errors.RepositoryNotFoundError as error:
        text = f"there is no such repository, or it is private and needs a token: {LOGIN}"
        raise ValueError(f"{what}: {text}") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{what}: there is no such revision") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            text = f"the token may not do that ({status}): {LOGIN}, with one that may"
            raise ValueError(f"{what}: {text}") from error
        kind = OSError if status == 429 or status >= 500 else ValueError
        raise kind(f"{what}: {_text(error)}") from error
    except ValueError as error:  # what the client checks itself
        raise ValueError(f"{what}: {_text(error)}") from error
    except Exception as error:  # of whatever library the client makes its connections with
        raise OSError(f"{what}: {_text(error)}") from error
    finally:
        if not is_left:
            progress.enable_progress_bars()


def _text(error: BaseException) -> str:
    """The line of an error, or of the one behind "Error while uploading"."""
    if isinstance(error, RuntimeError) and error.__cause__:
        error = error.__cause__
    return cut(one_line(error).partition(" For more information")[0])

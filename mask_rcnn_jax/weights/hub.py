"""Models on a hub that speaks Hugging Face's protocol: fetched, and pushed.

The client is `huggingface_hub`, the extra "hub", by its own rules: HF_ENDPOINT names the hub,
HF_TOKEN or `hf auth login` say who asks, HF_HUB_CACHE is where files are kept, and with
HF_HUB_OFFLINE only those are taken. It pushes; what a hub sends is read by `network` and
`download`, within their limits, and named by us: a client would take an ETag for a file name.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

from absl import logging

from mask_rcnn_jax.download import download
from mask_rcnn_jax.network import Limits, read_url
from mask_rcnn_jax.optional_packages import import_package
from mask_rcnn_jax.terminal.progress import bytes_progress
from mask_rcnn_jax.terminal.safe_text import cut, one_line
from mask_rcnn_jax.version import __version__
from mask_rcnn_jax.weights.model_folder import MOST_BYTES, WEIGHTS, check, is_model_folder

_SCHEME = re.compile("hf:/")  # a Path has one slash
_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_ADDRESS = re.compile(rf"hf://?({_NAME}/{_NAME})(?:@([A-Za-z0-9][\w./-]{{0,254}}))?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
_SECONDS = 20.0  # to wait for an answer about a repository
_LIMITS = Limits(silence=_SECONDS)
_MOST_DESCRIPTION = 1 << 24  # bytes of such an answer, which lists all files
LOGIN = "set HF_TOKEN, or run `hf auth login`"
_CODES = {
    "GatedRepo": f"its owner asks for terms to be accepted on its page, and for a login: {LOGIN}",
    "RepoNotFound": f"there is no such repository, or it is private and needs a token: {LOGIN}",
    "RevisionNotFound": "there is no such revision",
}
_WRONG_TOKEN = "Invalid credentials in Authorization header"


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
    cache = Path(client.constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    folder = _kept(cache, revision) if _COMMIT.fullmatch(revision or "") else None
    if folder is None:
        folder = _asked(client, cache, f"{address}", repository, revision)
    try:
        checksum = check(folder)
    except ValueError as error:
        raise ValueError(f"{error}; delete {folder.parents[1]} to fetch it again") from error
    logging.info("%s: revision %s, SHA-256 of %s %s", address, folder.name, WEIGHTS, checksum)
    return folder


def _asked(client: Any, cache: Path, address: str, repository: str, revision: str | None) -> Path:
    """Return the folder of what the hub says a revision is, or said when it could be asked."""
    sent = client.utils.build_hf_headers()
    headers = {name: text for name, text in sent.items() if name.lower() == "authorization"}
    try:
        commit, sizes = _described(client, address, repository, revision, headers)
    except OSError as error:
        if folder := _kept(cache, revision):
            logging.warning("%s; the copy that is kept is taken", error)
            return folder
        raise OSError(f"{error}; no copy of it is kept in {cache.parent}") from error
    folder = cache / "snapshots" / commit
    if not is_model_folder(folder):
        logging.info("%s: fetching revision %s", address, commit)
        for name in MOST_BYTES:
            url = f"{client.constants.ENDPOINT}/{repository}/resolve/{commit}/{name}"
            given: Any = dict(size=sizes[name], headers=headers, make_progress=bytes_progress)
            with _answered(address):
                download(url, folder / name, None, **given)
    if revision != commit:  # keeps what the name stands for
        kept = cache / "refs" / (revision or "main")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(commit)
    return folder


def _described(
    client: Any, address: str, repository: str, revision: str | None, headers: Mapping[str, str]
) -> tuple[str, dict[str, int]]:
    """Return the commit that a revision is, and the sizes of our files in it, both checked."""
    if client.constants.HF_HUB_OFFLINE:
        raise OSError(f"{address}: HF_HUB_OFFLINE is set")
    path = f"{repository}/revision/{quote(revision or 'main', safe='')}"
    url = f"{client.constants.ENDPOINT}/api/models/{path}?blobs=True"
    with _answered(address):
        content = read_url(url, _MOST_DESCRIPTION, _LIMITS, headers)
    try:
        about = json.loads(content)
        commit = str(about["sha"])
        sizes = {str(one["rfilename"]): one.get("size") for one in about["siblings"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        expected = "expected json with sha and siblings"
        raise ValueError(f"{address}: {url} describes no model, {expected}") from error
    asked = revision if revision and _COMMIT.fullmatch(revision) else None
    if not _COMMIT.fullmatch(commit) or commit != (asked or commit):
        expected = asked or "40 hexadecimal digits"
        raise ValueError(f"{address}: the hub's commit is {cut(repr(commit))}, expected {expected}")
    for name, most in MOST_BYTES.items():
        if name not in sizes:
            expected = "expected what `export --format hub` writes"
            raise ValueError(f"{address} holds no model of mask_rcnn_jax: no {name}, {expected}")
        size = sizes[name]
        if type(size) is not int or not 0 < size <= most:
            found = f"{size:,}" if type(size) is int else cut(repr(size))
            raise ValueError(f"{address}: {name} has {found} bytes, expected at most {most:,}")
    return commit, sizes


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
        client = import_package("huggingface_hub")
        for module in ("constants", "errors", "utils"):
            import_package(f"huggingface_hub.{module}")
    except ImportError as error:
        text = "models on a hub need huggingface_hub: pip install 'mask-rcnn-jax[hub]'"
        raise ValueError(text) from error
    return client


def _api(client: Any) -> Any:
    return client.HfApi(library_name="mask_rcnn_jax", library_version=__version__)


def _kept(cache: Path, revision: str | None) -> Path | None:
    """Return the folder of a revision that was fetched before, if it is whole."""
    commit = revision
    if not _COMMIT.fullmatch(revision or ""):
        try:
            commit = (cache / "refs" / (revision or "main")).read_text().strip()
        except (OSError, ValueError):
            return None
    folder = cache / "snapshots" / f"{commit}"
    return folder if is_model_folder(folder) else None


@contextmanager
def _answered(what: str) -> Iterator[None]:
    """Make one line of what `network` raises: ValueError for an answer, OSError for none."""
    try:
        yield
    except OSError as error:
        status = error if isinstance(error, HTTPError) else error.__cause__
        if isinstance(status, HTTPError):
            raise _refusal(what, status.code, status.headers, error) from error
        raise OSError(f"{what}: {_text(error)}") from error


def _refusal(what: str, status: int, headers: Any, error: Exception) -> Exception:
    """The error that a status of the hub's is."""
    code = headers.get("X-Error-Code", "")
    if status == 401 and headers.get("X-Error-Message") != _WRONG_TOKEN:
        code = "RepoNotFound"  # a hub does not tell strangers which ones there are
    if text := _CODES.get(code):
        return ValueError(f"{what}: {text}")
    if status in (401, 403):
        text = f"the token may not do that ({status}): {LOGIN}, with one that may"
        return ValueError(f"{what}: {text}")
    kind = OSError if status == 429 or status >= 500 else ValueError
    return kind(f"{what}: {_text(error)}")


@contextmanager
def _told(client: Any, what: str) -> Iterator[None]:
    """Make one line of an error of the client's: ValueError for an answer, OSError for none."""
    progress = client.utils
    is_left = progress.are_progress_bars_disabled() or sys.stderr.isatty()
    is_left = is_left or "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ
    try:
        if not is_left:  # a log has lines alone
            progress.disable_progress_bars()
        yield
    except client.errors.HfHubHTTPError as error:
        answer = error.response
        raise _refusal(what, answer.status_code, answer.headers, error) from error
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

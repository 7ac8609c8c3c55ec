"""Consent to import functions that a json names: the code of a stranger's run does not run unasked.

A recipe, the command line and a call may name any function as `package.module:function`: they are
the user's own. A run's config.json may come from elsewhere. What it names is imported if it is a
part or an augmentation of this package, if `--allow_code` or `allow_code` names its module, or if
this user's own commands wrote the file: a folder of the user's, ~/.local/state/mask_rcnn_jax, keeps
the SHA-256 of such files with functions in them.
"""

import hashlib
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from absl import logging

OURS = ("mask_rcnn_jax.models.", "mask_rcnn_jax.data.")  # what a recipe's parts are made of

_allowed: ContextVar[frozenset[str]] = ContextVar("allowed", default=frozenset())


@contextmanager
def allow_code(names: str | Iterable[str] = ()) -> Iterator[None]:
    """Let the json of a run that you did not train here import what it names, in a `with` block.

    names: modules, packages or single functions such as `my.module:Backbone`, one or several, each
        with commas between several.
    """
    token = _allowed.set(_allowed.get())
    try:
        allow(names)
        yield
    finally:
        _allowed.reset(token)


def allow(names: str | Iterable[str]) -> None:
    """Allow as `allow_code`, until the end of its block."""
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, Iterable) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"names is {names!r}, expected modules, packages or functions")
    found = {name.strip() for one in listed for name in (one, *one.split(","))}
    _allowed.set(_allowed.get() | found - {""})


def functions(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the functions that a recipe's tree names in place of built-in ones, by their entry."""
    model, data = tree.get("model"), tree.get("data")
    found = dict(_names(model, "model")) if isinstance(model, Mapping) else {}
    augment = data.get("augment") if isinstance(data, Mapping) else ()
    listed = augment if isinstance(augment, list | tuple) else ()
    found |= {f"data.augment[{place}]": name for place, name in enumerate(listed)}
    loss = tree.get("loss")
    own = loss.get("own") if isinstance(loss, Mapping) else ()
    listed = own if isinstance(own, list | tuple) else ()
    found |= {f"loss.own[{place}]": name for place, name in enumerate(listed)}
    return {entry: name for entry, name in found.items() if isinstance(name, str) and ":" in name}


def _names(section: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _names(value, f"{where}.{key}")
        elif key == "name":
            yield f"{where}.{key}", value


def check(named: Mapping[str, str], path: str | os.PathLike, content: bytes) -> None:
    """Raise ValueError, naming file, entry and flag, for code without consent.

    Args:
        named: functions, and files of code, by their entry.
        path: the file that names them.
        content: its bytes.
    """
    refused = {e: name for e, name in named.items() if not (_is_allowed(name) or _is_ours(name))}
    if not refused or _is_remembered(content):
        return
    entry, name = next(iter(refused.items()))
    module = name.partition(":")[0]
    raise ValueError(
        f"{path}: {entry} is {name!r}, and this file is none that you made here: its code runs "
        f"only with --allow_code {module} (mrcnn.allow_code in Python)"
    )


def _is_allowed(name: str) -> bool:
    module = name.partition(":")[0]
    return any(
        name == one or module == one or module.startswith(f"{one}.") for one in _allowed.get()
    )


def _is_ours(name: str) -> bool:
    """Whether a name is that of a class of this package that is a part, which only computes.

    Its functions are none: some read, write or run what they are given.
    """
    module, _, attribute = name.partition(":")
    if not re.fullmatch(r"mask_rcnn_jax(\.\w+)+", module) or not module.startswith(OURS):
        return False
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        return False
    return isinstance(found, type) and is_dataclass(found) and found.__module__.startswith(OURS)


def remember(content: bytes) -> None:
    """Note that this user's own command wrote a file with functions in it.

    Where no note can be kept, a warning says so, and `check` will refuse the file.
    """
    digest = hashlib.sha256(content).hexdigest()
    try:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / digest).touch(mode=0o600)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        logging.warning("the model's own code will need --allow_code: no note is kept: %s", error)


def _is_remembered(content: bytes) -> bool:
    """Whether there is a note, in a folder that only this user can write to."""
    try:
        folder = _folder()
        status = folder.stat()
        is_own = status.st_mode & 0o022 == 0 and status.st_uid == os.getuid()
        return is_own and (folder / hashlib.sha256(content).hexdigest()).is_file()
    except (OSError, RuntimeError):
        return False


def _folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "mask_rcnn_jax" / "own_runs"

"""A run at an address of an object store: a folder on the local disk, and its copy there.

Only the first process writes a run. It works in the folder, and another of its threads copies what
has changed, so that the copy is at each moment what a run on a disk could have left when it was
killed: logs come before the checkpoints that they belong to, the checksums of a checkpoint last,
and those of one that is deleted go first.

Of two runs at one address, the one that started last goes on: `OWNER` there holds its token, which
is read again before anything is written.
"""

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
from absl import logging

from mask_rcnn_jax import store_folders as stores
from mask_rcnn_jax.stores import is_address
from mask_rcnn_jax.training import processes
from mask_rcnn_jax.training.lock import FILE_NAME as LOCK
from mask_rcnn_jax.weights import stored_run
from mask_rcnn_jax.weights.checksums import FILE_NAME as SUMS
from mask_rcnn_jax.weights.run_checkpoint import checkpoint_steps, find_fault, has_checkpoint
from mask_rcnn_jax.weights.stored_run import whole_steps

OWNER = "train.owner"
UNSCORED = "unscored"  # a file: its content is the step after which checkpoints do not count yet
_UNSCORED = f"checkpoints/{UNSCORED}"
_EVENTS = "events.out.tfevents."
_TRIES = 3  # to fetch a run that another one may still write to

Size = tuple[int, int]  # bytes, and the time of the last change in nanoseconds


class Mirror:
    """Keeps a run's folder and its copy alike; does nothing for a workdir that is no address.

    Attributes:
        address: of the run; "" without one.
        folder: the workdir on the local disk.
        is_stopped: whether the run is to be started again, so that what cannot be copied is no
            error.
    """

    def __init__(self, workdir: str | os.PathLike):
        self.address = stores.full(workdir) if is_address(workdir) else ""
        self.folder = stored_run.place(self.address, "train") if self.address else Path(workdir)
        self.is_stopped = False
        self._token = uuid.uuid4().hex
        self._tokens = self.folder.parent / "tokens"  # with which the folder is that of the run
        self._copied: dict[
            str, Size | None
        ] = {}  # what is at the address; None: of unknown content
        self._lost = ""  # why this run ends
        self._thread = ThreadPoolExecutor(1, "mirror")
        self._next: Future | None = None

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to resume from. OSError if nothing can be written."""
        if not self.address:
            return has_checkpoint(self.folder)
        stores.check_writable(self.address)
        return bool(whole_steps(stores.list_tree(self.address)))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder what is at the address, and the other way round in the end.

        All processes call it. Raises OSError if the store cannot be read at the start or, where
        the block raises nothing, written in the end; the folder has all of the run then.
        """
        if self.address:
            processes.on_first(self._start)
        try:
            yield
        except BaseException:
            self._end(quietly=True)
            raise
        self._end(quietly=self.is_stopped)

    def update(self) -> None:
        """Have another thread copy what has changed."""
        waits = self._next and not (self._next.running() or self._next.done())
        if self.address and not (waits or self._lost):
            self._next = self._thread.submit(self._try_copy)

    def check(self) -> None:
        """Raise OSError if another run has taken the address."""
        if self._lost:
            raise OSError(self._lost)
        if self._next and self._next.done():
            self._next.result()

    def checkpoint(self, step: int) -> Path:
        """The folder of a checkpoint for this process; other machines have to fetch it."""
        folder = self.folder
        if self.address and jax.process_index() > 0:
            folder, fault = stored_run.fetch_checkpoint(self.address, step)
            if fault:
                raise OSError(f"{self.address}/checkpoints/{step} came damaged: {fault}")
        return folder.absolute() / "checkpoints" / str(step)

    def _start(self) -> None:
        owner = (stores.read_bytes(f"{self.address}/{OWNER}") or b"").decode(errors="replace")
        names = stores.list_tree(self.address)
        if parts := sorted(_all_steps(names) - {*whole_steps(names)} if not owner else ()):
            raise ValueError(
                f"{self.address}/checkpoints/{parts[0]} has no {SUMS}: it was copied in part, or "
                "is of a version without checksums; delete it or choose another --workdir"
            )
        logging.info(
            "%s is kept in %s, and copied after each checkpoint", self.address, self.folder
        )
        for draft in self.folder.parent.glob("tmp.*"):  # of a process that was killed
            shutil.rmtree(draft, ignore_errors=True)
        tokens = self._tokens.read_text().split() if self._tokens.exists() else []
        # Nobody else wrote since, and the folder may be ahead, unless a cleaner of disks was there.
        is_ours = owner in tokens and self._has_step(max(whole_steps(names), default=-1))
        if is_ours:
            self._tokens.write_text(f"{owner} {self._token}")
        else:
            self._tokens.unlink(missing_ok=True)
        stores.write_bytes(f"{self.address}/{OWNER}", self._token.encode())
        if not is_ours:
            self._fetch()
            self._tokens.write_text(self._token)
            return
        alike = {step for step in whole_steps(names) if self._is_same(step)}
        kept = ("eval/", _EVENTS, *(f"checkpoints/{step}/" for step in alike))
        sizes = {name: _size(self.folder / name) for name in names if name.startswith(kept)}
        same = {name: size for name, size in sizes.items() if size and size[0] == names[name]}
        self._copied = {**dict.fromkeys(names), **same}
        if jax.process_count() > 1:  # the others look at the address
            self._copy()

    def _has_step(self, least: int) -> bool:
        """Whether the folder has a whole checkpoint of that step or later; -1: none is needed."""
        steps = [step for step in checkpoint_steps(self.folder) if step >= least]
        folders = (self.folder / "checkpoints" / str(step) for step in steps)
        return least < 0 or any(find_fault(folder) is None for folder in folders)

    def _is_same(self, step: int) -> bool:
        sums = f"checkpoints/{step}/{SUMS}"
        path = self.folder / sums
        return path.exists() and path.read_bytes() == stores.read_bytes(f"{self.address}/{sums}")

    def _fetch(self) -> None:
        for tries_left in reversed(range(_TRIES)):
            names = stores.list_tree(self.address)
            wanted = _wanted(names)
            self._clear(max(whole_steps(names), default=-1))
            try:
                stores.get_files(self.address, wanted, self.folder)
                break
            except FileNotFoundError:  # deleted just now
                if not tries_left:
                    raise
        self._copied = {**dict.fromkeys(names), **{n: _size(self.folder / n) for n in wanted}}

    def _clear(self, newest: int) -> None:
        """Empty the folder. What is ahead of the newest step at the address is moved aside."""
        steps, aside = checkpoint_steps(self.folder), self.folder.parent / "replaced"
        is_ahead = bool(steps) and steps[0] > newest
        if is_ahead:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            text = (
                "%s was written by another run since this machine had step %d, which is in %s now"
            )
            logging.warning(text, self.address, steps[0], aside)
        for path in self.folder.iterdir():
            if path.name.startswith(LOCK):
                continue
            if is_ahead:
                path.rename(aside / path.name)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _try_copy(self) -> None:
        try:
            self._copy()
        except (OSError, ValueError) as error:  # the second of an answer that is none of a store
            if not self._lost:  # `check` says so
                text = "%s; the run goes on, and all that is missing is copied with what comes next"
                logging.warning(text, error)

    def _copy(self) -> None:
        steps = checkpoint_steps(self.folder)
        steps = [n for n in steps if (self.folder / f"checkpoints/{n}/{SUMS}").exists()]
        # Looked for after the steps: without it, the logs below have all up to the newest step.
        is_held = (self.folder / _UNSCORED).exists()
        self._delete_gone(steps)
        if is_held:
            self._put([_UNSCORED])
        self._put(filter(_is_log, stores.files_below(self.folder)))
        for step in reversed(steps):
            self._put_checkpoint(step)
        self._delete_gone(steps)
        if not is_held and _UNSCORED in self._copied:
            self._delete([_UNSCORED])

    def _put(self, names: Iterable[str]) -> None:
        sizes = {name: _size(self.folder / name) for name in names}
        changed = {n: size for n, size in sizes.items() if size and size != self._copied.get(n)}
        if not changed:
            return
        self._check_owner()
        # Copies: a store may refuse a file that grows.
        with tempfile.TemporaryDirectory(dir=self._tokens.parent, prefix="tmp.") as drafts:
            for name in list(changed):
                draft = Path(drafts) / name
                draft.parent.mkdir(parents=True, exist_ok=True)
                try:
                    shutil.copyfile(self.folder / name, draft)
                except FileNotFoundError:  # deleted just now
                    del changed[name]
            stores.put_files(self.address, changed, Path(drafts))
        self._copied |= changed

    def _put_checkpoint(self, step: int) -> None:
        folder = self.folder / "checkpoints" / str(step)
        names = [f"checkpoints/{step}/{name}" for name in stores.files_below(folder)]
        sums = f"checkpoints/{step}/{SUMS}"
        sizes = {name: _size(self.folder / name) for name in names}
        if all(self._copied.get(name) == size for name, size in sizes.items()) or sums not in names:
            return
        # Of a checkpoint that was here before, or a part of one, which another run may have put
        # until now: no list may have its files.
        there = stores.list_tree(f"{self.address}/checkpoints/{step}")
        self._copied = dict.fromkeys(f"checkpoints/{step}/{name}" for name in there) | self._copied
        others = self._below(step) - {*names}
        if others or sums in self._copied:
            self._delete([sums, *others])
        names.remove(sums)
        self._copied |= dict.fromkeys(names)
        try:
            for part in (names, [sums]):
                self._check_owner()
                stores.put_files(self.address, part, self.folder)
        except FileNotFoundError:
            if folder.exists():
                raise
            return  # deleted just now, and next time there
        self._copied |= sizes

    def _delete_gone(self, steps: list[int]) -> None:
        """Delete the checkpoints that are not in the folder, if one that is there is left."""
        if any(f"checkpoints/{step}/{SUMS}" in self._copied for step in steps):
            for step in _all_steps(self._copied) - {*steps}:
                sums = f"checkpoints/{step}/{SUMS}"
                self._delete([sums, *(self._below(step) - {sums})])

    def _below(self, step: int) -> set[str]:
        return {name for name in self._copied if name.startswith(f"checkpoints/{step}/")}

    def _delete(self, names: list[str]) -> None:
        self._check_owner()
        stores.delete(self.address, names)
        for name in names:
            self._copied.pop(name, None)

    def _check_owner(self) -> None:
        if stores.read_bytes(f"{self.address}/{OWNER}") != self._token.encode():
            self._lost = (
                f"{self.address}/{OWNER} is gone or another run's, which goes on; this run ends "
                f"here, and its folder is {self.folder}"
            )
            raise OSError(self._lost)

    def _end(self, *, quietly: bool) -> None:
        self._thread.shutdown()
        if not self.address or jax.process_index() > 0 or (quietly and self._lost):
            return
        try:
            self.check()
            self._copy()
        except (OSError, ValueError) as error:
            if self._lost and not quietly:
                raise
            text = f"{error}; all of it is in {self.folder}, and the same command copies it"
            if not quietly:
                raise OSError(text) from error
            logging.warning("%s", text)


def _all_steps(names: Iterable[str]) -> set[int]:
    """The steps of checkpoints of which there are files, whole or not."""
    parts = (name.split("/") for name in names if name.startswith("checkpoints/"))
    return {
        int(part[1]) for part in parts if len(part) > 2 and re.fullmatch("0|[1-9][0-9]*", part[1])
    }


def _wanted(names: Iterable[str]) -> list[str]:
    """The files that a run goes on with: of its evaluations the last one, and no old events.

    What else is below its address, such as data or other runs, is none of them.
    """
    names = list(names)
    kept = {f"checkpoints/{step}" for step in whole_steps(names)}
    evaluated = [int(found[1]) for name in names if (found := re.match("eval/([0-9]+)/", name))]
    kept |= {f"eval/{max(evaluated, default='')}"}
    return [
        name
        for name in names
        if name == _UNSCORED
        or "/".join(name.split("/")[:2]) in kept
        or "/" not in name
        and _is_log(name)
        and not name.startswith((_EVENTS, OWNER))
    ]


def _is_log(name: str) -> bool:
    """Whether it is a file of a run, but not of its checkpoints, and complete."""
    last = name.rpartition("/")[2]
    is_draft = last.endswith(".tmp") or last.startswith("tmp.")
    return not (name.startswith(("checkpoints/", LOCK, OWNER, stores.PROBE)) or is_draft)


def _size(path: Path) -> Size | None:
    """None if there is no file."""
    with suppress(FileNotFoundError, NotADirectoryError):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    return None

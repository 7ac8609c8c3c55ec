"""A lock on the workdir of a run, so that two runs never write into one.

It is a file that only one process can create, on one machine or on several that share the folder,
and that its process touches now and then. It is stale, and taken over, if that process is gone. Of
a process that cannot be looked at, on another machine or in another container, this is known once
the file was not touched for `STALE` seconds, whatever the clock of that machine says.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from absl import logging

from mask_rcnn_jax.training import processes

FILE_NAME = "train.lock"
BEAT, STALE = 10.0, 60.0  # seconds
_PAUSE = 0.5  # seconds between two looks


@contextmanager
def locked(
    workdir: Path, check_more: Callable[[], object] = lambda: None
) -> Iterator[Callable[[], None]]:
    """Hold the lock of a workdir, on the first process for all.

    Yields a function that raises OSError if the lock was lost, as where the workdir was removed,
    or what `check_more` raises on the first process; every process must call it. Raises ValueError
    if another run holds the lock.
    """
    path = workdir.absolute() / FILE_NAME
    content, end = json.dumps(_describe_process()), threading.Event()

    def beat() -> None:
        while not end.wait(BEAT):
            with suppress(OSError):  # `check` says so
                if (found := _read(path)) and found[0] == content:
                    os.utime(path)

    def check() -> None:
        if (found := _read(path)) is None or found[0] != content:
            raise OSError(
                f"{path} is gone or another run's: the folder was removed or taken while this run "
                "was at work, which ends here"
            )
        check_more()

    processes.on_first(lambda: _take(path, content))
    try:
        if jax.process_index() == 0:
            threading.Thread(target=beat, name=FILE_NAME, daemon=True).start()
        yield lambda: processes.on_first(check)
    finally:
        end.set()
        found = _read(path) if jax.process_index() == 0 else None
        if found and found[0] == content:
            path.unlink(missing_ok=True)


def _take(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    seen, since = None, 0.0  # the lock of a process that cannot be looked at, from then on
    while True:
        try:
            with open(path, "x") as file:
                file.write(content)
            return
        except FileExistsError:
            found = _read(path)
        if found is None:
            if path.is_symlink():
                raise OSError(f"{path} is a link to nothing; delete it")
            continue  # given back just now
        text, touched = found
        owner = _parse(text)
        alive = _is_alive(owner)
        if alive is None and seen not in (None, found):
            alive = True
        if alive is None and seen and time.monotonic() - since > STALE:
            alive = False
        if alive is None and not seen and _age(path, touched) > STALE:
            alive = False
        if alive:
            process = f"process {owner.get('pid')} on {owner.get('host')}"
            raise ValueError(
                f"{path.parent} is in use by another run, {process}, started "
                f"{owner.get('started')}; end that run, choose another --workdir, "
                f"or delete {path} if it has ended"
            )
        if alive is False:
            logging.info("%s was left by a process that is gone", path)
            if _take_over(path, text, content):
                return
            continue
        if seen is None:
            where = owner.get("host", "another machine")
            text = "%s: waiting at most %d seconds to see if the run on %s is alive"
            logging.info(text, path, STALE, where)
            seen, since = found, time.monotonic()
        time.sleep(_PAUSE)


def _describe_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "space": _process_space(),
        "pid": os.getpid(),
        "born": _birth(os.getpid()),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "token": uuid.uuid4().hex,
    }


def _process_space() -> str:
    """Name the scope in which process ids are unique: a boot of a machine, a container on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
        return socket.gethostname()


def _birth(pid: int) -> str | None:
    """When a process began, in ticks since the start of the machine; "" if it has ended.

    None where the system does not say: other than Linux, or of another user's process. Tells it
    from a later process of the same number.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if _may_exist(pid) or not Path("/proc/self/stat").exists() else ""
    return "" if state in "ZX" else fields[18]  # a zombie has ended


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether a process is at work; None if that cannot be seen from here."""
    pid = owner.get("pid")
    if owner.get("space") != _process_space() or not isinstance(pid, int):
        return None
    birth = _birth(pid)
    return None if birth is None else birth == owner.get("born")


def _may_exist(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _read(path: Path) -> tuple[str, float] | None:
    """The text of the lock and when it was touched; None if there is no lock."""
    try:
        with open(path, errors="replace") as file:
            return file.read(10_000), os.fstat(file.fileno()).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None


def _parse(text: str) -> dict[str, Any]:
    """What it says of its process; {} if it is damaged or not written yet."""
    try:
        owner = json.loads(text)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _age(path: Path, touched: float) -> float:
    """Seconds since it was touched, by the clock of the file system's machine."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    probe.touch()
    try:
        return probe.stat().st_mtime - touched
    finally:
        probe.unlink()


def _take_over(path: Path, stale: str, content: str) -> bool:
    """Replace a stale lock; whether ours is the one that stays.

    Of several who find it stale at one moment, the last one to replace it has it. It is replaced,
    not removed: the second would remove the lock of the first.
    """
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    draft.write_text(content)
    if (found := _read(path)) is None or found[0] != stale:
        draft.unlink()
        return False
    draft.rename(path)
    time.sleep(_PAUSE)
    return (found := _read(path)) is not None and found[0] == content

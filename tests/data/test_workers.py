"""Real processes that read with workers, killed in every way: nothing of them stays behind."""

import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from absl import logging

from mask_rcnn_jax.data import workers
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.workers import SHARED
from tests.memory_set import ShapeSet

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="needs Linux' /dev/shm")


@contextmanager
def reading(*arguments, signal_early=False):
    """Yields (process, name of its shared files, process ids of its workers)."""
    command = [sys.executable, "-m", "tests.data.reading", *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            if signal_early:
                wait_until(lambda: len(workers_of(process.pid)) == 2)
                os.killpg(process.pid, signal.SIGTERM)
            owner, *pids = process.stdout.readline().split()
            yield process, owner, [int(pid) for pid in pids]
        finally:
            process.kill()


def workers_of(pid):
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    commands = (Path(f"/proc/{n}/cmdline") for path in paths for n in path.read_text().split())
    return [command for command in commands if b"spawn_main" in command.read_bytes()]


def files_of(owner):
    return [path.name for path in SHARED.iterdir() if owner in path.name]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    assert holds()


@pytest.mark.parametrize(
    "number, to_group",
    [
        (signal.SIGKILL, False),
        pytest.param(signal.SIGHUP, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
    ],
)
def test_workers_and_shared_memory_end_with_the_process_that_reads(number, to_group):
    with reading() as (process, owner, pids):
        assert len(pids) == 2 and all(map(is_running, pids))
        wait_until(lambda: any(name.startswith(f"{owner}-") for name in files_of(owner)))
        assert any(name.startswith(f"sem.{owner}") for name in files_of(owner))
        (os.killpg if to_group else os.kill)(process.pid, number)
        process.wait(20)
        wait_until(lambda: not any(map(is_running, pids)))
        wait_until(lambda: files_of(owner) in ([], [f"{owner}.lock"]))


@pytest.mark.slow
def test_the_next_start_removes_files_of_dead_owners_and_no_others():
    """This one's workers ignore the SIGTERM that its group gets, also while they start, and it ends
    without a word about shared memory."""
    dead, living = "mrcnn-00000dea", "mrcnn-000011fe"
    try:
        with open(SHARED / f"{living}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # first, since other tests may run beside these
            for owner in (dead, living):
                for name in (f"{owner}-0123", f"sem.{owner}-4567", f"{owner}.lock"):
                    (SHARED / name).touch()
            with reading(40, signal_early=True) as (process, owner, pids):
                os.killpg(process.pid, signal.SIGTERM)
                out, err = process.communicate(timeout=60)
                assert process.returncode == 0 and err == ""
            assert files_of(dead) == [] and len(files_of(living)) == 3
        wait_until(lambda: files_of(owner) == [] and not any(map(is_running, pids)))
    finally:
        for name in files_of(dead) + files_of(living):
            (SHARED / name).unlink()


def test_what_other_users_put_there_is_neither_waited_for_nor_a_pattern(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "SHARED", tmp_path)
    os.mkfifo(tmp_path / "mrcnn-0000b1e0.lock")  # to open it waits for a writer
    for name in ("mrcnn-*.lock", "mrcnn-000011fe-0123"):
        (tmp_path / name).touch()
    thread = threading.Thread(target=workers.remove_leftovers, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and (tmp_path / "mrcnn-000011fe-0123").exists()


class SlowSet(ShapeSet):
    """Images that nobody has the time to wait for."""

    def decode(self, index):
        time.sleep(600)


@pytest.mark.parametrize("seconds", [0, pytest.param(9, marks=pytest.mark.slow)])
def test_workers_end_at_once_though_they_are_at_work(seconds):
    """While they start, and in mid-image; grain alone waits for 25 seconds for each."""
    options = ExampleOptions((64, 64), resize="shortest_edge", max_instances=9, mask_size=8)
    order = TrainOrder(seed=1, batch_size=2)
    loader = TrainLoader(SlowSet("train", 20), options, order, num_workers=2)

    def read():
        with suppress(Exception):
            next(loader)

    threading.Thread(target=read, daemon=True).start()
    wait_until(lambda: len(multiprocessing.active_children()) == 2)
    time.sleep(seconds)
    begin = time.monotonic()
    loader.close()
    assert time.monotonic() - begin < 10 and not multiprocessing.active_children()


@pytest.mark.slow
def test_the_next_start_removes_files_of_a_group_that_was_killed():
    with reading() as (process, dead, pids):
        wait_until(lambda: any(name.startswith(f"{dead}-") for name in files_of(dead)))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
        wait_until(lambda: not any(map(is_running, pids)))
        assert len(files_of(dead)) > 1
    with reading(8):
        assert files_of(dead) == []


@pytest.mark.parametrize(
    "free, ahead", [(1200, 4), (1199, 3), (1000, 3), (800, 2), (600, 1), (599, 1), (0, 1)]
)
def test_workers_go_fewer_batches_ahead_where_shared_memory_is_small(
    free, ahead, monkeypatch, caplog
):
    """Of n ahead, 2 n + 4 batches of each of two workers are there, of 50 bytes each."""
    found = shutil.disk_usage(SHARED)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: found)
    monkeypatch.setattr(
        logging, "log_first_n", lambda level, text, n, *a: logging.log(level, text, *a)
    )
    assert workers._batches_ahead(2, 50) == ahead
    assert ("/dev/shm" in caplog.text and "--shm-size" in caplog.text) is (ahead < 4)


def test_shared_memory_is_no_more_than_was_planned(monkeypatch):
    """For the batches that are there when no one takes any, of images with many objects."""
    planned, before = [], workers._batches_ahead

    def noted(number, size):
        planned.append(number * size * 12)
        return before(number, size)

    monkeypatch.setattr(workers, "_batches_ahead", noted)
    options = ExampleOptions((64, 64), resize="shortest_edge", max_instances=9, mask_size=112)
    loader = TrainLoader(
        ShapeSet("train", 20), options, TrainOrder(seed=1, batch_size=8), num_workers=2
    )
    try:
        kept = [next(loader) for _ in range(2)]
        prefix = loader._reader._prefix
        sizes = []
        while len(sizes) < 5 or sizes[-1] != sizes[-5]:
            time.sleep(0.2)
            paths = SHARED.glob(f"{prefix}*")
            sizes.append(sum(path.stat().st_blocks * 512 for path in paths))
        assert kept and planned[0] / 8 < sizes[-1] < planned[0]
    finally:
        loader.close()


@pytest.mark.parametrize(
    "number, kind, words",
    [
        (signal.SIGKILL, RuntimeError, "a worker process was killed, as the system does when mem"),
        (signal.SIGBUS, OSError, "/dev/shm, the shared memory, is full .*--shm-size"),
    ],
)
def test_what_ended_a_worker_is_said(number, kind, words):
    options = ExampleOptions((64, 64), resize="shortest_edge", max_instances=9, mask_size=8)
    order = TrainOrder(seed=1, batch_size=2)
    loader = TrainLoader(ShapeSet("train", 20), options, order, num_workers=1)
    try:
        next(loader)
        (_, process), *_ = workers._workers_of(loader._reader._parts)
        os.kill(process.pid, number)
        with pytest.raises(kind, match=words):
            for _ in range(100):
                next(loader)
    finally:
        loader.close()


UNGUARDED = """
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import ExampleOptions
from tests.memory_set import ShapeSet

options = ExampleOptions((64, 64), resize="shortest_edge", max_instances=9, mask_size=8)
order = TrainOrder(seed=1, batch_size=2)
next(TrainLoader(ShapeSet("train", 20), options, order, num_workers=1))
"""
UNGUARDED_RUN = """
import mask_rcnn_jax as mrcnn
from tests.faults import stubbed_train
from tests.memory_set import ShapeSet

stubbed_train.stub()
recipe = mrcnn.load_config("tests/faults/recipe.py", {"data.num_workers": 1, "data.val_json": ""})
mrcnn.train(recipe, WORKDIR, train_set=ShapeSet("train", 20))
"""


@pytest.mark.parametrize("text", [UNGUARDED, UNGUARDED_RUN])
def test_a_script_without_a_main_guard_is_told_so_once(text, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(text.replace("WORKDIR", repr(str(tmp_path / "run"))))
    root = Path(__file__).parents[2]
    given = {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, script], cwd=root, env=os.environ | given, capture_output=True, text=True
    )
    assert done.returncode == 1
    line = f'ValueError: {script} lacks `if __name__ == "__main__":` before what it does'
    assert done.stderr.splitlines()[-1].startswith(line) and done.stderr.count(line) == 1
    assert "in use by another run" not in done.stderr

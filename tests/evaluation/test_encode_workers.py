"""Detections encoded in worker processes: the same results, and nothing stays behind."""

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from mask_rcnn_jax.evaluation import workers
from mask_rcnn_jax.evaluation.encode import ImageDetections
from mask_rcnn_jax.evaluation.workers import count_workers, encode_images

OPTIONS = {"paste": "integer", "inclusive_boxes": False}
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux' /proc")


def images(count):
    rng = np.random.default_rng(0)
    for number in range(count):
        size = number % 4
        corners = np.sort(rng.uniform(-10, 70, (size, 2, 2)), axis=1).reshape(-1, 4)
        masks = rng.random((size, 28, 28), np.float32)
        scores = rng.random(size, np.float32)
        yield ImageDetections(f"image {number}", 48, 64, corners, scores, [3] * size, masks)


def children():
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in listed if b"workers.work" in _command_line(pid)]


def _command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_workers_give_the_same_results_in_order():
    """More images than are read ahead, of different numbers of objects."""
    alone = list(encode_images(images(30), **OPTIONS, num_workers=0))
    assert [len(boxes) for boxes, _ in alone] == [number % 4 for number in range(30)]
    assert list(encode_images(images(30), **OPTIONS, num_workers=2)) == alone


def test_few_images_take_no_worker_and_many_at_most_one_per_core(monkeypatch):
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert [count_workers(number) for number in (60, 250, 5000)] == [0, 2, 8]
    assert [count_workers(5000, sharing) for sharing in (1, 2, 3, 8, 9)] == [8, 4, 2, 0, 0]
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert count_workers(5000) == 0


def test_an_error_in_a_worker_is_the_owners():
    with pytest.raises(ValueError, match="rule is 'other', expected one of"):
        list(encode_images(images(3), paste="other", inclusive_boxes=False, num_workers=2))


@needs_proc
def test_a_killed_worker_is_one_line_and_the_other_ends():
    with closing(encode_images(images(1000), **OPTIONS, num_workers=2)) as encoded:
        next(encoded)
        first, second = children()
        os.kill(first, signal.SIGKILL)
        with pytest.raises(OSError, match="^a worker process that .* killed by signal 9; is mem"):
            list(encoded)
    assert not is_running(first) and not is_running(second)


@needs_proc
def test_workers_end_with_the_reader_of_their_results():
    with closing(encode_images(itertools.cycle(images(4)), **OPTIONS, num_workers=2)) as encoded:
        next(encoded)
        pids = children()
    assert len(pids) == 2 and not any(map(is_running, pids))


@needs_proc
@pytest.mark.parametrize(
    "number, to_group", [(signal.SIGKILL, False), (signal.SIGINT, True), (signal.SIGTERM, True)]
)
def test_workers_end_with_their_owner(number, to_group):
    """A signal to the group reaches them too; it is the owner's to say what follows."""
    code = (
        "import itertools, signal\n"
        # A test run in the background of a shell ignores it, and so would its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from tests.evaluation.test_encode_workers import *\n"
        "found = encode_images(itertools.cycle(images(4)), **OPTIONS, num_workers=2)\n"
        "next(found)\n"
        "print(*children(), flush=True)\n"
        "for _ in found: pass\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
        (os.killpg if to_group else os.kill)(owner.pid, number)
        owner.wait(20)
        end = time.monotonic() + 20
        while any(map(is_running, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(is_running, pids))
        complaints = owner.stderr.read()
        assert "BrokenPipe" not in complaints and complaints.count("Traceback") <= 1


def test_a_worker_needs_neither_jax_nor_the_main_program():
    code = (
        "import sys; from mask_rcnn_jax.evaluation import workers; "
        "print([name for name in ('jax', 'flax', 'cv2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

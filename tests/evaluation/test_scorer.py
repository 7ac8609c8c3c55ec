"""Results scored in a process of its own: the same scores, and nothing stays behind."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mask_rcnn_jax.evaluation.options import Scoring
from mask_rcnn_jax.evaluation.scorer import Job, Scorer
from tests.evaluation import lvis_case
from tests.evaluation.test_encode_workers import _command_line, is_running, needs_proc
from tests.evaluation.test_pycocotools import one_object
from tests.faults.harness import wait_until

READING = {"scoring": True, "boxes_only": False, "skip_bad": False}


def a_job(**changes):
    gt, boxes = one_object()
    return replace(Job(gt, READING, boxes, None, [1], Scoring(), 100, 100), **changes)


def scored(job, folder):
    with closing(Scorer(job, folder)) as scorer:
        return scorer.result()


def children():
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in listed if b"scorer.work" in _command_line(pid)]


def blocked(folder):
    """A scorer that waits where it writes the box results, for someone who reads them."""
    os.mkfifo(folder / "bbox_results.json")
    return Scorer(a_job(), folder)


@pytest.mark.parametrize("protocol", ["coco", "lvis", "cells"])
def test_scores_notes_and_files_are_those_of_the_process_itself(protocol, tmp_path):
    gt, boxes, masks = lvis_case.make_case(0)
    gt["annotations"][0]["id"] = 0  # which is noted
    path = tmp_path / "gt.json"
    path.write_text(json.dumps(gt))
    ids = [image["id"] for image in gt["images"]][1:]
    rules, given = Scoring(protocol=protocol), (READING, boxes, masks, ids)
    job, lines = Job(path, *given, rules, 3, 3), []
    expected = job.score(lines.append)
    assert len(lines) >= 2
    assert scored(job, tmp_path / "out") == (expected, lines)
    read = {file.name: json.loads(file.read_text()) for file in (tmp_path / "out").iterdir()}
    assert read == {
        "bbox_results.json": boxes,
        "segm_results.json": masks,
        "metrics.json": expected,
    }
    assert scored(replace(job, source=gt), tmp_path / "out")[0] == expected


def test_an_error_is_that_of_the_process_itself(tmp_path):
    job = a_job(boxes=[a_job().boxes[0] | {"image_id": 7}])
    with pytest.raises(ValueError, match="7") as expected:
        job.score(print)
    with pytest.raises(ValueError) as error:
        scored(job, tmp_path)
    assert str(error.value) == str(expected.value)
    assert not (tmp_path / "metrics.json").exists()
    (tmp_path / "bbox_results.json").unlink()
    (tmp_path / "bbox_results.json").mkdir()
    with pytest.raises(OSError, match="bbox_results.json"):
        scored(a_job(), tmp_path)


@needs_proc
def test_a_killed_process_is_said_and_its_work_done_here(tmp_path, caplog):
    (tmp_path / "metrics.json").write_text("of before")
    with closing(blocked(tmp_path)) as scorer:
        assert not scorer.is_done() and scorer.result(0.01) is None
        os.kill(children()[0], signal.SIGKILL)
        assert wait_until(scorer.is_done)
        (tmp_path / "bbox_results.json").unlink()
        assert (tmp_path / "metrics.json").read_text() == "of before"
        assert scorer.result() == (a_job().score(print), [])
    expected = "a worker process that scores was killed by signal 9; is memory short?; scored again"
    assert expected in caplog.text
    assert (tmp_path / "metrics.json").exists()


@dataclass
class Large:
    """Ground truth that fits into the memory of one process alone."""

    path: Path
    fits: int

    def __fspath__(self):
        if os.getpid() != self.fits:
            raise MemoryError
        return os.fspath(self.path)


def test_a_process_without_memory_is_the_same(tmp_path, caplog):
    path = tmp_path / "gt.json"
    path.write_text(json.dumps(one_object()[0]))
    scores, _ = scored(a_job(source=Large(path, os.getpid())), tmp_path)
    assert scores == a_job().score(print)
    assert "a worker process lacks memory; scored again" in caplog.text


@pytest.mark.parametrize(("module", "why"), [
    (__name__, "be given its work: Can't"), ("__main__", "read its work: Can't get attribute"),
])  # fmt: skip
def test_names_of_a_class_that_another_process_lacks_are_scored_here(
    module, why, tmp_path, caplog, monkeypatch, capfd
):
    class Label(str):
        __module__ = module

    if module == "__main__":
        Label.__qualname__ = "Label"
        monkeypatch.setattr(sys.modules[module], "Label", Label, raising=False)
    gt = a_job().source
    gt["categories"][0]["name"] = Label("cell")
    scores, _ = scored(a_job(source=gt), tmp_path)
    assert scores == a_job(source=gt).score(print)
    assert f"a worker process that scores cannot {why}" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


@needs_proc
def test_the_process_ends_once_it_has_answered_and_if_nobody_waits(tmp_path):
    scorer = blocked(tmp_path)
    (child,) = children()
    scorer.close()
    assert not is_running(child)
    (tmp_path / "bbox_results.json").unlink()
    with closing(Scorer(a_job(), tmp_path)) as scorer:
        started = children()  # none if it has answered by now
        scorer.result()
        assert wait_until(lambda: not any(map(is_running, started)))  # its memory is free


@needs_proc
@pytest.mark.parametrize(
    "number, to_group", [(signal.SIGKILL, False), (signal.SIGINT, True), (signal.SIGTERM, True)]
)
def test_it_ends_with_its_owner(number, to_group, tmp_path):
    code = (
        "import signal\n"
        # A test run in the background of a shell ignores it, and so would its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from tests.evaluation.test_scorer import *\n"
        f"with closing(blocked(Path({str(tmp_path)!r}))) as scorer:\n"
        "    print(*children(), flush=True)\n"
        "    scorer.result()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as owner:
        (child,) = (int(pid) for pid in owner.stdout.readline().split())
        assert is_running(child)
        (os.killpg if to_group else os.kill)(owner.pid, number)
        owner.wait(20)
        assert wait_until(lambda: not is_running(child), 20)
        assert owner.stderr.read().count("Traceback") <= 1  # of the owner


def test_it_needs_neither_jax_nor_the_main_program():
    code = (
        "import sys; from mask_rcnn_jax.evaluation import scorer; "
        "print([name for name in ('jax', 'flax', 'cv2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

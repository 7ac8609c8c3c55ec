"""Score results and write the scores: in this process, or in one of its own while this one trains.

Such a process needs no JAX, and ends with its owner, however that ends.
"""

import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import logging
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.annotations.reader import read_ground_truth
from mask_rcnn_jax.disk import write_whole
from mask_rcnn_jax.evaluation import coco, keypoints, workers
from mask_rcnn_jax.evaluation.notes import notes
from mask_rcnn_jax.evaluation.options import Scoring

Scores = dict[str, Any]
_COMMAND = "from mask_rcnn_jax.evaluation import scorer; scorer.work()"
NICENESS = 5  # the loader's workers come first


@dataclass(frozen=True)
class Job:
    """Results, and how they are scored.

    Attributes:
        source: ground truth as `read_ground_truth` takes it, `reading` its options.
        boxes: COCO results; `masks` likewise, None if there are none to score.
        image_ids: the images that are scored.
        rules: the protocol and the engine.
        limit: `eval.detections_per_image` if that is what the model gives, for the notes.
        most: detections of a class in an image that are scored at most, see `coco.score`.
        keypoints: COCO results, None without any; scored if the ground truth is read with some.
    """

    source: str | os.PathLike | dict[str, Any]
    reading: dict[str, Any]
    boxes: list[dict]
    masks: list[dict] | None
    image_ids: Sequence[int | str]
    rules: Scoring
    limit: int | None
    most: int
    keypoints: list[dict] | None = None

    def score(
        self, tell: Callable[[str], object], callback: Callable[[COCOeval], None] | None = None
    ) -> Scores:
        """`coco.score` of the results; `tell` gets each line of `notes`."""
        truth = read_ground_truth(self.source, **self.reading)
        for line in notes(truth, self.image_ids, self.rules.protocol, self.limit, self.most):
            tell(line)
        points = self.keypoints if truth.keypoints else None
        if points is not None and (
            line := keypoints.sigmas_of(truth.keypoints, self.rules.keypoint_sigmas)[1]
        ):
            tell(line)
        return coco.score(
            truth,
            self.boxes,
            self.masks,
            image_ids=self.image_ids,
            rules=self.rules,
            detections_per_image=self.most,
            callback=callback,
            keypoint_results=points,
        )

    def write(self, folder: Path) -> None:
        """Write bbox_results.json, and segm_results.json and keypoints_results.json if there are
        masks and keypoints."""
        folder.mkdir(parents=True, exist_ok=True)
        found = {"bbox": self.boxes, "segm": self.masks, "keypoints": self.keypoints}
        for name, results in found.items():
            if results is not None:
                write_whole(folder / f"{name}_results.json", json.dumps(results))


def write_scores(scores: Scores, folder: Path) -> None:
    """Write metrics.json, whole or not at all."""
    write_whole(folder / "metrics.json", json.dumps(scores, indent=1))


class Scorer:
    """Scores a job and writes results and scores to a folder, in a process of its own.

    Should that process be killed, or lack memory, `result` does its work.
    """

    def __init__(self, job: Job, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._job, self._folder, self._open = job, folder, ExitStack()
        self._thread = self._open.enter_context(ThreadPoolExecutor(1, "scorer"))
        process = self._open.enter_context(workers.worker(_COMMAND))  # ended before the thread
        self._answer = self._thread.submit(workers.ask, process, (job, folder), "scores")

    def is_done(self) -> bool:
        """Whether `result` need not wait."""
        return self._answer.done()

    def result(self, wait_s: float | None = None) -> tuple[Scores, list[str]] | None:
        """Return scores and notes; None if they take longer than `wait_s`, None for ever.

        Raises what `coco.score` and writing raise.
        """
        if not wait([self._answer], wait_s).done:
            return None
        try:
            return self._answer.result()
        except (workers.Lost, MemoryError) as error:
            text = "%s; scored again, in the process of the training"
            logging.warning(text, error if str(error) else "a worker process lacks memory")
        return _score(self._job, self._folder)

    def close(self) -> None:
        """End the process, whether it is done or not."""
        self._open.close()


def work() -> None:
    """Answer the job of the standard input on the standard output: scores and notes, or the error.

    Ends at once with the standard input, which its owner keeps open.
    """
    os.nice(NICENESS)
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # what an engine prints is no answer
    try:
        job, folder = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_owner, daemon=True).start()
    except (EOFError, pickle.UnpicklingError, MemoryError):  # the owner has ended, or scores itself
        return
    except AttributeError as error:  # of a class that only the main program has
        answer: Any = workers.Lost(f"a worker process that scores cannot read its work: {error}")
    else:
        answer = _answer(job, folder)
    pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
    answers.flush()
    os._exit(0)  # the thread holds what Python would take apart


def _answer(job: Job, folder: Path) -> Any:
    try:
        return _score(job, folder)
    except Exception as error:
        return error


def _end_with_owner() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _score(job: Job, folder: Path) -> tuple[Scores, list[str]]:
    lines: list[str] = []
    job.write(folder)
    scores = job.score(lines.append)
    write_scores(scores, folder)
    return scores, lines

"""HTML reports about evaluations and finished runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.data.dataset import Dataset, dataset_name
from mask_rcnn_jax.data.overview import image_ids
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.recipe.options import EvalOptions
from mask_rcnn_jax.report.analysis import Analysis, analyze
from mask_rcnn_jax.report.page import write_report
from mask_rcnn_jax.terminal import console
from mask_rcnn_jax.training import evaluator
from mask_rcnn_jax.training.encoding import Found
from mask_rcnn_jax.training.metrics import FILE_NAME, read_metrics

NAME = "report.html"
ReadImage = Callable[[dict], np.ndarray | None]  # of an entry of a COCO json's `images`


def collector(wanted: bool) -> tuple[list[Analysis], Callable[[COCOeval], None] | None]:
    """Return a list, and a callback that appends the analysis of an evaluation to it; None if not
    wanted."""
    analyses = []
    return analyses, (lambda evaluation: analyses.append(analyze(evaluation))) if wanted else None


def dataset_reader(dataset: Dataset) -> ReadImage:
    """Return a function that reads a dataset's images, as they are to be seen."""
    places = {image_id: index for index, image_id in enumerate(image_ids(dataset))}
    bands = getattr(dataset, "bands", Bands())
    return lambda image: bands.to_rgb(dataset.decode(places[image["id"]]))


def write(
    folder: Path,
    title: str,
    ground_truth: str,
    analyses: Sequence[Analysis],
    read: ReadImage,
    records: Sequence[dict],
    metrics: Mapping[str, Any],
) -> None:
    """Write report.html into the folder, with the images that can be read.

    ground_truth: names the dataset. records: of metrics.jsonl. metrics: the scores, if any.
    """
    failures: dict[int | str, str] = {}

    def read_image(image: dict) -> np.ndarray | None:
        try:
            return read(image)
        except (KeyError, OSError, TypeError, ValueError) as error:
            failures[image["id"]] = f"image {image['id']}: {error!r}"
            return None

    about = {"Ground truth": ground_truth} if analyses else {}
    for label, name, more in (
        ("Boundary AP", "boundary_AP", ""),
        ("Keypoints AP", "keypoints_AP", "; curves, tables and images below are without keypoints"),
    ):
        if name in metrics:
            about[label] = f"{metrics[name]:.3f}{more}"
    cells = metrics.get("cells")
    write_report(folder / NAME, title, about, analyses, read_image, records, cells)
    if failures:
        text = "report: %d images could not be read, the first: %s"
        logging.warning(text, len(failures), next(iter(failures.values())))
    logging.info("report: %s", folder / NAME)


def write_run_report(
    wanted: EvalOptions, workdir: Path, step: int, dataset: Dataset | None
) -> None:
    """Write a finished run's report into its workdir: its last evaluation, and its training.

    Without an evaluation, or with LVIS's protocol, it is about the training alone. A run is worth
    more than its report: whatever fails is logged, and nothing is raised.
    """
    try:
        with console.lasting("writing the report"):
            _write_run_report(wanted, workdir, step, dataset)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        logging.warning("%s could not be written, the run is whole: %s", workdir / NAME, why)


def _write_run_report(
    wanted: EvalOptions, workdir: Path, step: int, dataset: Dataset | None
) -> None:
    analyses, metrics = (
        ([], {}) if dataset is None else _last_scores(wanted, workdir / "eval" / str(step), dataset)
    )
    read = (lambda image: None) if dataset is None else dataset_reader(dataset)
    name = "" if dataset is None else dataset_name(dataset)
    records = read_metrics(workdir / FILE_NAME)
    write(workdir, f"Training of {workdir}, step {step}", name, analyses, read, records, metrics)


def _last_scores(
    wanted: EvalOptions, folder: Path, dataset: Dataset
) -> tuple[list[Analysis], dict[str, Any]]:
    """Score the results in a folder once more: a training's own scores need no analysis, and may be
    of another engine. Returns nothing where there is nothing to analyze."""
    if wanted.protocol == "lvis" or not (folder / "bbox_results.json").exists():
        return [], {}

    def results(kind: str) -> list[dict] | None:
        path = folder / f"{kind}_results.json"
        return json.loads(path.read_text()) if path.exists() else None

    ids = image_ids(dataset)[: wanted.max_images or None]
    analyses, collect = collector(True)
    found = Found(results("bbox") or [], results("segm"), results("keypoints"), ids)
    return analyses, evaluator.score(dataset, found, wanted, collect)

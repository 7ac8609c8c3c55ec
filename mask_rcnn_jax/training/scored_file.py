"""Score a COCO results file with the COCO protocol."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from mask_rcnn_jax.annotations.reader import GroundTruth, read_ground_truth
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data.options import DataOptions
from mask_rcnn_jax.data.source import annotation_file, load_split
from mask_rcnn_jax.disk import write_whole
from mask_rcnn_jax.evaluation import coco as coco_evaluation
from mask_rcnn_jax.evaluation import keypoints
from mask_rcnn_jax.evaluation.engines import announce_engine
from mask_rcnn_jax.evaluation.notes import absent_category, box_form, check_scorable, notes
from mask_rcnn_jax.images.decode import decode_image
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.store_folders import written_at
from mask_rcnn_jax.terminal.safe_text import safe_stdout
from mask_rcnn_jax.training import reports


def evaluate_results(
    results_json: str | Path,
    config: Recipe | ConfigDict | str | Path,
    *,
    output: str | Path | None = None,
    report: bool = False,
) -> dict:
    """Score a COCO results file, of boxes, masks or keypoints, against the "val" set of `data`.

    Args:
        output: folder for metrics.json; None writes nothing.
        report: also write report.html into `output`.

    Returns:
        The COCO metrics of the types of result that the file holds, as `evaluate` names them.

    Raises:
        ValueError: the config merges classes, so that the set's ids may not be those of results.
    """
    if report and not output:
        raise ValueError("--report with --results needs --output, where report.html is written")
    recipe = as_recipe(config)
    data, wanted = recipe.data, recipe.eval
    for name in ("more_train", "class_map"):
        if value := getattr(data, name):
            advice = "since the category ids of results are taken as those of data.val_json"
            raise ValueError(f"data.{name} is {value}, expected () with --results, {advice}")
    announce_engine(wanted.engine)
    coco_evaluation.check_protocol(wanted.protocol, report)
    results = coco_evaluation.load_results(results_json)
    boxes, masks = coco_evaluation.split_results(results)
    points = results if results and "keypoints" in results[0] else None
    annotations = annotation_file(data, "val")
    boxes_only = recipe.learns_boxes_only and masks is None
    rules: dict[str, Any] = {"boxes_only": boxes_only, "skip_bad": data.bad_annotations == "skip"}
    names = () if points is None else data.keypoints
    truth = read_ground_truth(annotations, scoring=True, **rules, keypoints=names)
    if truth.skip_bad:
        for line in truth.left_out():
            logging.warning("%s", line)
    check_scorable(truth)
    for line in notes(truth, protocol=wanted.protocol, scored=wanted.detections_per_image):
        logging.warning("%s", line)
    _warn_unknown_categories(results_json, truth, results)
    if points is not None:
        scored = names or keypoints.names_in(truth.content["categories"])
        if line := keypoints.sigmas_of(scored, wanted.keypoint_sigmas)[1]:
            logging.warning("%s", line)
    analyses, collect = reports.collector(report)
    metrics = coco_evaluation.score(
        truth,
        boxes,
        masks,
        results_name=str(results_json),
        rules=wanted,
        detections_per_image=wanted.detections_per_image,
        callback=collect,
        keypoint_results=points,
    )
    if form := box_form(boxes or [], truth):
        logging.warning("%s: %s", results_json, form)
    with safe_stdout():
        print(coco_evaluation.format_table(metrics), flush=True)
    if not output:
        return metrics
    with written_at(output) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "metrics.json", json.dumps(metrics, indent=1))
        if report:
            title, read = f"Evaluation of {results_json}", _files_reader(data)
            reports.write(folder, title, annotations, analyses, read, [], metrics)
    return metrics


def _warn_unknown_categories(
    results_json: str | Path, truth: GroundTruth, results: list[dict]
) -> None:
    known = {category["id"] for category in truth.content["categories"]}
    unknown = [r["category_id"] for r in results if r["category_id"] not in known]
    if unknown:
        text = "%s: %d results are of categories that the ground truth lacks, first: %r; not scored"
        why = absent_category(unknown[0], truth.content["categories"])
        reason = f" ({why})" if why else ""
        logging.warning(text + "%s", results_json, len(unknown), unknown[0], reason)


def _files_reader(data: DataOptions) -> reports.ReadImage:
    """Reads from the files of the "val" set, whose json may lack everything but file names."""
    if data.source != "json":
        return reports.dataset_reader(load_split(data, "val"))

    def read(image: dict) -> np.ndarray:
        path = os.path.join(data.val_images, image["file_name"])
        has_size = "height" in image and "width" in image
        size = (int(image["height"]), int(image["width"])) if has_size else None
        upright = data.apply_exif == "always"
        if not data.bands.names:
            return decode_image(path, expected_size=size, upright=upright)
        pixels = data.bands.read(path, expected_size=size, upright=upright)
        return data.bands.to_rgb(data.bands.scaled(pixels))

    return read

"""A model over a data set: detections, COCO scores, validation losses and images."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.data import canvases
from mask_rcnn_jax.data.dataset import (
    Dataset,
    category_ids,
    dataset_name,
    is_boxes_only,
    keypoints,
)
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.ground_truth import ground_truth, ground_truth_source
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.overview import image_id, image_size, num_objects
from mask_rcnn_jax.data.views import ViewLoader
from mask_rcnn_jax.evaluation import coco as coco_evaluation
from mask_rcnn_jax.evaluation import lvis, scorer, visualize
from mask_rcnn_jax.evaluation.encode import ImageDetections, split_images
from mask_rcnn_jax.evaluation.notes import nothing_to_score
from mask_rcnn_jax.evaluation.options import Scoring
from mask_rcnn_jax.evaluation.scorer import Job, Scorer
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.recipe.options import EvalOptions
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.structures import Batch, Detections
from mask_rcnn_jax.terminal import console
from mask_rcnn_jax.terminal.progress import Progress
from mask_rcnn_jax.terminal.safe_text import file_name, printable, safe_stdout
from mask_rcnn_jax.training import processes
from mask_rcnn_jax.training.encoding import Found, Rules, encode
from mask_rcnn_jax.training.step import shard_batch

PredictStep = Callable[[dict, Any], Detections]  # of a batch, or of the views of one


def evaluation_options(recipe: Recipe, dataset: Dataset) -> ExampleOptions:
    """Options for the images to evaluate on; their canvases follow the images' sizes."""
    indices = range(len(dataset.images))[: recipe.eval.max_images or None]
    sizes = [image_size(dataset.images, index) for index in indices]
    rows = recipe.eval.batch_size * jax.device_count()
    most, multiple = recipe.eval.canvases, recipe.model.input.pad_multiple
    return canvases.evaluation_options(recipe.data, sizes, rows=rows, most=most, multiple=multiple)


def check_scorable(dataset: Dataset, wanted: EvalOptions) -> None:
    """Raise ValueError, before the work, if a dataset has nothing to score, or lacks labels that
    its protocol needs."""
    if wanted.protocol == "lvis":
        lvis.check_labels(ground_truth(dataset))
    count = min(len(dataset.images), wanted.max_images or len(dataset.images))
    nothing_to_score(dataset_name(dataset), count, num_objects(dataset.images, count))


def detect(
    predict_step: PredictStep,
    variables: dict,
    batches: EvalLoader | ViewLoader,
    dataset: Dataset,
    mesh: Mesh,
    rules: Rules,
    accepts: Callable[[Any], bool] = lambda batch: True,
) -> Found:
    """COCO results of every image of the accepted batches, in the order of the dataset.

    A batch of a `ViewLoader` is one in several sizes; detections are in pixels of the first.

    Every process works on its own batches and returns the results of all. Masks of one batch are
    encoded, in worker processes if there are many, while the device works on the next.
    """
    progress = Progress("evaluated", batches.num_images)

    def images(batch: Batch, detections: Detections) -> Iterator[ImageDetections]:
        records, indices = dataset.images, batch.image_index.tolist()
        ids = [image_id(records, i) if i >= 0 else None for i in indices]
        sizes = [image_size(records, i) if i >= 0 else (0, 0) for i in indices]
        rows, classes = processes.local_rows(detections), category_ids(dataset)
        given = rows, batch.scales, ids, sizes, classes
        return split_images(*given, rules.keypoint_offset)

    def detected() -> Iterator[ImageDetections]:
        pending, seen = [], 0
        views: Any
        for views in filter(accepts, batches):
            batch = views if isinstance(views, Batch) else views[0]
            pending.append((batch, predict_step(variables, shard_batch(views, mesh))))
            if len(pending) > 1:
                yield from images(*pending.pop(0))
            together = jax.process_count() * int(np.sum(batch.image_index >= 0))
            progress.advance(min(together, batches.num_images - seen))
            seen = min(batches.num_images, seen + together)
        for last in pending:
            yield from images(*last)

    return encode(detected(), batches.num_images, dataset, rules)


def score_and_write(
    dataset: Dataset,
    found: Found,
    output: Path,
    wanted: EvalOptions,
    callback: Callable[[COCOeval], None] | None = None,
    most: int | None = None,
) -> dict:
    """COCO metrics of the results; the table goes to stdout, results and metrics to `output`.

    The first process scores and writes, the others are told the metrics, or its OSError.
    `callback` is that of `evaluation.coco.score`, which is called on the first process; `most` is
    that of `score`.
    """
    work = partial(_score_and_write, dataset, found, output, wanted, callback, most)
    return processes.on_first(work)


def _score_and_write(
    dataset: Dataset,
    found: Found,
    output: Path,
    wanted: EvalOptions,
    callback: Callable[[COCOeval], None] | None,
    most: int | None,
) -> dict:
    job = scoring_job(dataset, found, wanted, most)
    job.write(output)
    with console.lasting(f"scoring {len(found.image_ids)} images", "scored"):
        metrics = job.score(_tell, callback)
    scorer.write_scores(metrics, output)
    say_scores(metrics, [])
    return metrics


def start_scorer(dataset: Dataset, found: Found, output: Path, wanted: EvalOptions) -> Scorer:
    return Scorer(scoring_job(dataset, found, wanted), output)


def score(
    dataset: Dataset,
    found: Found,
    wanted: EvalOptions,
    callback: Callable[[COCOeval], None] | None = None,
    most: int | None = None,
) -> dict:
    """Score results as `evaluation.coco.score` does, on the annotations that the dataset holds.

    Masks are not scored for a dataset or a model of boxes alone. What `evaluation.notes` says is
    logged once in a process. `most` are the detections of a class in an image that are scored at
    most; by default those that the model gives, `eval.detections_per_image`.
    """
    return scoring_job(dataset, found, wanted, most).score(_tell, callback)


def scoring_job(
    dataset: Dataset, found: Found, wanted: EvalOptions, most: int | None = None
) -> Job:
    """What `score` scores, and how."""
    own = wanted.detections_per_image
    limit, most = (own, own) if most is None else (None, most)
    masks = None if is_boxes_only(dataset) else found.masks
    given = *ground_truth_source(dataset), found.boxes, masks, found.image_ids
    return Job(*given, _rules(wanted), limit, most, found.keypoints)


def _rules(wanted: EvalOptions) -> Scoring:
    """Without the recipe's other options, which need JAX."""
    return Scoring(**{field.name: getattr(wanted, field.name) for field in fields(Scoring)})


def _tell(line: str) -> None:
    if line not in _told:
        _told.add(line)
        logging.warning("%s", line)


_told: set[str] = set()  # a training would say the same at each evaluation


def say_scores(metrics: dict, lines: list[str]) -> None:
    for line in lines:
        _tell(line)
    with safe_stdout():
        print(coco_evaluation.format_table(metrics), flush=True)


def draw_pictures(
    predict_step: PredictStep,
    variables: dict,
    batches: EvalLoader,
    dataset: Dataset,
    mesh: Mesh,
    output: Path,
    keypoint_threshold: float = -np.inf,
) -> dict[str, np.ndarray]:
    """Every image of `batches`, by file name: ground truth on the left, detections on the right.

    Also written below `output`. The first process draws; the others return nothing.
    keypoint_threshold: see `visualize.draw_detections`.
    """
    pictures, names = {}, dataset.class_names
    skeleton = keypoints(dataset).skeleton
    bands = getattr(dataset, "bands", Bands())
    written: set[str] = set()
    for batch in batches:
        detections = processes.all_rows(predict_step(variables, shard_batch(batch, mesh)))
        canvas = batch.images.shape[1:3]
        drawn = replace(batch.targets, polygons=None)
        batch = processes.all_rows(replace(batch, images=None, targets=drawn))
        if jax.process_index() != 0:
            continue
        for row, index in enumerate(batch.image_index):
            if index < 0:
                continue
            found, truth = jax.tree.map(lambda x, row=row: x[row], (detections, batch.targets))
            to_original = 1 / np.tile(batch.scales[row][::-1], 2)
            boxes, found = truth.boxes * to_original, found.replace(boxes=found.boxes * to_original)
            of_points, points = np.array([*to_original[:2], 1.0]), None
            if truth.keypoints is not None:
                points = truth.keypoints * of_points, skeleton
            if found.keypoints is not None:
                found = found.replace(keypoints=found.keypoints * of_points)
            # Masks of the whole canvas are not drawn: they are no crops of boxes.
            masks = None if truth.masks.shape[1:] == canvas else truth.masks
            name, image = dataset.images[index].file_name, bands.to_rgb(dataset.decode(index))
            given = image, boxes, truth.classes, masks, names
            left = visualize.draw_ground_truth(*given, keypoints=points)
            right = visualize.draw_detections(
                *(image, found, names), skeleton=skeleton, keypoint_threshold=keypoint_threshold
            )
            picture = visualize.side_by_side(left, right)
            visualize.write_image(output / file_name(name, ".jpg", written), picture)
            pictures[printable(name)] = picture
    return pictures

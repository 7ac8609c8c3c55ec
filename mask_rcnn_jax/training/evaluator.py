"""A model over a data set: detections, COCO scores, validation losses and images."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
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
from mask_rcnn_jax.data.dataset import Dataset, category_ids, dataset_name, is_boxes_only
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.ground_truth import ground_truth, ground_truth_source
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.overview import image_id, image_size, num_objects
from mask_rcnn_jax.data.tiles import Tiles
from mask_rcnn_jax.data.views import ViewLoader
from mask_rcnn_jax.evaluation import cells, lvis, scorer, visualize
from mask_rcnn_jax.evaluation import coco as coco_evaluation
from mask_rcnn_jax.evaluation.encode import ImageDetections, split_images
from mask_rcnn_jax.evaluation.engines import announce_engine
from mask_rcnn_jax.evaluation.notes import nothing_to_score
from mask_rcnn_jax.evaluation.options import Scoring
from mask_rcnn_jax.evaluation.scorer import Job, Scorer
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.recipe.options import EvalOptions
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.structures import Batch, Detections
from mask_rcnn_jax.terminal import console
from mask_rcnn_jax.terminal.progress import Progress
from mask_rcnn_jax.terminal.safe_text import file_name, printable, safe_stdout
from mask_rcnn_jax.training import processes, step
from mask_rcnn_jax.training.beside import Pending
from mask_rcnn_jax.training.compiling import announce_compiling
from mask_rcnn_jax.training.encoding import Found, Rules, encode
from mask_rcnn_jax.training.metrics import PER_CLASS
from mask_rcnn_jax.training.setup import make_eval_loader, make_tile_loader
from mask_rcnn_jax.training.step import TrainState, shard_batch
from mask_rcnn_jax.training.tiles import detect_in_tiles

PredictStep = Callable[[dict, Any], Detections]  # of a batch, or of the views of one
LossStep = Callable[[dict, Batch], dict[str, jax.Array]]
Validation = Callable[[TrainState], tuple[dict[str, float] | Pending, dict[str, np.ndarray]]]

# Fewer results and images are scored in the process itself, in about a second.
FEWEST_BESIDE = 5000

GROUPS = {"": "", "_rare": "r", "_common": "c", "_frequent": "f"}
# Names in metrics.jsonl and in the scores.
LOGGED = {
    f"ap/{kind}{group}": f"{prefix}AP{letter}"
    for kind, prefix in (("box", ""), ("mask", "mask_"))
    for group, letter in GROUPS.items()
}


def make_validation(
    recipe: Recipe,
    val_set: Dataset,
    model: MaskRCNN,
    mesh: Mesh,
    workdir: Path,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Validation:
    """`validate(state) -> (metrics, images)`; everything is also written below `eval/<step>/`.

    metrics: `ap/box`, `ap/mask` if masks are scored, both with `_at_K` where K detections are
    scored, with LVIS's protocol also both with `_rare`, `_common` and `_frequent`, otherwise
    `ap_class/box/CATEGORY` and `ap_class/mask/CATEGORY`, and, where asked for, `val_loss/...`.
    images: by file name, ground truth beside detections.
    Many results are scored by a process of its own, which the metrics are `Pending` of, unless a
    rule of `recipe.train` or the run's last step waits for them.
    With `data.windows`, images are cut into tiles of that size, and neither drawn nor in losses.
    Raises `Stopped` before the next batch once `stop_requested()`.
    """

    def stoppable(run_batch):
        def run_or_stop(*arguments):
            if stop_requested():
                raise processes.Stopped
            return run_batch(*arguments)

        return run_or_stop

    wanted = recipe.eval
    announce_engine(wanted.engine)
    check_scorable(val_set, wanted)
    predict = step.make_predict_step(model, mesh, wanted)
    predict = stoppable(announce_compiling("detector", predict))
    loss_step = step.make_loss_step(model, mesh, loss=recipe.loss, seed=recipe.train.seed)
    loss_step = stoppable(announce_compiling("validation losses", loss_step))
    options = evaluation_options(recipe, val_set)
    numbers: dict[str, Any] = {"batch_size": wanted.batch_size}
    numbers["num_workers"] = recipe.data.num_workers
    load = partial(make_eval_loader, val_set, options, **numbers)

    # LVIS has over a thousand categories.
    metrics_of = partial(logged_scores, of_categories=wanted.protocol != "lvis")
    windows = recipe.data.windows
    if windows.is_on and (wanted.loss_images or wanted.pictures):
        text = "eval.loss_images and eval.pictures are of whole images: none with data.windows"
        logging.warning(text)

    def found_in(state: TrainState) -> Found:
        given = val_set, mesh, Rules.of(recipe)
        if not windows.is_on:
            loader = load(max_images=wanted.max_images)
            return detect(predict, state.evaluated, loader, *given)
        limits = {"batch_size": wanted.batch_size, "max_images": wanted.max_images}
        tiles = make_tile_loader(val_set, recipe.data, Tiles(max(windows.size)), **limits)
        return detect_in_tiles(predict, state.evaluated, tiles, *given)

    def losses_and_pictures(state: TrainState, output: Path) -> tuple[dict, dict]:
        losses, images = {}, {}
        if wanted.loss_images and not windows.is_on:
            images_of = partial(make_eval_loader, val_set, recipe.data, **numbers)
            loader = images_of(max_images=wanted.loss_images, fill=True)
            losses = mean_losses(loss_step, state.evaluated, loader, mesh)
        if wanted.pictures and not windows.is_on:
            loader = load(max_images=wanted.pictures)
            folder = output / "pictures"
            images = draw_pictures(predict, state.evaluated, loader, val_set, mesh, folder)
            logging.info("annotated pictures: %s", folder)
        return losses, images

    def validate(state: TrainState) -> tuple[dict[str, float] | Pending, dict[str, np.ndarray]]:
        at, needed = int(state.step), bool(recipe.train.needs_evaluation())
        output, found = workdir / "eval" / str(at), found_in(state)
        is_quick = len(found[0]) + len(found[2]) < FEWEST_BESIDE
        if needed or is_quick or at >= recipe.train.steps:
            metrics = metrics_of(score_and_write(val_set, found, output, wanted))
            losses, images = losses_and_pictures(state, output)
            return metrics | losses, images
        start = partial(_start_scorer, val_set, found, output, wanted)
        pending = Pending(at, start, _say, metrics_of)
        with ExitStack() as on_error:
            on_error.callback(pending.close)
            pending.others, images = losses_and_pictures(state, output)
            on_error.pop_all()
        return pending, images

    return validate


def evaluation_options(recipe: Recipe, dataset: Dataset) -> ExampleOptions:
    """Options for the images to evaluate on; their canvases follow the images' sizes."""
    indices = range(len(dataset.images))[: recipe.eval.max_images or None]
    sizes = [image_size(dataset.images, index) for index in indices]
    rows = recipe.eval.batch_size * jax.device_count()
    most, multiple = recipe.eval.canvases, recipe.model.input.pad_multiple
    return canvases.evaluation_options(recipe.data, sizes, rows=rows, most=most, multiple=multiple)


def logged_scores(scores: Mapping[str, Any], *, of_categories: bool) -> dict[str, float]:
    """The metrics of `LOGGED`, `ap/box_at_K` and `ap/mask_at_K` (services refuse "@"), `cells/f1`
    and so on, and `category_metrics`."""
    metrics = {name: scores[key] for name, key in LOGGED.items() if key in scores}
    if at := coco_evaluation.at_limit(scores):
        names = {f"ap/box_at_{at[1:]}": f"AP{at}", f"ap/mask_at_{at[1:]}": f"mask_AP{at}"}
        metrics |= {name: scores[key] for name, key in names.items() if key in scores}
    metrics |= cells.logged(scores["cells"]) if "cells" in scores else {}
    return metrics | (category_metrics(scores["per_category"]) if of_categories else {})


def category_metrics(per_category: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics `ap_class/box/NAME` and `ap_class/mask/NAME` of categories that have objects: AP@K
    where it exists, or else AP.

    Characters that a logger's service may refuse become underscores; of two names that become
    equal, the second gets a number.
    """
    metrics, taken = {}, Counter()
    for name, aps in per_category.items():
        name = re.sub(r"[^\w .-]", "_", name)
        taken[name] += 1
        name += f"_{taken[name]}" if taken[name] > 1 else ""
        at = coco_evaluation.at_limit(aps)
        for kind, key in (("box", f"AP{at}"), ("mask", f"mask_AP{at}")):
            if aps.get(key, -1) >= 0:
                metrics[f"{PER_CLASS}{kind}/{name}"] = aps[key]
    return metrics


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
    """COCO results (boxes, masks) of every image of the accepted batches, and these images' ids, in
    the order of the dataset.

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
        return split_images(rows, batch.scales, ids, sizes, classes)

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
    with console.lasting(f"scoring {len(found[2])} images", "scored"):
        metrics = job.score(_tell, callback)
    scorer.write_scores(metrics, output)
    _say(metrics, [])
    return metrics


def _start_scorer(dataset: Dataset, found: Found, output: Path, wanted: EvalOptions) -> Scorer:
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
    boxes, masks, image_ids = found
    own = wanted.detections_per_image
    limit, most = (own, own) if most is None else (None, most)
    masks = None if is_boxes_only(dataset) else masks
    given = *ground_truth_source(dataset), boxes, masks, image_ids
    return Job(*given, _rules(wanted), limit, most)


def _rules(wanted: EvalOptions) -> Scoring:
    """Without the recipe's other options, which need JAX."""
    return Scoring(**{field.name: getattr(wanted, field.name) for field in fields(Scoring)})


def _tell(line: str) -> None:
    if line not in _told:
        _told.add(line)
        logging.warning("%s", line)


_told: set[str] = set()  # a training would say the same at each evaluation


def _say(metrics: dict, lines: list[str]) -> None:
    for line in lines:
        _tell(line)
    with safe_stdout():
        print(coco_evaluation.format_table(metrics), flush=True)


def mean_losses(
    loss_step: LossStep, variables: dict, batches: EvalLoader, mesh: Mesh
) -> dict[str, float]:
    """Losses averaged over the full batches, named `val_loss/...`; empty if there is none.

    A batch that was filled up is left out: its padding images would count as empty ones.
    """
    full = (batch for batch, is_full in zip(batches, batches.is_full, strict=True) if is_full)
    losses = [loss_step(variables, shard_batch(batch, mesh)) for batch in full]
    if not losses:
        return {}
    means = jax.tree.map(lambda *values: float(np.mean(values)), *jax.device_get(losses))
    return {f"val_{name}": value for name, value in means.items()}


def draw_pictures(
    predict_step: PredictStep,
    variables: dict,
    batches: EvalLoader,
    dataset: Dataset,
    mesh: Mesh,
    output: Path,
) -> dict[str, np.ndarray]:
    """Every image of `batches`, by file name: ground truth on the left, detections on the right.

    Also written below `output`. The first process draws; the others return nothing.
    """
    pictures, names = {}, dataset.class_names
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
            # Masks of the whole canvas are not drawn: they are no crops of boxes.
            masks = None if truth.masks.shape[1:] == canvas else truth.masks
            name, image = dataset.images[index].file_name, bands.to_rgb(dataset.decode(index))
            left = visualize.draw_ground_truth(image, boxes, truth.classes, masks, names)
            picture = visualize.side_by_side(left, visualize.draw_detections(image, found, names))
            visualize.write_image(output / file_name(name, ".jpg", written), picture)
            pictures[printable(name)] = picture
    return pictures

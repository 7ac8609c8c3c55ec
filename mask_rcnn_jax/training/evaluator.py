"""A model over a data set: detections, COCO scores and validation loss."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.data.dataset import Dataset, category_ids
from mask_rcnn_jax.data.ground_truth import ground_truth
from mask_rcnn_jax.data.loader import EvalLoader
from mask_rcnn_jax.evaluation import coco as coco_evaluation
from mask_rcnn_jax.evaluation import visualize
from mask_rcnn_jax.progress import Progress
from mask_rcnn_jax.structures import Batch, Detections
from mask_rcnn_jax.training import processes
from mask_rcnn_jax.training.step import shard_batch


def detect(
    predict_step: Callable[[dict, Batch], Detections],
    variables: dict,
    batches: Iterable[Batch],
    dataset: Dataset,
    mesh: Mesh,
    num_images: int,
    *,
    paste: str,
    inclusive_boxes: bool,
) -> tuple[list[dict], list[dict]]:
    """COCO results (boxes, masks) of every image of `batches`, in the order of the dataset; `paste`
    and `inclusive_boxes` are those of `evaluation.coco.to_coco_results`.

    Every process works on its own batches and returns the results of all. Masks of one batch are
    encoded while the device works on the next.
    """
    results: tuple[list[dict], list[dict]] = ([], [])
    append = partial(_append_results, paste=paste, inclusive_boxes=inclusive_boxes)
    progress = Progress("evaluated", num_images)
    pending, seen = None, 0
    for batch in batches:
        detections = predict_step(variables, shard_batch(batch, mesh))
        if pending is not None:
            append(results, *pending, dataset)
        pending = batch, detections
        together = jax.process_count() * int(np.sum(batch.image_index >= 0))
        progress.advance(min(together, num_images - seen))
        seen = min(num_images, seen + together)
    if pending is not None:
        append(results, *pending, dataset)
    place = {record.id: index for index, record in enumerate(dataset.images)}
    boxes, masks = (
        sorted(chain(*processes.gather(entries)), key=lambda entry: place[entry["image_id"]])
        for entries in results
    )
    return boxes, masks


def _append_results(
    results, batch: Batch, detections: Detections, dataset: Dataset, *, paste, inclusive_boxes
) -> None:
    records = [dataset.images[i] if i >= 0 else None for i in batch.image_index]
    new = coco_evaluation.to_coco_results(
        processes.local_rows(detections),
        batch.scales,
        [record and record.id for record in records],
        [(record.height, record.width) if record else (0, 0) for record in records],
        category_ids(dataset),
        paste=paste,
        inclusive_boxes=inclusive_boxes,
    )
    for all_results, batch_results in zip(results, new, strict=True):
        all_results.extend(batch_results)


def score_and_write(
    dataset: Dataset,
    results: tuple[list[dict], list[dict]],
    image_ids: list,
    output: Path,
    callback: Callable[[COCOeval], None] | None = None,
) -> dict:
    """COCO metrics of the results; the table goes to stdout, results and metrics to `output`.

    The first process scores and writes, the others are told the metrics. `callback` is that of
    `evaluation.coco.score`, called on the first process.
    """
    if jax.process_index() != 0:
        return processes.from_first(None)
    output.mkdir(parents=True, exist_ok=True)
    for name, entries in zip(("bbox_results", "segm_results"), results, strict=True):
        (output / f"{name}.json").write_text(json.dumps(entries))
    metrics = coco_evaluation.score(
        ground_truth(dataset), *results, image_ids=image_ids, skip_bad=True, callback=callback
    )
    (output / "metrics.json").write_text(json.dumps(metrics, indent=1))
    print(coco_evaluation.format_table(metrics), flush=True)
    return processes.from_first(metrics)


def mean_losses(
    loss_step: Callable[[dict, Batch], dict[str, jax.Array]],
    variables: dict,
    batches: EvalLoader,
    mesh: Mesh,
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
    predict_step: Callable[[dict, Batch], Detections],
    variables: dict,
    batches: Iterable[Batch],
    dataset: Dataset,
    mesh: Mesh,
    output: Path,
) -> dict[str, np.ndarray]:
    """Every image of `batches`, by file name: ground truth on the left, detections on the right.

    Also written below `output`. The first process draws; the others return nothing.
    """
    pictures = {}
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
            one = jax.tree.map(lambda leaf, row=row: leaf[row], detections)
            file_name = dataset.images[index].file_name
            image = dataset.decode(index)
            to_original = 1 / np.tile(batch.scales[row][::-1], 2)
            truth = jax.tree.map(lambda leaf, row=row: leaf[row], batch.targets)
            whole = truth.masks.shape[1:] == canvas  # not drawn: no crops of boxes
            picture = visualize.side_by_side(
                visualize.draw_ground_truth(
                    image, truth.boxes * to_original, truth.classes,
                    None if whole else truth.masks,
                    dataset.class_names,
                ),
                visualize.draw_detections(
                    image, one.replace(boxes=one.boxes * to_original), dataset.class_names
                ),
            )  # fmt: skip
            name = Path(file_name).with_suffix(".jpg")
            visualize.write_image(output / "_".join(name.parts), picture)
            pictures[file_name] = picture
    return pictures

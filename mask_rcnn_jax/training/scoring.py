"""Score a run, a file of weights or a COCO results file with the COCO protocol."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mask_rcnn_jax import compile_cache, device
from mask_rcnn_jax.config import as_recipe, check_path, check_written
from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.dataset import (
    Dataset,
    check_classes,
    check_dataset,
    check_scored_keypoints,
    dataset_name,
)
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.overview import image_size
from mask_rcnn_jax.data.resize import ResizePlan, resize_plan
from mask_rcnn_jax.data.source import load_split, load_val
from mask_rcnn_jax.data.tiles import Tiles, tiling
from mask_rcnn_jax.data.views import ViewLoader
from mask_rcnn_jax.evaluation import coco as coco_evaluation
from mask_rcnn_jax.evaluation.engines import announce_engine
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.store_folders import written_at
from mask_rcnn_jax.structures import Batch, Detections
from mask_rcnn_jax.training import evaluator, reports
from mask_rcnn_jax.training.batches import make_eval_loader, make_tile_loader, view_sizes
from mask_rcnn_jax.training.checks import unused_keypoints
from mask_rcnn_jax.training.compiling import announce_compiling
from mask_rcnn_jax.training.encoding import Rules
from mask_rcnn_jax.training.metrics import FILE_NAME, read_metrics
from mask_rcnn_jax.training.processes import gather
from mask_rcnn_jax.training.step import make_mesh, make_predict_step, replicate
from mask_rcnn_jax.training.tiles import detect_in_tiles
from mask_rcnn_jax.training.views import make_views_step
from mask_rcnn_jax.weights import pretrained, published, stored_run
from mask_rcnn_jax.weights.model_folder import folder_of
from mask_rcnn_jax.weights.restore import Restored, make_model, restore


class Exported(Protocol):
    """A model that brings its own program, as `predict.engines.load_exported` returns it."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def categories(self) -> list[dict]: ...

    @property
    def batch(self) -> int | None: ...

    @property
    def name(self) -> str: ...

    def accepts(self, plan: ResizePlan) -> bool: ...

    def check_unchanged(self, recipe: Recipe) -> None: ...

    def __call__(self, images: np.ndarray, image_sizes: np.ndarray) -> Detections: ...


def evaluate(
    weights: str | Path | Exported,
    config: Recipe | ConfigDict | str | Path | None = None,
    *,
    val_set: Dataset | None = None,
    output: str | Path | None = None,
    report: bool = False,
    tile: int = 0,
    overlap: float = 0.2,
    accept_mismatch: bool = False,
) -> dict:
    """Detect objects on a dataset, score them and write the results.

    Args:
        weights: a run, one of its checkpoints, a file of weights, a model on a hub
            (hf://owner/name), or an exported model, which is scored on the images that have a size
            it takes.
        config: a recipe, its name or path, or a ConfigDict; None takes that of the run, of the
            export or of the hub. A file needs one.
        val_set: the dataset; None takes the recipe's `data.val_json`.
        output: folder, or its address in an object store, for bbox_results.json, segm_results.json,
            keypoints_results.json and metrics.json; None takes `eval/<step>` in the run's workdir.
            A file and an exported
            model need one.
        report: also write report.html.
        tile: side of the tiles of large images, see `Predictor`; 0 cuts none.
        overlap: smallest overlap of neighboring tiles, as a fraction of their side.
        accept_mismatch: that of `load_variables`.

    Returns:
        The 24 COCO metrics, named AP, AP50, .., mask_AP, mask_AP50, .., or LVIS's 26, and
        "per_category"; those of masks are left out for a dataset of boxes alone. Others, "AP@K",
        "keypoints_AP", .. and "cells", are there where `evaluation.coco.score` adds them.

    Raises:
        ValueError, OSError: weights, config or dataset cannot be used or do not fit each other.
    """
    tiles, has_output = tiling(tile, overlap), output is not None
    compile_cache.use_default()
    if output is not None:
        check_written(output, "output", is_folder=True, in_store=True)
    given = None if config is None else as_recipe(config)
    if not hasattr(weights, "accepts"):
        check_path(weights, "weights", "a path, a name of weights or an exported model")
    if isinstance(weights, str | Path):
        weights = str(published.local(weights))
    restored, exported = _source(weights, given, accept_mismatch, has_output=has_output)
    name = str(exported.name if exported else weights)
    recipe, variables, categories, checkpoint = restored
    announce_engine(recipe.eval.engine)
    coco_evaluation.check_protocol(recipe.eval.protocol, report)
    known = bool(checkpoint or exported or folder_of(name))
    val_set = _val_set(recipe, val_set, categories, name, known=known)
    evaluator.check_scorable(val_set, recipe.eval)
    if line := unused_keypoints(val_set, recipe):
        logging.warning("%s", line)
    title, records = f"Evaluation of {name}", []
    if checkpoint:
        run = stored_run.address_of(checkpoint.workdir) or checkpoint.workdir
        output = output or f"{run}/eval/{checkpoint.step}"
        title = f"Evaluation of {run}, step {checkpoint.step}"
        if report and (checkpoint.workdir / FILE_NAME).is_file():
            records = read_metrics(checkpoint.workdir / FILE_NAME)
    assert output is not None  # `_source` asks for one where there is no run
    with written_at(output) as folder:
        folder.mkdir(parents=True, exist_ok=True)  # an unwritable one is found out before the work
        if exported:
            found = _detect_exported(exported, recipe, val_set, tiles)
        else:
            found = _detect(recipe, len(categories), variables, val_set, tiles)
        analyses, collect = reports.collector(report)
        arguments = val_set, found, folder, recipe.eval, collect
        metrics = evaluator.score_and_write(*arguments, _fullest(found) if tiles else None)
        if analyses:  # on the first process
            read = reports.dataset_reader(val_set)
            reports.write(folder, title, dataset_name(val_set), analyses, read, records, metrics)
    logging.info("results: %s", output)
    return metrics


def _fullest(found: evaluator.Found) -> int:
    """Count the detections in the image with the most; tiles together find more than
    `eval.detections_per_image`."""
    return max(Counter(one["image_id"] for one in found.boxes).values(), default=0)


def _source(
    weights: str | Path | Exported,
    recipe: Recipe | None,
    accept_mismatch: bool,
    *,
    has_output: bool,
) -> tuple[Restored, Exported | None]:
    """Restore the model to evaluate, or take an exported one, which has no variables."""
    if isinstance(weights, str | Path):
        is_whole = pretrained.is_run(weights) or folder_of(weights)
        brings_recipe = is_whole or published.brought_recipe(weights)
        if recipe is None and not brings_recipe or not (has_output or pretrained.is_run(weights)):
            needed = "--output" if brings_recipe else "--config and --output"
            python = needed.replace("--", "")
            raise ValueError(f"{weights} is no run: it needs {needed} ({python} in Python)")
        return restore(recipe, weights, accept_mismatch=accept_mismatch), None
    if not has_output:
        raise ValueError("an exported model needs --output")
    if jax.process_count() > 1:
        raise ValueError("an exported model is evaluated in one process")
    if recipe is not None:
        weights.check_unchanged(recipe)
    return Restored(recipe or weights.recipe, {}, weights.categories, None), weights


def _val_set(
    recipe: Recipe, given: Dataset | None, categories: list[dict], name: str, *, known: bool
) -> Dataset:
    """Return the given dataset, or the recipe's, which must have the classes of the model.

    known: whether the model brings its categories; otherwise they are a guess, whose number counts.
    """
    dataset, boxes_only = given, recipe.learns_boxes_only
    if dataset is not None and type(dataset) is not CocoDataset:
        check_dataset(dataset, "val_set")
    if dataset is None and known:
        dataset = load_val(recipe.data, categories, boxes_only=boxes_only)
    elif dataset is None:
        dataset = load_split(recipe.data, "val", boxes_only=boxes_only)
    if known:
        check_classes(dataset, categories, name)
    elif len(dataset.class_names) != len(categories):
        raise ValueError(
            f"{name} has {len(categories)} classes, expected {len(dataset.class_names)} as in "
            f"{dataset_name(dataset)} (data.class_ids says how ids become classes)"
        )
    check_scored_keypoints(dataset, recipe.data.keypoints)
    return dataset


def fitting(
    options: ExampleOptions,
    max_images: int,
    dataset: Dataset,
    accepts: Callable[[ResizePlan], bool],
) -> int:
    """Count the images to evaluate on with a size that an exported model takes.

    Takes sizes from the annotations, opens no image. Raises ValueError if there are none, and warns
    if there are others.
    """
    count = min(len(dataset.images), max_images or len(dataset.images))
    sizes = Counter(image_size(dataset.images, index) for index in range(count))
    kept = sum(n for size, n in sizes.items() if accepts(resize_plan(*size, options)))
    if not kept:
        most = " x ".join(map(str, sizes.most_common(1)[0][0])) if sizes else "none"
        raise ValueError(
            f"no image of {dataset_name(dataset)} has a size that the exported model takes; most "
            f"are {most}"
        )
    if kept < count:
        text = "scores are of %d of %d images: the exported model does not take the others' sizes"
        logging.warning(text, kept, count)
    return kept


def _detect(
    recipe: Recipe, num_classes: int, variables: dict, val_set: Dataset, tiles: Tiles | None
) -> evaluator.Found:
    device.log_devices()
    device.log_precision(recipe.train.precision, gather)
    device.check_kernels(recipe.train.implementation, gather)
    model, mesh = make_model(recipe, num_classes), make_mesh()
    variables, rules = replicate(variables, mesh), Rules.of(recipe)
    if tiles is None:
        predict, loader = _predictions(recipe, model, mesh, val_set)
        return evaluator.detect(predict, variables, loader, val_set, mesh, rules)
    if recipe.eval.augments:
        raise ValueError("eval.tta_scales and eval.tta_flip are set, expected neither with tiles")
    predict = announce_compiling("detector", make_predict_step(model, mesh, recipe.eval))
    numbers = {"batch_size": recipe.eval.batch_size, "max_images": recipe.eval.max_images}
    tile_loader = make_tile_loader(val_set, recipe.data, tiles, **numbers)
    return detect_in_tiles(predict, variables, tile_loader, val_set, mesh, rules)


def _detect_exported(
    exported: Exported, recipe: Recipe, val_set: Dataset, tiles: Tiles | None
) -> evaluator.Found:
    """Detect with an exported model in the images that it takes."""
    if tiles or recipe.eval.augments:
        raise ValueError("an exported model is evaluated without tiles, tta_scales and tta_flip")
    options, limit = recipe.data, recipe.eval.max_images
    fitting(options, limit, val_set, exported.accepts)
    loader = EvalLoader(
        val_set,
        options,
        batch_size=exported.batch or recipe.eval.batch_size,
        accepts=exported.accepts,
        num_workers=options.num_workers,
        max_images=limit,
    )
    mesh = jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1])

    def predict(_, batch: Batch) -> Detections:
        return exported(np.asarray(batch.images), np.asarray(batch.image_sizes))

    return evaluator.detect(predict, {}, loader, val_set, mesh, Rules.of(recipe))


def _predictions(
    recipe: Recipe, model: MaskRCNN, mesh: Mesh, val_set: Dataset
) -> tuple[evaluator.PredictStep, EvalLoader | ViewLoader]:
    """A step and its batches: with several views of each image, if the recipe says so."""
    wanted, workers = recipe.eval, recipe.data.num_workers
    numbers: dict[str, Any] = {"batch_size": wanted.batch_size, "max_images": wanted.max_images}

    def load(options: ExampleOptions) -> EvalLoader:
        return make_eval_loader(val_set, options, num_workers=workers, **numbers)

    if not wanted.augments:
        predict = announce_compiling("detector", make_predict_step(model, mesh, wanted))
        return predict, load(evaluator.evaluation_options(recipe, val_set))
    logging.info("%d views of each image: sizes of %s", wanted.views, wanted.tta_scales)
    loaders = [load(options) for options in view_sizes(recipe.data, wanted)]
    step = make_views_step(model, mesh, wanted, flip=wanted.tta_flip)
    return announce_compiling("detector", step), ViewLoader(loaders)

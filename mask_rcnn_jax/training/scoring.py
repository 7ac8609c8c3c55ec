"""Score a run, a file of weights or a COCO results file with the COCO protocol."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mask_rcnn_jax.annotations.reader import GroundTruth, read_ground_truth
from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.dataset import Dataset, check_classes, check_dataset, dataset_name
from mask_rcnn_jax.data.images import decode_image
from mask_rcnn_jax.data.loader import EvalLoader
from mask_rcnn_jax.data.options import example_options, train_sets
from mask_rcnn_jax.data.overview import image_size
from mask_rcnn_jax.data.resize import ResizePlan, resize_plan
from mask_rcnn_jax.data.source import annotation_file, learns_boxes_only, load_split, load_val
from mask_rcnn_jax.data.tiles import Tiles, tiling
from mask_rcnn_jax.data.views import ViewLoader
from mask_rcnn_jax.evaluation import coco as coco_evaluation
from mask_rcnn_jax.evaluation.engines import configured_engine
from mask_rcnn_jax.models.detect import detect_options
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.structures import Batch, Detections
from mask_rcnn_jax.terminal.safe_text import safe_stdout
from mask_rcnn_jax.training import evaluator, reports
from mask_rcnn_jax.training.compiling import say_compiling
from mask_rcnn_jax.training.metrics import FILE_NAME, read_metrics
from mask_rcnn_jax.training.setup import (
    make_eval_loader,
    make_tile_loader,
    resolve_config,
    view_sizes,
)
from mask_rcnn_jax.training.step import make_mesh, make_predict_step, replicate
from mask_rcnn_jax.training.tiles import detect_in_tiles
from mask_rcnn_jax.training.views import Views, make_views_step, view_options
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.restore import make_model, restore


class Exported(Protocol):
    """A model that brings its own program, as `predict.engines.load_exported` returns it."""

    @property
    def config(self) -> ConfigDict: ...

    @property
    def categories(self) -> list[dict]: ...

    @property
    def batch(self) -> int | None: ...

    @property
    def name(self) -> str: ...

    def accepts(self, plan: ResizePlan) -> bool: ...

    def check_unchanged(self, config: ConfigDict) -> None: ...

    def __call__(self, images: np.ndarray, image_sizes: np.ndarray) -> Detections: ...


def evaluate(
    weights: str | Path | Exported,
    config: ConfigDict | str | Path | None = None,
    *,
    val_set: Dataset | None = None,
    output: str | Path | None = None,
    report: bool = False,
    tile: int = 0,
    overlap: float = 0.2,
) -> dict:
    """Detect objects on a dataset, score them and write the results.

    Args:
        weights: a run, one of its checkpoints, a file of weights, or an exported model, which is
            scored on the images that have a size it takes.
        config: a recipe's name or path, or a config, which is not changed; None takes that of the
            run or the export. A file needs one.
        val_set: the dataset; None takes `config.data.val_json`.
        output: folder for bbox_results.json, segm_results.json and metrics.json; None takes
            `eval/<step>` in the run's workdir. A file and an exported model need one.
        report: also write report.html.
        tile: images with a longer side are cut into overlapping squares of this many pixels, whose
            detections are merged; 0 cuts none.
        overlap: smallest overlap of neighboring tiles, as a fraction of their side.

    Returns:
        The 24 COCO metrics, named AP, AP50, .., mask_AP, mask_AP50, .., or LVIS's 26, and
        "per_category"; those of masks are left out for a dataset of boxes alone.

    Raises:
        ValueError, OSError: weights, config or dataset cannot be used or do not fit each other.
    """
    tiles = tiling(tile, overlap)
    given = None if config is None else resolve_config(config)
    exported = None if isinstance(weights, str | Path) else weights
    if isinstance(weights, str | Path):
        if not pretrained.is_run(weights) and (config is None or output is None):
            raise ValueError(f"--weights {weights} is no run: it needs --config and --output")
        resolved, variables, categories, checkpoint = restore(given, weights)
    else:
        if output is None:
            raise ValueError("an exported model needs --output")
        if jax.process_count() > 1:
            raise ValueError("an exported model is evaluated in one process")
        if given is not None:
            weights.check_unchanged(given)
        resolved, variables = given or weights.config, {}
        categories, checkpoint = weights.categories, None
    name = str(exported.name if exported else weights)
    engine = configured_engine(resolved)
    protocol = coco_evaluation.configured_protocol(resolved, report=report)
    if val_set is None:
        boxes_only = learns_boxes_only(resolved)
        if checkpoint or exported:
            val_set = load_val(resolved.data, categories, boxes_only=boxes_only)
        else:
            val_set = load_split(resolved.data, "val", boxes_only=boxes_only)
    elif type(val_set) is not CocoDataset:
        check_dataset(val_set, "val_set")
    evaluator.check_labels(val_set, protocol)
    title, records = f"Evaluation of {name}", []
    if checkpoint:
        check_classes(val_set, categories, name)
        output = output or checkpoint.workdir / "eval" / str(checkpoint.step)
        title = f"Evaluation of {name}, step {checkpoint.step}"
        if report and (checkpoint.workdir / FILE_NAME).is_file():
            records = read_metrics(checkpoint.workdir / FILE_NAME)
    elif exported:
        check_classes(val_set, categories, name)
    elif len(val_set.class_names) != len(categories):
        raise ValueError(
            f"{name} has {len(categories)} classes, expected {len(val_set.class_names)} as in "
            f"{dataset_name(val_set)} (data.class_ids says how ids become classes)"
        )
    assert output is not None  # checked above for a file of weights
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)  # an unwritable folder is found out before the work
    if exported:
        found = _detect_exported(exported, resolved, val_set, tiles)
    else:
        found = _detect(resolved, len(categories), variables, val_set, tiles)
    analyses, collect = reports.collector(report)
    metrics = evaluator.score_and_write(val_set, found, folder, engine, protocol, collect)
    if analyses:  # on the first process
        read = reports.dataset_reader(val_set)
        reports.write(folder, title, dataset_name(val_set), analyses, read, records)
    logging.info("results: %s", folder)
    return metrics


def evaluate_results(
    results_json: str | Path,
    config: ConfigDict | str | Path,
    *,
    output: str | Path | None = None,
    report: bool = False,
) -> dict:
    """Score a COCO results file, boxes or masks or both, against the "val" set of `config.data`.

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
    config = resolve_config(config)
    sets = train_sets(config.data)
    for name in ("more_train", "class_map"):
        if value := getattr(sets, name):
            advice = "since the category ids of results are taken as those of data.val_json"
            raise ValueError(f"data.{name} is {value}, expected () with --results, {advice}")
    engine = configured_engine(config)
    protocol = coco_evaluation.configured_protocol(config, report=report)
    boxes, masks = coco_evaluation.split_results(coco_evaluation.load_results(results_json))
    annotations = annotation_file(config.data, "val")
    boxes_only = learns_boxes_only(config) and masks is None
    truth = read_ground_truth(annotations, scoring=True, boxes_only=boxes_only)
    skip_bad = config.data.bad_annotations == "skip"
    if skip_bad:
        for line in truth.left_out():
            logging.warning("%s", line)
    _warn_of_unknown_categories(results_json, truth, boxes or masks or [])
    analyses, collect = reports.collector(report)
    metrics = coco_evaluation.score(
        truth,
        boxes,
        masks,
        skip_bad=skip_bad,
        results_name=str(results_json),
        engine=engine,
        protocol=protocol,
        callback=collect,
    )
    with safe_stdout():
        print(coco_evaluation.format_table(metrics), flush=True)
    if output:
        Path(output).mkdir(parents=True, exist_ok=True)
        (Path(output) / "metrics.json").write_text(json.dumps(metrics, indent=1))
    if report and output:
        title, read = f"Evaluation of {results_json}", _config_reader(config)
        reports.write(Path(output), title, annotations, analyses, read, records=[])
    return metrics


def fitting(config: ConfigDict, dataset: Dataset, accepts: Callable[[ResizePlan], bool]) -> int:
    """Count the images to evaluate on with a size that an exported model takes.

    Takes sizes from the annotations, opens no image. Raises ValueError if there are none, and warns
    if there are others.
    """
    count, options = len(dataset.images), example_options(config)
    count = min(count, config.eval.max_images or count)
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
    config: ConfigDict, num_classes: int, variables: dict, val_set: Dataset, tiles: Tiles | None
) -> evaluator.Found:
    model, mesh = make_model(config, num_classes), make_mesh()
    variables = replicate(variables, mesh)
    if tiles:
        return _detect_in_tiles(config, model, mesh, val_set, variables, tiles)
    predict, loader = _predictions(config, model, mesh, val_set)
    return evaluator.detect(predict, variables, loader, val_set, mesh, config)


def _detect_exported(
    exported: Exported, config: ConfigDict, val_set: Dataset, tiles: Tiles | None
) -> evaluator.Found:
    """Detect with an exported model in the images that it takes."""
    if tiles or view_options(config) != Views():
        raise ValueError("an exported model is evaluated without tiles, tta_scales and tta_flip")
    fitting(config, val_set, exported.accepts)
    options, rows = example_options(config), exported.batch or config.eval.batch_size
    limits = {"num_workers": config.data.num_workers, "max_images": config.eval.max_images}
    loader = EvalLoader(val_set, options, batch_size=rows, accepts=exported.accepts, **limits)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1])

    def predict(_, batch: Batch) -> Detections:
        return exported(np.asarray(batch.images), np.asarray(batch.image_sizes))

    return evaluator.detect(predict, {}, loader, val_set, mesh, config)


def _predictions(
    config: ConfigDict, model: MaskRCNN, mesh: Mesh, val_set: Dataset
) -> tuple[evaluator.PredictStep, EvalLoader | ViewLoader]:
    """A step and its batches: with several views of each image, if the config says so."""
    views, detect, limit = view_options(config), detect_options(config), config.eval.max_images
    if views == Views():
        predict = say_compiling("detector", make_predict_step(model, mesh, detect))
        options = evaluator.evaluation_options(config, val_set)
        return predict, make_eval_loader(config, val_set, limit, options=options)
    logging.info("%d views of each image: sizes of %s", views.count, views.tta_scales)
    sizes = view_sizes(config)
    loaders = [make_eval_loader(config, val_set, limit, options=options) for options in sizes]
    step = make_views_step(model, mesh, detect, flip=views.tta_flip)
    return say_compiling("detector", step), ViewLoader(loaders)


def _detect_in_tiles(
    config: ConfigDict,
    model: MaskRCNN,
    mesh: Mesh,
    val_set: Dataset,
    variables: dict,
    tiles: Tiles,
) -> evaluator.Found:
    if view_options(config) != Views():
        raise ValueError("eval.tta_scales and eval.tta_flip are set, expected neither with tiles")
    loader = make_tile_loader(config, val_set, tiles)
    predict = say_compiling("detector", make_predict_step(model, mesh, detect_options(config)))
    return detect_in_tiles(predict, variables, loader, val_set, mesh, config)


def _warn_of_unknown_categories(
    results_json: str | Path, truth: GroundTruth, results: list[dict]
) -> None:
    known = {category["id"] for category in truth.content["categories"]}
    unknown = [r["category_id"] for r in results if r["category_id"] not in known]
    if unknown:
        text = "%s: %d results are of categories that the ground truth lacks, first: %r; not scored"
        logging.warning(text, results_json, len(unknown), unknown[0])


def _config_reader(config: ConfigDict) -> reports.ReadImage:
    """Reads from the files of the "val" set, whose json may lack everything but file names."""
    if config.data.source != "json":
        return reports.dataset_reader(load_split(config.data, "val"))

    def read(image: dict) -> np.ndarray:
        path = os.path.join(config.data.val_images, image["file_name"])
        has_size = "height" in image and "width" in image
        size = (int(image["height"]), int(image["width"])) if has_size else None
        return decode_image(path, expected_size=size)

    return read

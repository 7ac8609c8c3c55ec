"""Score a model, or an existing results file, with the COCO protocol.

    python -m mask_rcnn_jax.evaluate --workdir runs/coco
    python -m mask_rcnn_jax.evaluate --config configs/coco_torchvision.py --weights model.pth \\
        --output out
    python -m mask_rcnn_jax.evaluate --config configs/coco.py --results segm_results.json

The first takes the run's config, or one that is given, and its latest checkpoint;
`--weights runs/coco/checkpoints/90000` takes another.
Results go to `--output`, or to `eval/<step>` in the workdir. `--report` adds report.html there, a
page with curves, tables and images of the costliest errors.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from absl import flags, logging
from ml_collections import ConfigDict
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax import cli
from mask_rcnn_jax.data.coco import check_classes, check_image_size, decode_image
from mask_rcnn_jax.data.options import has_inclusive_boxes
from mask_rcnn_jax.data.source import annotation_file, load_split
from mask_rcnn_jax.evaluation import coco as coco_evaluation
from mask_rcnn_jax.models.detect import detect_options
from mask_rcnn_jax.report.analysis import Analysis, analyze
from mask_rcnn_jax.report.page import write_report
from mask_rcnn_jax.training import evaluator
from mask_rcnn_jax.training.metrics import FILE_NAME, read_metrics
from mask_rcnn_jax.training.setup import make_eval_loader
from mask_rcnn_jax.training.step import make_mesh, make_predict_step, replicate
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.restore import make_model, restore


def evaluate_model(
    config: ConfigDict | None, weights: str, output: str | None, *, report: bool = False
) -> dict:
    """Detect on `config.data.val_json`, score, and write results; returns the metrics.

    weights: a run, one of its checkpoints, or a file of weights; without a config that of the run
    is taken, a file needs one, and an output folder.
    report: also write report.html.
    """
    if not pretrained.is_run(weights) and (config is None or output is None):
        raise ValueError(f"--weights {weights} is no run: it needs --config and --output")
    config, variables, categories, checkpoint = restore(config, weights)
    dataset = load_split(config.data, "val")
    title, records = f"Evaluation of {weights}", []
    if checkpoint:
        check_classes(dataset, categories, weights)
        output = output or str(checkpoint.workdir / "eval" / str(checkpoint.step))
        title = f"Evaluation of {weights}, step {checkpoint.step}"
        if report and (checkpoint.workdir / FILE_NAME).is_file():
            records = read_metrics(checkpoint.workdir / FILE_NAME)
    elif len(dataset.class_names) != len(categories):
        raise ValueError(
            f"{weights} has {len(categories)} classes, expected {len(dataset.class_names)} as in "
            f"{dataset.json_path} (data.class_ids says how ids become classes)"
        )
    model = make_model(config, len(categories))
    assert output is not None  # a file of weights has none without --output
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)  # an unwritable folder is found out before the work
    mesh = make_mesh()
    loader = make_eval_loader(config, dataset, config.eval.max_images)
    results = evaluator.detect(
        make_predict_step(model, mesh, detect_options(config)),
        replicate(variables, mesh),
        loader, dataset, mesh, loader.num_images,
        paste=config.eval.paste, inclusive_boxes=has_inclusive_boxes(config),
    )  # fmt: skip
    image_ids = [record.id for record in dataset.images[: loader.num_images]]
    analyses, collect = _collector(report)
    metrics = evaluator.score_and_write(dataset, results, image_ids, folder, collect)
    if analyses:  # on the first process
        _write_report(folder, title, config, analyses, records)
    logging.info("results: %s", folder)
    return metrics


def evaluate_results(
    config: ConfigDict, results_json: str, output: str | None, *, report: bool = False
) -> dict:
    """Score a COCO results file, boxes or masks or both, against the "val" set of `config.data`.

    report: also write report.html into `output`.
    """
    if report and not output:
        raise ValueError("--report with --results needs --output, where report.html is written")
    results = coco_evaluation.split_results(coco_evaluation.load_results(results_json))
    skip_bad = config.data.bad_annotations == "skip"
    annotations = annotation_file(config.data, "val")
    analyses, collect = _collector(report)
    metrics = coco_evaluation.score(annotations, *results, skip_bad=skip_bad, callback=collect)
    print(coco_evaluation.format_table(metrics), flush=True)
    if output:
        Path(output).mkdir(parents=True, exist_ok=True)
        (Path(output) / "metrics.json").write_text(json.dumps(metrics, indent=1))
    if report and output:
        _write_report(Path(output), f"Evaluation of {results_json}", config, analyses, records=[])
    return metrics


def _collector(wanted: bool) -> tuple[list[Analysis], Callable[[COCOeval], None] | None]:
    """A list, and a callback that appends the analysis of an evaluation; None if not wanted."""
    analyses = []
    return analyses, (lambda evaluation: analyses.append(analyze(evaluation))) if wanted else None


def _write_report(
    folder: Path, title: str, config: ConfigDict, analyses: list[Analysis], records: list[dict]
) -> None:
    """report.html in the folder, with the pictures of the "val" set that are there."""
    failures = []
    read = _reader(config)

    def read_picture(image: dict) -> np.ndarray | None:
        try:
            return read(image)
        except (KeyError, OSError, TypeError, ValueError) as error:
            failures.append(f"image {image['id']}: {error!r}")
            return None

    about = {"Ground truth": annotation_file(config.data, "val")}
    write_report(folder / "report.html", title, about, analyses, read_picture, records)
    if failures:
        logging.warning(
            "report: %d pictures could not be read, the first: %s", len(failures), failures[0]
        )
    logging.info("report: %s", folder / "report.html")


def _reader(config: ConfigDict) -> Callable[[dict], np.ndarray]:
    """What decodes the picture of an entry of the json's `images`."""
    if config.data.source == "tfds":
        dataset = load_split(config.data, "val")
        places = {record.id: index for index, record in enumerate(dataset.images)}
        return lambda image: dataset.decode(places[image["id"]])

    def read(image: dict) -> np.ndarray:
        path = os.path.join(config.data.val_images, image["file_name"])
        picture = decode_image(path)
        if "height" in image and "width" in image:
            check_image_size(picture, (image["height"], image["width"]), path)
        return picture

    return read


def _define_flags() -> None:
    cli.define_config(required=False)
    cli.define_processes()
    flags.DEFINE_string("workdir", None, "Folder of a run; its latest checkpoint is taken.")
    flags.DEFINE_string("weights", None, "A workdir, one of its checkpoints/<step>, or a file.")
    flags.DEFINE_string("results", None, "A COCO results file to score without a model.")
    flags.DEFINE_string("output", None, "Where to write results and metrics.json.")
    flags.DEFINE_bool("report", False, "Also write report.html, to look at.")


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    sources = [source for source in (FLAGS.workdir, FLAGS.weights, FLAGS.results) if source]
    if len(sources) != 1:
        raise ValueError("evaluate needs exactly one of --workdir, --weights and --results")
    if FLAGS.results and FLAGS.config is None:
        raise ValueError("evaluate --results needs --config, whose data.val_json is scored against")
    if FLAGS.results:
        evaluate_results(FLAGS.config, FLAGS.results, FLAGS.output, report=FLAGS.report)
    else:
        evaluate_model(FLAGS.config, sources[0], FLAGS.output, report=FLAGS.report)


if __name__ == "__main__":
    cli.run(main, _define_flags)

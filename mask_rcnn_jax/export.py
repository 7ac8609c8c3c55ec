"""Export a trained model for use elsewhere.

    python -m mask_rcnn_jax.export --workdir runs/mine --format stablehlo --output out
    python -m mask_rcnn_jax.export --workdir runs/mine --format onnx --output out
    python -m mask_rcnn_jax.export --workdir runs/mine --format onnx --output out \\
        --picture_size 1080,1920 --deepstream
    python -m mask_rcnn_jax.export --workdir runs/mine --format onnx --output out \\
        --int8 --calibration data/photos
    python -m mask_rcnn_jax.export --workdir runs/mine --format torchvision \\
        --output mine.safetensors
    python -m mask_rcnn_jax.export --workdir runs/mine --format detectron2 --output mine.pkl
    python -m mask_rcnn_jax.export --workdir runs/mine --format hub --output out/hub \\
        --license apache-2.0 --push_to owner/name

`stablehlo` and `onnx` write a folder with a complete model, from image to detections, and its
manifest.json; it runs without this package, see docs/deployment.md. `--int8` adds an int8 model and
reports the AP of both on config.data.val_json; `--int8_budget` keeps layers in float until int8
loses no more AP than that.

`safetensors`, `torchvision` and `detectron2` write weights only. `safetensors` keeps our names, for
`--weights` and `model.init_from`; `--float16` halves the file. `torchvision` is a state dict for
torchvision's MaskRCNN (`load_state_dict(safetensors.torch.load_file(FILE))`), with classes 1, 2,
... in category order.
Any difference from configs/coco_torchvision.py is listed and must also be made in torchvision.
`detectron2` is the same for its `MODEL.WEIGHTS`, with differences from configs/coco_detectron2.py
or coco_vitdet.py.

`hub` writes a folder with recipe, categories, weights and model card, which `--push_to` uploads;
`hf://owner/name` is then a model for all commands, see docs/hub.md.

Every export is compared with the original model before it is written.
"""

from mask_rcnn_jax.terminal import interrupts

if __name__ == "__main__":
    interrupts.begin()  # imports take seconds

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import jax
import numpy as np
from absl import flags

from mask_rcnn_jax import cli, consent
from mask_rcnn_jax.config import check_written, named_code
from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.dataset import check_classes
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.resize import ResizePlan
from mask_rcnn_jax.data.source import annotation_file, load_val
from mask_rcnn_jax.evaluation.coco import at_limit
from mask_rcnn_jax.evaluation.engines import announce_engine
from mask_rcnn_jax.exporting.artifact import Artifact, build_artifact
from mask_rcnn_jax.exporting.hub_folder import HubOptions, hub_files
from mask_rcnn_jax.exporting.images import placement
from mask_rcnn_jax.exporting.manifest import dump, make_manifest, write
from mask_rcnn_jax.exporting.options import ArtifactOptions
from mask_rcnn_jax.exporting.quantize import CALIBRATORS, RUNTIMES
from mask_rcnn_jax.exporting.weight_file import WEIGHTS, export_weights
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.store_folders import written_at
from mask_rcnn_jax.stores import is_address
from mask_rcnn_jax.training import evaluator
from mask_rcnn_jax.training.encoding import Rules
from mask_rcnn_jax.training.metrics import read_evaluations
from mask_rcnn_jax.training.scoring import fitting
from mask_rcnn_jax.weights import hub
from mask_rcnn_jax.weights.restore import restore

MODELS = ("stablehlo", "onnx")
FORMATS = (*MODELS, *WEIGHTS, "hub")
LISTED = 10  # layers by their error in int8
AP_NAMES = ("AP", "AP50", "mask_AP", "mask_AP50", "keypoints_AP", "keypoints_AP50")


def export_model(
    recipe: Recipe | None,
    weights: str,
    format: str,
    output: str,
    options: ArtifactOptions,
    accept_mismatch: bool = False,
) -> None:
    """Write a model in a format of `MODELS`, compared with the original."""
    recipe, variables, categories, _ = restore(recipe, weights, accept_mismatch=accept_mismatch)
    data = replace(recipe.data, canvases=())  # an exported program has one canvas
    recipe = replace(recipe, data=data)
    dataset = _scored_dataset(recipe, weights, categories, options) if options.int8 else None
    aps: dict[str, dict[str, float]] = {}

    def scored(artifact: Artifact, kind: str) -> dict[str, float]:
        assert dataset is not None
        aps[kind] = score(recipe, dataset, artifact, kind)
        return aps[kind]

    arguments = recipe, variables, categories, format, options, Path(output)
    artifact = build_artifact(*arguments, score=scored)
    checks = artifact.self_check
    details = {**artifact.details, "self_check": checks}
    if dataset is not None:
        for name in artifact.predictors.keys() - aps.keys():
            scored(artifact, name)
        details["ap"] = aps = {name: aps[name] for name in artifact.predictors}
        for name in next(iter(aps.values())):
            pair = "  ".join(f"{kind} {values[name]:.4f}" for kind, values in aps.items())
            print(f"{name:<{max(10, len(name) + 1)}}{pair}")
    if found := details.get("int8_budget"):
        report_budget(found)
    files = {**artifact.files, "manifest.json": b""}
    names, interface = sorted(files), artifact.interface
    manifest = make_manifest(
        recipe, categories, format=format, files=names, interface=interface, details=details
    )
    files["manifest.json"] = dump(manifest)
    write(Path(output), files)
    if named_code(manifest["config"]):
        consent.remember(files["manifest.json"])
    print(f"{output}: {', '.join(names)}")
    for kind, check in checks.items():
        print(f"self-check, {kind}: {check['text']}")


def export_hub(
    recipe: Recipe | None,
    weights: str,
    output: str,
    options: HubOptions,
    accept_mismatch: bool = False,
) -> None:
    """Write a whole model into a folder, and push it to a hub if that is asked for."""
    options.check()
    restored = restore(recipe, weights, accept_mismatch=accept_mismatch)
    found = restored.checkpoint
    evaluations = read_evaluations(found.workdir, found.step) if found else []
    files = hub_files(restored, evaluations, options)
    write(Path(output), files)
    print(f"{output}: {', '.join(sorted(files))}")
    if options.push_to:
        names = list(files)
        address = hub.push(Path(output), names, options.push_to, private=options.private)
        print(f"pushed: {address}")


def _scored_dataset(
    recipe: Recipe, weights: str, categories: list[dict], options: ArtifactOptions
) -> CocoDataset:
    """Open what an int8 model is scored on, with all that can be wrong with it said before minutes
    of calibration."""
    data, path = recipe.data, annotation_file(recipe.data, "val")
    if not (is_address(path) or os.path.isfile(path)):
        where = "config.data.val_json"
        raise ValueError(f"--int8 reports AP on {where}, which is {path!r}: no such file")
    dataset = load_val(data, categories, boxes_only=recipe.learns_boxes_only)
    check_classes(dataset, categories, weights)
    announce_engine(recipe.eval.engine)
    evaluator.check_scorable(dataset, recipe.eval)
    placed = placement(data, options)
    resized = placed.size if options.picture_size else None

    def accepts(plan: ResizePlan) -> bool:
        return plan.canvas == placed.canvas and resized in (None, plan.size)

    fitting(data, recipe.eval.max_images, dataset, accepts)
    return dataset


def score(recipe: Recipe, dataset: CocoDataset, artifact: Artifact, kind: str) -> dict[str, float]:
    """Compute AP of an exported model on the `config.data.val_json` images that fit its input.

    kind: which of `artifact.predictors`.
    """
    data, limit = recipe.data, recipe.eval.max_images
    loader = EvalLoader(dataset, data, batch_size=1, num_workers=data.num_workers, max_images=limit)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1])

    def predict_batch(_, batch):
        return artifact.predictors[kind](np.asarray(batch.images), np.asarray(batch.image_sizes))

    def accepts(batch):
        return artifact.accepts(batch.images, batch.image_sizes)

    found = evaluator.detect(predict_batch, {}, loader, dataset, mesh, Rules.of(recipe), accepts)
    metrics = evaluator.score(dataset, found, recipe.eval)
    names = [*AP_NAMES, *(name + at_limit(metrics) for name in AP_NAMES)]
    return {name: metrics[name] for name in names if name in metrics}


def report_budget(found: dict) -> None:
    """Print the layers of which int8 has the largest error, and those that stay in float."""
    errors, in_float = found["errors"], found["in_float"]
    print(f"{len(in_float)} layers stay in float, for at most {found['limit']} of AP lost in int8")
    for layer in dict.fromkeys([*list(errors)[:LISTED], *in_float]):
        error = f"error {errors[layer]:.2e}" if layer in errors else "error not measured"
        print(f"  {layer:40}{error}{', in float' if layer in in_float else ''}")


def _define_flags() -> None:
    cli.define_config(required=False)
    flags.DEFINE_string("workdir", None, "Run folder; its latest checkpoint is used.")
    flags.DEFINE_string("weights", None, cli.WEIGHTS_HELP)
    cli.define_accept_mismatch()
    flags.DEFINE_enum("format", None, FORMATS, "Export format.", required=True)
    output_help = "Output folder; for weights the .safetensors file, for detectron2 a .pkl."
    flags.DEFINE_string("output", None, output_help, required=True)
    batch_help = "Batch size; by default any. With --deepstream, the number of sources."
    flags.DEFINE_integer("batch", None, batch_help, 1)
    canvas_help = "Canvas to export, for recipes with two; square images are landscape."
    flags.DEFINE_enum("orientation", "landscape", ["landscape", "portrait"], canvas_help)
    size_help = "HEIGHT,WIDTH of all images; removes the onnx input image_sizes."
    flags.DEFINE_list("picture_size", [], size_help)
    deepstream_help = "onnx with TAO's outputs and DeepStream's config; planar float32 input."
    flags.DEFINE_bool("deepstream", False, deepstream_help)
    flags.DEFINE_integer("opset", None, "onnx opset; default 17.")
    static_help = "onnx whose shapes are all fixed, for compilers that take no others."
    flags.DEFINE_bool("static", False, static_help)
    float16_help = "onnx whose layers compute in float16; safetensors of half the size."
    flags.DEFINE_bool("float16", False, float16_help)
    flags.DEFINE_bool("int8", False, "Also export an int8 model, calibrated with --calibration.")
    flags.DEFINE_string("calibration", None, "Folder of representative images for --int8.")
    flags.DEFINE_enum("calibrator", "minmax", CALIBRATORS, "How to choose onnx int8 ranges.")
    runtime_help = "What the onnx int8 model is for; default cpu, or tensorrt with --deepstream."
    flags.DEFINE_enum("int8_for", None, RUNTIMES, runtime_help)
    flags.DEFINE_string("license", "", "hub: of the model, such as apache-2.0; unset states none.")
    flags.DEFINE_string("push_to", "", "hub: OWNER/NAME of the repository to upload to.")
    flags.DEFINE_bool("private", False, "hub: with --push_to, the repository is private.")
    budget_help = "AP that int8 may lose: layers stay in float until it loses no more."
    flags.DEFINE_float("int8_budget", None, budget_help)


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    if (FLAGS.workdir is None) == (FLAGS.weights is None):
        raise ValueError("export needs exactly one of --workdir and --weights")
    values = {field.name: getattr(FLAGS, field.name) for field in fields(ArtifactOptions)}
    values["picture_size"] = _size("--picture_size", FLAGS.picture_size)
    options = ArtifactOptions(**values)
    options.check(FLAGS.format)
    is_folder = FLAGS.format not in WEIGHTS
    check_written(FLAGS.output, "--output", is_folder=is_folder, in_store=True)
    hub_options = HubOptions(FLAGS.license, FLAGS.push_to, FLAGS.private)
    if FLAGS.format != "hub" and hub_options != HubOptions():
        raise ValueError("--license, --push_to and --private are for --format=hub")
    with written_at(FLAGS.output) as path:
        arguments = cli.given_recipe(), FLAGS.workdir or FLAGS.weights, FLAGS.format, str(path)
        if FLAGS.format in WEIGHTS:
            export_weights(*arguments, FLAGS.accept_mismatch, FLAGS.float16)
        elif FLAGS.format == "hub":
            recipe, source, _, output = arguments
            export_hub(recipe, source, output, hub_options, FLAGS.accept_mismatch)
        else:
            export_model(*arguments, options, FLAGS.accept_mismatch)


def _size(name: str, values: list[str]) -> tuple[int, int] | None:
    if not values:
        return None
    if len(values) != 2 or not all(value.strip().isdigit() and int(value) for value in values):
        raise ValueError(f"{name} is {','.join(values)}, expected HEIGHT,WIDTH in pixels")
    return int(values[0]), int(values[1])


if __name__ == "__main__":
    cli.run(main, _define_flags, store_output=True)

"""Write a trained model for use elsewhere.

    python -m mask_rcnn_jax.export --workdir runs/mine --format stablehlo --output out
    python -m mask_rcnn_jax.export --workdir runs/mine --format onnx --output out
    python -m mask_rcnn_jax.export --workdir runs/mine --format onnx --output out \\
        --picture_size 1080,1920 --deepstream
    python -m mask_rcnn_jax.export --workdir runs/mine --format onnx --output out \\
        --int8 --calibration data/photos
    python -m mask_rcnn_jax.export --workdir runs/mine --format torchvision \\
        --output mine.safetensors

`stablehlo` and `onnx` are whole models, a picture in and detections out, that run without this
package: a folder with the model and its manifest.json. docs/deployment.md shows how to use them.
With `--int8` it also holds the float model, and reports the AP of both on config.data.val_json.

`safetensors` and `torchvision` are weights alone. The first keeps our names and is read by
`--weights` and `model.init_from`. The second is the state dict of torchvision's MaskRCNN
(`load_state_dict(safetensors.torch.load_file(FILE))`), with classes 1, 2, ... in the order of the
categories; a recipe that differs from configs/coco_torchvision.py needs the same changes there, and
what differs is listed.

Everything is compared with the live model before it is written.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags, logging
from ml_collections import ConfigDict
from safetensors.numpy import save

from mask_rcnn_jax import cli
from mask_rcnn_jax.data.coco import CocoDataset, check_classes
from mask_rcnn_jax.data.loader import EvalLoader
from mask_rcnn_jax.data.options import example_options, has_inclusive_boxes
from mask_rcnn_jax.data.source import annotation_file, load_split
from mask_rcnn_jax.deploy.artifact import Artifact, ArtifactOptions, build_artifact
from mask_rcnn_jax.deploy.manifest import Program, make_manifest
from mask_rcnn_jax.deploy.quantize import CALIBRATORS
from mask_rcnn_jax.evaluation import coco as coco_evaluation
from mask_rcnn_jax.training import evaluator
from mask_rcnn_jax.weights.convert import to_flax, to_ours_flat, to_torchvision
from mask_rcnn_jax.weights.expected_model import mismatches
from mask_rcnn_jax.weights.restore import restore, restore_config

WEIGHTS = ("safetensors", "torchvision")
MODELS = ("stablehlo", "onnx")
FORMATS = MODELS + WEIGHTS
AP_NAMES = ("AP", "AP50", "mask_AP", "mask_AP50")


def export_weights(config: ConfigDict | None, weights: str, form: str, output: str) -> Path:
    """Write the weights of a run, of one of its checkpoints or of a file; returns what it wrote.

    config: needed for a file of weights; without one that of the run is taken. form: of `WEIGHTS`.
    """
    target = Path(output)
    if target.suffix != ".safetensors":
        raise ValueError(f"--output is {output}, expected a name that ends in .safetensors")
    if form == "torchvision":
        check_torchvision(restore_config(config, weights)[0].model)
    config, variables, categories, _ = restore(config, weights)
    eps = config.model.backbone.norm_eps
    if form == "torchvision":
        arrays = to_torchvision(variables, norm_eps=eps)
        eps = 1e-5  # what it has been converted to
    else:
        arrays = to_ours_flat(variables)
    content = save(arrays)
    again, _ = to_flax(arrays, norm=config.model.backbone.norm, eps=eps)
    difference = _largest_difference(again, variables)
    manifest = make_manifest(
        config,
        categories,
        form=form,
        files=[target.name],
        program=None,
        details={"self_check": {"largest_difference": difference}, "config": _json(config)},
    )
    write(target.parent, {
        target.name: content, f"{target.stem}.manifest.json": _dump(manifest),
    })  # fmt: skip
    print(f"{target}: {len(arrays)} arrays in the names of --format={form}")
    print(f"self-check: read back, the largest difference is {difference:.2g}")
    return target


def export_model(
    config: ConfigDict | None, weights: str, form: str, output: str, options: ArtifactOptions
) -> dict:
    """Write a model of `MODELS`, checked against the live one; returns its manifest."""
    config, variables, categories, _ = restore(config, weights)
    dataset = None
    if options.int8:
        annotations = annotation_file(config.data, "val")
        if not os.path.isfile(annotations):
            raise ValueError(
                f"--int8 reports AP on config.data.val_json, which is {annotations!r}: no such file"
            )
        dataset = load_split(config.data, "val")
        check_classes(dataset, categories, weights)
    artifact = build_artifact(config, variables, categories, form, options, Path(output))
    details = {"self_check": artifact.self_check, "config": _json(config)}
    if options.int8:
        aps = {}
        for name, predict in artifact.predictors.items():
            aps[name] = score(config, dataset, predict, artifact)
        details["ap"] = aps
        for name in AP_NAMES:
            pair = "  ".join(f"{kind} {values[name]:.4f}" for kind, values in aps.items())
            print(f"{name:10}{pair}")
    files = {**artifact.files, "manifest.json": b""}
    program = Program(
        artifact.inputs,
        artifact.canvas,
        artifact.precision,
        options.picture_size,
        artifact.resized,
        "int32" if options.deepstream else "bool",
    )
    manifest = make_manifest(
        config,
        categories,
        form=form,
        files=sorted(files),
        program=program,
        details={**artifact.details, **details},
    )
    files["manifest.json"] = _dump(manifest)
    write(Path(output), files)
    print(f"{output}: {', '.join(sorted(files))}")
    for kind, check in artifact.self_check.items():
        print(f"self-check, {kind}: {check['text']}")
    return manifest


def score(
    config: ConfigDict, dataset: CocoDataset, predict: Callable, artifact: Artifact
) -> dict[str, float]:
    """AP of an exported model on the images of `config.data.val_json` that fit its input."""
    loader = EvalLoader(
        dataset, example_options(config), batch_size=1, num_workers=config.data.num_workers,
        max_images=config.eval.max_images,
    )  # fmt: skip
    kept = []

    def fitting():
        for batch in loader:
            if artifact.takes(batch.images, batch.image_sizes):
                kept.append(dataset.images[int(batch.image_index[0])].id)
                yield batch

    results = evaluator.detect(
        lambda _, batch: predict(np.asarray(batch.images), np.asarray(batch.image_sizes)),
        {}, fitting(), dataset, jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1]),
        loader.num_images, paste=config.eval.paste, inclusive_boxes=has_inclusive_boxes(config),
    )  # fmt: skip
    if not kept:
        raise ValueError(f"no image of {dataset.json_path} has the size that the model is for")
    if len(kept) < loader.num_images:
        logging.info("AP of the %d of %d images that fit", len(kept), loader.num_images)
    metrics = coco_evaluation.score(dataset.json_path, *results, image_ids=kept, skip_bad=True)
    return {name: metrics[name] for name in AP_NAMES}


def check_torchvision(model: ConfigDict) -> None:
    """Raise ValueError for a model whose layers torchvision does not have; list what else differs.

    Its ResNet has batch normalisation and strides in its 3x3 convolutions. Everything beyond the
    layers (anchors, RoIAlign, the input's colours and padding) is given to its classes by the
    user, or missing there, and costs accuracy where it differs.
    """
    backbone = model.backbone
    if backbone.name != "resnet":
        raise ValueError(f"model.backbone.name is {backbone.name!r}, torchvision has 'resnet' only")
    if backbone.norm == "group":
        raise ValueError(
            "model.backbone.norm is 'group', torchvision's ResNet has batch normalization only"
        )
    if backbone.depth >= 50 and backbone.stride_in != "3x3":
        raise ValueError(
            f"model.backbone.stride_in is {backbone.stride_in!r}, torchvision's ResNet strides in "
            "'3x3' only"
        )
    for line in mismatches("torchvision", model, without=["backbone.norm_eps"]):  # is converted
        logging.warning("%s", line)


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write files, each in one step: it is there as a whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        draft = folder / (name + ".tmp")
        draft.write_bytes(content)
        os.replace(draft, folder / name)


def _largest_difference(a: dict, b: dict) -> float:
    gaps = jax.tree.map(lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max()), a, b)
    return max(jax.tree.leaves(gaps))


def _json(config: ConfigDict) -> dict:
    return json.loads(json.dumps(config.to_dict()))


def _dump(content: dict) -> bytes:
    return json.dumps(content, indent=1).encode()


def _define_flags() -> None:
    cli.define_config(required=False)
    flags.DEFINE_string("workdir", None, "Folder of a run; its latest checkpoint is taken.")
    flags.DEFINE_string("weights", None, "A workdir, one of its checkpoints/<step>, or a file.")
    flags.DEFINE_enum("format", None, FORMATS, "What to write.", required=True)
    flags.DEFINE_string(
        "output", None, "A folder; for weights the .safetensors file.", required=True
    )
    flags.DEFINE_integer(
        "batch", None, "Pictures of one run. stablehlo takes any unless it is set, onnx has 1.", 1
    )
    flags.DEFINE_enum(
        "orientation", "landscape", ["landscape", "portrait"],
        "Whose canvas, for recipes that have two; square pictures are landscape.",
    )  # fmt: skip
    flags.DEFINE_list(
        "picture_size", [], "HEIGHT,WIDTH of all pictures; onnx then has no input image_sizes."
    )
    flags.DEFINE_bool(
        "deepstream", False, "onnx for nvinfer: planar float32 input and nvinfer.txt."
    )
    flags.DEFINE_integer("opset", None, "Of onnx; 17 unless it is set.")
    flags.DEFINE_bool("int8", False, "Also quantise to int8, by the pictures of --calibration.")
    flags.DEFINE_string("calibration", None, "Folder of pictures like those to come.")
    flags.DEFINE_enum("calibrator", "minmax", CALIBRATORS, "How onnx ranges are found.")


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    if (FLAGS.workdir is None) == (FLAGS.weights is None):
        raise ValueError("export needs exactly one of --workdir and --weights")
    options = ArtifactOptions(
        batch=FLAGS.batch, orientation=FLAGS.orientation,
        picture_size=_size("--picture_size", FLAGS.picture_size), deepstream=FLAGS.deepstream,
        opset=FLAGS.opset, int8=FLAGS.int8, calibration=FLAGS.calibration,
        calibrator=FLAGS.calibrator,
    )  # fmt: skip
    options.check(FLAGS.format)
    weights = FLAGS.workdir or FLAGS.weights
    if FLAGS.format in WEIGHTS:
        export_weights(FLAGS.config, weights, FLAGS.format, FLAGS.output)
    else:
        export_model(FLAGS.config, weights, FLAGS.format, FLAGS.output, options)


def _size(name: str, values: list[str]) -> tuple[int, int] | None:
    if not values:
        return None
    if len(values) != 2 or not all(value.strip().isdigit() and int(value) for value in values):
        raise ValueError(f"{name} is {','.join(values)}, expected HEIGHT,WIDTH in pixels")
    return int(values[0]), int(values[1])


if __name__ == "__main__":
    cli.run(main, _define_flags)

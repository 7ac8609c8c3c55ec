"""From a trained model to the files of an exported one, checked against it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from mask_rcnn_jax.data.coco import decode_image
from mask_rcnn_jax.data.options import example_options
from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.deploy import manifest, onnx, pictures, quantize, quantize_jax, stablehlo
from mask_rcnn_jax.deploy.compare import BOX_BAR, SCORE_BAR, compare
from mask_rcnn_jax.deploy.inputs import IMAGE_SUFFIXES
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.models.detect import detect_options
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.structures import Detections

DEFAULT_OPSET = 17
CHECKED_PICTURES = 4


@dataclass(frozen=True)
class ArtifactOptions:
    """What `export` was asked for, by the names of its flags."""

    batch: int | None = None
    orientation: str = "landscape"
    picture_size: tuple[int, int] | None = None
    deepstream: bool = False
    opset: int | None = None
    int8: bool = False
    calibration: str | None = None
    calibrator: str = "minmax"

    def check(self, form: str) -> None:
        """Raise ValueError for a flag that the format, or another flag, has no use for."""
        is_model, is_onnx = form in ("stablehlo", "onnx"), form == "onnx"
        conditions = {
            "--batch": (self.batch is not None, is_model),
            "--int8": (self.int8, is_model),
            "--opset": (self.opset is not None, is_onnx),
            "--picture_size": (self.picture_size is not None, is_onnx),
            "--deepstream": (self.deepstream, is_onnx),
            "--calibrator=entropy": (self.calibrator == "entropy", is_onnx),
        }
        for flag, (given, useful) in conditions.items():
            if given and not useful:
                raise ValueError(f"{flag} has no meaning with --format={form}")
        if self.calibration is not None and not self.int8:
            raise ValueError("--calibration is for --int8, which is not given")
        if self.int8 and self.calibration is None:
            raise ValueError("--int8 needs --calibration, a folder of pictures like those to come")
        if self.deepstream and self.picture_size is None:
            raise ValueError(
                "--deepstream needs --picture_size, the HEIGHT,WIDTH of the frames: nvinfer fills "
                "a single input"
            )


@dataclass
class Artifact:
    """Files of an exported model by name, and what is known of it."""

    canvas: tuple[int, int]  # (H, W) of the input
    full_canvas: tuple[int, int]  # of the recipe
    resized: tuple[int, int] | None  # of pictures that are all of one size
    inputs: dict[str, dict]
    precision: str
    files: dict[str, bytes] = field(default_factory=dict)
    # "float" and "int8": (images, image_sizes) on the recipe's canvas to `Detections`
    predictors: dict[str, Callable] = field(default_factory=dict)
    self_check: dict[str, dict] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def takes(self, images: np.ndarray, sizes: np.ndarray) -> bool:
        """Whether a batch of pictures is what the model is for."""
        fits = tuple(images.shape[1:3]) == self.full_canvas
        return fits and (self.resized is None or bool(np.all(np.asarray(sizes) == self.resized)))


@dataclass(frozen=True)
class Source:
    """The model that is exported."""

    config: ConfigDict
    model: MaskRCNN
    predict: Callable  # (variables, images, image_sizes) to `Detections`
    variables: dict
    categories: list[dict]
    canvas: tuple[int, int]  # of the recipe, as `Artifact.full_canvas`
    resized: tuple[int, int] | None


def build_artifact(
    config: ConfigDict,
    variables: dict,
    categories: list[dict],
    form: str,
    options: ArtifactOptions,
    folder: Path,
) -> Artifact:
    """The model as `form`, "onnx" or "stablehlo", compared with the live one.

    folder: where the cache of the calibration is kept.
    Raises ValueError for what cannot be exported, and RuntimeError if the float model's detections
    are not the live ones.
    """
    check_ready(form)
    precision = "float32" if form == "onnx" else config.train.precision
    if precision != config.train.precision:
        logging.info("computes in float32, train.precision is %s", config.train.precision)
    model = build_model(config.model, precision=precision, implementation="xla")
    predict = partial(model.apply, method="predict", detect=detect_options(config))
    example = example_options(config)
    plan = resize_plan(*_typical_size(example, options), example)
    resized = plan.size if options.picture_size else None
    source = Source(config, model, predict, variables, categories, plan.canvas, resized)

    def laid_out(found):
        return list(pictures.on_canvas(found, example, plan.canvas, options.picture_size))

    paths = pictures.picture_paths(options.calibration) if options.int8 else []
    to_check = pictures.check_pictures(_val_pictures(config), plan.canvas, CHECKED_PICTURES)
    live = jax.jit(partial(predict, variables))
    checked = partial(_check, live, laid_out(to_check), config.eval.score_threshold)
    artifact = {"onnx": _make_onnx, "stablehlo": _make_stablehlo}[form](source, options)
    checked(artifact, "float")
    if options.int8:
        calibration = laid_out(decode_image(path) for path in paths)
        if form == "onnx":
            _add_int8_onnx(artifact, calibration, options, folder / "calibration.json")
        else:
            _add_int8_stablehlo(artifact, source, calibration, options)
        artifact.details["calibration"] = {
            "pictures": len(calibration),
            "calibrator": options.calibrator,
        }
        checked(artifact, "int8")
    return artifact


def check_ready(form: str) -> None:
    """Raise ValueError, naming what to install, if a package for the format is missing."""
    if form == "onnx":
        onnx.check_packages("onnx", "onnxruntime")
    else:
        stablehlo.check_serialiser()


def _typical_size(example, options: ArtifactOptions) -> tuple[int, int]:
    """(height, width) of a picture that lies on the canvas to export."""
    if options.picture_size:
        return options.picture_size
    if example.resize == "fit":
        return example.image_size
    short, long = sorted(example.image_size)
    return (short, long) if options.orientation == "landscape" else (long, short)


def _val_pictures(config: ConfigDict) -> list[Path]:
    """Some pictures of the validation set, if it is there."""
    folder = Path(config.data.val_images)
    if not folder.is_dir():
        return []
    found = (path for path in sorted(folder.iterdir()) if path.suffix.lower() in IMAGE_SUFFIXES)
    return list(islice(found, CHECKED_PICTURES))


def _make_onnx(source: Source, options: ArtifactOptions) -> Artifact:
    batch, planar = options.batch or 1, options.deepstream
    opset = options.opset or DEFAULT_OPSET
    canvas = onnx.export_canvas(source.model, source.canvas, source.resized)
    dtype = "float32" if planar else source.config.data.image_dtype
    given = onnx.OnnxInput(canvas, source.resized, batch, dtype, planar)
    detect = detect_options(source.config)
    built = onnx.build_onnx(source.model, source.variables, given, opset=opset, detect=detect)
    content = built.SerializeToString()
    shape = [batch, 3, *canvas] if planar else [batch, *canvas, 3]
    artifact = Artifact(
        canvas,
        source.canvas,
        source.resized,
        inputs=_inputs(dtype, shape, None if source.resized else [batch, 2]),
        precision="float32",
    )
    artifact.files["model.onnx"] = content
    artifact.files["labels.txt"] = manifest.labels(source.categories).encode()
    if options.deepstream:
        name = "model_int8.onnx" if options.int8 else "model.onnx"
        artifact.files["nvinfer.txt"] = manifest.nvinfer_config(
            canvas,
            model_file=name,
            batch=batch,
            num_classes=len(source.categories),
            int8=options.int8,
        ).encode()
    artifact.predictors["float"] = onnx.load_onnx(content)
    artifact.details["opset"] = opset
    return artifact


def _add_int8_onnx(
    artifact: Artifact, calibration: list, options: ArtifactOptions, cache: Path
) -> None:
    images = artifact.inputs["images"]
    feeds = [onnx.as_feeds(*pair, images["shape"], images["dtype"]) for pair in calibration]
    feeds = [{name: feed[name] for name in artifact.inputs} for feed in feeds]
    content, cached = quantize.quantize_onnx(
        artifact.files["model.onnx"], feeds, calibrator=options.calibrator, cache=cache
    )
    logging.info("calibrated by %s", cache if cached else f"{len(feeds)} pictures")
    artifact.files["model_int8.onnx"] = content
    artifact.predictors["int8"] = onnx.load_onnx(content)


def _make_stablehlo(source: Source, options: ArtifactOptions) -> Artifact:
    batch = options.batch or "batch"
    dtype = source.config.data.image_dtype
    artifact = Artifact(
        source.canvas,
        source.canvas,
        None,
        inputs=_inputs(dtype, [batch, *source.canvas, 3], [batch, 2]),
        precision=source.config.train.precision,
    )
    artifact.details["platforms"] = list(stablehlo.PLATFORMS)
    _add_program(artifact, "float", "model.stablehlo", source.predict, source.variables, options)
    return artifact


def _add_int8_stablehlo(
    artifact: Artifact, source: Source, calibration: list, options: ArtifactOptions
) -> None:
    ranges = quantize_jax.measure_ranges(source.predict, source.variables, calibration)
    quantised = quantize_jax.quantize_jax(source.predict, source.variables, ranges)
    _add_program(artifact, "int8", "model_int8.stablehlo", *quantised, options)


def _add_program(
    artifact: Artifact,
    kind: str,
    file: str,
    predict: Callable,
    variables: dict,
    options: ArtifactOptions,
) -> None:
    dtype = artifact.inputs["images"]["dtype"]
    program = stablehlo.export_stablehlo(
        predict, variables, canvas=artifact.canvas, batch=options.batch, dtype=dtype
    )
    artifact.files[file] = program
    artifact.predictors[kind] = partial(_run, stablehlo.load_stablehlo(program), options.batch)


def _run(program: Callable, batch: int | None, images, image_sizes) -> Detections:
    """A program on pictures, of which the last is repeated up to a fixed batch."""
    rows = np.minimum(np.arange(batch or len(images)), len(images) - 1)
    found = program(np.asarray(images)[rows], np.asarray(image_sizes, np.int32)[rows])
    return Detections(**{name: value[: len(images)] for name, value in found.items()})


def _inputs(dtype: str, shape: list, sizes_shape: list | None) -> dict[str, dict]:
    inputs = {"images": {"dtype": dtype, "shape": shape, "means": "pictures on the canvas"}}
    if sizes_shape is not None:
        inputs["image_sizes"] = {
            "dtype": "int32",
            "shape": sizes_shape,
            "means": "height and width of the resized picture on the canvas",
        }
    return inputs


def _check(
    live: Callable, sources: list, score_threshold: float, artifact: Artifact, kind: str
) -> None:
    """Fill `self_check`. A float32 model must be within the bars; in bfloat16 the rounding depends
    on the order of sums, in int8 there is more of it."""
    found = compare(live, artifact.predictors[kind], sources, score_threshold)
    artifact.self_check[kind] = {**vars(found), "text": str(found)}
    exact = kind == "float" and artifact.precision == "float32"
    if exact and not found.within_bars:
        raise RuntimeError(
            f"self-check: the exported model is not the live one: {found}; expected boxes to "
            f"{BOX_BAR} px and scores to {SCORE_BAR}"
        )

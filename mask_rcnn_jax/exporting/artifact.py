"""Export a trained model to files and compare their detections with the original model's."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from mask_rcnn_jax import device
from mask_rcnn_jax.exporting import (
    deepstream,
    manifest,
    mixed,
    onnx,
    quantize,
    quantize_jax,
    stablehlo,
    tensorrt,
    triton,
)
from mask_rcnn_jax.exporting.compare import (
    BOX_TOLERANCE,
    KEYPOINT_TOLERANCE,
    MASK_TOLERANCE,
    SCORE_TOLERANCE,
    UNMATCHED_TOLERANCE,
    compare,
    in_two_batches,
)
from mask_rcnn_jax.exporting.images import (
    check_images,
    decoded,
    image_paths,
    on_canvas,
    placement,
)
from mask_rcnn_jax.exporting.manifest import ModelInterface
from mask_rcnn_jax.exporting.options import ArtifactOptions
from mask_rcnn_jax.jax_to_onnx.graph import BATCH
from mask_rcnn_jax.models.build import build_model, resolve_precision
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.quantization import Quantization, trained_ranges
from mask_rcnn_jax.predict.programs import load_onnx, load_stablehlo, make_feeds, run_program
from mask_rcnn_jax.recipe.recipe import Recipe

DEFAULT_OPSET = 17
CHECK_IMAGES = 4


@dataclass
class Artifact:
    """Files of an exported model by name, and its metadata."""

    interface: ModelInterface
    full_canvas: tuple[int, int]  # (H, W) of the recipe
    files: dict[str, bytes] = field(default_factory=dict)
    # "float" and "int8": functions (images, image_sizes) -> `Detections` on the recipe's canvas
    predictors: dict[str, Callable] = field(default_factory=dict)
    self_check: dict[str, dict] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)  # additional manifest entries

    def accepts(self, images: np.ndarray, sizes: np.ndarray) -> bool:
        """Whether a batch has the input size of the model."""
        fits, resized = tuple(images.shape[1:3]) == self.full_canvas, self.interface.resized
        return fits and (resized is None or bool(np.all(np.asarray(sizes) == resized)))


@dataclass(frozen=True)
class SourceModel:
    """Model to export."""

    options: ArtifactOptions
    recipe: Recipe
    model: MaskRCNN
    predict: Callable  # (variables, images, image_sizes) -> `Detections`
    variables: dict
    trained: dict[str, float]  # ranges that int8 training has measured
    categories: list[dict]
    canvas: tuple[int, int]  # as `Artifact.full_canvas`
    resized: tuple[int, int] | None  # as `ModelInterface.resized`


def build_artifact(
    recipe: Recipe,
    variables: dict,
    categories: list[dict],
    format: str,
    options: ArtifactOptions,
    folder: Path,
    score: Callable[["Artifact", str], dict[str, float]] | None = None,
) -> Artifact:
    """Export a model and compare it with the original.

    Args:
        recipe: the model's.
        variables: the model's weights.
        categories: `[{"id", "name"}, ...]`, class 1 first.
        format: "onnx" or "stablehlo".
        options: flags of `export`.
        folder: location of the calibration cache.
        score: function (artifact, name of a predictor) -> AP by name, for `options.int8_budget`.

    Raises:
        ValueError: if the model cannot be exported.
        RuntimeError: if a float32 export's detections differ from the original model's.
    """
    if format == "onnx":
        onnx.check_packages("onnx", "onnxruntime")
    source = _source_model(recipe, variables, categories, format, options)
    example = replace(recipe.data, canvases=())
    if options.deepstream:
        deepstream.check_bands(example.bands)
        if recipe.model.has_keypoints:
            raise ValueError("--deepstream: its parser reads boxes and masks, no keypoints")

    def model_inputs(decoded):
        return list(on_canvas(decoded, example, source.canvas, options.picture_size))

    paths = image_paths(options.calibration or "", example.bands) if options.int8 else []
    inputs = model_inputs(check_images(example, source.canvas, CHECK_IMAGES))
    reference = jax.jit(partial(source.predict, variables))
    check = partial(_check, reference, inputs, recipe.eval.score_threshold)
    artifact = {"onnx": _make_onnx, "stablehlo": _make_stablehlo}[format](source)
    check(artifact, "float")
    cache = folder / "calibration.json"
    if options.int8:
        calibration = model_inputs(decoded(path, example) for path in paths)
        _add_int8(artifact, source, format, calibration, cache, score)
        check(artifact, "int8")
    if options.deepstream:
        content = artifact.files["model_int8.onnx" if options.int8 else "model.onnx"]
        batch = options.batch or 1
        artifact.files |= deepstream.files(content, categories, artifact.interface, batch)
    if options.deepstream or options.int8_for == "tensorrt":
        _add_tensorrt(artifact, options, cache, source.trained)
    return artifact


def _source_model(
    recipe: Recipe, variables: dict, categories: list[dict], format: str, options: ArtifactOptions
) -> SourceModel:
    configured = resolve_precision(recipe.train.precision)
    precision = "float32" if format == "onnx" else configured
    if precision != configured and not options.float16:
        logging.info("exporting in float32; train.precision is %s", configured)
    elif format != "onnx":
        device.log_precision(recipe.train.precision)
    # The float model. What int8 training has measured is for the int8 model.
    section = replace(recipe.model, quantization=Quantization())
    model = build_model(section, precision=precision, implementation="xla")
    trained = trained_ranges(variables)
    predict = partial(model.apply, method="predict", detect=recipe.eval)
    plan = placement(replace(recipe.data, canvases=()), options)
    resized = plan.size if options.picture_size else None
    given = options, recipe, model, predict, variables, trained, categories
    return SourceModel(*given, plan.canvas, resized)


def _add_int8(
    artifact: Artifact,
    source: SourceModel,
    format: str,
    calibration: list,
    cache: Path,
    score: Callable[[Artifact, str], dict[str, float]] | None,
) -> None:
    """Add the int8 model, with the layers in float that `options.int8_budget` asks for."""
    options, trained = source.options, source.trained
    measured = partial(quantize_jax.measure_ranges, source.predict, source.variables)
    if format == "onnx":
        feeds = _feeds(artifact, calibration)
        add_int8 = partial(_add_int8_onnx, artifact, feeds, options, cache, trained)
    else:
        add_int8 = partial(_add_int8_program, artifact, source, trained or measured(calibration))
    if options.int8_budget is None:
        add_int8(())
    else:
        assert score is not None
        few = calibration[:CHECK_IMAGES]
        ranges = measured(few) | {name: limit for name, limit in trained.items() if limit > 0}
        given = source.model, source.predict, source.variables
        errors = mixed.layer_errors(*given, few, ranges)
        layers = dict.fromkeys(errors)
        if format == "onnx":  # has those of users' own parts, too
            layers |= dict.fromkeys(quantize.quantized_layers(artifact.files["model.onnx"]))
        limit, scored = options.int8_budget, partial(score, artifact)
        in_float = mixed.keep_budget(limit, list(layers), add_int8, scored)
        budget = {"limit": limit, "in_float": list(in_float), "errors": errors}
        artifact.details["int8_budget"] = budget
    calibrated = {"pictures": len(calibration), "calibrator": options.calibrator}
    if trained:
        calibrated["trained_ranges"] = sum(limit > 0 for limit in trained.values())
    if format == "onnx":
        calibrated["int8_for"] = options.int8_runtime
    artifact.details["calibration"] = calibrated


def _make_onnx(source: SourceModel) -> Artifact:
    options, planar = source.options, source.options.deepstream
    batch = options.batch
    if options.static:
        batch = batch or 1
    elif planar:  # nvinfer fills a batch as far as it has frames
        batch = None
    if batch is None and not onnx.takes_batches(source.model, source.resized):
        logging.info("exporting for one image at a time: maps end at each; see --picture_size")
        batch = 1
    opset = options.opset or DEFAULT_OPSET
    canvas = onnx.export_canvas(source.model, source.canvas, source.resized)
    dtype = "float32" if planar else source.recipe.data.image_dtype
    given = onnx.OnnxInput(canvas, source.resized, batch, dtype, planar)
    how: Any = dict(opset=opset, detect=source.recipe.eval)
    how |= dict(static=options.static, float16=options.float16)
    built = onnx.build_onnx(source.model, source.variables, given, **how)
    for key, value in manifest.metadata(source.recipe, source.categories, canvas).items():
        built.metadata_props.add(key=key, value=value)
    content = built.SerializeToString()
    rows = batch or BATCH
    channels = source.model.input.channels
    shape = [rows, channels, *canvas] if planar else [rows, *canvas, channels]
    inputs = _inputs(dtype, shape, None if source.resized else [rows, 2])
    valid_dtype = "int32" if planar else "bool"
    precision = "float16" if options.float16 else "float32"
    facts = inputs, canvas, precision, options.picture_size, source.resized, valid_dtype
    artifact = Artifact(ModelInterface(*facts), source.canvas)
    artifact.files["model.onnx"] = content
    artifact.files["labels.txt"] = manifest.labels(source.categories).encode()
    artifact.files["config.pbtxt"] = triton.model_config(built).encode()
    artifact.predictors["float"] = load_onnx(content)
    artifact.details |= {"opset": opset, "static": options.static}
    return artifact


def _feeds(artifact: Artifact, calibration: list) -> list[dict[str, np.ndarray]]:
    inputs = artifact.interface.inputs
    shape, dtype = inputs["images"]["shape"], inputs["images"]["dtype"]
    feeds = [make_feeds(images, sizes, shape, dtype) for images, sizes in calibration]
    return [{name: feed[name] for name in inputs} for feed in feeds]


def _add_int8_onnx(
    artifact: Artifact,
    feeds: list[dict[str, np.ndarray]],
    options: ArtifactOptions,
    cache: Path,
    trained: dict[str, float],
    in_float: Sequence[str],
) -> None:
    content, cached = quantize.quantize_onnx(
        artifact.files["model.onnx"],
        feeds,
        calibrator=options.calibrator,
        cache=cache,
        runtime=options.int8_runtime,
        trained=trained,
        in_float=in_float,
    )
    logging.info("calibrated with %s", cache if cached else f"{len(feeds)} images")
    artifact.files["model_int8.onnx"] = content
    artifact.predictors["int8"] = load_onnx(content)


def _add_tensorrt(
    artifact: Artifact, options: ArtifactOptions, cache: Path, trained: dict[str, float]
) -> None:
    """Add the calibration cache, and warn of all that TensorRT may not support."""
    # A cache can name tensors, not the layers that read them in float.
    if options.int8 and not artifact.details.get("int8_budget", {}).get("in_float"):
        measured = json.loads(cache.read_text())["ranges"]
        ranges = quantize.with_trained(artifact.files["model.onnx"], measured, trained)
        artifact.files["calibration.cache"] = tensorrt.calibration_cache(ranges).encode()
    batch = options.batch or (1 if options.deepstream else triton.MAX_BATCH)
    engines = {deepstream.MODEL: partial(deepstream.engine_file, batch)}
    entry = tensorrt.manifest_entry(artifact.files, batch, engines)
    artifact.details["tensorrt"] = entry
    for name, problems in entry["problems"].items():
        for problem in problems:
            logging.warning("%s for TensorRT %s: %s", name, tensorrt.VERSION, problem)


def _make_stablehlo(source: SourceModel) -> Artifact:
    batch = source.options.batch
    rows, canvas = batch or BATCH, source.canvas
    shape = [rows, *canvas, source.model.input.channels]
    inputs = _inputs(source.recipe.data.image_dtype, shape, [rows, 2])
    precision = resolve_precision(source.recipe.train.precision)
    artifact = Artifact(ModelInterface(inputs, canvas, precision), canvas)
    artifact.details["platforms"] = list(stablehlo.PLATFORMS)
    _add_program(artifact, "float", "model.stablehlo", source.predict, source.variables, batch)
    return artifact


def _add_program(
    artifact: Artifact, kind: str, file: str, predict: Callable, variables: dict, batch: int | None
) -> None:
    images = artifact.interface.inputs["images"]
    given: dict[str, Any] = {"canvas": artifact.full_canvas, "dtype": images["dtype"]}
    given |= {"batch": batch, "channels": images["shape"][-1]}
    program = stablehlo.export_stablehlo(predict, variables, **given)
    artifact.files[file] = program
    artifact.predictors[kind] = partial(run_program, load_stablehlo(program), batch)


def _add_int8_program(
    artifact: Artifact, source: SourceModel, ranges: dict[str, float], in_float: Sequence[str]
) -> None:
    ranges = {layer: limit for layer, limit in ranges.items() if layer not in in_float}
    given = artifact.interface.inputs["images"]
    shape = 1, *artifact.full_canvas, given["shape"][-1]
    images = jax.ShapeDtypeStruct(shape, given["dtype"])
    example = images, jax.ShapeDtypeStruct((1, 2), np.int32)
    quantized = quantize_jax.quantize_jax(source.predict, source.variables, ranges, example)
    _add_program(artifact, "int8", "model_int8.stablehlo", *quantized, source.options.batch)


def _inputs(dtype: str, shape: list, sizes_shape: list | None) -> dict[str, dict]:
    inputs = {"images": {"dtype": dtype, "shape": shape, "means": "images on the canvas"}}
    if sizes_shape is not None:
        means = "height and width of the resized image on the canvas"
        inputs["image_sizes"] = {"dtype": "int32", "shape": sizes_shape, "means": means}
    return inputs


def _check(
    reference: Callable, inputs: list, score_threshold: float, artifact: Artifact, kind: str
) -> None:
    """Fill `self_check`. Only float32 models must be within tolerance: bfloat16 rounding depends on
    the summation order, and int8 rounding is coarser. In float16 numbers may be too large. ONNX
    models for batches of any size detect in one image and in all others at once."""
    predict = artifact.predictors[kind]
    if "model.onnx" in artifact.files and artifact.interface.inputs["images"]["shape"][0] == BATCH:
        predict = in_two_batches(predict, inputs)
    found = compare(reference, predict, inputs, score_threshold)
    artifact.self_check[kind] = {**vars(found), "text": str(found)}
    if not found.detections:
        logging.warning("self-check: it compared no detection, so it says little about %s", kind)
    precision = artifact.interface.precision
    exact, half = kind == "float" and precision == "float32", precision == "float16"
    if exact and not found.within_tolerance:
        raise RuntimeError(
            f"self-check: the exported model differs from the original: {found}; expected at most "
            f"{BOX_TOLERANCE} px for boxes, {SCORE_TOLERANCE} for scores, {MASK_TOLERANCE} for "
            f"masks, {KEYPOINT_TOLERANCE} px for keypoints and a share of {UNMATCHED_TOLERANCE} on "
            "one side only"
        )
    if not found.is_finite or (half and 0 < found.detections <= 2 * found.unmatched):
        hint = "; numbers in its layers are probably too large for --float16" if half else ""
        raise RuntimeError(f"self-check: the exported model is not the original: {found}{hint}")

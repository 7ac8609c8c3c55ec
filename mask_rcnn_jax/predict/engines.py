"""Run models that `export` wrote: in JAX, onnxruntime or OpenVINO.

Each engine makes a function (images [B, H, W, C], image_sizes [B, 2]) -> `Detections` of NumPy
arrays from a file.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mask_rcnn_jax.config import exported_recipe
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.resize import ResizePlan, resize_plan
from mask_rcnn_jax.images.bands import MODEL_ENTRIES
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.optional_packages import import_package
from mask_rcnn_jax.predict.programs import load_onnx, load_openvino, load_stablehlo, run_program
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.recipe.manifest import Manifest, read_manifest
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.structures import Detections

PRECISIONS = ("bfloat16", "int8")
# Each engine's format of `export`, the package that it needs, and its extra.
ENGINES = {
    "jax": ("stablehlo", "jax", ""),
    "onnxruntime": ("onnx", "onnxruntime", "onnxruntime"),
    "openvino": ("onnx", "openvino", "openvino"),
}


class UnfitImage(ValueError):
    """Raised for an image whose size an exported model does not take."""


@dataclass(frozen=True)
class Exported:
    """One or several exported models of the same weights, for different sizes of images.

    Attributes:
        recipe: as exported.
        categories: {"id", "name"} for each class, class 1 first.
        batch: rows of a batch; None for any.
        models: one for each size.
        name: folder and engine.
        compiles: whether it compiles a program for each number of rows.
        engine: its name, and the precision if one was chosen.
    """

    recipe: Recipe
    categories: list[dict]
    batch: int | None
    models: tuple["ExportedModel", ...]
    name: str
    compiles: bool = False
    engine: str = ""

    @property
    def sample_sizes(self) -> list[tuple[int, int]]:
        """(height, width) of an image for each model."""
        return [model.original or model.canvas for model in self.models]

    def accepts(self, plan: ResizePlan) -> bool:
        """Whether a model takes images on this canvas and of this size there."""
        return self._model(plan.canvas, plan.size) is not None

    def check(self, plan: ResizePlan) -> None:
        """Raise UnfitImage if `accepts` is false."""
        if not self.accepts(plan):
            canvas, size = (f"{one[0]} x {one[1]}" for one in (plan.canvas, plan.size))
            taken = " or ".join(model.takes for model in self.models)
            raise UnfitImage(
                f"an image of {size} on a canvas of {canvas} does not fit the exported model, "
                f"which takes {taken} (see --orientation and --picture_size of export)"
            )

    def check_unchanged(self, recipe: Recipe, but: Sequence[str] = ()) -> None:
        """Raise ValueError for an entry of `recipe` that differs and is part of the model.

        but: entries that may differ.
        """
        given, kept = flatten(recipe.to_dict()), flatten(self.recipe.to_dict())
        in_model = {f"data.{name}" for name in ExampleOptions.__dataclass_fields__}
        in_model |= {f"data.bands.{name}" for name in MODEL_ENTRIES}
        in_model |= {f"eval.{name}" for name in Detect.__dataclass_fields__} | {"train.precision"}
        free = {"model.num_classes", "model.init_from", "model.adapt_input", *but}
        for name in sorted((given.keys() & kept.keys()) - free):
            if (name in in_model or name.startswith("model.")) and given[name] != kept[name]:
                raise ValueError(
                    f"{name} is {given[name]!r}, but the model was exported with {kept[name]!r}"
                )

    def __call__(self, images: np.ndarray, image_sizes: np.ndarray) -> Detections:
        """Detect in images [B, H, W, C] with sizes [B, 2], each in the model for its size.

        Rows beyond `batch` are an error. Images of one pixel are padding.
        """
        if self.batch is not None and len(images) > self.batch:
            raise ValueError(
                f"{len(images)} images at a time, but the model was exported for {self.batch}: "
                "see --batch of export"
            )
        images, image_sizes = np.asarray(images), np.asarray(image_sizes)
        canvas, rows = images.shape[1:3], {}
        for row, (height, width) in enumerate(image_sizes.tolist()):
            model = self._model(canvas, (height, width))
            if model is None:
                if not rows or height * width > 1:
                    self.check(ResizePlan(canvas, (height, width), (1.0, 1.0)))
                model = next(iter(rows))
            rows.setdefault(model, []).append(row)
        if len(rows) == 1:
            return next(iter(rows)).run(images, image_sizes)
        found = [
            model.run(images[of_model], image_sizes[of_model]) for model, of_model in rows.items()
        ]
        order = np.argsort(np.concatenate(list(rows.values())))
        return jax.tree.map(lambda *parts: np.concatenate(parts)[order], *found)

    def _model(self, canvas: Sequence[int], size: Sequence[int]) -> "ExportedModel | None":
        fits = (model for model in self.models if model.accepts(tuple(canvas), tuple(size)))
        return next(fits, None)


@dataclass(frozen=True)
class ExportedModel:
    """A loaded file.

    Attributes:
        canvas: (H, W) on which the recipe places its images.
        resized: (height, width) of every image there; None for any.
        run: function (images [B, H, W, C], image_sizes [B, 2]) -> `Detections`.
        original: (height, width) of an image before it is resized to `resized`, which may be
            rounded: it need not be resized to itself.
        path: the file.
    """

    canvas: tuple[int, int]
    resized: tuple[int, int] | None
    run: Callable[[np.ndarray, np.ndarray], Detections]
    original: tuple[int, int] | None = None
    path: Path | None = None

    def accepts(self, canvas: tuple, size: tuple) -> bool:
        return canvas == self.canvas and self.resized in (None, size)

    @property
    def takes(self) -> str:
        height, width = self.resized or self.canvas
        return f"images of {height} x {width}" if self.resized else f"{height} x {width}"


def load_exported(
    folders: str | os.PathLike | Sequence[str | os.PathLike],
    engine: str | None = None,
    precision: str | None = None,
) -> Exported:
    """Load the models in folders of `export`, such as one for each orientation.

    Args:
        folders: one, or several with the same weights and recipe.
        engine: a name of `ENGINES`; None takes "jax" for StableHLO and "onnxruntime" for ONNX.
        precision: "int8" takes the int8 model of each folder, "bfloat16" lets OpenVINO compute in
            bfloat16; None computes as exported.

    Raises:
        ValueError: a package or a file is missing, or engine, precision and folders do not fit.
    """
    if isinstance(folders, str | os.PathLike):
        folders = [folders]
    found = [(Path(folder), read_manifest(Path(folder))) for folder in folders]
    first, manifest = found[0]
    engine = engine or ("onnxruntime" if manifest.format == "onnx" else "jax")
    _check_engine(engine, precision)
    recipe, classes, batch = exported_recipe(manifest), manifest.categories, manifest.batch
    models = []
    for folder, other in found:
        if (exported_recipe(other), other.categories, other.batch) != (recipe, classes, batch):
            raise ValueError(f"{folder} and {first} were exported with other recipes or batches")
        models.append(_load_model(folder, other, engine, precision, recipe.data))
    compiles, engine = engine == "jax", f"{engine} ({precision})" if precision else engine
    name = f"{', '.join(map(str, folders))} in {engine}"
    return Exported(recipe, list(classes), batch, tuple(models), name, compiles, engine)


def _check_engine(engine: str, precision: str | None) -> None:
    if engine not in ENGINES:
        raise ValueError(f"--engine is {engine!r}, expected one of {', '.join(ENGINES)}")
    if precision not in (None, *PRECISIONS):
        expected = " or ".join(PRECISIONS)
        raise ValueError(f"--engine_precision is {precision!r}, expected {expected}")
    if precision == "bfloat16" and engine != "openvino":
        raise ValueError(f"--engine_precision=bfloat16 needs --engine=openvino, not {engine}")
    import_engine(engine)


def import_engine(engine: str) -> Any:
    """Import the package of an engine; ValueError names the extra that installs it."""
    _, package, extra = ENGINES[engine]
    try:
        return import_package(package)
    except ImportError as error:
        raise ValueError(
            f"--engine={engine} needs the package {package}: pip install 'mask-rcnn-jax[{extra}]'"
        ) from error


def _load_model(
    folder: Path, manifest: Manifest, engine: str, precision: str | None, options: ExampleOptions
) -> ExportedModel:
    format = ENGINES[engine][0]
    path = folder / f"model{'_int8' if precision == 'int8' else ''}.{format}"
    if not path.is_file():
        flags = f"--format {format}{' --int8' if precision == 'int8' else ''}"
        raise ValueError(f"{folder} has no {path.name}, which export writes with {flags}")
    canvas, resized, original = manifest.canvas, None, manifest.picture_size
    if original:
        canvas, resized, _ = resize_plan(*original, options)
    loaders: dict[str, Callable[[], Callable]] = {
        "jax": lambda: partial(run_program, load_stablehlo(path.read_bytes()), manifest.batch),
        "onnxruntime": lambda: load_onnx(path.read_bytes()),
        "openvino": lambda: load_openvino(path, "bf16" if precision == "bfloat16" else "f32"),
    }
    try:
        run = loaders[engine]()
    except Exception as error:  # each package has errors of its own
        raise ValueError(f"{engine} cannot load {path}: {error}") from error
    return ExportedModel(canvas, resized, run, original, path)

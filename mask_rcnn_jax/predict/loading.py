"""From a run, or a recipe and weights, to a predictor."""

import os
from pathlib import Path

import jax
from absl import flags, logging

from mask_rcnn_jax.config import as_recipe, check_path, load_config, recipe_names
from mask_rcnn_jax.predict.engines import Exported, load_exported
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.recipe.manifest import MANIFEST
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.weights import published
from mask_rcnn_jax.weights.restore import restore


def load(
    model: str | os.PathLike,
    weights: str | os.PathLike | None = None,
    *,
    score_threshold: float = 0.5,
    batch_size: int | None = None,
    tile: int = 0,
    overlap: float = 0.2,
    engine: str | None = None,
    precision: str | None = None,
) -> Predictor:
    """Load a trained model, ready to predict.

    Args:
        model: a run (its workdir or one of its checkpoints/<step>), a folder that `export` wrote
            with format "stablehlo", "onnx" or "hub", a model on a hub ("hf://owner/name", or with
            "@" and a revision), or the name of public weights, such as
            "maskrcnn_resnet50_fpn_v2_coco" (`weights.published`), which are downloaded once; or,
            with `weights`, a recipe as for `load_config`.
        weights: a weights file, a run, a model on a hub, or the name of public weights.
        score_threshold: lowest score of what is found.
        batch_size: images at a time on each device; None is 1, or that of the export.
        tile: side of the tiles of large images, see `Predictor`; 0 cuts none.
        overlap: smallest overlap of neighboring tiles, as a fraction of their side.
        engine: runs an exported model: "jax", "onnxruntime" or "openvino"; None takes "jax"
            for StableHLO and "onnxruntime" for ONNX.
        precision: "int8" takes the int8 model of the folder, "bfloat16" is for OpenVINO; None
            computes as exported.

    Raises:
        ValueError: the weights do not fit, or are unknown, or the run names other code.
        OSError: a file cannot be read or downloaded.
    """
    check_path(model, "model", "a run, a folder of `export`, a name of weights or a recipe's path")
    if weights is None and (Path(model) / MANIFEST).is_file():
        exported = load_exported(model, engine, precision)
        return load_predictor(exported, score_threshold, batch_size, tile, overlap)
    if engine is not None or precision is not None:
        raise ValueError(f"engine and precision are for a folder of `export`, {model} is none")
    if weights is None:
        if str(model).partition(":")[0] in recipe_names():
            raise ValueError(f"{model} is a recipe, expected weights as well, or a run")
        if os.path.isfile(model):
            text = "is a file of weights, which needs its recipe as well: load(recipe, weights)"
            raise ValueError(f"{model} {text}")
        restored = restore(None, model)
    else:
        restored = restore(load_config(str(model)), weights)
    recipe = restored.recipe.with_score_threshold(score_threshold)
    given = recipe, restored.variables, batch_size, restored.categories
    return Predictor(*given, tile, overlap)


def load_predictor(
    exported: Exported,
    score_threshold: float,
    batch_size: int | None,
    tile: int = 0,
    overlap: float = 0.2,
    recipe: Recipe | None = None,
) -> Predictor:
    """Make a predictor of an exported model. recipe: None takes that of the export."""
    lowest = exported.recipe.eval.score_threshold
    if score_threshold < lowest:
        text = "the model was exported with eval.score_threshold=%g and finds nothing below"
        logging.warning(text, lowest)
    recipe = (recipe or exported.recipe).with_score_threshold(score_threshold)
    return Predictor(recipe, None, batch_size, None, tile, overlap, engine=exported)


def given_model(command: str, *others: str) -> str | Exported:
    """Return the run or weights file, or load the exported model, that the flags name.

    Raises ValueError unless it is exactly one. others: flags that may be given in their place; the
    value is returned.
    """
    FLAGS, names = flags.FLAGS, ("workdir", "weights", "artifact", *others)
    given = [name for name in names if getattr(FLAGS, name)]
    if len(given) != 1:
        *more, last = (f"--{name}" for name in names)
        raise ValueError(f"{command} needs exactly one of {', '.join(more)} and {last}")
    if given != ["artifact"]:
        for name in ("engine", "engine_precision"):
            if getattr(FLAGS, name):
                raise ValueError(f"--{name} is for exported models: it needs --artifact")
        return str(published.local(getattr(FLAGS, given[0])))
    exported = load_exported(FLAGS.artifact, FLAGS.engine, FLAGS.engine_precision)
    if FLAGS.config is not None:
        exported.check_unchanged(as_recipe(FLAGS.config, imports=False))
    return exported


def default_batch_size() -> int:
    """Return how many images to predict at a time on each device.

    One image keeps a CPU busy; a batch would only use more memory.
    """
    return 1 if jax.default_backend() == "cpu" else 8

"""Restore a model, its variables and its class names from a run or a weights file."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import logging
from ml_collections import ConfigDict

from mask_rcnn_jax import consent, parts
from mask_rcnn_jax.config import as_recipe, check_path, load_own, named_code, read_workdir
from mask_rcnn_jax.images.bands import MODEL_ENTRIES
from mask_rcnn_jax.models.build import BUILDERS, PARTS, abstract_variables, build_model
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.protocols import PartLike, ability
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.stores import is_address
from mask_rcnn_jax.weights import model_folder, pretrained, published
from mask_rcnn_jax.weights.categories import guess_categories
from mask_rcnn_jax.weights.convert import num_classes_in
from mask_rcnn_jax.weights.expected_model import SAVED
from mask_rcnn_jax.weights.run_checkpoint import CheckpointPath, find_checkpoint
from mask_rcnn_jax.weights.saved_model import saved_categories

# Entries outside the model section that define the model's input and the meaning of its classes.
_INPUT_DATA = "image_size resize resize_rounding antialias image_dtype class_ids"
MODEL_INPUT = [f"data.{name}" for name in _INPUT_DATA.split()]
MODEL_INPUT += [f"data.bands.{name}" for name in MODEL_ENTRIES]


class Restored(NamedTuple):
    """A model with its weights."""

    recipe: Recipe  # with the number of classes in `model.num_classes`
    variables: dict  # {"params", "batch_stats"}
    categories: list[dict]  # [{"id", "name"}, ...], class 1 first
    checkpoint: CheckpointPath | None  # None for a weights file


def restore(
    recipe: Recipe | None, weights: str | os.PathLike, *, accept_mismatch: bool = False
) -> Restored:
    """Restore a model from a run's workdir, one of its checkpoints or a weights file.

    Args:
        recipe: None uses the run's; a weights file needs one.
        weights: the run, the checkpoint, the file, or a name that `published.find` knows or a model
            on a hub, hf://owner/name, which bring their recipe.
        accept_mismatch: only warn if the recipe describes another model than the run or the file.

    Raises ValueError if the recipe describes another model than the run's, the weights do not fit
    it, or the run names code that `consent` does not let run.
    """
    check_path(weights, "weights")
    given, weights = weights, published.local(weights)
    recipe, categories, checkpoint = restore_recipe(recipe, weights, accept_mismatch)
    if categories is None and is_address(given):
        weights = given  # where a manifest may lie beside it
    path = checkpoint.folder if checkpoint else weights
    variables = load_variables(path, recipe, accept_mismatch=accept_mismatch)
    if categories is None:
        stated = saved_categories(published.shipped(weights))
        categories = guess_categories(recipe.data, variables, stated)
        recipe = recipe.with_classes(len(categories))
    return Restored(recipe, variables, categories, checkpoint)


def restore_recipe(
    recipe: Recipe | None, weights: str | os.PathLike, accept_mismatch: bool = False
) -> tuple[Recipe, list[dict] | None, CheckpointPath | None]:
    """Restore recipe, categories (None for a weights file) and checkpoint, but no variables."""
    weights = published.local(weights)
    if published.is_nearly_name(weights):
        raise published.absent(weights)
    checkpoint = find_checkpoint(weights) if pretrained.is_run(weights) else None
    folder = checkpoint.workdir if checkpoint else model_folder.folder_of(weights)
    if folder is None:
        return recipe or _recipe_for(weights), None, None
    with consent.allow_code(named_code(recipe.to_dict()).values() if recipe else ()):
        of_run, categories = (read_workdir if checkpoint else model_folder.read)(folder)
    recipe = of_run if recipe is None else recipe
    _check_model(recipe, of_run, folder, accept_mismatch)
    if recipe.model.num_classes not in (0, len(categories)):
        raise ValueError(
            f"model.num_classes is {recipe.model.num_classes}, but {weights} was trained on "
            f"{len(categories)} categories; 0 takes the run's number"
        )
    return recipe.with_classes(len(categories)), categories, checkpoint


def _recipe_for(weights: str | os.PathLike) -> Recipe:
    """Return the recipe of published weights; ValueError for a file, which brings none."""
    if recipe := published.brought_recipe(weights):
        return load_own(recipe)
    if published.is_name(weights):
        raise ValueError(f"{weights} is a backbone, expected a detector; use model.init_from")
    if not os.path.exists(weights) and not os.path.exists(f"{weights}.index"):
        raise published.absent(weights)
    raise ValueError(f"{weights} is not a run: it needs a recipe (--config)")


def load_variables(
    path: str | os.PathLike, config: Recipe | ConfigDict, *, accept_mismatch: bool = False
) -> dict:
    """Load {"params": ..., "batch_stats": ...} of a whole detector.

    Args:
        path: a workdir (its latest checkpoint), `checkpoints/<step>`, a weights file, a name that
            `published.find` knows, or a model on a hub, hf://owner/name.
        config: the model's recipe; a `num_classes` of 0 takes the number of the weights. Of a run
            that keeps an average of its weights, `eval.weights` says which to take.
        accept_mismatch: only warn if the file or the run states that its weights belong to another
            model, such as one of other colors, whose entries an error lists.

    Raises ValueError listing missing, unexpected and misshapen arrays if the weights do not fit.
    """
    check_path(path, "path")
    recipe = as_recipe(config)
    loaded = pretrained.load(
        path,
        recipe.model,
        raw=recipe.eval.weights == "raw",
        antialias=recipe.data.antialias,
        accept_mismatch=accept_mismatch,
    )
    num_classes = num_classes_in(loaded)
    if num_classes is None:
        raise ValueError(f"{path} holds a backbone, expected a detector; use model.init_from")
    if recipe.model.num_classes not in (0, num_classes):
        raise ValueError(
            f"{path} has {num_classes} classes, expected {recipe.model.num_classes} as in "
            "model.num_classes or data.val_json (data.class_ids says how ids become classes)"
        )
    expected = abstract_variables(make_model(recipe, num_classes))
    strict: dict[str, tuple] = dict.fromkeys(("reinit", "optional", "unused"), ())
    variables, _ = pretrained.merge_into(expected, loaded, **strict, source=str(path))
    absent = sorted(expected["params"].keys() - loaded["params"].keys())
    if absent:
        advice = "use model.init_from for such a file"
        if absent in (["mask_head"], ["keypoint_head"]):
            alone = "of boxes alone" if absent == ["mask_head"] else "without keypoints"
            advice = f"model.{absent[0]}.name=none is the model {alone}"
        raise ValueError(f"{path} has no {', '.join(absent)}; {advice}")
    return variables


def make_model(
    recipe: Recipe,
    num_classes: int,
    remat: str = "none",
    image_counts: tuple[int, ...] = (),
) -> MaskRCNN:
    """Build the model for `num_classes` foreground classes.

    remat, image_counts: see `build_model`; they matter in training only. Raises ValueError if the
    recipe has another number of classes, widths above those of the whole model, or kernels this
    machine cannot run.
    """
    if recipe.model.num_classes not in (0, num_classes):
        raise ValueError(
            f"model.num_classes is {recipe.model.num_classes}, but the annotations have "
            f"{num_classes} categories; 0 takes their number"
        )
    train = recipe.train
    if train.implementation == "pallas" and jax.default_backend() != "gpu":
        raise ValueError("train.implementation is pallas, which needs an NVIDIA GPU; use auto")
    model = build_model(
        replace(recipe.model, num_classes=num_classes),
        precision=train.precision,
        implementation=train.implementation,
        remat=remat,
        image_counts=image_counts,
    )
    for section in PARTS:
        part: Any = getattr(model, section, None)
        # Without it, `widths` is something of the part's.
        prunable = ability(part, PartLike, "prunable")
        for name, width in part.widths if prunable else ():
            if width > (most := prunable[name].full):
                entry = f"model.{section}.widths"
                raise ValueError(f"{entry} has {width} for {name!r}, expected at most {most}")
    return model


def entries_in_json(recipe: Recipe) -> dict[str, Any]:
    """Return all entries of a recipe by their dotted names, as json has them.

    Those that a user's own part was not given have its defaults.
    """
    tree = recipe.to_dict()
    for name in BUILDERS:
        part = getattr(recipe.model, name)
        tree["model"][name] = parts.defaults(part) | tree["model"][name]
    return json.loads(json.dumps(flatten(tree), default=repr))


def _check_model(
    recipe: Recipe, of_run: Recipe, workdir: Path, accept_mismatch: bool = False
) -> None:
    """Raise ValueError if a recipe's model or input differs from the run's, or only warn."""
    before, now = map(entries_in_json, (of_run, recipe))
    free = ["model.init_from", "model.adapt_input", "model.num_classes"]
    # Limits of prediction, as those of `eval`: weights belong to any.
    free += ["model.rpn.pre_nms_topk_test", "model.rpn.post_nms_topk_test"]
    names = sorted(before.keys() | now.keys())
    described = [n for n in names if n in MODEL_INPUT or n.startswith("model.") and n not in free]
    for name in described:
        if before.get(name) == now.get(name):
            continue
        says = f"{name}={before.get(name)!r}, the config says {now.get(name)!r}"
        if not accept_mismatch:
            raise ValueError(
                f"{workdir} was trained with {says}; leave out --config.{name}, or --config, to "
                "use the run's, or go on with --accept_mismatch"
            )
        if name not in SAVED:  # what is read next warns of those
            logging.warning("%s was trained with %s", workdir, says)

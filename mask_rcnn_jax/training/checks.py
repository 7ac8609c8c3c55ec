"""Checks on a run's recipe, before any work."""

import math

import jax.numpy as jnp
import optax

from mask_rcnn_jax.data.dataset import Dataset, dataset_name, is_boxes_only, keypoints
from mask_rcnn_jax.data.options import DataOptions, canvas_size
from mask_rcnn_jax.models.protocols import BackboneLike, ability
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.recipe.stopping import StopRule
from mask_rcnn_jax.training.batches import view_sizes
from mask_rcnn_jax.training.optim import count_microbatches


def check_recipe(recipe: Recipe, devices: int, optimizer: object) -> int:
    """The number of microbatches of a device; ValueError for what cannot be done.

    optimizer: a user's own, or None.
    """
    view_sizes(recipe.data, recipe.eval)
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}, expected an optax transformation, such as "
            "optax.adamw(1e-3)"
        )
    train, accumulate_steps = recipe.train, recipe.optim.accumulate_steps
    return count_microbatches(accumulate_steps, train.images_per_device, train.batch_size, devices)


def check_start(recipe: Recipe) -> None:
    """Raise ValueError if a run would begin with random weights that do not learn, and
    `model.init_from` does not ask for them."""
    if recipe.model.init_from:
        return
    section, optim = recipe.model.backbone, recipe.optim
    norm = section.get("norm", None)
    layers = ability(section.make(dtype=jnp.float32, remat=False), BackboneLike, "frozen")
    still = {
        f"model.backbone.norm={norm}": norm in ("frozen", "affine"),
        f"{', '.join(layers)} of the backbone": layers,
        f"optim.freeze={optim.freeze}": optim.freeze,
        f"optim.lora.rank={optim.lora.rank}": optim.lora.rank,
    }
    if found := [what for what, is_still in still.items() if is_still]:
        raise ValueError(
            f"the weights are random, and some do not learn ({'; '.join(found)}): name those to "
            "start from, --config.model.init_from=NAME (`prepare weights` lists names), or ask for "
            "random ones, --config.model.init_from=random"
        )


def check_evaluated(
    rule: StopRule, val_set: Dataset | None, *, learns_masks: bool, finds_keypoints: bool
) -> None:
    """Raise ValueError if a run is to stop by an AP that nothing would measure."""
    if val_set is None:
        for name, value in rule.needs_evaluation().items():
            text = "needs an evaluation: set data.val_json and data.val_images"
            raise ValueError(f"train.{name} is {value:g}, which {text}")
    has_masks = val_set is not None and learns_masks and not is_boxes_only(val_set)
    if rule.stop_at_mask_ap > 0 and not has_masks:
        expected = "expected 0 where no masks are scored"
        raise ValueError(f"train.stop_at_mask_ap is {rule.stop_at_mask_ap:g}, {expected}")
    has_keypoints = val_set is not None and finds_keypoints and bool(keypoints(val_set).names)
    if rule.stop_at_keypoints_ap > 0 and not has_keypoints:
        found = f"train.stop_at_keypoints_ap is {rule.stop_at_keypoints_ap:g}"
        raise ValueError(f"{found}, expected 0 without data.keypoints and model.keypoint_head")


def beyond_the_end(recipe: Recipe) -> str:
    """A line about a schedule that the run ends before; "" for others."""
    optim = recipe.optim
    if optim.schedule != "steps" or not optim.decay_at or min(optim.decay_at) < 1:
        return ""
    found = f"optim.decay_at is {optim.decay_at}, fractions of train.steps={recipe.train.steps}"
    if optim.warmup_until <= 1:
        return f"{found}: the learning rate never falls"
    return f"{found}, and optim.warmup_until is {optim.warmup_until}: the warm-up never ends"


def crops_larger(data: DataOptions) -> str:
    """A line about crops of twice the area that evaluation sees, for a lower `data.image_size`
    that is meant to save time or memory; "" for others."""
    if "fixed_size_crop" not in data.augment or data.windows.is_on:
        return ""
    (height, width), size = canvas_size(data.in_training()), data.image_size
    if height * width <= 2 * math.prod(canvas_size(data)):
        return ""
    return (
        f"data.image_size={size} is that of evaluation; training sees crops of {height} x {width}: "
        f"data.fixed_size_crop.size, and data.scale_jitter.size with it, make them smaller"
    )


def check_keypoints(train_set: Dataset, recipe: Recipe) -> None:
    """Raise ValueError if a model is to learn keypoints that a dataset has not, or in another
    order."""
    found, names = tuple(keypoints(train_set).names), recipe.data.keypoints
    if recipe.model.has_keypoints and found != names:
        where = dataset_name(train_set)
        raise ValueError(f"{where} has the keypoints {found}, data.keypoints is {names}")


def unused_keypoints(dataset: Dataset, recipe: Recipe) -> str:
    """A line about keypoints that the model neither learns nor finds; "" if there are none."""
    names = keypoints(dataset).names
    if recipe.model.has_keypoints or not names:
        return ""
    found = f"{dataset_name(dataset)}: its {len(names)} keypoints ({names[0]}, ..) are not used"
    return f"{found}, since model.keypoint_head is none: they are neither learned nor scored"

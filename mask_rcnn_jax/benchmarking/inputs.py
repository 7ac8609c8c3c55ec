"""Recipes' training and prediction steps, and synthetic batches for them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mask_rcnn_jax.annotations.keypoints import mirror_places
from mask_rcnn_jax.data.options import ExampleOptions, canvas_size
from mask_rcnn_jax.host import on_host
from mask_rcnn_jax.models.build import (
    abstract_prepared,
    abstract_variables,
    build_model,
    resolve_precision,
)
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.platforms import traced_for
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.structures import Batch, Targets
from mask_rcnn_jax.training.distill import Distillation
from mask_rcnn_jax.training.low_rank import abstract_adapters
from mask_rcnn_jax.training.optim import build_optimizer, count_microbatches
from mask_rcnn_jax.training.own_losses import resolve_losses
from mask_rcnn_jax.training.step import (
    StepOptions,
    TrainState,
    make_predict_step,
    make_train_step,
)

COCO_CLASSES = {"contiguous": 80, "raw": 90}  # foreground classes
OBJECTS = 8  # per image; COCO's mean is 7.3


def num_classes(recipe: Recipe) -> int:
    """Return the recipe's class count, or COCO's if the recipe leaves it to the data."""
    return recipe.model.num_classes or COCO_CLASSES[recipe.data.class_ids]


def recipe_model(recipe: Recipe) -> MaskRCNN:
    """Build the recipe's model with `num_classes(recipe)` classes."""
    model, train = replace(recipe.model, num_classes=num_classes(recipe)), recipe.train
    names = ("precision", "implementation", "remat")
    return build_model(model, **{name: getattr(train, name) for name in names})


def recipe_teacher(recipe: Recipe, model: MaskRCNN) -> tuple[Distillation | None, tuple[dict, ...]]:
    """Load the teacher of the recipe, see `training.teacher.open_teacher`."""
    if not recipe.distill.teacher:
        return None, ()
    from mask_rcnn_jax.training.teacher import open_teacher  # imports what reads weights

    return open_teacher(recipe, model)


def recipe_step(
    recipe: Recipe,
    model: MaskRCNN,
    params: Mapping[str, Any],
    mesh: Mesh | AbstractMesh,
    batch_size: int,
    distillation: Distillation | None = None,
):
    """Build the recipe's `step(state, batch)` and optimizer; `params` may be abstract."""
    accumulate_steps, train = recipe.optim.accumulate_steps, recipe.train
    parts = count_microbatches(accumulate_steps, train.images_per_device, batch_size, mesh.size)
    given = resolve_losses(recipe.loss), train.seed, recipe.data.flip_probability, parts
    mirror = mirror_places(recipe.data.keypoints)
    options = StepOptions(*given, freeze=recipe.optim.freeze, keypoint_mirror=mirror)
    schedule = recipe.schedule()
    tx = build_optimizer(recipe, schedule, params, model.backbone)
    return make_train_step(model, tx, schedule, mesh, options, distillation), tx


def abstract_step(recipe: Recipe, mesh: Mesh, batch_size: int) -> tuple[Any, TrainState, Batch]:
    """Return the training step and its abstract state and batch, as `step_bytes` takes them."""
    model = recipe_model(recipe)
    variables = abstract_variables(model)
    step, tx = recipe_step(recipe, model, variables["params"], mesh, batch_size)
    state = jax.eval_shape(lambda variables: TrainState.start(variables, tx), variables)
    return step, state, abstract_batch(recipe, batch_size, training=True)


def lower_step(
    recipe: Recipe,
    step_mesh: Mesh | AbstractMesh,
    mesh: Mesh | AbstractMesh,
    batch_size: int,
    platform: str | None = None,
) -> jax.stages.Lowered:
    """Lower the training step on `step_mesh` for abstract arguments on `mesh`.

    platform: "cuda" lowers for GPUs even if the devices are not GPUs. Required if `mesh` is
        abstract.
    """
    model = recipe_model(recipe)
    variables = abstract_variables(model)
    params = abstract_adapters(variables["params"], recipe.optim.lora, model.backbone)
    variables = {**variables, "params": params}
    distillation, teacher = recipe_teacher(recipe, model)
    step, tx = recipe_step(recipe, model, variables["params"], step_mesh, batch_size, distillation)
    state = jax.eval_shape(lambda variables: TrainState.start(variables, tx), variables)
    batch = abstract_batch(recipe, batch_size, training=True)
    placed = _placed(state, mesh, P()), _placed(batch, mesh, P("data")), _placed(teacher, mesh, P())
    with traced_for(platform):
        traced = step.trace(*placed[:2], *placed[2])
    return traced.lower(lowering_platforms=platform and (platform,))


def lower_predict(
    recipe: Recipe,
    step_mesh: Mesh | AbstractMesh,
    mesh: Mesh | AbstractMesh,
    batch_size: int,
    platform: str | None = None,
) -> jax.stages.Lowered:
    """Lower prediction for abstract arguments, as `lower_step` does."""
    model = recipe_model(recipe)
    predict: Any = make_predict_step(model, step_mesh, recipe.eval)
    # For absent GPUs as `LiveModel` has them for those that are there.
    of_model = abstract_prepared if isinstance(step_mesh, AbstractMesh) else abstract_variables
    variables = _placed(of_model(model), mesh, P())
    batch = _placed(abstract_batch(recipe, batch_size), mesh, P("data"))
    with traced_for(platform):
        traced = predict.trace(variables, batch)
    return traced.lower(lowering_platforms=platform and (platform,))


def train_flops(recipe: Recipe) -> float | None:
    """Return a training step's FLOPs per image, before optimization, None if unknown.

    Counted in the GPU program, because loop bodies count once and only the CPU program has
    convolutions in loops; but by the CPU's client, as a GPU's counts compiled programs only, with
    nothing for cuDNN's calls.
    """
    recipe, mesh = _without_kernels(recipe), _one_device()
    optim, train = replace(recipe.optim, accumulate_steps=1), recipe.train
    whole = replace(recipe, optim=optim, train=replace(train, images_per_device=0))
    with on_host():
        return _flops(lower_step(whole, mesh, mesh, 1, "cuda"))


def infer_flops(recipe: Recipe) -> float | None:
    """Return prediction FLOPs per image, before optimization, counted as in `train_flops`."""
    mesh = _one_device()
    with on_host():
        return _flops(lower_predict(_without_kernels(recipe), mesh, mesh, 1, "cuda"))


def _flops(lowered: jax.stages.Lowered) -> float | None:
    cost: Any = lowered.cost_analysis()
    return cost and cost["flops"]


def for_platform(
    recipe: Recipe, platform: str, capability: tuple[int, int] | None = None
) -> Recipe:
    """Return a recipe with the precision that it has on "tpu", or "cuda" with GPUs of a compute
    capability, to compile programs without one."""
    precision: Any = resolve_precision(recipe.train.precision, platform, capability)
    return replace(recipe, train=replace(recipe.train, precision=precision))


def _without_kernels(recipe: Recipe) -> Recipe:
    """Return a recipe with XLA's forms; XLA cannot count FLOPs inside Pallas kernels."""
    return replace(recipe, train=replace(recipe.train, implementation="xla"))


def _one_device() -> AbstractMesh:
    """Return a mesh of one device, of whatever kind: JAX may be allowed to use GPUs only."""
    return AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))


def _placed(tree, mesh: Mesh | AbstractMesh, spec: P):
    """Return abstract arrays placed on a mesh."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def synthetic_batch(
    recipe: Recipe, batch_size: int, objects: int = OBJECTS, *, training: bool = False
) -> Batch:
    """Generate landscape noise images with ellipses, sized as objects in COCO.

    objects: ellipses per image, at most `data.max_instances`. training: with the canvas of training
        and not of evaluation.
    """
    options = recipe.data.in_training() if training else recipe.data
    height, width = canvas_size(options)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batch_size, height, width, options.bands.count), np.uint8)
    images = images.astype(np.dtype(options.image_dtype))
    return Batch(
        images=images,
        image_sizes=np.tile(np.array([height, width], np.int32), (batch_size, 1)),
        scales=np.ones((batch_size, 2), np.float32),
        image_index=np.arange(batch_size, dtype=np.int32),
        targets=_ellipses(rng, options, images.shape, num_classes(recipe), objects),
    )


def abstract_batch(recipe: Recipe, batch_size: int, *, training: bool = False) -> Batch:
    """Return a synthetic batch's shapes and dtypes."""
    one = synthetic_batch(recipe, 1, training=training)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype), one)


def _ellipses(
    rng: np.random.Generator,
    options: ExampleOptions,
    image_shape: tuple[int, ...],
    num_classes: int,
    objects: int,
) -> Targets:
    batch, *canvas = image_shape[:3]
    rows, side = options.max_instances, options.mask_size
    count = min(objects, rows)
    limit = np.array(canvas[::-1], np.float32)
    center = rng.uniform(0.1, 0.9, (batch, count, 2)) * limit
    half = np.exp(rng.uniform(np.log(8), np.log(min(canvas) / 3), (batch, count, 2)))
    boxes = np.zeros((batch, rows, 4), np.float32)
    boxes[:, :count, :2] = np.maximum(center - half, 0)
    boxes[:, :count, 2:] = np.minimum(center + half, limit)
    valid = np.zeros((batch, rows), bool)
    valid[:, :count] = True
    classes = np.where(valid, rng.integers(1, num_classes + 1, valid.shape), 0).astype(np.int32)

    if options.mask_frame == "box":
        y, x = np.mgrid[:side, :side] / (side - 1) * 2 - 1
        masks = np.broadcast_to((x * x + y * y <= 1) * np.uint8(255), (batch, rows, side, side))
    else:
        masks = np.zeros((batch, rows, *canvas), np.uint8)
        for image, row in np.ndindex(batch, count):
            x1, y1, x2, y2 = boxes[image, row].astype(int)
            masks[image, row, y1:y2, x1:x2] = 255

    polygons = np.zeros((batch, rows, options.max_vertices, 3), np.float32)
    polygons[..., 2] = -1
    corners = min(32, options.max_vertices)
    if corners:
        angle = np.arange(corners) / corners * 2 * np.pi
        circle = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
        outline = center[:, :, None] + half[:, :, None] * circle
        polygons[:, :count, :corners, :2] = np.clip(outline, 0, limit)
        polygons[:, :count, :corners, 2] = 0
    masks = np.where(valid[..., None, None], masks, np.uint8(0))
    found = Targets(boxes=boxes, classes=classes, masks=masks, valid=valid, polygons=polygons)
    if not options.keypoints:
        return found
    return replace(found, keypoints=_random_keypoints(rng, boxes, valid, len(options.keypoints)))


def _random_keypoints(
    rng: np.random.Generator, boxes: np.ndarray, valid: np.ndarray, count: int
) -> np.ndarray:
    """Visible points [B, G, P, 3] anywhere in boxes [B, G, 4]; zeros where these are padding."""
    low, high = boxes[..., None, :2], boxes[..., None, 2:]
    places = low + (high - low) * rng.random((*valid.shape, count, 2))
    points = np.concatenate([places, np.full((*valid.shape, count, 1), 2.0)], axis=-1)
    return np.where(valid[..., None, None], points, 0).astype(np.float32)

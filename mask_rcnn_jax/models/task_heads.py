"""The tasks' heads in a model: on the RoIs of training, and on what was detected."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from mask_rcnn_jax.models.protocols import taken
from mask_rcnn_jax.models.sampling import MaskRoIs
from mask_rcnn_jax.models.tasks import TaskOutputs
from mask_rcnn_jax.ops.extent import STRIDES, ValidExtent
from mask_rcnn_jax.ops.points import in_image, sample_map
from mask_rcnn_jax.structures import Batch

# Of an image, in prediction: the mask head's largest maps of one take 0.8 MB each in float32.
MASKS_AT_ONCE = 256


def results(
    model: Any,
    task: str,
    pyramid: list[jax.Array],
    boxes: jax.Array,
    classes: jax.Array,
    extent: ValidExtent,
) -> jax.Array:
    """Return what a task finds, such as masks [B, D, M, M], for boxes and their classes."""
    batch, count = classes.shape
    longest = STRIDES[0] * max(pyramid[0].shape[1:3])
    finish = next(one.found for one in model.tasks if one.name == task)

    def at_once(model: Any, boxes: jax.Array, classes: jax.Array) -> jax.Array:
        pooled = model.pool(pyramid, boxes, model.roi_size(task), extent)
        return finish(
            run_head(model, task, pooled, classes, pyramid, boxes), boxes, longest=longest
        )

    if count <= MASKS_AT_ONCE:
        return at_once(model, boxes, classes)
    parts = -(-count // MASKS_AT_ONCE)
    rows = -(-count // parts)

    def split(x: jax.Array) -> jax.Array:
        rest = [(0, 0)] * (x.ndim - 2)
        padded = jnp.pad(x, [(0, 0), (0, parts * rows - count), *rest])
        return jnp.moveaxis(padded.reshape(batch, parts, rows, *x.shape[2:]), 1, 0)

    def part(model: Any, carry: tuple, of_part: tuple) -> tuple[tuple, jax.Array]:
        return carry, at_once(model, *of_part)

    in_turn: Any = nn.scan(part, variable_broadcast=True, split_rngs={})
    _, found = in_turn(model, (), (split(boxes), split(classes)))
    return jnp.moveaxis(found, 0, 1).reshape(batch, parts * rows, *found.shape[3:])[:, :count]


def run_head(
    model: Any,
    task: str,
    pooled: jax.Array,
    classes: jax.Array,
    pyramid: list[jax.Array],
    boxes: jax.Array,
    images: jax.Array | None = None,
    **training: Any,
) -> Any:
    """Run a task's head on the RoI features of boxes [B, R, 4] with classes [B, R].

    images: [1, R], those that the boxes are in, with B = 1; None: B counts images. training:
    `keys` and `train`, which a head may take in training.
    """

    def sample(points: jax.Array) -> jax.Array:
        return sample_map(pyramid[0], in_image(points, boxes) / STRIDES[0], images)

    head = model.head(task)
    return head(pooled, classes, **taken(head, sample=sample, **training))


def train_tasks(
    model: Any,
    pyramid: list[jax.Array],
    rois: MaskRoIs | None,
    batch: Batch,
    extent: ValidExtent,
    keys: jax.Array | None,
    *,
    train: bool,
) -> dict[str, TaskOutputs]:
    """Run each task's head on foreground RoIs, and compute its targets."""
    outputs = {}
    for task in model.tasks:
        assert rois is not None
        pooled = model.pool_rois(pyramid, rois, extent, model.roi_size(task.name))
        given = pooled, rois.classes[None], pyramid, rois.boxes[None], rois.images[None]
        own_keys = rois.keys(keys, len(batch.images))[None]
        found = run_head(model, task.name, *given, keys=own_keys, train=train)
        logits = jax.tree.map(lambda x: x[0], found)
        outputs[task.name] = TaskOutputs(logits, task.targets(batch, rois, logits), task)
    return outputs

"""Test-time augmentation: detections from several sizes of an image and their mirror images."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.structures import Batch, Detections
from mask_rcnn_jax.training.flip import mirrored
from mask_rcnn_jax.training.step import sharded


class _View(NamedTuple):
    """A batch in one size, as it is or mirrored."""

    images: jax.Array
    sizes: jax.Array  # [B, 2] (height, width)
    scale: jax.Array  # [B, 1, 4], pixels of boxes here per pixel in the first size
    mirror: Callable[[jax.Array], jax.Array] | None  # of boxes

    def to_view(self, boxes: jax.Array) -> jax.Array:
        """Boxes [B, D, 4] in pixels of the first size, in pixels of this view."""
        boxes = boxes * self.scale
        return self.mirror(boxes) if self.mirror else boxes

    def from_view(self, boxes: jax.Array) -> jax.Array:
        """Invert `to_view`."""
        return (self.mirror(boxes) if self.mirror else boxes) / self.scale


class _Candidates(Detect):
    """All that `Detect` chooses from."""

    def select(
        self,
        boxes: jax.Array,
        scores: jax.Array,
        class_index: jax.Array,
        iou_offset: float,
        implementation: str | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        return boxes, scores, class_index, scores >= 0


def make_views_step(
    model: MaskRCNN, mesh: Mesh, detect: Detect, *, flip: bool
) -> Callable[[dict, tuple[Batch, ...]], Detections]:
    """`predict(variables, batches) -> Detections`, in network pixels of the first batch.

    batches: the same images in several sizes. The detections of all views go through the
    suppression of `detect` together; masks are averaged over the views (detectron2's
    GeneralizedRCNNWithTTA). Soft-NMS, which would lower scores twice, is left to this pass alone.
    """
    detect_view = detect if detect.nms == "hard" else _Candidates(**_fields(detect))

    def step(variables: dict, batches: tuple[Batch, ...]) -> Detections:
        views = []
        for batch in batches:
            views += _views(batch, batches[0], flip, model.box_coder.iou_offset)
        found = []
        for view in views:
            # Nobody asks for these masks, so that XLA leaves them out.
            seen = model.apply(variables, view.images, view.sizes, detect_view, method="predict")
            assert isinstance(seen, Detections)
            scores = jnp.where(seen.valid, seen.scores, -1.0)
            found.append((view.from_view(seen.boxes), scores, seen.classes))
        boxes, scores, classes, valid = _merged(model, detect, found)
        masks = None
        if model.mask_head is not None:
            mean = _mean_masks(model, variables, views, boxes, classes)
            masks = jnp.where(valid[..., None, None], mean, 0.0)
        return Detections(boxes=boxes, scores=scores, classes=classes, masks=masks, valid=valid)

    return jax.jit(sharded(step, mesh=mesh, out_specs=P("data")))


def _fields(detect: Detect) -> dict[str, Any]:
    return {field.name: getattr(detect, field.name) for field in fields(Detect)}


def _views(batch: Batch, first: Batch, flip: bool, offset: float) -> list[_View]:
    """The views of one size. offset: `BoxCoder.iou_offset`."""
    scale = jnp.tile((batch.scales / first.scales)[:, ::-1], 2)[:, None]
    plain = _View(batch.images, batch.image_sizes, scale, None)
    if not flip:
        return [plain]
    columns, widths = jnp.arange(batch.images.shape[2]), batch.image_sizes[:, 1]

    def mirror_image(image: jax.Array, width: jax.Array) -> jax.Array:
        return jnp.take(image, mirrored(columns, width), axis=1)

    def mirror_boxes(boxes: jax.Array) -> jax.Array:
        return jax.vmap(box_ops.flip)(boxes, widths.astype(jnp.float32) - offset)

    images = jax.vmap(mirror_image)(batch.images, widths)
    return [plain, plain._replace(images=images, mirror=mirror_boxes)]


def _merged(
    model: MaskRCNN, detect: Detect, found: Sequence[tuple[jax.Array, ...]]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Boxes, scores, classes and valid of (boxes, scores, classes) from several views."""
    boxes, scores, classes = (jnp.concatenate(rows, axis=1) for rows in zip(*found, strict=True))
    scores, order = lax.top_k(scores, scores.shape[1])
    boxes = jnp.take_along_axis(boxes, order[..., None], axis=1)
    classes = jnp.take_along_axis(classes, order, axis=1)
    candidates = boxes, scores, classes, model.box_coder.iou_offset
    return detect.select(*candidates, model.implementation)


def _mean_masks(
    model: MaskRCNN,
    variables: dict,
    views: Sequence[_View],
    boxes: jax.Array,
    classes: jax.Array,
) -> jax.Array:
    """Mask probabilities [B, D, M, M] of boxes [B, D, 4], averaged over the views."""
    total = jnp.zeros(())
    for view in views:
        given = view.images, view.sizes, view.to_view(boxes), classes
        masks = model.apply(variables, *given, method="predict_masks")
        assert isinstance(masks, jax.Array)
        total += masks[..., ::-1] if view.mirror else masks
    return total / len(views)

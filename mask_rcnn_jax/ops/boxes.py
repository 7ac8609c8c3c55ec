"""Box arithmetic: area, IoU, delta coding, clipping and flipping.

Boxes are `[x1, y1, x2, y2]` in pixels. `offset` is 0 for continuous coordinates (width = x2 - x1)
and 1 for the Caffe-era inclusive-pixel convention (width = x2 - x1 + 1), which NVIDIA's TensorFlow
2 recipe keeps in its box coder and its PyTorch recipe keeps everywhere.
Every function is finite, with finite gradients, on all-zero padding boxes.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from mask_rcnn_jax.ranges import ABOVE_0, Ranged, numbers

# exp(dw) enlarges an anchor by at most 1000 / 16: a 16 px anchor, a 1000 px image.
MAX_LOG_SCALE = math.log(1000.0 / 16.0)
MIN_WIDTH = 1e-8  # lower bound before a division or log; NVIDIA TensorFlow 2's value


BoxWeights = Annotated[
    tuple[float, float, float, float], numbers("four numbers above 0", ABOVE_0.allows)
]


@dataclass(frozen=True)
class BoxCoder(Ranged):
    """Box delta coder and pixel convention for all box arithmetic.

    Attributes:
        weights: factors for the RoI deltas (dx, dy, dw, dh); anchors use 1.
        inclusive: where x2 and y2 are inclusive pixels (width = x2 - x1 + 1). "none": nowhere;
            "all": everywhere (Detectron, maskrcnn-benchmark); "decoder": in RoI deltas, decoding
            and clipping, but not in anchor encoding or IoU (NVIDIA's TensorFlow examples).
    """

    weights: BoxWeights = (10.0, 10.0, 5.0, 5.0)
    inclusive: Literal["none", "decoder", "all"] = "none"

    @property
    def offset(self) -> float:
        """1.0 if decoding uses inclusive pixels, else 0.0."""
        return 0.0 if self.inclusive == "none" else 1.0

    @property
    def iou_offset(self) -> float:
        """1.0 if IoU, areas and anchors use inclusive pixels, else 0.0."""
        return 1.0 if self.inclusive == "all" else 0.0

    def iou(self, a: Float[Array, "N 4"], b: Float[Array, "G 4"]) -> Float[Array, "N G"]:
        """`pairwise_iou` in this convention."""
        return pairwise_iou(a, b, offset=self.iou_offset)

    def sides(self, boxes: Float[Array, "*dims 4"]) -> Float[Array, "*dims 2"]:
        """Width and height."""
        return boxes[..., 2:] - boxes[..., :2] + self.offset

    def clip(
        self, boxes: Float[Array, "*dims 4"], size: Num[Array, "2"]
    ) -> Float[Array, "*dims 4"]:
        """`clip` in this convention."""
        return clip(boxes, size, offset=self.offset)

    def encode_anchors(
        self, boxes: Float[Array, "*dims 4"], anchors: Float[Array, "*dims2 4"]
    ) -> Float[Array, "*out 4"]:
        """Return the deltas from anchors to boxes."""
        return encode(boxes, anchors, offset=self.iou_offset)

    def decode_anchors(
        self, deltas: Float[Array, "*dims 4"], anchors: Float[Array, "*dims2 4"]
    ) -> Float[Array, "*out 4"]:
        """Invert `encode_anchors`."""
        return decode(deltas, anchors, offset=self.offset)

    def encode_rois(
        self, boxes: Float[Array, "*dims 4"], rois: Float[Array, "*dims2 4"]
    ) -> Float[Array, "*out 4"]:
        """Return the deltas from RoIs to boxes."""
        return encode(boxes, rois, weights=self.weights, offset=self.offset)

    def decode_rois(
        self, deltas: Float[Array, "*dims 4"], rois: Float[Array, "*dims2 4"]
    ) -> Float[Array, "*out 4"]:
        """Invert `encode_rois`."""
        return decode(deltas, rois, weights=self.weights, offset=self.offset)


def area(boxes: Float[Array, "*dims 4"], *, offset: float = 0.0) -> Float[Array, "*dims"]:
    """Area in square pixels; 0 for inverted boxes."""
    width = jnp.maximum(boxes[..., 2] - boxes[..., 0] + offset, 0.0)
    height = jnp.maximum(boxes[..., 3] - boxes[..., 1] + offset, 0.0)
    return width * height


def pairwise_iou(
    a: Float[Array, "N 4"], b: Float[Array, "G 4"], *, offset: float = 0.0
) -> Float[Array, "N G"]:
    """Intersection over union for every pair; 0 if the union is empty."""
    x1 = jnp.maximum(a[:, None, 0], b[None, :, 0])
    y1 = jnp.maximum(a[:, None, 1], b[None, :, 1])
    x2 = jnp.minimum(a[:, None, 2], b[None, :, 2])
    y2 = jnp.minimum(a[:, None, 3], b[None, :, 3])
    inter = jnp.maximum(x2 - x1 + offset, 0.0) * jnp.maximum(y2 - y1 + offset, 0.0)
    union = area(a, offset=offset)[:, None] + area(b, offset=offset)[None, :] - inter
    # Replace the empty union before dividing: a NaN here would survive in the gradient.
    return inter / jnp.where(union > 0.0, union, 1.0)


def encode(
    boxes: Float[Array, "*dims 4"],
    anchors: Float[Array, "*dims2 4"],
    *,
    weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    offset: float = 0.0,
) -> Float[Array, "*out 4"]:
    """Return the deltas (dx, dy, dw, dh) from `anchors` to `boxes`; leading axes broadcast.

    dx and dy are in anchor widths and heights, dw and dh are log side ratios (R-CNN, Girshick
    2014), each multiplied by its weight.
    """
    boxes, anchors = jnp.broadcast_arrays(boxes, anchors)
    box_x, box_y, box_w, box_h = _center_form(boxes, offset)
    anchor_x, anchor_y, anchor_w, anchor_h = _center_form(anchors, offset)
    box_w, box_h = jnp.maximum(box_w, MIN_WIDTH), jnp.maximum(box_h, MIN_WIDTH)
    anchor_w, anchor_h = jnp.maximum(anchor_w, MIN_WIDTH), jnp.maximum(anchor_h, MIN_WIDTH)
    dx = weights[0] * (box_x - anchor_x) / anchor_w
    dy = weights[1] * (box_y - anchor_y) / anchor_h
    dw = weights[2] * (jnp.log(box_w) - jnp.log(anchor_w))
    dh = weights[3] * (jnp.log(box_h) - jnp.log(anchor_h))
    return jnp.stack([dx, dy, dw, dh], axis=-1)


def decode(
    deltas: Float[Array, "*dims 4"],
    anchors: Float[Array, "*dims2 4"],
    *,
    weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    offset: float = 0.0,
) -> Float[Array, "*out 4"]:
    """Invert `encode`; leading axes broadcast. Growth is limited by `MAX_LOG_SCALE`."""
    deltas, anchors = jnp.broadcast_arrays(deltas, anchors)
    anchor_x, anchor_y, anchor_w, anchor_h = _center_form(anchors, offset)
    x = deltas[..., 0] / weights[0] * anchor_w + anchor_x
    y = deltas[..., 1] / weights[1] * anchor_h + anchor_y
    w = jnp.exp(jnp.minimum(deltas[..., 2] / weights[2], MAX_LOG_SCALE)) * anchor_w
    h = jnp.exp(jnp.minimum(deltas[..., 3] / weights[3], MAX_LOG_SCALE)) * anchor_h
    x1, y1 = x - 0.5 * w, y - 0.5 * h
    return jnp.stack([x1, y1, x + 0.5 * w - offset, y + 0.5 * h - offset], axis=-1)


def clip(
    boxes: Float[Array, "*dims 4"], size: Num[Array, "2"] | tuple[int, int], *, offset: float = 0.0
) -> Float[Array, "*dims 4"]:
    """Clip boxes to an image of `size` (height, width): coordinates in [0, side - offset]."""
    height, width = size[0] - offset, size[1] - offset
    x1, y1, x2, y2 = (boxes[..., i] for i in range(4))
    x1, x2 = (jnp.minimum(jnp.maximum(x, 0.0), width) for x in (x1, x2))
    y1, y2 = (jnp.minimum(jnp.maximum(y, 0.0), height) for y in (y1, y2))
    return jnp.stack([x1, y1, x2, y2], axis=-1)


def flip(
    boxes: Float[Array, "*dims 4"], width: float | Float[Array, ""]
) -> Float[Array, "*dims 4"]:
    """Mirror boxes left to right in an image `width` pixels wide."""
    x1, y1, x2, y2 = (boxes[..., i] for i in range(4))
    return jnp.stack([width - x2, y1, width - x1, y2], axis=-1)


def _center_form(
    boxes: Float[Array, "*dims 4"], offset: float
) -> tuple[Array, Array, Array, Array]:
    """Center x and y, width, height."""
    w = boxes[..., 2] - boxes[..., 0] + offset
    h = boxes[..., 3] - boxes[..., 1] + offset
    return boxes[..., 0] + 0.5 * w, boxes[..., 1] + 0.5 * h, w, h

"""The one list of shapes on which the kernels are tested, compiled and timed.

`args` are the kernel's positional arguments, abstract; `options` its static keyword arguments. Tiny
cases suit an interpreter; the others have the sizes of a Mask R-CNN with an FPN of 256 channels on
832 x 1344 pixels. `example` makes values that look like a model's for any of them.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Pixels of the levels P2 to P5 of one image.
PYRAMID_ROWS = sum((832 // stride) * (1344 // stride) for stride in (4, 8, 16, 32))


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the kernel named `op`."""

    name: str
    op: str  # "gather_sum", "nms" or "fill_polygons"
    args: tuple[jax.ShapeDtypeStruct | None, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    tiny: bool = False

    def __str__(self) -> str:
        return self.name


def _gather_sum(
    name: str,
    rois: int,
    *,
    size: int,
    taps: int,
    dtype: str,
    rows: int,
    channels: int = 256,
    tiny: bool = False,
) -> Case:
    """`rois` RoIs of `size` x `size` cells, `taps` an axis, from a table of `rows` pixels."""
    index = jax.ShapeDtypeStruct((rois, size, taps), jnp.int32)
    weight = jax.ShapeDtypeStruct((rois, size, taps), jnp.float32)
    table = jax.ShapeDtypeStruct((rows, channels), jnp.dtype(dtype))
    return Case(name, "gather_sum", (table, index, index, weight, weight), tiny=tiny)


def _nms(
    name: str,
    problems: int,
    num: int,
    *,
    grouped: bool = False,
    iou_thresh: float = 0.5,
    max_out: int,
    offset: float = 0.0,
    tiny: bool = False,
) -> Case:
    boxes = jax.ShapeDtypeStruct((problems, num, 4), jnp.float32)
    valid = jax.ShapeDtypeStruct((problems, num), jnp.bool_)
    groups = jax.ShapeDtypeStruct((problems, num), jnp.int32) if grouped else None
    options = dict(iou_thresh=iou_thresh, max_out=max_out, offset=offset)
    return Case(name, "nms", (boxes, valid, groups), options, tiny)


def _fill_polygons(
    name: str, rois: int, vertices: int, *, size: int = 28, tiny: bool = False
) -> Case:
    edges = jax.ShapeDtypeStruct((rois, vertices, 4), jnp.int32)
    flag = jax.ShapeDtypeStruct((rois, vertices), jnp.bool_)
    return Case(name, "fill_polygons", (edges, flag, flag), dict(size=size), tiny)


# The taps of an axis: 2 of one sample, 4 of 2 x 2 samples, S + 1 of at most S adaptive samples.
ROI_ALIGN_CASES = tuple(
    _gather_sum(f"{name}_{dtype}", rois, size=size, taps=taps, dtype=dtype, rows=rows)
    for dtype in ("float32", "bfloat16")
    for name, rois, size, taps, rows in (
        ("box_train_2_images_1_sample", 2 * 512, 7, 2, 2 * PYRAMID_ROWS),
        ("box_train_2_images_4_samples", 2 * 512, 7, 4, 2 * PYRAMID_ROWS),
        ("box_train_2_images_adaptive_8", 2 * 512, 7, 9, 2 * PYRAMID_ROWS),
        ("box_train_2_images_adaptive_16", 2 * 512, 7, 17, 2 * PYRAMID_ROWS),
        ("box_train_8_images_4_samples", 8 * 512, 7, 4, 8 * PYRAMID_ROWS),
        ("mask_train_2_images_1_sample", 2 * 128, 14, 2, 2 * PYRAMID_ROWS),
        ("mask_train_8_images_4_samples", 8 * 128, 14, 4, 8 * PYRAMID_ROWS),
        ("mask_28_train_2_images_4_samples", 2 * 128, 28, 4, 2 * PYRAMID_ROWS),
        ("box_test_1_image_4_samples", 1000, 7, 4, PYRAMID_ROWS),
    )
) + (
    _gather_sum(
        "tiny_1_sample_float32", 2, size=3, taps=2, dtype="float32",
        rows=60, channels=128, tiny=True,
    ),
    _gather_sum(
        "tiny_4_samples_bfloat16", 2, size=3, taps=4, dtype="bfloat16",
        rows=60, channels=256, tiny=True,
    ),
    _gather_sum(
        "tiny_adaptive_float32", 2, size=2, taps=9, dtype="float32",
        rows=200, channels=128, tiny=True,
    ),
)  # fmt: skip

# RPN: a problem is a level of an image. Detections: a problem is an image, a group is a class.
NMS_CASES = (
    _nms("rpn_train_2_images", 2 * 5, 2000, iou_thresh=0.7, max_out=1000),
    _nms("rpn_train_8_images", 8 * 5, 2000, iou_thresh=0.7, max_out=1000),
    _nms("rpn_train_2_images_inclusive", 2 * 5, 2000, iou_thresh=0.7, max_out=2000, offset=1.0),
    _nms("rpn_test_1_image", 5, 1000, iou_thresh=0.7, max_out=1000),
    _nms("detections_1_image", 1, 4096, grouped=True, max_out=100),
    _nms("detections_8_images", 8, 4096, grouped=True, max_out=100),
    _nms("detections_8_images_all", 8, 4096, grouped=True, max_out=4096, offset=1.0),
    _nms("largest", 2, 8192, grouped=True, max_out=8192),
    _nms("tiny", 2, 128, max_out=128, tiny=True),
    _nms("tiny_grouped", 2, 100, grouped=True, max_out=20, tiny=True),
    _nms("tiny_inclusive", 1, 128, iou_thresh=0.7, max_out=128, offset=1.0, tiny=True),
)

# 128 RoIs an image are the foreground's share of 512.
MASK_TARGET_CASES = (
    _fill_polygons("mask_train_2_images", 2 * 128, 512),
    _fill_polygons("mask_train_8_images", 8 * 128, 512),
    _fill_polygons("mask_56_train_2_images", 2 * 128, 512, size=56),
    _fill_polygons("tiny", 3, 24, tiny=True),
    _fill_polygons("tiny_40", 2, 12, size=40, tiny=True),
)

CASES = ROI_ALIGN_CASES + NMS_CASES + MASK_TARGET_CASES


def example(case: Case, seed: int = 0) -> tuple[np.ndarray | None, ...]:
    """Values for the arguments of `case`, the same for the same seed."""
    make = {"gather_sum": _taps, "nms": _boxes, "fill_polygons": _outlines}[case.op]
    return make(np.random.default_rng(seed), case)


def _taps(rng: np.random.Generator, case: Case) -> tuple[np.ndarray, ...]:
    """Windows of neighbouring pixels of one map that is about square; weights sum to 1."""
    table, y_taps, x_taps = case.args[:3]
    width = math.isqrt(table.shape[0])
    height = table.shape[0] // width

    def axis(taps: jax.ShapeDtypeStruct, length: int) -> tuple[np.ndarray, np.ndarray]:
        rois, cells, count = taps.shape
        start = rng.uniform(0, length / 2, (rois, 1, 1))
        cell = rng.uniform(0.2, 0.5, (rois, 1, 1)) * length / cells * np.arange(cells)[:, None]
        first = np.floor(start + cell).astype(np.int32)
        weights = rng.uniform(0.1, 1.0, taps.shape)
        weights /= weights.sum(axis=-1, keepdims=True)
        index = np.minimum(first + np.arange(count), length - 1)
        return index.astype(np.int32), weights.astype(np.float32)

    y, y_weights = axis(y_taps, height)
    x, x_weights = axis(x_taps, width)
    values = rng.standard_normal(table.shape, np.float32).astype(table.dtype)
    return values, y * width, x, y_weights, x_weights


def _boxes(rng: np.random.Generator, case: Case) -> tuple[np.ndarray | None, ...]:
    """Clusters of boxes as a detector makes around objects; a tenth of the rows is not valid."""
    boxes, _, groups = case.args
    problems, num = boxes.shape[:2]
    objects = max(num // 16, 1)
    centre = rng.uniform(0, 1000, (problems, objects, 2))
    side = rng.uniform(16, 300, (problems, objects, 2))
    which = rng.integers(0, objects, (problems, num))[..., None]
    centre, side = (np.take_along_axis(x, which, axis=1) for x in (centre, side))
    centre = centre + side * rng.normal(0, 0.1, centre.shape)
    side = side * np.exp(rng.normal(0, 0.1, side.shape))
    made = np.concatenate([centre - side / 2, centre + side / 2], axis=-1).astype(np.float32)
    valid = rng.random((problems, num)) < 0.9
    made_groups = None if groups is None else (which[..., 0] % 7 + 1).astype(np.int32)
    return made, valid, made_groups


def _outlines(rng: np.random.Generator, case: Case) -> tuple[np.ndarray, ...]:
    """One or two closed wavy outlines a RoI, in refined pixels, a third of the vertices unused."""
    rois, vertices = case.args[1].shape
    extent = 5 * case.options["size"]
    edges = rng.integers(0, extent, (rois, vertices, 4), np.int32)
    begins, used = np.zeros((rois, vertices), bool), np.zeros((rois, vertices), bool)
    count = max(vertices // 3, 3)
    for roi in range(rois):
        for part in range(rng.integers(1, 3)):
            angle = np.sort(rng.uniform(0, 2 * np.pi, count))
            radius = rng.uniform(0.2, 0.7) * extent * (1 + 0.2 * np.sin(7 * angle))
            centre = rng.uniform(0.3, 0.7, 2) * extent
            points = centre + radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
            points = points.astype(np.int32)
            rows = slice(part * count, (part + 1) * count)
            edges[roi, rows] = np.concatenate([points, np.roll(points, -1, axis=0)], axis=-1)
            used[roi, rows] = True
            begins[roi, part * count] = True
    return edges, begins, used

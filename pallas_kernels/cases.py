"""Shapes for testing, compiling and timing the kernels.

`args` are the kernel's abstract positional arguments, `options` its static keyword arguments. Tiny
cases suit an interpreter; the others have the sizes in a Mask R-CNN with a 256-channel FPN on 832 x
1344 pixels. `example` generates realistic values for any case.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Pixels per image on each of the levels P2 to P5.
PYRAMID_ROWS = tuple((832 // stride) * (1344 // stride) for stride in (4, 8, 16, 32))


@dataclasses.dataclass(frozen=True)
class Case:
    """One call to the kernel named `op`."""

    name: str
    op: str  # "gather_sum", "nms" or "fill_polygons"
    args: tuple[Any, ...]  # trees of abstract arrays
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
    rows: tuple[int, ...],
    images: int = 1,
    channels: int = 256,
) -> Case:
    """`rois` RoIs with `size` x `size` cells and `taps` per axis.

    rows: pixels of an image in each table.
    """
    index = jax.ShapeDtypeStruct((rois, size, taps), jnp.int32)
    weight = jax.ShapeDtypeStruct((rois, size, taps), jnp.float32)
    shapes = [(images * n, channels) for n in rows]
    tables = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)
    args = tables, index, index, weight, weight
    return Case(name, "gather_sum", args, tiny=name.startswith("tiny"))


def _nms(
    name: str,
    problems: int,
    num: int,
    *,
    grouped: bool = False,
    iou_thresh: float = 0.5,
    max_out: int,
    offset: float = 0.0,
) -> Case:
    boxes = jax.ShapeDtypeStruct((problems, num, 4), jnp.float32)
    valid = jax.ShapeDtypeStruct((problems, num), jnp.bool_)
    groups = jax.ShapeDtypeStruct((problems, num), jnp.int32) if grouped else None
    options = dict(iou_thresh=iou_thresh, max_out=max_out, offset=offset)
    return Case(name, "nms", (boxes, valid, groups), options, name.startswith("tiny"))


def _fill_polygons(name: str, rois: int, vertices: int, *, size: int = 28) -> Case:
    edges = jax.ShapeDtypeStruct((rois, vertices, 4), jnp.int32)
    flag = jax.ShapeDtypeStruct((rois, vertices), jnp.bool_)
    args = edges, flag, flag
    return Case(name, "fill_polygons", args, dict(size=size), name.startswith("tiny"))


# Taps per axis: 2 for one sample, 4 for 2 x 2 samples, S + 1 for at most S adaptive samples.
ROI_ALIGN_CASES = tuple(
    _gather_sum(
        f"{name}_{dtype}", rois, size=size, taps=taps, dtype=dtype, rows=PYRAMID_ROWS, images=images
    )
    for dtype in ("float32", "bfloat16")
    for name, rois, size, taps, images in (
        ("box_train_2_images_1_sample", 2 * 512, 7, 2, 2),
        ("box_train_2_images_4_samples", 2 * 512, 7, 4, 2),
        ("box_train_2_images_adaptive_8", 2 * 512, 7, 9, 2),
        ("box_train_2_images_adaptive_16", 2 * 512, 7, 17, 2),
        ("box_train_8_images_4_samples", 8 * 512, 7, 4, 8),
        ("mask_train_2_images_1_sample", 2 * 128, 14, 2, 2),
        ("mask_train_8_images_4_samples", 8 * 128, 14, 4, 8),
        ("mask_28_train_2_images_4_samples", 2 * 128, 28, 4, 2),
        ("box_test_1_image_4_samples", 1000, 7, 4, 1),
    )
) + tuple(
    _gather_sum(f"{name}_{dtype}", 3, size=size, taps=taps, dtype=dtype, rows=rows, channels=width)
    for name, dtype, size, taps, rows, width in (
        ("tiny_1_sample", "float32", 3, 2, (60,), 128),
        ("tiny_4_samples", "bfloat16", 3, 4, (30, 20, 10), 256),
        ("tiny_adaptive", "float32", 2, 9, (100, 60, 40), 128),
    )
)

# RPN: a problem is a level in an image. Detections: a problem is an image, a group is a class.
NMS_CASES = (
    _nms("rpn_train_2_images", 2 * 5, 2000, iou_thresh=0.7, max_out=1000),
    _nms("rpn_train_8_images", 8 * 5, 2000, iou_thresh=0.7, max_out=1000),
    _nms("rpn_train_2_images_inclusive", 2 * 5, 2000, iou_thresh=0.7, max_out=2000, offset=1.0),
    _nms("rpn_test_1_image", 5, 1000, iou_thresh=0.7, max_out=1000),
    _nms("detections_1_image", 1, 4096, grouped=True, max_out=100),
    _nms("detections_8_images", 8, 4096, grouped=True, max_out=100),
    _nms("detections_8_images_all", 8, 4096, grouped=True, max_out=4096, offset=1.0),
    _nms("largest", 2, 8192, grouped=True, max_out=8192),
    _nms("tiny", 2, 128, max_out=128),
    _nms("tiny_grouped", 2, 100, grouped=True, max_out=20),
    _nms("tiny_inclusive", 1, 128, iou_thresh=0.7, max_out=128, offset=1.0),
)

# 128 RoIs per image: the foreground share among 512.
MASK_TARGET_CASES = (
    _fill_polygons("mask_train_2_images", 2 * 128, 512),
    _fill_polygons("mask_train_8_images", 8 * 128, 512),
    _fill_polygons("mask_56_train_2_images", 2 * 128, 512, size=56),
    _fill_polygons("tiny", 3, 24),
    _fill_polygons("tiny_40", 2, 12, size=40),
)

CASES = ROI_ALIGN_CASES + NMS_CASES + MASK_TARGET_CASES


def example(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """Generate values for the arguments of `case`, reproducible by seed."""
    generate = {"gather_sum": _taps, "nms": _boxes, "fill_polygons": _outlines}[case.op]
    return generate(np.random.default_rng(seed), case)


def _taps(rng: np.random.Generator, case: Case) -> tuple[Any, ...]:
    """Windows of neighboring pixels, each on one of roughly square maps; weights sum to 1."""
    tables, y_taps, x_taps = case.args[:3]
    rows = np.array([table.shape[0] for table in tables])
    levels = rng.permutation(np.arange(y_taps.shape[0]) % len(tables))
    widths = np.array([math.isqrt(n) for n in rows])[levels]
    heights, starts = rows[levels] // widths, (np.cumsum(rows) - rows)[levels]

    def axis(taps: jax.ShapeDtypeStruct, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rois, cells, count = taps.shape
        lengths = lengths[:, None, None]
        start = rng.uniform(0, 0.5, (rois, 1, 1)) * lengths
        cell = rng.uniform(0.2, 0.5, (rois, 1, 1)) * lengths / cells * np.arange(cells)[:, None]
        first = np.floor(start + cell).astype(np.int32)
        weights = rng.uniform(0.1, 1.0, taps.shape)
        weights /= weights.sum(axis=-1, keepdims=True)
        index = np.minimum(first + np.arange(count), lengths - 1)
        return index.astype(np.int32), weights.astype(np.float32)

    y, y_weights = axis(y_taps, heights)
    x, x_weights = axis(x_taps, widths)
    y = (starts[:, None, None] + y * widths[:, None, None]).astype(np.int32)
    values = [rng.standard_normal(t.shape, np.float32).astype(t.dtype) for t in tables]
    return values, y, x, y_weights, x_weights


def _boxes(rng: np.random.Generator, case: Case) -> tuple[np.ndarray | None, ...]:
    """Box clusters like a detector's around objects; a tenth of the rows are invalid."""
    boxes, _, groups = case.args
    problems, num = boxes.shape[:2]
    objects = max(num // 16, 1)
    center = rng.uniform(0, 1000, (problems, objects, 2))
    side = rng.uniform(16, 300, (problems, objects, 2))
    index = rng.integers(0, objects, (problems, num))[..., None]
    center, side = (np.take_along_axis(x, index, axis=1) for x in (center, side))
    center = center + side * rng.normal(0, 0.1, center.shape)
    side = side * np.exp(rng.normal(0, 0.1, side.shape))
    values = np.concatenate([center - side / 2, center + side / 2], axis=-1).astype(np.float32)
    valid = rng.random((problems, num)) < 0.9
    return values, valid, None if groups is None else (index[..., 0] % 7 + 1).astype(np.int32)


def _outlines(rng: np.random.Generator, case: Case) -> tuple[np.ndarray, ...]:
    """One or two closed wavy outlines per RoI, in refined pixels; a third of vertices unused."""
    rois, vertices = case.args[1].shape
    extent = 5 * case.options["size"]
    edges = rng.integers(0, extent, (rois, vertices, 4), np.int32)
    begins, used = np.zeros((rois, vertices), bool), np.zeros((rois, vertices), bool)
    count = max(vertices // 3, 3)
    for roi in range(rois):
        for part in range(rng.integers(1, 3)):
            angle = np.sort(rng.uniform(0, 2 * np.pi, count))
            radius = rng.uniform(0.2, 0.7) * extent * (1 + 0.2 * np.sin(7 * angle))
            center = rng.uniform(0.3, 0.7, 2) * extent
            points = center + radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
            points = points.astype(np.int32)
            rows = slice(part * count, (part + 1) * count)
            edges[roi, rows] = np.concatenate([points, np.roll(points, -1, axis=0)], axis=-1)
            used[roi, rows] = True
            begins[roi, part * count] = True
    return edges, begins, used

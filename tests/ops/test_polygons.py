import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.ops import polygons as polygon_ops
from tests.helpers import shared

polygon_mask_targets = jax.jit(
    polygon_ops.polygon_mask_targets, static_argnames=("size", "min_size")
)


def packed(objects, vertices=64):
    """[G, V, 3] of objects that are lists of [n, 2] arrays."""
    out = np.tile(np.array([0, 0, -1], np.float32), (len(objects), vertices, 1))
    for row, parts in enumerate(objects):
        points = [np.column_stack([p, np.full(len(p), i)]) for i, p in enumerate(parts)]
        points = np.concatenate(points)
        out[row, : len(points)] = points
    return jnp.asarray(out)


def drawn_by_pycocotools(parts, roi, size, min_size):
    roi = roi.astype(np.float64)
    scale = size / np.maximum(roi[2:] - roi[:2], min_size)
    parts = [((part.astype(np.float64) - roi[:2]) * scale).ravel().tolist() for part in parts]
    return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(parts, size, size)))


def wrong_share(objects, rois, matched, *, size=28, min_size=0.1, vertices=64):
    """Share of pixels unlike pycocotools', and of pixels that are 1."""
    targets, drawn = polygon_mask_targets(
        packed(objects, vertices), jnp.asarray(rois), jnp.asarray(matched), size=size,
        min_size=min_size,
    )  # fmt: skip
    assert targets.dtype == jnp.float32
    assert np.all(drawn)
    expected = [
        drawn_by_pycocotools(objects[g], roi, size, min_size)
        for g, roi in zip(matched, rois, strict=True)
    ]
    return np.mean(np.asarray(targets) != np.array(expected)), np.mean(expected)


def random_objects(rng, count, spread, center, max_parts=3):
    return [
        [
            rng.normal(center, spread, (rng.integers(3, 16), 2)).astype(np.float32)
            for _ in range(rng.integers(1, max_parts + 1))
        ]
        for _ in range(count)
    ]


def test_a_rectangle_and_a_triangle_by_hand():
    """A pixel is in when its center is; here the centers on the slope are out."""
    rectangle = np.array([[2, 1], [6, 1], [6, 7], [2, 7]], np.float32)
    triangle = np.array([[0, 0], [8, 0], [0, 8]], np.float32)
    roi = jnp.array([[0.0, 0.0, 8.0, 8.0]] * 2)
    targets, drawn = polygon_mask_targets(
        packed([[rectangle], [triangle]]), roi, jnp.array([0, 1]), size=8
    )
    expected = np.zeros((8, 8))
    expected[1:7, 2:6] = 1
    np.testing.assert_array_equal(targets[0], expected)
    np.testing.assert_array_equal(targets[1], np.tri(8, k=-1)[::-1])
    assert drawn.tolist() == [True, True]


def test_parts_are_joined_and_a_part_crossing_itself_has_a_hole():
    square = np.array([[0, 0], [8, 0], [8, 8], [0, 8]], np.float32)
    inner = square / 2 + 2
    twice = np.concatenate([square, inner])  # one outline: into the hole and out again
    roi = jnp.array([[0.0, 0.0, 8.0, 8.0]] * 2)
    objects = packed([[square, inner], [twice]])
    union, hole = polygon_mask_targets(objects, roi, jnp.array([0, 1]), size=8)[0]
    np.testing.assert_array_equal(union, 1)
    assert np.asarray(hole)[3:5, 3:5].sum() == 0
    assert np.asarray(hole).sum() > 20


@pytest.mark.parametrize("spread", [5, 30, 200, 2000])
def test_random_polygons_equal_pycocotools(spread):
    """Up to far outside the roi of 56 x 42 pixels."""
    rng = np.random.default_rng(spread)
    objects = random_objects(rng, 100, spread, 25)
    rois = np.tile(np.array([[0, 0, 56, 42]], np.float32), (100, 1))
    wrong, ones = wrong_share(objects, rois, np.arange(100))
    assert wrong <= 1e-4
    assert ones > 0.03


@pytest.mark.parametrize(("size", "min_size"), [(14, 1.0), (28, 0.1), (56, 0.1), (112, 0.1)])
def test_tiny_rois_and_other_sizes_equal_pycocotools(size, min_size):
    rng = np.random.default_rng(size)
    objects = random_objects(rng, 60, 2, 25)
    corner = rng.uniform(22, 28, (60, 2))
    rois = np.concatenate([corner, corner + rng.uniform(0.3, 4, (60, 2))], 1).astype(np.float32)
    wrong, ones = wrong_share(objects, rois, np.arange(60), size=size, min_size=min_size)
    assert wrong <= 1e-3
    assert 0.1 < ones < 0.9


def test_rows_of_whole_and_half_pixels_equal_pycocotools():
    """Vertices on pixel borders and centers, where every rounding is a tie."""
    rng = np.random.default_rng(0)
    objects = [
        [np.round(part * 2) / 2 for part in parts] for parts in random_objects(rng, 100, 12, 14)
    ]
    rois = np.tile(np.array([[0, 0, 28, 28]], np.float32), (100, 1))
    wrong, _ = wrong_share(objects, rois, np.arange(100))
    assert wrong <= 1e-3


def test_more_than_32_parts():
    rng = np.random.default_rng(1)
    objects = random_objects(rng, 4, 4, 14, max_parts=1)
    parts = [
        np.float32(rng.uniform(0, 28, 2)) + part[0] - 14 for part in objects for _ in range(10)
    ]
    rois = np.array([[0, 0, 28, 28]], np.float32)
    assert wrong_share([parts], rois, [0], vertices=700)[0] <= 1e-3


def test_coco_polygons_with_jittered_rois_equal_pycocotools():
    path = shared("data/coco_mini/annotations/instances_val2017.json")
    annotations = json.loads(path.read_text())["annotations"]
    annotations = [a for a in annotations if not a["iscrowd"]][:400]
    objects = [
        [np.asarray(part, np.float32).reshape(-1, 2) for part in a["segmentation"]]
        for a in annotations
    ]
    boxes = np.array([a["bbox"] for a in annotations], np.float32)
    boxes[:, 2:] += boxes[:, :2]
    rng = np.random.default_rng(2)
    sides = np.tile(boxes[:, 2:] - boxes[:, :2], 2)
    amount = rng.choice([0.02, 0.1, 0.3, 2.0], (len(boxes), 1))
    rois = boxes + rng.normal(size=boxes.shape) * amount * sides
    rois = np.concatenate([rois[:, :2], np.maximum(rois[:, :2] + 1, rois[:, 2:])], axis=1)
    rois = rois.astype(np.float32)
    wrong, ones = wrong_share(objects, rois, np.arange(len(boxes)), vertices=256)
    assert wrong <= 1e-4
    assert 0.2 < ones < 0.8


def test_an_object_without_vertices_is_not_drawn_and_padding_may_be_anywhere():
    square = np.array([[2, 2], [6, 2], [6, 6], [2, 6]], np.float32)
    polygons = np.tile(np.array([9, 9, -1], np.float32), (3, 7, 1))
    polygons[1, 2:6] = np.column_stack([square, np.zeros(4)])
    polygons[2, :4] = np.column_stack([square, np.zeros(4)])
    rois = jnp.array([[0.0, 0.0, 8.0, 8.0]] * 3)
    targets, drawn = polygon_mask_targets(jnp.asarray(polygons), rois, jnp.arange(3), size=8)
    assert drawn.tolist() == [False, True, True]
    np.testing.assert_array_equal(targets[0], 0)
    np.testing.assert_array_equal(targets[1], targets[2])
    assert targets[1].sum() == 16
    none = jnp.zeros((3, 0, 3))
    targets, drawn = polygon_mask_targets(none, rois, jnp.arange(3), size=8)
    assert not np.any(targets) and not np.any(drawn)


def test_degenerate_rois_are_finite_and_empty_where_nothing_is():
    square = np.array([[2, 2], [6, 2], [6, 6], [2, 6]], np.float32)
    rois = jnp.array([[4, 4, 4, 4], [90, 90, 99, 99], [6, 6, 2, 2], [0, 0, 0, 0], [-1e9] * 4,
                      [-1e9, -1e9, 1e9, 1e9], [jnp.nan] * 4])  # fmt: skip
    targets, drawn = polygon_mask_targets(packed([[square]]), rois, jnp.zeros(7, jnp.int32))
    assert np.all(drawn)
    assert set(np.unique(targets[:6])) == {0.0, 1.0}
    assert np.all(np.isfinite(targets))
    assert np.all(targets[0] == 1)  # a tenth of a pixel, in the middle of the square
    assert not np.any(targets[jnp.array([1, 2, 3, 4, 5])])


def test_each_image_of_a_batch_is_as_alone():
    rng = np.random.default_rng(3)
    objects = packed(random_objects(rng, 6, 20, 25)).reshape(2, 3, 64, 3)
    corner = rng.uniform(0, 20, (2, 5, 2))
    rois = np.concatenate([corner, corner + rng.uniform(5, 40, (2, 5, 2))], axis=-1)
    rois = jnp.asarray(rois.astype(np.float32))
    matched = jnp.asarray(rng.integers(0, 3, (2, 5)))
    batched, _ = jax.vmap(polygon_mask_targets)(objects, rois, matched)
    for image in range(2):
        alone = polygon_mask_targets(objects[image], rois[image], matched[image])
        np.testing.assert_array_equal(batched[image], alone[0])


def test_memory_does_not_hold_every_edge_on_every_pixel():
    """128 rois x 512 vertices x 28 x 28 pixels would be 205 MB of integers."""
    shapes = [(100, 512, 3), (128, 4), (128,)]
    args = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, "ffi", strict=True)]
    compiled = polygon_mask_targets.lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 50e6

"""RoIAlign's form for TPUs gives what the definition gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops import roi_align as definition
from mask_rcnn_jax.ops import roi_align_windows as windows
from mask_rcnn_jax.ops.roi_align import RoIAlign, roi_align

SIDES = (96, 64), (48, 32), (24, 16), (12, 8)  # of the maps, width and height
OPTIONS = {
    "torchvision": RoIAlign(),
    "clamped": RoIAlign(sampling_ratio=1, border="clamp", min_size=0.0),
    "adaptive": RoIAlign(sampling_ratio=0, aligned=True, min_size=0.0),
    "too many samples": RoIAlign(sampling_ratio=0, max_sampling_ratio=2),
}


def inputs(dtype=np.float32):
    """Maps of 2 images, and boxes of every shape: some wider than three windows, some empty."""
    rng = np.random.default_rng(0)
    maps = [rng.normal(size=(2, h, w, 5)).astype(dtype) for w, h in SIDES]
    corners = rng.uniform(-0.1, 1.1, (2, 2, 60, 2)) * (384, 256)
    boxes = np.concatenate([corners.min(axis=0), corners.max(axis=0)], axis=-1)
    boxes[:, :20, 3] = boxes[:, :20, 1] + 20  # flat, so that they stay on the finest map
    boxes[:, 20] = 0
    boxes[:, 21, 2:] = boxes[:, 21, :2]
    boxes[:, 22] = (0, 200, 384, 256)
    boxes[:, 23:26] = (-100, -150, 450, 400)  # on the coarsest map
    boxes[:, 26:29] = (50, 20, 300, 310)
    valid = rng.uniform(size=boxes.shape[:2]) < 0.8
    images = np.array([[1], [0]]).repeat(60, axis=1)
    images, valid = jnp.asarray(images, jnp.int32), jnp.asarray(valid)
    return [jnp.asarray(one) for one in maps], jnp.asarray(boxes, jnp.float32), (images, valid)


def pooled_and_gradient(maps, boxes, of_rows, options, weights):
    def pool(maps):
        return roi_align(maps, boxes, options, output_size=(3, 5), of_rows=of_rows)

    out, transpose = jax.vjp(pool, maps)
    return out, transpose(weights)[0]


@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [*((name, "float32", 1e-5) for name in OPTIONS), ("torchvision", "bfloat16", 0.01)],
)
def test_equal_to_the_definition(name, dtype, bound, monkeypatch):
    maps, boxes, of_rows = inputs(jnp.dtype(dtype))
    weights = np.random.default_rng(1).normal(size=(2, 60, 3, 5, 5)).astype(maps[0].dtype)
    run = partial(pooled_and_gradient, maps, boxes, of_rows, OPTIONS[name], weights)
    expected = jax.jit(run)()
    monkeypatch.setattr(definition, "xla_gather_sum", windows.gather_sum)
    monkeypatch.setattr(definition, "xla_gather_sum_transpose", windows.gather_sum_transpose)
    found = jax.jit(lambda: run())()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert np.isfinite(one).all() and other.any()
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound * np.abs(other).max())


def test_wide_boxes_take_several_windows_and_those_not_pooled_none():
    x_taps = jnp.asarray([[0, 40], [0, 40], [7, 7], [3, 50]])[:, None]
    weights = jnp.asarray([[0.5, 0.5], [0.5, 0.0], [0.5, 0.5], [0.5, 0.5]])[:, None]
    y_weights = jnp.asarray([1.0, 1.0, 1.0, 0.0])[:, None, None]
    count, first = windows._count_windows(x_taps, y_weights, weights)
    assert count.tolist() == [3, 1, 1, 0] and first.tolist()[:3] == [0, 0, 7]


def test_no_boxes():
    maps, _, _ = inputs()
    taps = [
        jnp.zeros((0, *cells), dtype)
        for dtype in ("int32", "float32")
        for cells in ((3, 4), (5, 4))
    ]
    tables = [one.reshape(-1, 5) for one in maps]
    assert windows.gather_sum(tables, *taps).shape == (0, 3, 5, 5)
    grad = windows.gather_sum_transpose(jnp.ones((0, 3, 5, 5)), *taps, num_rows=9)
    assert grad.shape == (9, 5) and not grad.any()


@pytest.mark.parametrize(("platform", "implementation", "taken"), [
    ("tpu", None, True), ("tpu", "xla", False), ("cpu", None, False),
])  # fmt: skip
def test_programs_for_tpus_take_this_form(platform, implementation, taken):
    maps, boxes, _ = inputs()
    pool = partial(roi_align, options=RoIAlign(), output_size=7, implementation=implementation)
    traced = jax.jit(lambda maps, boxes: pool(maps, boxes)).trace(maps, boxes)
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert (f"slice_sizes = array<i64: 1, {5 * windows.BLOCK}>" in program) == taken

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops import roi_align as roi_align_module
from mask_rcnn_jax.ops.roi_align import RoIAlign, assign_levels
from tests.bounds import assert_within, pooling_bound, pooling_gradient_bound, sum_bound
from tests.helpers import GOLDENS, assert_finite_tree, load_golden, random_boxes

PLAIN = {"sampling_ratio": 1, "border": "clamp", "min_size": 0.0}


def eager_roi_align(features, boxes, *, extent=None, implementation=None, **settings):
    """`roi_align` with the fields of `RoIAlign` among its settings; all maps are read."""
    rest = {"extent": extent, "implementation": implementation}
    rest |= {k: settings.pop(k) for k in ("output_size", "level_offset") if k in settings}
    options = RoIAlign(**{"max_level": 1 + len(features)} | PLAIN | settings)
    return roi_align_module.roi_align(features, boxes, options, **rest)


SETTINGS = (
    "output_size",
    "level_offset",
    "implementation",
    *(field.name for field in dataclasses.fields(RoIAlign)),
)
roi_align = jax.jit(eager_roi_align, static_argnames=SETTINGS)


def pyramid(rng, batch=2, size=(64, 96), channels=3, levels=4):
    return [
        rng.normal(size=(batch, size[0] >> k, size[1] >> k, channels)).astype(np.float32)
        for k in range(levels)
    ]


def slow_roi_align(features, boxes, output_size, sampling_ratio, aligned, border, min_size):
    """One sample point at a time, in float64. `sampling_ratio` 0 follows the size of the box."""
    batch, num = boxes.shape[:2]
    out = np.zeros((batch, num, output_size, output_size, features[0].shape[-1]))
    for b, n in np.ndindex(batch, num):
        x1, y1, x2, y2 = boxes[b, n].astype(np.float64)
        root = np.sqrt(max(x2 - x1, 0) * max(y2 - y1, 0))
        level = 2 if root == 0 else int(np.floor(np.log2(root / 224))) + 4
        k = min(max(level, 2), 1 + len(features)) - 2
        f = features[k][b].astype(np.float64)
        x1, y1, x2, y2 = (c / (4 << k) for c in (x1, y1, x2, y2))
        width, height = x2 - x1, y2 - y1
        if min_size:
            width, height = max(width, min_size), max(height, min_size)
        shift = 0.5 if aligned else 0.0
        rows, columns = (
            sampling_ratio or max(int(np.ceil(side / output_size)), 0) for side in (height, width)
        )
        for p, q, i, j in np.ndindex(output_size, output_size, rows, columns):
            y = y1 - shift + (p + (i + 0.5) / rows) * height / output_size
            x = x1 - shift + (q + (j + 0.5) / columns) * width / output_size
            out[b, n, p, q] += slow_bilinear(f, y, x, border) / (rows * columns)
    return out


def slow_bilinear(f, y, x, border):
    rows, columns = f.shape[:2]
    if border == "zero" and (y < -1 or y > rows or x < -1 or x > columns):
        return 0.0
    y, x = min(max(y, 0), rows - 1), min(max(x, 0), columns - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
    v, u = y - top, x - left
    upper = (1 - u) * f[top, left] + u * f[top, right]
    return (1 - v) * upper + v * ((1 - u) * f[bottom, left] + u * f[bottom, right])


def bound_of(features, boxes, first_stride=4):
    """`pooling_bound` of every box, [B, N, 1, 1, 1]."""
    cells = np.abs(boxes).max(axis=-1)[..., None, None, None] / first_stride
    return pooling_bound(cells, max(float(np.abs(f).max()) for f in features))


def boxes_of_all_kinds(rng):
    """Inside, larger than the image, beyond each edge, empty, inverted, and all sizes."""
    inside = np.stack([random_boxes(rng, 6, size) for size in (100.0, 250.0)])
    odd = np.array(
        [[-50, -50, 500, 400], [300, 200, 420, 330], [0, 0, 0, 0], [80, 60, 20, 10]], np.float32
    )
    return np.concatenate([inside, np.stack([odd, odd + 7])], axis=1)


def test_levels_by_hand():
    roots = np.array([0, 111.99, 112, 223.99, 224, 447.9, 448, 895.9, 896, 4000], np.float32)
    boxes = np.stack([0 * roots, 0 * roots, roots, roots], axis=-1)
    expected = [2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    np.testing.assert_array_equal(assign_levels(jnp.asarray(boxes), max_level=6), expected)
    expected = np.minimum(expected, 5)
    np.testing.assert_array_equal(assign_levels(jnp.asarray(boxes), max_level=5), expected)


def test_levels_equal_torchvision():
    golden = load_golden("torchvision/ops")
    levels = assign_levels(jnp.asarray(golden["lvl_boxes"]), max_level=5)
    np.testing.assert_array_equal(levels - 2, golden["lvl"])  # theirs count from 0


def test_levels_with_inclusive_pixels():
    """A box of 0..111 is 112 pixels wide if both ends count."""
    box = jnp.array([[0.0, 0.0, 111.0, 111.0]])
    assert assign_levels(box, max_level=5).item() == 2
    assert assign_levels(box, max_level=5, offset=1.0).item() == 3
    flat = [jnp.zeros((1, 64, 64, 1)), jnp.ones((1, 32, 32, 1))]  # the level as a feature
    for offset, level in ((0.0, 0), (1.0, 1)):
        out = roi_align(flat, box[None], output_size=1, level_offset=offset)
        assert out.item() == level


@pytest.mark.parametrize("sampling", [0, 1, 2])
@pytest.mark.parametrize(("aligned", "shift"), [(False, 0.0), (True, 0.5)])
def test_ramp_by_hand(sampling, aligned, shift):
    """On features equal to their column index a cell holds the x of its own center."""
    ramp = jnp.broadcast_to(jnp.arange(12.0)[None, None, :, None], (1, 12, 12, 2))
    out = roi_align(
        [ramp], jnp.array([[[8.0, 4.0, 32.0, 28.0]]]), output_size=3,
        sampling_ratio=sampling, aligned=aligned,
    )  # fmt: skip
    np.testing.assert_allclose(out[0, 0, :, :, 0], np.tile([3.0, 5.0, 7.0], (3, 1)) - shift)


@pytest.mark.parametrize(
    ("sampling", "aligned", "border", "min_size"),
    [
        (1, False, "clamp", 0.0),
        (2, True, "zero", 0.0),
        (2, False, "zero", 1.0),
        (3, True, "clamp", 2.0),
        (0, False, "clamp", 0.0),
        (0, True, "zero", 0.0),
        (0, False, "zero", 1.0),
        (0, True, "clamp", 2.0),
    ],
)
def test_equals_slow_oracle(sampling, aligned, border, min_size):
    rng = np.random.default_rng(sampling)
    features, boxes = pyramid(rng, size=(64, 80)), boxes_of_all_kinds(rng)
    settings = {
        "output_size": 3, "sampling_ratio": sampling,
        "aligned": aligned, "border": border, "min_size": min_size,
    }  # fmt: skip
    out = roi_align([jnp.asarray(f) for f in features], jnp.asarray(boxes), **settings)
    expected = slow_roi_align(features, boxes, **settings)
    assert_within(out, expected, bound_of(features, boxes))


@pytest.mark.parametrize("border", ["clamp", "zero"])
def test_more_samples_than_the_bound_become_points_at_the_nearest_cell(border):
    """2 bins of 15 and of 5 cells: 15 samples are too many for a bound of 5, 5 are not."""
    rng = np.random.default_rng(10)
    f = rng.normal(size=(1, 12, 40, 2)).astype(np.float32)
    box = np.array([[[12.2, 0.9, 42.2, 10.9]]], np.float32)
    out = roi_align(
        [jnp.asarray(f)], jnp.asarray(4 * box), output_size=2, sampling_ratio=0,
        max_sampling_ratio=5, border=border,
    )  # fmt: skip
    expected = np.zeros((2, 2, 2))
    for p, q, i, j in np.ndindex(2, 2, 5, 6):
        y, x = 0.9 + 5 * p + i + 0.5, 12.2 + 15 * q + (j + 0.5) * 15 / 6
        if border == "zero" and x > 40:
            continue
        column = int(np.clip(np.floor(x + 0.5), 0, 39))
        expected[p, q] += slow_bilinear(f[0], y, float(column), border) / 30
    assert_within(out[0, 0], expected, bound_of([f], box, 1)[0, 0])


def test_bounded_samples_are_close_on_smooth_features():
    y, x = np.mgrid[:100, :100]
    f = jnp.asarray(np.sin(x / 9.0) * np.cos(y / 7.0), jnp.float32)[None, :, :, None]
    boxes = 4 * jnp.array([[[1.3, 2.4, 95.2, 13.7], [20.1, 3.0, 33.3, 97.5]]])
    settings = {"output_size": 3, "sampling_ratio": 0, "aligned": True}
    exact = roi_align([f], boxes, max_sampling_ratio=40, **settings)
    np.testing.assert_allclose(roi_align([f], boxes, **settings), exact, atol=0.02)
    assert np.abs(exact).max() > 0.2


@pytest.mark.parametrize(
    ("sampling", "border"),
    [(1, "clamp"), pytest.param(2, "zero", marks=pytest.mark.slow), (0, "zero")],
)
def test_what_lies_beyond_the_extent_does_not_exist(sampling, border):
    """As on maps cut to 44 x 70 pixels, rounded up to whole cells; and no gradient goes there."""
    rng = np.random.default_rng(11)
    features = [jnp.asarray(f) for f in pyramid(rng, levels=3)]
    across = np.full((2, 1, 4), [10.0, 10.0, 130.0, 140.0], np.float32)  # of the second level
    boxes = jnp.asarray(np.concatenate([boxes_of_all_kinds(rng), across], axis=1))
    settings = {
        "output_size": 3, "sampling_ratio": sampling, "border": border,
        "aligned": True,
    }  # fmt: skip
    cells = [(11, 18), (6, 9), (3, 5)]
    cut = [f[:, :rows, :columns] for f, (rows, columns) in zip(features, cells, strict=True)]
    out, vjp = jax.vjp(
        lambda f: roi_align(f, boxes, extent=jnp.array([44, 70]), **settings), features
    )
    assert_within(out, roi_align(cut, boxes, **settings), 2 * bound_of(features, boxes))
    for grad, (rows, columns) in zip(vjp(jnp.ones_like(out))[0], cells, strict=True):
        assert np.any(np.asarray(grad))
        np.testing.assert_array_equal(grad[:, rows:], 0.0)
        np.testing.assert_array_equal(grad[:, :, columns:], 0.0)


def test_an_extent_of_the_whole_maps_changes_nothing():
    rng = np.random.default_rng(12)
    features = [jnp.asarray(f) for f in pyramid(rng)]
    boxes = jnp.asarray(boxes_of_all_kinds(rng))
    settings = {"output_size": 2, "sampling_ratio": 2}
    whole = roi_align(features, boxes, **settings)
    for extent in ((256, 384), (500, 500)):
        out = roi_align(features, boxes, extent=jnp.array(extent), **settings)
        assert_within(out, whole, 2 * bound_of(features, boxes))


@pytest.mark.parametrize("sampling", [2, 0])
def test_gradient_is_the_transpose_of_the_forward(sampling):
    """Linear in the features, so <g, f(x)> = <f^T(g), x>, and autodiff of plain code agrees."""
    rng = np.random.default_rng(4)
    features = [jnp.asarray(f) for f in pyramid(rng, size=(32, 40), levels=3)]
    boxes = jnp.asarray(boxes_of_all_kinds(rng))
    settings = {"output_size": 4, "sampling_ratio": sampling}
    out, vjp = jax.vjp(lambda f: roi_align(f, boxes, **settings), features)
    upstream = jnp.asarray(rng.normal(size=out.shape).astype(np.float32))
    (grads,) = vjp(upstream)
    (magnitudes,) = vjp(jnp.abs(upstream))
    pairs = [np.float64(g) * f for g, f in zip(grads, features, strict=True)]
    products = np.float64(upstream) * out
    # Both sides have the same weights. 300: more than there are taps, or shares of a cell.
    size = np.sqrt(np.sum(products**2) + sum(np.sum(pair**2) for pair in pairs))
    pairing = sum(pair.sum() for pair in pairs)
    assert_within(pairing, products.sum(), sum_bound(300) * size)
    # One pixel at a time: the response to a unit impulse is a column of the same matrix.
    for level, index in ((0, (0, 3, 5, 1)), (1, (1, 15, 19, 0)), (2, (0, 0, 0, 2))):
        impulse = [jnp.zeros_like(f) for f in features]
        impulse[level] = impulse[level].at[index].set(1.0)
        response = np.float64(roi_align(impulse, boxes, **settings))
        bound = 2 * pooling_gradient_bound(np.abs(boxes).max() / 4, magnitudes[level])[index]
        assert_within(grads[level][index], np.sum(upstream * response), bound)


def test_no_gradient_to_boxes():
    features = [jnp.asarray(f) for f in pyramid(np.random.default_rng(5), levels=1)]
    boxes = jnp.array([[[3.0, 4.0, 50.0, 60.0]]] * 2)
    grad = jax.grad(lambda b: roi_align(features, b, output_size=2).sum())(boxes)
    np.testing.assert_array_equal(grad, 0.0)


def test_padding_changes_nothing():
    rng = np.random.default_rng(6)
    features = [jnp.asarray(f) for f in pyramid(rng)]
    boxes = jnp.asarray(boxes_of_all_kinds(rng))
    padded = jnp.pad(boxes, ((0, 0), (0, 5), (0, 0)))
    few, many = (roi_align(features, b, output_size=2) for b in (boxes, padded))
    assert_within(many[:, : boxes.shape[1]], few, 2 * bound_of(features, boxes))


@pytest.mark.parametrize("sampling", [1, 0])
def test_degenerate_boxes_are_finite_and_nan_boxes_stay_inside_the_table(sampling):
    features = [jnp.asarray(f) for f in pyramid(np.random.default_rng(7), levels=1)]
    boxes = jnp.array([[[0.0] * 4, [9.0] * 4, [1e9] * 4, [-1e9, -1e9, 1e9, 1e9]]] * 2)
    settings = {"output_size": 2, "sampling_ratio": sampling}
    out, vjp = jax.vjp(lambda f: roi_align(f, boxes, **settings), features)
    assert_finite_tree((out, vjp(jnp.ones_like(out))))
    if sampling == 0:  # no extent, no sample
        np.testing.assert_array_equal(np.asarray(out)[:, :2], 0.0)
    broken = boxes.at[:, 1].set(jnp.nan)
    good = np.array([0, 2, 3])
    before, after = (np.asarray(roi_align(features, b, **settings)) for b in (boxes, broken))
    np.testing.assert_array_equal(after[:, good], before[:, good])


def test_bfloat16_features_keep_their_dtype_and_float32_sums():
    rng = np.random.default_rng(8)
    features = [jnp.asarray(f, jnp.bfloat16) for f in pyramid(rng, levels=2)]
    boxes = jnp.asarray(boxes_of_all_kinds(rng))
    settings = {"output_size": 3, "sampling_ratio": 2}
    out, vjp = jax.vjp(lambda f: roi_align(f, boxes, **settings), features)
    assert out.dtype == jnp.bfloat16
    exact = roi_align([f.astype(jnp.float32) for f in features], boxes, **settings)
    # One rounding of the result to 8 bits, at the very end.
    exact = np.asarray(exact)
    bound = 2.0**-8 * np.abs(exact) + 2 * bound_of(features, boxes)
    assert_within(out.astype(jnp.float32), exact, bound)
    assert {g.dtype for g in vjp(out)[0]} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [1, 0])
def test_jit_equals_eager(sampling):
    rng = np.random.default_rng(9)
    features = [jnp.asarray(f) for f in pyramid(rng, levels=1)]
    boxes = jnp.asarray(boxes_of_all_kinds(rng))
    settings = {"output_size": 2, "sampling_ratio": sampling}
    eager = eager_roi_align(features, boxes, **settings)
    jitted = roi_align(features, boxes, **settings)
    assert_within(jitted, eager, 2 * bound_of(features, boxes))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"implementation": "cuda"}, "implementation is 'cuda'"),
        ({"sampling_ratio": -1}, "sampling_ratio is -1"),
        ({"max_sampling_ratio": 0}, "max_sampling_ratio is 0"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        roi_align([jnp.zeros((1, 8, 8, 1))], jnp.zeros((1, 1, 4)), output_size=2, **wrong)


def test_equals_torchvision_forward_and_gradient():
    """Every single-level case: aligned or not, 1, 2 or adaptive samples, square or not."""
    cases = json.loads((GOLDENS / "torchvision" / "ops_roi_align_cases.json").read_text())
    golden = load_golden("torchvision/ops")
    features = jnp.asarray(golden["ra_x"].transpose(0, 2, 3, 1))
    image, boxes = golden["ra_rois"][:, 0].astype(int), golden["ra_rois"][:, 1:]
    # Ours takes equally many boxes of every image: give all to both, then pick.
    boxes = jnp.asarray(np.stack([boxes, boxes]))
    assert len(cases) == 27
    for case in cases:
        # The scale, 1, 1/2 or 1/4, goes into the boxes: fewer programs to compile.
        scaled = boxes * case["spatial_scale"]
        settings = {
            "output_size": tuple(case["output_size"]), "max_sampling_ratio": 17,
            "sampling_ratio": case["sampling_ratio"], "aligned": case["aligned"], "border": "zero",
            "min_size": 0.0 if case["aligned"] else 1.0,
        }  # fmt: skip
        out, vjp = jax.vjp(lambda x, b=4 * scaled, s=settings: roi_align([x], b, **s), features)
        expected = golden[f"{case['key']}_y"]  # [R, C, P, Q]
        picked = np.asarray(out)[image, np.arange(len(image))]
        cells = np.abs(scaled).max()
        bound = 2 * pooling_bound(cells, float(np.abs(features).max()))
        assert_within(picked.transpose(0, 3, 1, 2), expected, bound, case["key"])
        draw = np.random.Generator(np.random.PCG64(6)).normal(size=expected.shape)
        upstream = np.zeros(out.shape, np.float32)
        upstream[image, np.arange(len(image))] = draw.astype(np.float32).transpose(0, 2, 3, 1)
        grad, magnitude = vjp(jnp.asarray(upstream))[0], vjp(jnp.abs(upstream))[0]
        expected = golden[f"{case['key']}_gx"].transpose(0, 2, 3, 1)
        assert_within(grad, expected, 2 * pooling_gradient_bound(cells, magnitude), case["key"])


@pytest.mark.parametrize("size", [7, pytest.param(14, marks=pytest.mark.slow)])
def test_equals_torchvision_multi_scale(size):
    golden = load_golden("torchvision/ops", whole=size == 14)
    features = [jnp.asarray(golden[f"ms_feat{k}"].transpose(0, 2, 3, 1)) for k in range(4)]
    counts = [len(golden["ms_boxes0"]), len(golden["ms_boxes1"])]
    boxes = np.zeros((2, max(counts), 4), np.float32)
    for row, count in enumerate(counts):
        boxes[row, :count] = golden[f"ms_boxes{row}"]
    out, vjp = jax.vjp(
        lambda f: roi_align(
            f, jnp.asarray(boxes), output_size=size, sampling_ratio=2,
            border="zero", min_size=1.0,
        ),
        features,
    )  # fmt: skip
    expected = golden[f"ms_out{size}"].transpose(0, 2, 3, 1)
    valid = np.arange(max(counts))[None] < np.array(counts)[:, None]
    bound = 2 * np.broadcast_to(bound_of(features, boxes), out.shape)
    assert_within(np.asarray(out)[valid], expected, bound[valid])

    draw = np.random.Generator(np.random.PCG64(8)).normal(size=golden[f"ms_out{size}"].shape)
    upstream = np.zeros(out.shape, np.float32)
    upstream[valid] = draw.astype(np.float32).transpose(0, 2, 3, 1)
    (grads,), (magnitudes,) = vjp(jnp.asarray(upstream)), vjp(jnp.abs(upstream))
    for level, (grad, magnitude) in enumerate(zip(grads, magnitudes, strict=True)):
        expected = golden[f"ms_gx{size}_{level}"].transpose(0, 2, 3, 1)
        assert_within(grad, expected, 2 * pooling_gradient_bound(boxes.max() / 4, magnitude))


@pytest.mark.parametrize("sampling_ratio", [1, 0])
def test_boxes_of_any_image_in_one_group(sampling_ratio):
    """As in a group for each image; a row that is not valid is zero and has no gradient."""
    rng = np.random.default_rng(3)
    maps = [jnp.asarray(f) for f in pyramid(rng, levels=2)]
    boxes = jnp.asarray(np.stack([random_boxes(rng, 3, 60.0) for _ in range(2)]))
    settings = dict(output_size=2, sampling_ratio=sampling_ratio)
    rows, valid = np.array([4, 0, 5, 1]), np.array([1, 0, 1, 1], bool)
    weights = jnp.asarray(rng.normal(size=(4, 2, 2, 3)).astype(np.float32))

    def apart(maps):
        pooled = roi_align(maps, boxes, **settings).reshape(-1, 2, 2, 3)[rows]
        return jnp.where(valid[:, None, None, None], pooled, 0.0)

    def together(maps):
        options = RoIAlign(max_level=3, **PLAIN | {"sampling_ratio": sampling_ratio})
        of_rows = jnp.asarray(rows // 3)[None], jnp.asarray(valid)[None]
        one = boxes.reshape(-1, 4)[rows][None]
        return roi_align_module.roi_align(maps, one, options, output_size=2, of_rows=of_rows)[0]

    results = []
    for pool in (apart, together):

        @jax.jit
        @partial(jax.grad, has_aux=True)
        def run(maps, pool=pool):
            pooled = pool(maps)
            return jnp.sum(pooled * weights), pooled

        results.append(run(maps))
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(results[1][0], results[0][0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_without_images_there_is_a_group_for_each():
    with pytest.raises(ValueError, match="1 groups of boxes for 2 images, expected one for each"):
        roi_align([jnp.zeros((2, 8, 12, 1))], jnp.zeros((1, 3, 4)), output_size=2)

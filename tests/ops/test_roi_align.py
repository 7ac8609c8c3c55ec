import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops import roi_align as roi_align_module
from mask_rcnn_jax.ops.roi_align import assign_levels
from tests.helpers import assert_finite_tree, random_boxes, shared

SETTINGS = ("output_size", "strides", "sampling", "half_pixel", "border", "min_size")
roi_align = jax.jit(roi_align_module.roi_align, static_argnames=SETTINGS)


def pyramid(rng, batch=2, size=(64, 96), channels=3, levels=4):
    return [
        rng.normal(size=(batch, size[0] >> k, size[1] >> k, channels)).astype(np.float32)
        for k in range(levels)
    ]


def slow_roi_align(features, boxes, output_size, strides, sampling, half_pixel, border, min_size):
    """One sample point at a time, in float64."""
    batch, num = boxes.shape[:2]
    out = np.zeros((batch, num, output_size, output_size, features[0].shape[-1]))
    for b, n in np.ndindex(batch, num):
        x1, y1, x2, y2 = boxes[b, n].astype(np.float64)
        root = np.sqrt(max(x2 - x1, 0) * max(y2 - y1, 0))
        level = 2 if root == 0 else int(np.floor(np.log2(root / 224))) + 4
        k = min(max(level, 2), 1 + len(features)) - 2
        f = features[k][b].astype(np.float64)
        x1, y1, x2, y2 = (c / strides[k] for c in (x1, y1, x2, y2))
        width, height = x2 - x1, y2 - y1
        if min_size is not None:
            width, height = max(width, min_size), max(height, min_size)
        shift = 0.5 if half_pixel else 0.0
        for p, q, i, j in np.ndindex(output_size, output_size, sampling, sampling):
            y = y1 - shift + (p + (i + 0.5) / sampling) * height / output_size
            x = x1 - shift + (q + (j + 0.5) / sampling) * width / output_size
            out[b, n, p, q] += slow_bilinear(f, y, x, border) / sampling**2
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
    golden = np.load(shared("goldens/torchvision/ops.npz"))
    levels = assign_levels(jnp.asarray(golden["lvl_boxes"]), max_level=5)
    np.testing.assert_array_equal(levels - 2, golden["lvl"])  # theirs count from 0


@pytest.mark.parametrize("sampling", [1, 2])
@pytest.mark.parametrize(("half_pixel", "shift"), [(False, 0.0), (True, 0.5)])
def test_ramp_by_hand(sampling, half_pixel, shift):
    """On features equal to their column index a cell holds the x of its own centre."""
    ramp = jnp.broadcast_to(jnp.arange(12.0)[None, None, :, None], (1, 12, 12, 2))
    out = roi_align(
        [ramp], jnp.array([[[8.0, 4.0, 32.0, 28.0]]]), output_size=3, strides=(4,),
        sampling=sampling, half_pixel=half_pixel,
    )  # fmt: skip
    np.testing.assert_allclose(out[0, 0, :, :, 0], np.tile([3.0, 5.0, 7.0], (3, 1)) - shift)


@pytest.mark.parametrize(
    ("sampling", "half_pixel", "border", "min_size"),
    [
        (1, False, "clamp", None),
        (2, True, "zero", None),
        (2, False, "zero", 1.0),
        (3, True, "clamp", 2.0),
    ],
)
def test_equals_slow_oracle(sampling, half_pixel, border, min_size):
    rng = np.random.default_rng(sampling)
    features, boxes = pyramid(rng, size=(64, 80)), boxes_of_all_kinds(rng)
    settings = {
        "output_size": 3, "strides": (4, 8, 16, 32), "sampling": sampling,
        "half_pixel": half_pixel, "border": border, "min_size": min_size,
    }  # fmt: skip
    out = roi_align([jnp.asarray(f) for f in features], jnp.asarray(boxes), **settings)
    np.testing.assert_allclose(out, slow_roi_align(features, boxes, **settings), atol=2e-5)


def test_gradient_is_the_transpose_of_the_forward():
    """Linear in the features, so <g, f(x)> = <f^T(g), x>, and autodiff of plain code agrees."""
    rng = np.random.default_rng(4)
    features = [jnp.asarray(f) for f in pyramid(rng, size=(32, 40), levels=3)]
    boxes = jnp.asarray(boxes_of_all_kinds(rng))
    settings = {"output_size": 4, "strides": (4, 8, 16), "sampling": 2}
    out, vjp = jax.vjp(lambda f: roi_align(f, boxes, **settings), features)
    upstream = jnp.asarray(rng.normal(size=out.shape).astype(np.float32))
    (grads,) = vjp(upstream)
    pairing = sum(float(jnp.vdot(g, f)) for g, f in zip(grads, features, strict=True))
    np.testing.assert_allclose(pairing, float(jnp.vdot(upstream, out)), rtol=1e-4)
    # One pixel at a time: the response to a unit impulse is a column of the same matrix.
    for level, index in ((0, (0, 3, 5, 1)), (1, (1, 15, 19, 0)), (2, (0, 0, 0, 2))):
        impulse = [jnp.zeros_like(f) for f in features]
        impulse[level] = impulse[level].at[index].set(1.0)
        expected = jnp.vdot(upstream, roi_align(impulse, boxes, **settings))
        np.testing.assert_allclose(grads[level][index], expected, rtol=1e-5, atol=1e-6)


def test_no_gradient_to_boxes():
    features = [jnp.asarray(f) for f in pyramid(np.random.default_rng(5), levels=1)]
    boxes = jnp.array([[[3.0, 4.0, 50.0, 60.0]]] * 2)
    grad = jax.grad(lambda b: roi_align(features, b, output_size=2, strides=(4,)).sum())(boxes)
    np.testing.assert_array_equal(grad, 0.0)


def test_padding_changes_nothing():
    rng = np.random.default_rng(6)
    features = [jnp.asarray(f) for f in pyramid(rng)]
    boxes = jnp.asarray(boxes_of_all_kinds(rng))
    padded = jnp.pad(boxes, ((0, 0), (0, 5), (0, 0)))
    settings = {"output_size": 2, "strides": (4, 8, 16, 32)}
    few, many = (roi_align(features, b, **settings) for b in (boxes, padded))
    np.testing.assert_allclose(few, many[:, : boxes.shape[1]], rtol=1e-6, atol=1e-6)


def test_degenerate_boxes_are_finite_and_nan_boxes_stay_inside_the_table():
    features = [jnp.asarray(f) for f in pyramid(np.random.default_rng(7), levels=1)]
    boxes = jnp.array([[[0.0] * 4, [9.0] * 4, [1e9] * 4, [-1e9, -1e9, 1e9, 1e9]]] * 2)
    out, vjp = jax.vjp(lambda f: roi_align(f, boxes, output_size=2, strides=(4,)), features)
    assert_finite_tree((out, vjp(jnp.ones_like(out))))
    broken = boxes.at[:, 1].set(jnp.nan)
    good = np.array([0, 2, 3])
    again = roi_align(features, broken, output_size=2, strides=(4,))
    np.testing.assert_array_equal(np.asarray(again)[:, good], np.asarray(out)[:, good])


def test_bfloat16_features_keep_their_dtype_and_float32_sums():
    rng = np.random.default_rng(8)
    features = [jnp.asarray(f, jnp.bfloat16) for f in pyramid(rng, levels=2)]
    boxes = jnp.asarray(boxes_of_all_kinds(rng))
    settings = {"output_size": 3, "strides": (4, 8), "sampling": 2}
    out, vjp = jax.vjp(lambda f: roi_align(f, boxes, **settings), features)
    assert out.dtype == jnp.bfloat16
    exact = roi_align([f.astype(jnp.float32) for f in features], boxes, **settings)
    # One rounding, at the very end.
    np.testing.assert_array_equal(out, exact.astype(jnp.bfloat16))
    assert {g.dtype for g in vjp(out)[0]} == {jnp.dtype(jnp.bfloat16)}


def test_jit_equals_eager():
    rng = np.random.default_rng(9)
    features = [jnp.asarray(f) for f in pyramid(rng, levels=1)]
    boxes = jnp.asarray(boxes_of_all_kinds(rng))
    eager = roi_align_module.roi_align(features, boxes, output_size=2, strides=(4,))
    jitted = roi_align(features, boxes, output_size=2, strides=(4,))
    np.testing.assert_allclose(jitted, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"implementation": "cuda"}, "implementation is 'cuda'"),
        ({"border": "torch"}, "border is 'torch'"),
        ({"sampling": 0}, "sampling is 0"),
        ({"strides": (4, 8)}, "2 strides for 1 feature maps"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    settings = {"output_size": 2, "strides": (4,)} | wrong
    with pytest.raises(ValueError, match=message):
        roi_align_module.roi_align([jnp.zeros((1, 8, 8, 1))], jnp.zeros((1, 1, 4)), **settings)


def torchvision_cases():
    """Their single-level cases that we offer: a fixed number of samples, square outputs."""
    cases = json.loads(shared("goldens/torchvision/ops_roi_align_cases.json").read_text())
    return [c for c in cases if c["sampling_ratio"] and len(set(c["output_size"])) == 1]


def test_equals_torchvision_forward_and_gradient():
    golden = np.load(shared("goldens/torchvision/ops.npz"))
    features = jnp.asarray(golden["ra_x"].transpose(0, 2, 3, 1))
    image, boxes = golden["ra_rois"][:, 0].astype(int), golden["ra_rois"][:, 1:]
    # Ours takes equally many boxes of every image: give all to both, then pick.
    boxes = jnp.asarray(np.stack([boxes, boxes]))
    cases = torchvision_cases()
    assert len(cases) == 16
    for case in cases:
        settings = {
            "output_size": case["output_size"][0], "strides": (round(1 / case["spatial_scale"]),),
            "sampling": case["sampling_ratio"], "half_pixel": case["aligned"],
            "border": "zero", "min_size": None if case["aligned"] else 1.0,
        }  # fmt: skip
        out, vjp = jax.vjp(lambda x, s=settings: roi_align([x], boxes, **s), features)
        expected = golden[f"{case['key']}_y"]  # [R, C, P, P]
        picked = np.asarray(out)[image, np.arange(len(image))]
        np.testing.assert_allclose(picked.transpose(0, 3, 1, 2), expected, atol=1e-5)

        draw = np.random.Generator(np.random.PCG64(6)).normal(size=expected.shape)
        upstream = np.zeros(out.shape, np.float32)
        upstream[image, np.arange(len(image))] = draw.astype(np.float32).transpose(0, 2, 3, 1)
        (grad,) = vjp(jnp.asarray(upstream))
        # Up to a hundred terms of size 1 meet in one pixel, added in another order.
        expected = golden[f"{case['key']}_gx"].transpose(0, 2, 3, 1)
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("size", [7, 14])
def test_equals_torchvision_multi_scale(size):
    golden = np.load(shared("goldens/torchvision/ops.npz"))
    features = [jnp.asarray(golden[f"ms_feat{k}"].transpose(0, 2, 3, 1)) for k in range(4)]
    counts = [len(golden["ms_boxes0"]), len(golden["ms_boxes1"])]
    boxes = np.zeros((2, max(counts), 4), np.float32)
    for row, count in enumerate(counts):
        boxes[row, :count] = golden[f"ms_boxes{row}"]
    out, vjp = jax.vjp(
        lambda f: roi_align(
            f, jnp.asarray(boxes), output_size=size, strides=(4, 8, 16, 32), sampling=2,
            border="zero", min_size=1.0,
        ),
        features,
    )  # fmt: skip
    expected = golden[f"ms_out{size}"].transpose(0, 2, 3, 1)
    valid = np.arange(max(counts))[None] < np.array(counts)[:, None]
    # A sample near x = 80 cells is placed to 8e-6 in float32, and these features (standard normal)
    # change by up to 4 from cell to cell.
    np.testing.assert_allclose(np.asarray(out)[valid], expected, atol=3e-5)

    draw = np.random.Generator(np.random.PCG64(8)).normal(size=golden[f"ms_out{size}"].shape)
    upstream = np.zeros(out.shape, np.float32)
    upstream[valid] = draw.astype(np.float32).transpose(0, 2, 3, 1)
    for level, grad in enumerate(vjp(jnp.asarray(upstream))[0]):
        expected = golden[f"ms_gx{size}_{level}"].transpose(0, 2, 3, 1)
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=3e-5)

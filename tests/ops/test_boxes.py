import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops import boxes as box_ops
from tests.helpers import assert_finite_with_grad, random_boxes, shared

pairwise_iou = jax.jit(box_ops.pairwise_iou, static_argnames="offset")
encode = jax.jit(box_ops.encode, static_argnames=("weights", "offset"))
decode = jax.jit(box_ops.decode, static_argnames=("weights", "offset"))

DEGENERATE = np.array(
    [[0, 0, 0, 0], [5, 5, 5, 9], [5, 5, 9, 5], [9, 9, 5, 5], [0, 0, 8, 8]], np.float32
)


def slow_iou(a, b, offset):
    out = np.zeros((len(a), len(b)))
    for i, p in enumerate(a.astype(np.float64)):
        for j, q in enumerate(b.astype(np.float64)):
            width = max(min(p[2], q[2]) - max(p[0], q[0]) + offset, 0)
            height = max(min(p[3], q[3]) - max(p[1], q[1]) + offset, 0)
            area_p = (p[2] - p[0] + offset) * (p[3] - p[1] + offset)
            area_q = (q[2] - q[0] + offset) * (q[3] - q[1] + offset)
            out[i, j] = width * height / (area_p + area_q - width * height)
    return out


def test_area_by_hand():
    boxes = jnp.array([[1.0, 2.0, 4.0, 6.0], [3.0, 3.0, 3.0, 9.0], [4.0, 6.0, 1.0, 2.0]])
    np.testing.assert_array_equal(box_ops.area(boxes), [12.0, 0.0, 0.0])
    np.testing.assert_array_equal(box_ops.area(boxes[:2], offset=1.0), [20.0, 7.0])


@pytest.mark.parametrize(("offset", "expected"), [(0.0, 36 / 126), (1.0, 50 / 150)])
def test_iou_by_hand(offset, expected):
    a, b = jnp.array([[0.0, 0.0, 9.0, 9.0]]), jnp.array([[5.0, 0.0, 14.0, 9.0]])
    iou = pairwise_iou(a, jnp.concatenate([a, b, a + 100.0]), offset=offset)
    np.testing.assert_allclose(iou, [[1.0, expected, 0.0]], rtol=1e-7)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_iou_equals_slow_oracle(offset):
    rng = np.random.default_rng(0)
    a, b = random_boxes(rng, 23), random_boxes(rng, 17)
    iou = pairwise_iou(jnp.asarray(a), jnp.asarray(b), offset=offset)
    np.testing.assert_allclose(iou, slow_iou(a, b, offset), rtol=2e-6, atol=1e-7)


def test_iou_equals_torchvision():
    golden = np.load(shared("goldens/torchvision/ops.npz"))
    iou = pairwise_iou(jnp.asarray(golden["iou_a"]), jnp.asarray(golden["iou_b"]))
    np.testing.assert_allclose(iou, np.nan_to_num(golden["iou"]), atol=1e-6)


def test_degenerate_boxes_have_finite_values_and_gradients():
    boxes = jnp.asarray(DEGENERATE)
    good = jnp.asarray(random_boxes(np.random.default_rng(1), 5))
    assert_finite_with_grad(pairwise_iou, boxes, boxes)
    np.testing.assert_array_equal(pairwise_iou(boxes[:4], boxes[:4]), np.zeros((4, 4)))
    for first, second in ((boxes, good), (good, boxes), (boxes, boxes)):
        assert_finite_with_grad(encode, first, second)
        assert_finite_with_grad(decode, first, second)


@pytest.mark.parametrize("function", [box_ops.encode, box_ops.decode])
def test_coder_jit_equals_eager(function):
    rng = np.random.default_rng(2)
    a, b = jnp.asarray(random_boxes(rng, 9)), jnp.asarray(random_boxes(rng, 9))
    np.testing.assert_allclose(jax.jit(function)(a, b), function(a, b), rtol=1e-5, atol=1e-6)


def test_encode_by_hand():
    anchor = jnp.array([10.0, 20.0, 20.0, 40.0])  # centre (15, 30), 10 wide, 20 high
    box = jnp.array([13.0, 20.0, 33.0, 60.0])  # centre (23, 40), 20 wide, 40 high
    expected = [0.8, 0.5, np.log(2.0), np.log(2.0)]
    np.testing.assert_allclose(encode(box, anchor), expected, rtol=1e-6)
    weighted = encode(box, anchor, weights=(10.0, 10.0, 5.0, 5.0))
    np.testing.assert_allclose(weighted, np.multiply(expected, [10, 10, 5, 5]), rtol=1e-6)
    # Inclusive pixels: 11 x 21 about (15.5, 30.5), and 21 x 41 about (23.5, 40.5).
    inclusive = [8 / 11, 10 / 21, np.log(21 / 11), np.log(41 / 21)]
    np.testing.assert_allclose(encode(box, anchor, offset=1.0), inclusive, rtol=1e-6)


def test_decode_clamps_growth_to_62_5():
    box = decode(jnp.array([0.0, 0.0, 100.0, 4.0]), jnp.array([-1.0, -1.0, 1.0, 1.0]))
    np.testing.assert_allclose(box, [-62.5, -np.exp(4.0), 62.5, np.exp(4.0)], rtol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (10.0, 10.0, 5.0, 5.0)])
def test_decode_inverts_encode(weights, offset):
    rng = np.random.default_rng(3)
    boxes, anchors = jnp.asarray(random_boxes(rng, 50)), jnp.asarray(random_boxes(rng, 50))
    deltas = encode(boxes, anchors, weights=weights, offset=offset)
    back = decode(deltas, anchors, weights=weights, offset=offset)
    np.testing.assert_allclose(back, boxes, atol=2e-5)


def test_coder_broadcasts_leading_axes():
    rng = np.random.default_rng(4)
    anchors = jnp.asarray(random_boxes(rng, 6))
    deltas = jnp.asarray(rng.normal(size=(2, 6, 3, 4)).astype(np.float32))
    together = decode(deltas, anchors[None, :, None])
    assert together.shape == (2, 6, 3, 4)
    alone = decode(deltas[1, :, 2], anchors)
    np.testing.assert_allclose(together[1, :, 2], alone, rtol=1e-6, atol=1e-5)
    back = encode(together, anchors[None, :, None])
    np.testing.assert_allclose(back, deltas, atol=1e-5)


@pytest.mark.parametrize("name", ["1111", "10_10_5_5"])
def test_coder_equals_torchvision(name):
    golden = np.load(shared("goldens/torchvision/ops.npz"))
    weights = tuple(float(c) for c in (name.split("_") if "_" in name else name))
    anchors = jnp.asarray(golden["coder_anchors"])
    deltas = encode(jnp.asarray(golden["coder_gt"]), anchors, weights=weights)
    np.testing.assert_allclose(deltas, golden[f"encode_{name}"], rtol=1e-5, atol=1e-5)
    per_class = jnp.asarray(golden[f"decode_in_{name}"].reshape(-1, 3, 4))
    decoded = decode(per_class, anchors[:, None], weights=weights)
    expected = golden[f"decode_{name}"].reshape(-1, 3, 4)
    np.testing.assert_allclose(decoded, expected, rtol=1e-5, atol=1e-4)


def test_coder_equals_nvidia():
    golden = np.load(shared("goldens/nvidia_tf2/nv_train.npz"))
    swap = [1, 0, 3, 2]  # theirs are y before x
    fg = golden["roi_class_targets"] > 0
    deltas = encode(
        jnp.asarray(golden["roi_gt_boxes"][fg][:, swap]),
        jnp.asarray(golden["roi_boxes"][fg][:, swap]),
        weights=(10.0, 10.0, 5.0, 5.0),
        offset=1.0,
    )
    np.testing.assert_allclose(
        deltas, golden["roi_encoded_box_targets"][fg][:, swap], rtol=1e-5, atol=3e-6
    )


def test_clip_by_hand():
    boxes = jnp.array([[-3.0, -4.0, 700.0, 500.0], [700.0, 500.0, 800.0, 600.0]])
    clipped = box_ops.clip(boxes, (480, 640))
    np.testing.assert_array_equal(clipped, [[0, 0, 640, 480], [640, 480, 640, 480]])
    clipped = box_ops.clip(boxes, jnp.array([480, 640]), offset=1.0)
    np.testing.assert_array_equal(clipped, [[0, 0, 639, 479], [639, 479, 639, 479]])


def test_clip_equals_torchvision():
    golden = np.load(shared("goldens/torchvision/ops.npz"))
    clipped = box_ops.clip(jnp.asarray(golden["clip_in"]), jnp.asarray(golden["clip_hw"]))
    np.testing.assert_array_equal(clipped, golden["clip"])


def test_flip_by_hand_and_twice_is_identity():
    boxes = jnp.array([[0.0, 1.0, 10.0, 5.0], [90.0, 0.0, 100.0, 2.0]])
    flipped = box_ops.flip(boxes, 100.0)
    np.testing.assert_array_equal(flipped, [[90, 1, 100, 5], [0, 0, 10, 2]])
    np.testing.assert_array_equal(box_ops.flip(flipped, 100.0), boxes)

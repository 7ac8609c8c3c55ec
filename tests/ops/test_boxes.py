import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops import boxes as box_ops
from tests.bounds import assert_within, decoding_bound, encoding_bound, rounding_bound
from tests.helpers import assert_finite_with_grad, load_golden, random_boxes

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
    golden = load_golden("torchvision/ops")
    iou = pairwise_iou(jnp.asarray(golden["iou_a"]), jnp.asarray(golden["iou_b"]))
    # Sixteen roundings on either side: of sides, areas, their sum and the division.
    assert_within(iou, np.nan_to_num(golden["iou"]), rounding_bound(2 * 16, 1.0))


def test_degenerate_boxes_have_finite_values_and_gradients():
    boxes = jnp.asarray(DEGENERATE)
    good = jnp.asarray(random_boxes(np.random.default_rng(1), 5))
    assert_finite_with_grad(pairwise_iou, boxes, boxes)
    np.testing.assert_array_equal(pairwise_iou(boxes[:4], boxes[:4]), np.zeros((4, 4)))
    for first, second in ((boxes, good), (good, boxes), (boxes, boxes)):
        assert_finite_with_grad(encode, first, second)
        assert_finite_with_grad(decode, first, second)


def test_coder_jit_equals_eager():
    rng = np.random.default_rng(2)
    boxes, anchors = random_boxes(rng, 9), random_boxes(rng, 9)
    deltas = box_ops.encode(jnp.asarray(boxes), jnp.asarray(anchors))
    assert_within(encode(boxes, anchors), deltas, 2 * encoding_bound(boxes, anchors))
    eager = box_ops.decode(deltas, jnp.asarray(anchors))
    assert_within(decode(deltas, anchors), eager, 2 * decoding_bound(deltas, anchors))


def test_encode_by_hand():
    anchor = jnp.array([10.0, 20.0, 20.0, 40.0])  # center (15, 30), 10 wide, 20 high
    box = jnp.array([13.0, 20.0, 33.0, 60.0])  # center (23, 40), 20 wide, 40 high
    expected = [0.8, 0.5, np.log(2.0), np.log(2.0)]
    assert_within(encode(box, anchor), expected, encoding_bound(box, anchor))
    weights = (10.0, 10.0, 5.0, 5.0)
    bound = encoding_bound(box, anchor, weights)
    assert_within(
        encode(box, anchor, weights=weights), np.multiply(expected, [10, 10, 5, 5]), bound
    )
    weights = (2.0, 3.0, 5.0, 7.0)  # each its own
    bound = encoding_bound(box, anchor, weights)
    assert_within(encode(box, anchor, weights=weights), np.multiply(expected, weights), bound)
    assert_within(
        decode(np.multiply(expected, weights).astype(np.float32), anchor, weights=weights),
        box,
        1e-4,
    )
    # Inclusive pixels: 11 x 21 about (15.5, 30.5), and 21 x 41 about (23.5, 40.5).
    inclusive = [8 / 11, 10 / 21, np.log(21 / 11), np.log(41 / 21)]
    assert_within(encode(box, anchor, offset=1.0), inclusive, encoding_bound(box, anchor))


def test_decode_clamps_growth_to_62_5():
    box = decode(jnp.array([0.0, 0.0, 100.0, 4.0]), jnp.array([-1.0, -1.0, 1.0, 1.0]))
    np.testing.assert_allclose(box, [-62.5, -np.exp(4.0), 62.5, np.exp(4.0)], rtol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (10.0, 10.0, 5.0, 5.0)])
def test_decode_inverts_encode(weights, offset):
    rng = np.random.default_rng(3)
    boxes, anchors = random_boxes(rng, 50), random_boxes(rng, 50)
    deltas = encode(jnp.asarray(boxes), jnp.asarray(anchors), weights=weights, offset=offset)
    back = decode(deltas, anchors, weights=weights, offset=offset)
    # What a delta is wrong by moves the box by as many sides of its anchor or of itself.
    wrong = encoding_bound(boxes, anchors)
    sides = [np.tile(b[:, 2:] - b[:, :2] + offset, 2) for b in (anchors, boxes)]
    moved = wrong[:, [0, 1, 0, 1]] * sides[0] + wrong[:, [2, 3, 2, 3]] * sides[1]
    assert_within(back, boxes, decoding_bound(deltas, anchors, weights) + moved)


def test_coder_broadcasts_leading_axes():
    rng = np.random.default_rng(4)
    anchors = random_boxes(rng, 6)
    deltas = rng.normal(size=(2, 6, 3, 4)).astype(np.float32)
    wide = np.broadcast_to(anchors[None, :, None], deltas.shape)
    bound = decoding_bound(deltas, wide)
    together = np.asarray(decode(deltas, anchors[None, :, None]))
    assert together.shape == (2, 6, 3, 4)
    assert_within(together[1, :, 2], decode(deltas[1, :, 2], anchors), 2 * bound[1, :, 2])
    # Corners that are wrong by `bound` change a delta by as many sides.
    back = encode(together, anchors[None, :, None])
    sides = [np.tile(b[..., 2:] - b[..., :2], 2) for b in (wide, together)]
    moved = 2 * bound / np.minimum(*sides)
    assert_within(back, deltas, encoding_bound(together, wide) + moved)


@pytest.mark.parametrize("name", ["1111", "10_10_5_5"])
def test_coder_equals_torchvision(name):
    golden = load_golden("torchvision/ops")
    weights = tuple(float(c) for c in (name.split("_") if "_" in name else name))
    anchors, boxes = golden["coder_anchors"], golden["coder_gt"]
    deltas = encode(jnp.asarray(boxes), jnp.asarray(anchors), weights=weights)
    bound = 2 * encoding_bound(boxes, anchors, weights)
    assert_within(deltas, golden[f"encode_{name}"], bound)
    per_class = golden[f"decode_in_{name}"].reshape(-1, 3, 4)
    decoded = decode(jnp.asarray(per_class), jnp.asarray(anchors)[:, None], weights=weights)
    expected = golden[f"decode_{name}"].reshape(-1, 3, 4)
    wide = np.broadcast_to(anchors[:, None], per_class.shape)
    assert_within(decoded, expected, 2 * decoding_bound(per_class, wide, weights))


def test_coder_equals_nvidia():
    golden = load_golden("nvidia_tf2/nv_train")
    swap = [1, 0, 3, 2]  # theirs are y before x
    fg = golden["roi_class_targets"] > 0
    boxes, rois = (golden[name][fg][:, swap] for name in ("roi_gt_boxes", "roi_boxes"))
    weights = (10.0, 10.0, 5.0, 5.0)
    deltas = encode(jnp.asarray(boxes), jnp.asarray(rois), weights=weights, offset=1.0)
    expected = golden["roi_encoded_box_targets"][fg][:, swap]
    assert_within(deltas, expected, 2 * encoding_bound(boxes, rois, weights))


def test_clip_by_hand():
    boxes = jnp.array([[-3.0, -4.0, 700.0, 500.0], [700.0, 500.0, 800.0, 600.0]])
    clipped = box_ops.clip(boxes, (480, 640))
    np.testing.assert_array_equal(clipped, [[0, 0, 640, 480], [640, 480, 640, 480]])
    clipped = box_ops.clip(boxes, jnp.array([480, 640]), offset=1.0)
    np.testing.assert_array_equal(clipped, [[0, 0, 639, 479], [639, 479, 639, 479]])


def test_clip_equals_torchvision():
    golden = load_golden("torchvision/ops")
    clipped = box_ops.clip(jnp.asarray(golden["clip_in"]), jnp.asarray(golden["clip_hw"]))
    np.testing.assert_array_equal(clipped, golden["clip"])


def test_flip_by_hand_and_twice_is_identity():
    boxes = jnp.array([[0.0, 1.0, 10.0, 5.0], [90.0, 0.0, 100.0, 2.0]])
    flipped = box_ops.flip(boxes, 100.0)
    np.testing.assert_array_equal(flipped, [[90, 1, 100, 5], [0, 0, 10, 2]])
    np.testing.assert_array_equal(box_ops.flip(flipped, 100.0), boxes)

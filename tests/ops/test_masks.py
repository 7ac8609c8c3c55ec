import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops import masks as mask_ops
from tests.helpers import assert_finite_tree, random_boxes, shared

mask_targets = jax.jit(mask_ops.mask_targets, static_argnames=("size", "half_pixel"))


def slow_mask_targets(masks, gt_boxes, rois, matched_idxs, size, half_pixel):
    """Interpolated values 0..255 before the threshold: one bin at a time, in float64."""
    side = masks.shape[-1]
    out = np.zeros((len(rois), size, size))
    for r, p, q in np.ndindex(*out.shape):
        mask = masks[matched_idxs[r]].astype(np.float64)
        gt, roi = gt_boxes[matched_idxs[r]].astype(np.float64), rois[r].astype(np.float64)
        x = roi[0] + (q + 0.5) / size * (roi[2] - roi[0])
        y = roi[1] + (p + 0.5) / size * (roi[3] - roi[1])
        x = (x - gt[0]) / (gt[2] - gt[0]) * side - (0.5 if half_pixel else 0.0)
        y = (y - gt[1]) / (gt[3] - gt[1]) * side - (0.5 if half_pixel else 0.0)
        top, left = int(np.floor(y)), int(np.floor(x))
        for i, j in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
            if 0 <= i < side and 0 <= j < side:
                out[r, p, q] += (1 - abs(y - i)) * (1 - abs(x - j)) * mask[i, j]
    return out


def test_own_box_gives_the_mask_back():
    """A RoI equal to its ground truth, sampled at the crop's own resolution."""
    mask = (np.random.default_rng(0).random((1, 28, 28)) < 0.5).astype(np.uint8) * 255
    box = jnp.array([[10.0, 20.0, 66.0, 132.0]])
    targets = mask_targets(jnp.asarray(mask), box, box, jnp.zeros(1, jnp.int32), size=28)
    assert targets.dtype == jnp.float32
    np.testing.assert_array_equal(targets, mask / 255)


def test_shifted_roi_by_hand():
    """A full mask in x 0..8: a RoI over x 4..12 is half inside, one over x 20..28 outside."""
    full = jnp.full((2, 16, 16), 255, jnp.uint8)
    gt = jnp.array([[0.0, 0.0, 8.0, 8.0], [100.0, 100.0, 108.0, 108.0]])
    rois = jnp.array([[4.0, 0.0, 12.0, 8.0], [20.0, 0.0, 28.0, 8.0]])
    targets = mask_targets(full, gt, rois, jnp.array([0, 0]), size=4)
    np.testing.assert_array_equal(targets[0], np.tile([1, 1, 0, 0], (4, 1)))
    np.testing.assert_array_equal(targets[1], 0)


def test_threshold_is_one_half_up():
    box = jnp.array([[0.0, 0.0, 4.0, 4.0]])
    for value, expected in ((127, 0.0), (128, 1.0)):
        mask = jnp.full((1, 4, 4), value, jnp.uint8)
        targets = mask_targets(mask, box, box, jnp.zeros(1, jnp.int32), size=2)
        np.testing.assert_array_equal(targets, np.full((1, 2, 2), expected))


@pytest.mark.parametrize("half_pixel", [True, False])
def test_equals_slow_oracle(half_pixel):
    rng = np.random.default_rng(1)
    masks = rng.integers(0, 256, (3, 20, 20)).astype(np.uint8)
    gt_boxes = random_boxes(rng, 3)
    matched = rng.integers(0, 3, 12).astype(np.int32)
    rois = gt_boxes[matched] + rng.normal(0, 4, (12, 4)).astype(np.float32)
    targets = mask_targets(
        jnp.asarray(masks),
        jnp.asarray(gt_boxes),
        jnp.asarray(rois),
        jnp.asarray(matched),
        size=7,
        half_pixel=half_pixel,
    )
    exact = slow_mask_targets(masks, gt_boxes, rois, matched, 7, half_pixel)
    decided = np.abs(exact - 127.5) > 0.02  # float32 places a sample to 1e-5 of a crop's pixel
    assert decided.mean() > 0.99
    np.testing.assert_array_equal(np.asarray(targets)[decided], (exact >= 127.5)[decided])


def test_padded_rows_change_nothing_and_degenerate_boxes_are_finite():
    rng = np.random.default_rng(2)
    masks = jnp.asarray(rng.integers(0, 256, (2, 8, 8)).astype(np.uint8))
    boxes = jnp.asarray(random_boxes(rng, 2))
    idxs = jnp.arange(2)
    few = mask_targets(masks, boxes, boxes, idxs, size=4)
    padded_masks, padded_boxes = (
        jnp.pad(masks, ((0, 3), (0, 0), (0, 0))),
        jnp.pad(boxes, ((0, 3), (0, 0))),
    )
    # After two real rows: an empty RoI of an empty box, one of a real box, one inside out.
    rois = jnp.concatenate([boxes, jnp.zeros((2, 4)), boxes[:1, jnp.array([2, 3, 0, 1])]])
    many = mask_targets(padded_masks, padded_boxes, rois, jnp.array([0, 1, 3, 0, 0]), size=4)
    np.testing.assert_array_equal(many[:2], few)
    assert_finite_tree(many)
    np.testing.assert_array_equal(many[4], few[0, ::-1, ::-1])


def test_jit_equals_eager():
    rng = np.random.default_rng(3)
    masks = jnp.asarray(rng.integers(0, 256, (2, 8, 8)).astype(np.uint8))
    boxes = jnp.asarray(random_boxes(rng, 2))
    eager = mask_ops.mask_targets(masks, boxes, boxes, jnp.arange(2), size=4)
    np.testing.assert_array_equal(mask_targets(masks, boxes, boxes, jnp.arange(2), size=4), eager)


@pytest.mark.parametrize("image", [0, 1])
def test_equals_nvidia(image):
    golden = np.load(shared("goldens/nvidia_tf2/nv_train.npz"))
    swap = [1, 0, 3, 2]  # theirs are y before x
    # Only the crops of the first 16 ground truths are stored, with a border of 2 zero pixels.
    crops = golden["cropped_gt_masks_first16"][image][:, 2:-2, 2:-2]
    matched = golden["mask_proposal_to_label"][image]
    stored = (golden["mask_class_targets"][image] > 0) & (matched < 16)
    assert stored.sum() > 20
    targets = mask_targets(
        jnp.asarray(crops * 255.0),
        jnp.asarray(golden["gt_boxes"][image, :16][:, swap]),
        jnp.asarray(golden["mask_rois"][image][stored][:, swap]),
        jnp.asarray(matched[stored]),
        half_pixel=False,
    )
    expected = np.unpackbits(golden["mask_targets"][image], axis=-1)[stored][:, :, :28]
    np.testing.assert_array_equal(targets, expected)

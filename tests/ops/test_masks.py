import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops import masks as mask_ops
from tests.bounds import assert_within, placing_bound, rounding_bound
from tests.helpers import assert_finite_tree, assert_finite_with_grad, load_golden, random_boxes

mask_targets = jax.jit(mask_ops.mask_targets, static_argnames=("size", "aligned"))
soft_mask_targets = jax.jit(mask_ops.soft_mask_targets, static_argnames="size")


def slow_mask_targets(masks, gt_boxes, rois, matched_idxs, size, aligned):
    """Interpolated values 0..255 before the threshold: one bin at a time, in float64."""
    side = masks.shape[-1]
    out = np.zeros((len(rois), size, size))
    for r, p, q in np.ndindex(*out.shape):
        mask = masks[matched_idxs[r]].astype(np.float64)
        gt, roi = gt_boxes[matched_idxs[r]].astype(np.float64), rois[r].astype(np.float64)
        x = roi[0] + (q + 0.5) / size * (roi[2] - roi[0])
        y = roi[1] + (p + 0.5) / size * (roi[3] - roi[1])
        x = (x - gt[0]) / (gt[2] - gt[0]) * side - (0.5 if aligned else 0.0)
        y = (y - gt[1]) / (gt[3] - gt[1]) * side - (0.5 if aligned else 0.0)
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


@pytest.mark.parametrize("aligned", [True, False])
def test_equals_slow_oracle(aligned):
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
        aligned=aligned,
    )
    exact = slow_mask_targets(masks, gt_boxes, rois, matched, 7, aligned)
    # Places in pixels of the crop, of which a box of 5 pixels has 20; they differ by up to 255.
    decided = np.abs(exact - 127.5) > 255 * placing_bound(100 * 20 / 5)
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
    golden = load_golden("nvidia_tf2/nv_train")
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
        aligned=False,
    )
    expected = np.unpackbits(golden["mask_targets"][image], axis=-1)[stored][:, :, :28]
    # No interpolated value is closer to one half of 255 than 0.29, and rounding moves it by 0.1.
    np.testing.assert_array_equal(targets, expected)


def slow_soft_targets(masks, boxes, rois, matched_idxs, size, image_size=None):
    """The mean of single samples, in float64. Masks 0..1; `boxes` of crops, or an image size."""
    out = np.zeros((len(rois), size, size))
    for r, (x1, y1, x2, y2) in enumerate(rois.astype(np.float64)):
        mask = masks[matched_idxs[r]].astype(np.float64)
        box = None if image_size else boxes[matched_idxs[r]].astype(np.float64)
        width, height = max(x2 - x1, 1.0), max(y2 - y1, 1.0)
        rows, columns = int(np.ceil(height / size)), int(np.ceil(width / size))
        for p, q, i, j in np.ndindex(size, size, rows, columns):
            y = y1 + (p + (i + 0.5) / rows) * height / size
            x = x1 + (q + (j + 0.5) / columns) * width / size
            if image_size:
                value = slow_clamped(mask[: image_size[0], : image_size[1]], y, x)
            else:
                y = (y + 0.5 - box[1]) / (box[3] - box[1]) * mask.shape[0] - 0.5
                x = (x + 0.5 - box[0]) / (box[2] - box[0]) * mask.shape[1] - 0.5
                value = slow_bilinear(np.pad(mask, 2), np.clip(y, -2, mask.shape[0]) + 2,
                                      np.clip(x, -2, mask.shape[1]) + 2)  # fmt: skip
            out[r, p, q] += value / (rows * columns)
    return out


def slow_bilinear(mask, y, x):
    top, left = int(y), int(x)
    v, u = y - top, x - left
    corners = np.pad(mask, ((0, 1), (0, 1)))[top : top + 2, left : left + 2]
    return np.array([1 - v, v]) @ corners @ np.array([1 - u, u])


def slow_clamped(mask, y, x):
    """Zero further than one pixel outside, else the nearest place inside."""
    height, width = mask.shape
    if y < -1 or y > height or x < -1 or x > width:
        return 0.0
    return slow_bilinear(mask, np.clip(y, 0, height - 1), np.clip(x, 0, width - 1))


# Places of up to 60 pixels in masks of 0 to 1, and sums of the 100 weights of both axes.
SAMPLING = placing_bound(60) + rounding_bound(100, 1.0)


def test_soft_targets_by_hand():
    """Left half full. A bin is two pixels wide and read at pixel indices 0.5 and 1.5, and so on."""
    mask = np.zeros((1, 8, 8), np.uint8)
    mask[:, :, :4] = 255
    roi = jnp.array([[0.0, 0.0, 8.0, 8.0]])
    settings = {"size": 4, "image_size": jnp.array([8, 8])}
    targets = soft_mask_targets(jnp.asarray(mask), roi, roi, jnp.zeros(1, jnp.int32), **settings)
    assert targets.dtype == jnp.float32
    assert_within(targets[0], np.tile([1, 0.75, 0, 0], (4, 1)), SAMPLING)


def soft_case(rng):
    """Rois inside, over every edge, wholly outside, tiny, empty and inside out, and their masks."""
    masks = rng.integers(0, 256, (3, 40, 60)).astype(np.uint8)
    boxes = np.array([[3, 4, 40, 30], [10.3, 2.2, 20.9, 31.7], [0, 0, 50, 32]], np.float32)
    matched = rng.integers(0, 3, 14).astype(np.int32)
    rois = boxes[matched] + rng.normal(0, 5, (14, 4)).astype(np.float32)
    rois[:6] = [
        [-9, -7, 60, 45], [60, 50, 80, 70], [5, 5, 5, 5], [20, 20, 10, 9], [4.2, 5.1, 4.7, 20],
        [0, 0, 50, 32],
    ]  # fmt: skip
    return masks, boxes, rois, matched


def test_soft_targets_of_whole_masks_equal_slow_oracle():
    masks, boxes, rois, matched = soft_case(np.random.default_rng(4))
    args = [jnp.asarray(a) for a in (masks, boxes, rois, matched)]
    targets = soft_mask_targets(*args, size=7, image_size=jnp.array([32, 50]))
    expected = slow_soft_targets(masks / 255, boxes, rois, matched, 7, (32, 50))
    assert_within(targets, expected, SAMPLING)
    # What lies beyond the image is not read.
    garbage = args[0].at[:, 32:].set(7).at[:, :, 50:].set(99)
    again = soft_mask_targets(garbage, *args[1:], size=7, image_size=jnp.array([32, 50]))
    np.testing.assert_array_equal(again, targets)


def test_soft_targets_of_crops_equal_slow_oracle():
    masks, boxes, rois, matched = soft_case(np.random.default_rng(5))
    masks = masks[:, :24, :24]
    targets = soft_mask_targets(*[jnp.asarray(a) for a in (masks, boxes, rois, matched)], size=7)
    expected = slow_soft_targets(masks / 255, boxes, rois, matched, 7)
    # The smallest box has 24 pixels of the crop for 10.6 of the image.
    assert_within(targets, expected, 24 / 10.6 * SAMPLING)


def test_soft_targets_of_crops_are_close_to_those_of_whole_masks():
    """An ellipse, drawn at the resolution of the image and of the crop."""
    y, x = np.mgrid[:120, :160] + 0.5
    whole = ((x - 70) / 50) ** 2 + ((y - 60) / 40) ** 2 < 1
    v, u = (np.mgrid[:112, :112] + 0.5) / 112 - 0.5
    crop = u**2 + v**2 < 0.25
    box = np.array([[20, 20, 120, 100]], np.float32)
    rois = box + np.random.default_rng(6).normal(0, 8, (6, 4)).astype(np.float32)
    args = [jnp.asarray(a) for a in (box, rois, np.zeros(6, np.int32))]
    whole, crop = (jnp.asarray(mask[None] * np.uint8(255)) for mask in (whole, crop))
    exact = soft_mask_targets(whole, *args, image_size=jnp.array([120, 160]))
    assert np.abs(soft_mask_targets(crop, *args) - exact).mean() < 0.01


def test_soft_targets_do_not_depend_on_how_many_are_made_at_once(monkeypatch):
    masks, boxes, rois, matched = soft_case(np.random.default_rng(7))
    args = [jnp.asarray(a) for a in (masks, boxes, rois, matched)]

    def run():
        whole = functools.partial(mask_ops.soft_mask_targets, size=5)
        return jax.jit(whole)(*args, image_size=jnp.array([32, 50]))

    together = run()
    for pixels in (1, 4 * 40 * 60):  # one at a time, and four, which does not divide 14
        monkeypatch.setattr(mask_ops, "MAX_FLOAT_PIXELS", pixels)
        assert_within(run(), together, 2 * SAMPLING)


@pytest.mark.parametrize("image_size", [None, (32, 50)])
def test_soft_targets_of_padded_rows_are_finite_and_change_nothing(image_size):
    masks, boxes, rois, matched = soft_case(np.random.default_rng(8))
    args = [jnp.asarray(a) for a in (masks, boxes, rois, matched)]
    size = None if image_size is None else jnp.array(image_size)
    few = soft_mask_targets(*args, size=5, image_size=size)
    padded = [
        jnp.pad(a, ((0, 2), *((0, 0),) * (a.ndim - 1)), constant_values=value)
        for a, value in zip(args, (0, 0, 0, 4), strict=True)
    ]
    many = soft_mask_targets(*padded, size=5, image_size=size)
    assert_within(many[:14], few, 2 * SAMPLING if image_size else 2 * 24 / 10.6 * SAMPLING)
    np.testing.assert_array_equal(many[14:], 0.0)
    assert_finite_with_grad(
        lambda boxes, rois: soft_mask_targets(
            padded[0], boxes, rois, padded[3], size=5, image_size=size
        ),
        padded[1],
        padded[2],
    )


def test_soft_targets_equal_torchvision():
    golden = load_golden("torchvision/ops")
    masks = jnp.asarray(golden["mt_masks"] * np.uint8(255))
    rois, matched = jnp.asarray(golden["mt_boxes"]), jnp.asarray(golden["mt_idx"].astype(np.int32))
    size = jnp.array(masks.shape[1:])
    targets = soft_mask_targets(masks, jnp.zeros((3, 4)), rois, matched, image_size=size)
    assert_within(targets, golden["mt_out"], 2 * placing_bound(float(np.abs(rois).max())))


def test_soft_targets_equal_torchvision_in_training():
    golden = load_golden("torchvision/small_train")
    targets = []
    for image in (0, 1):
        shape = golden[f"gt_masks_resized_shape{image}"]
        masks = np.unpackbits(golden[f"gt_masks_resized{image}"], axis=-1)[..., : shape[-1]]
        # On a canvas that is larger than the image.
        masks = jnp.pad(jnp.asarray(masks * np.uint8(255)), ((0, 0), (0, 11), (0, 32)))
        row = golden[f"mask_pos_in_rois{image}"]
        targets.append(
            soft_mask_targets(
                masks,
                jnp.asarray(golden[f"gt_boxes_resized{image}"]),
                jnp.asarray(golden[f"roi_boxes{image}"][row]),
                jnp.asarray(golden[f"roi_matched_gt{image}"][row].astype(np.int32)),
                image_size=jnp.asarray(shape[1:]),
            )
        )
    assert_within(np.concatenate(targets), golden["mask_targets"], 2 * placing_bound(320))

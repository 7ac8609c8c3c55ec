"""Labels of anchors, proposals of a batch, and maps that end before their canvas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import coco_torchvision
from mask_rcnn_jax.models.build import build_model, init_variables, predict_options
from mask_rcnn_jax.models.frame import Frame, make_frame
from mask_rcnn_jax.models.rpn import label_anchors, select_proposals
from mask_rcnn_jax.structures import Targets
from tests.helpers import tiny_batch

LABELS = dict(fg_thresh=0.7, bg_thresh=0.3, low_quality="ties", anchors_per_image=4,
              fg_fraction=0.5, encode_offset=0.0, iou_offset=0.0)  # fmt: skip
PROPOSALS = dict(pre_nms_topk=10, nms_thresh=0.7, min_size=-1.0, box_offset=0.0, iou_offset=0.0)


def targets(*boxes):
    count = len(boxes)
    return Targets(
        boxes=jnp.array(boxes, jnp.float32), classes=jnp.ones(count, jnp.int32),
        masks=jnp.zeros((count, 8, 8), jnp.uint8), polygons=jnp.zeros((count, 0, 3)),
        valid=jnp.ones(count, bool),
    )  # fmt: skip


ANCHORS = jnp.array([[0, 0, 10, 10], [-2, 0, 8, 10], [90, 90, 101, 100], [50, 50, 60, 60]],
                    jnp.float32)  # fmt: skip


@pytest.mark.parametrize(
    ("straddle", "expected"), [(-1.0, [1, 0, 0, 0]), (0.0, [1, -1, -1, 0]), (2.0, [1, 0, 0, 0])]
)
def test_anchors_that_reach_over_the_image_are_left_out(straddle, expected):
    """maskrcnn-benchmark: they must lie inside the image, its right and lower edge not included."""
    labels, sampled, deltas = label_anchors(
        ANCHORS, None, targets([0, 0, 10, 10]), jnp.array([100, 100]), None, straddle=straddle,
        **{**LABELS, "bg_thresh": 0.7},
    )  # fmt: skip
    np.testing.assert_array_equal(labels, expected)
    assert set(np.flatnonzero(sampled >= 0)) <= set(np.flatnonzero(labels >= 0))
    np.testing.assert_array_equal(deltas, 0.0)


def test_an_anchor_that_is_not_there_claims_nothing():
    """It would be the best of its object; the next best is taken."""
    exists = [jnp.array([False, True, True, True])]
    labels, _, _ = label_anchors(ANCHORS, exists, targets([0, 0, 10, 10]), jnp.array([100, 100]),
                                 None, straddle=-1.0, **LABELS)  # fmt: skip
    np.testing.assert_array_equal(labels, [-1, 1, 0, 0])


def far_apart(scores):
    """Logits [B, N] with boxes that do not overlap, as the arguments of `select_proposals`."""
    logits = jnp.array(scores, jnp.float32)
    corner = 20.0 * jnp.arange(logits.shape[1])
    anchors = jnp.stack([corner, corner, corner + 10, corner + 10], axis=1)
    deltas = jnp.zeros((*logits.shape, 4))
    return [logits], [deltas], [anchors], None, jnp.full((len(scores), 2), 400)


def test_the_best_of_a_batch():
    """maskrcnn-benchmark keeps the best of all images together while it trains."""
    problem = far_apart([[5, 1, 4], [9, 8, 7]])
    image = select_proposals(*problem, post_nms_topk=2, scope="image", **PROPOSALS)
    np.testing.assert_array_equal(image.valid, [[True, True], [True, True]])
    batch = select_proposals(*problem, post_nms_topk=4, scope="batch", **PROPOSALS)
    np.testing.assert_array_equal(batch.valid, [[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(batch.boxes[0, 0], [0, 0, 10, 10])
    assert not batch.boxes[0, 1:].any() and not batch.scores[0, 1:].any()


def test_small_boxes_are_dropped():
    problem = far_apart([[5, 1, 4]])
    for min_size, count in ((-1.0, 3), (9.9, 3), (10.0, 0)):
        found = select_proposals(*problem, post_nms_topk=3, scope="image",
                                 **{**PROPOSALS, "min_size": min_size})  # fmt: skip
        assert int(found.valid.sum()) == count, min_size


def test_an_unknown_scope_is_named():
    with pytest.raises(ValueError, match="model.post_nms_scope is 'device'"):
        select_proposals(*far_apart([[1, 2]]), post_nms_topk=2, scope="device", **PROPOSALS)


def small_model():
    config = coco_torchvision.get_config()
    config.model.update(
        num_classes=3, depth=10, frozen_stages=0, fpn_channels=32, rpn_channels=32,
        box_channels=32, mask_channels=32, rpn_anchors_per_image=16, rois_per_image=16,
        pre_nms_topk_train=60, post_nms_topk_train=30, pre_nms_topk_test=60, post_nms_topk_test=30,
    )  # fmt: skip
    config.eval.update(score_threshold=0.0, pre_nms_topk=90, detections_per_image=10)
    return config


def test_a_larger_canvas_changes_nothing():
    """Maps end at the image rounded up to 32, whatever lies beyond: the same proposals, detections
    and labels on a canvas as large as that and on a larger one."""
    config = small_model()
    model, options = build_model(config.model), predict_options(config.eval)
    variables = init_variables(model, 0)
    height, width = 50, 70
    batch = tiny_batch(1, side=128)
    sizes = np.array([(height, width)], np.int32)

    @jax.jit
    def run(one):
        found = model.apply(variables, one.images, sizes, method="predict", **options)
        return found, model.apply(variables, one, None, train=False, method="forward_train")

    found, trained = [], []
    for rows, columns in ((64, 96), (128, 192)):
        canvas = np.full((1, rows, columns, 3), 77, np.uint8)  # beyond the image: anything
        canvas[:, :height, :width] = batch.images[:, :height, :width]
        for outputs, kept in zip(
            run(batch.replace(images=canvas, image_sizes=sizes)), (found, trained), strict=True
        ):
            kept.append(outputs)
    assert found[0].valid.all()
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4)
    for outputs in zip(trained[0].rois.boxes, trained[1].rois.boxes, strict=True):
        np.testing.assert_allclose(*outputs, atol=2e-4)
    for value in (-1, 0, 1):
        counts = [int((outputs.anchor_labels == value).sum()) for outputs in trained]
        assert counts[0] == counts[1] or value == -1


def test_anchor_strides_follow_the_map():
    """torchvision divides 800 padded rows by the 13 cells of the last level: 61 pixels."""
    frame = make_frame((832, 1344), jnp.array([[800, 1216]]), 32)
    anchors = frame.anchors((512.0,) * 5, ((1.0, 1.0),), centre=0.0, rounding="half_sides",
                            offset=0.0, stride="map")  # fmt: skip
    last = np.asarray(anchors[4]).reshape(13, 21, 4)
    np.testing.assert_array_equal(last[:3, 0, 1] + 256, [0, 61, 122])
    np.testing.assert_array_equal(last[0, :3, 0] + 256, [0, 64, 128])
    with pytest.raises(ValueError, match="model.anchor_stride is 'grid'"):
        frame.anchors((512.0,) * 5, ((1.0, 1.0),), centre=0.0, rounding="none", offset=0.0,
                      stride="grid")  # fmt: skip


def test_a_frame_without_extent_is_the_whole_canvas():
    frame = make_frame((64, 128), jnp.array([[30, 30]]), 0)
    assert frame == Frame((64, 128), None)
    x = jnp.ones((1, 16, 32, 2))
    assert frame.keep_inside(x) is x

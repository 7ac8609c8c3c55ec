"""A whole small model against torchvision 0.28: every stage, detections, losses and gradients.

The reference is ResNet-18 with FPN and all heads, on two images of different size, see the README
of the reference outputs. One model, evaluated once per mode; each test looks at one stage. Stages
behind a decision get the reference's own proposals: which boxes survive is a matter of rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.configs import coco_torchvision
from mask_rcnn_jax.data.resize import resize_image, resize_plan
from mask_rcnn_jax.evaluation.coco import to_coco_results
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.structures import Batch, Detections, Proposals, Targets
from mask_rcnn_jax.training.step import loss_terms
from mask_rcnn_jax.weights.convert import to_flax, to_torchvision
from tests.bounds import (
    assert_within,
    kink_bound,
    network_bound,
    placing_bound,
    rounding_bound,
    sum_bound,
)
from tests.helpers import load_golden
from tests.survivors import Survivors, pair_survivors

XLA_DEFAULTS = True

IMAGES = (0, 1)
SIDE = 320.0  # of the canvas; no coordinate is larger
# Products per output: of the stem, of 2 blocks a stage, of the pyramid, of the widest head.
TERMS = 147 + sum(4 * 9 * c for c in (64, 128, 256, 512)) + 2816 + 13056


def golden(name):
    return load_golden(f"torchvision/{name}", whole=True)


def small_config():
    config = coco_torchvision.get_config()
    config.data.update(image_size=(192, 320))
    config.model.update(
        num_classes=6,
        backbone=dict(depth=18, frozen_stages=0),
        box_head=dict(channels=256),
        rpn=dict(
            batch_size_per_image=64,
            pre_nms_topk_train=400,
            pre_nms_topk_test=300,
            post_nms_topk_train=300,
            post_nms_topk_test=200,
        ),
        sampling=dict(batch_size_per_image=64),
    )
    config.eval.update(score_threshold=0.35, detections_per_image=48)  # they find 47 and 23
    return config


@pytest.fixture(scope="module")
def variables():
    weights = {k: v.astype(np.float32) for k, v in golden("small_weights_fp16").items()}
    return jax.tree.map(jnp.asarray, to_flax(weights, norm="frozen", eps=1e-5)[0])


@pytest.fixture(scope="module")
def resized():
    """(uint8 image, plan, float32 canvas) of both images, by our own resizing."""
    options = as_recipe(small_config()).data
    rows = []
    for i in IMAGES:
        image = golden("small_eval")[f"img{i}"].transpose(1, 2, 0)
        plan = resize_plan(*image.shape[:2], options)
        rows.append((image, plan, resize_image(np.ascontiguousarray(image), plan, options)))
    return rows


@pytest.fixture(scope="module")
def inputs(resized):
    images = np.stack([canvas for _, _, canvas in resized])
    return images, np.array([plan.size for _, plan, _ in resized], np.int32)


def test_resized_images(inputs):
    images, sizes = inputs
    expected = golden("small_eval")
    np.testing.assert_array_equal(sizes, expected["image_sizes"])
    model = small_config().model
    ours = (images - model.input.mean) / np.array(model.input.std)
    for i, (height, width) in enumerate(sizes):
        ours[i, height:] = ours[i, :, width:] = 0
    np.testing.assert_allclose(ours.transpose(0, 3, 1, 2), expected["batch"], atol=1e-4)


def their_rpn_outputs():
    """Logits and deltas of every level."""
    expected = golden("small_eval")
    return [
        [
            expected[f"rpn_{name}_P{level}"].transpose(0, 2, 3, 1).reshape(shape)
            for level in range(2, 7)
        ]
        for name, shape in (("logits", (2, -1)), ("deltas", (2, -1, 4)))
    ]


def their_proposals(name):
    return np.stack([golden(name)[f"{'train_' * ('train' in name)}proposals{i}"] for i in IMAGES])


@pytest.fixture(scope="module")
def prediction(variables, inputs):
    """Detections and every stage's output, as numpy; one program for all."""
    model, options = build_model(small_config().model), as_recipe(small_config()).eval

    def behind_decisions(model, sizes, pyramid, extent):
        given = [[jnp.asarray(level) for level in levels] for levels in their_rpn_outputs()]
        proposals = {
            phase: model.propose(*given, sizes, extent, train=phase == "train")
            for phase in ("eval", "train")
        }
        roi_features = model.pool(pyramid, jnp.asarray(their_proposals("small_eval")), 7, extent)
        return {
            "anchors": model.anchor_grid(extent).boxes,
            "proposals": proposals,
            "roi_features": roi_features,
            "box_head": model.box_head(roi_features),
        }

    @jax.jit
    def run(variables, images, sizes):
        detections, kept = model.apply(
            variables, images, sizes, options, method="predict",
            capture_intermediates=lambda _, method: method in ("pyramid", "rpn_outputs"),
        )  # fmt: skip
        pyramid, extent = kept["intermediates"]["pyramid"][0]
        logits, deltas = kept["intermediates"]["rpn_outputs"][0]
        rest = model.apply(variables, sizes, pyramid, extent, method=behind_decisions)
        return detections, {"pyramid": pyramid, "logits": logits, "deltas": deltas, **rest}

    return jax.device_get(run(variables, *inputs))


@pytest.fixture(scope="module")
def stages(prediction):
    return prediction[1]


@pytest.mark.parametrize("level", range(2, 7))
def test_pyramid(stages, level):
    ours, theirs = stages["pyramid"][level - 2], golden("small_eval")[f"P{level}"]
    assert_within(ours.transpose(0, 3, 1, 2), theirs, network_bound(TERMS, theirs))


@pytest.mark.parametrize("level", range(2, 7))
def test_rpn_head(stages, level):
    for name, theirs in zip(("logits", "deltas"), their_rpn_outputs(), strict=True):
        ours, theirs = stages[name][level - 2], theirs[level - 2]
        assert_within(ours, theirs, network_bound(TERMS, theirs), name)


def test_anchors(stages):
    np.testing.assert_array_equal(
        np.concatenate(stages["anchors"]), golden("small_eval")["anchors"]
    )


# About ten roundings on either side, of coordinates that are less than twice the canvas before they
# are clipped.
DECODING = rounding_bound(2 * 10, 2 * SIDE)


def test_decoded_anchors(stages):
    deltas = their_rpn_outputs()[1][0][:, :1000]
    decoded = box_ops.decode(jnp.asarray(deltas), jnp.asarray(stages["anchors"][0][:1000]))
    assert_within(decoded, golden("small_eval")["rpn_decoded_first1000"], DECODING)


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("phase", ["eval", "train"])
def test_proposals(stages, phase, image):
    ours = stages["proposals"][phase]
    assert ours.valid[image].all()
    ours = Survivors(ours.boxes[image], ours.scores[image])
    boxes = their_proposals(f"small_{phase}")[image]
    # They keep no scores of the proposals to train on; these are those of the best partners.
    scores = golden("small_eval")[f"proposal_scores{image}"] if phase == "eval" else ours.scores
    theirs = Survivors(boxes, scores)
    rows, their_rows = pair_survivors(
        ours, theirs, iou_thresh=0.7, box_close=DECODING, score_close=1e-6
    )
    np.testing.assert_allclose(ours.scores[rows], theirs.scores[their_rows], atol=1e-6)


@pytest.mark.parametrize("image", IMAGES)
def test_box_head(stages, image):
    expected = golden("small_eval")
    features = stages["roi_features"][image, :32].transpose(0, 3, 1, 2)
    theirs = expected[f"box_roi_features{image}_first32"]
    # A sample is placed at up to a quarter of the side, with six roundings; from one cell of a map
    # to the next is at most twice its largest value.
    sampling = rounding_bound(2 * 6, SIDE / 4) * 2 * np.abs(theirs).max()
    assert_within(features, theirs, network_bound(TERMS, theirs) + sampling)
    logits, deltas = (part[image] for part in stages["box_head"])
    theirs = expected[f"cls_logits{image}"]
    assert_within(logits, theirs, network_bound(TERMS, theirs))
    theirs = expected[f"box_deltas{image}"]
    assert_within(deltas.reshape(len(deltas), -1), theirs, network_bound(TERMS, theirs))


def pair_detections(found, image, boxes):
    """Our rows and theirs that are the same detection; their scores agree. No row of ours pads."""
    expected = golden("small_eval")
    # The slopes of softmax and of the decoder, whose weights are 10.
    logits, deltas = (
        network_bound(TERMS, expected[f"{name}{image}"]).max()
        for name in ("cls_logits", "box_deltas")
    )
    scores, classes = expected[f"det_scores{image}"], expected[f"det_labels{image}"]
    rows, their_rows = pair_survivors(
        Survivors(found.boxes, found.scores, found.classes),
        Survivors(boxes, scores, classes), iou_thresh=0.5, box_close=deltas / 10 * SIDE,
        score_close=logits / 2,
    )  # fmt: skip
    scores = scores[their_rows]
    assert_within(found.scores[rows], scores, 2 * scores * (1 - scores) * logits)
    return rows, their_rows


@pytest.mark.parametrize("image", IMAGES)
def test_detections_from_raw_images(prediction, resized, image):
    expected, detections = golden("small_eval"), prediction[0]
    one = jax.tree.map(lambda leaf: leaf[image][detections.valid[image]], detections)
    rows, their_rows = pair_detections(one, image, expected[f"det_boxes_resized{image}"])
    scale_y, scale_x = resized[image][1].scale
    original = one.replace(boxes=one.boxes / np.array([scale_x, scale_y] * 2))
    pair_detections(original, image, expected[f"det_boxes{image}"])
    logits = network_bound(TERMS, expected[f"mask_logits{image}_selected"]).max()
    assert_within(one.masks[rows], expected[f"mask_probs{image}"][their_rows, 0], logits / 4)


@pytest.mark.parametrize("image", IMAGES)
def test_masks_in_the_picture(resized, image):
    """Pasted into the original picture, as evaluation writes them."""
    expected = golden("small_eval")
    shape = expected[f"pasted_shape{image}"]
    pasted = np.unpackbits(expected[f"pasted_bin{image}"], axis=-1)[..., : shape[-1]]
    names = dict(boxes="det_boxes_resized", scores="det_scores", classes="det_labels")
    theirs = {ours: expected[f"{name}{image}"][None] for ours, name in names.items()}
    theirs |= dict(masks=expected[f"mask_probs{image}"][None, :, 0])
    one = Detections(**theirs, valid=np.ones(theirs["scores"].shape, bool))
    raw, plan, _ = resized[image]
    _, masks = to_coco_results(
        one, [plan.scale], [1], [raw.shape[:2]], range(1, 7), paste=small_config().eval.paste
    )
    ours = np.stack([segmentation_to_mask(m["segmentation"], *raw.shape[:2]) for m in masks])
    different = (ours != pasted.reshape(ours.shape)).sum(axis=(1, 2))
    # A probability within 1e-6 of one half may fall on either side.
    assert different.max() <= 1 and different.sum() <= 3, different


@pytest.fixture(scope="module")
def training(variables, inputs):
    """Outputs and gradients of the training forward pass with torchvision's deterministic samples:
    the first of each kind."""
    expected = golden("small_train")
    images, sizes = inputs
    canvas = images.shape[1:3]
    targets = []
    for i in IMAGES:
        count = len(expected[f"gt_labels{i}"])
        height, width = expected[f"gt_masks_resized_shape{i}"][-2:]
        masks = np.zeros((8, *canvas), np.uint8)
        bits = np.unpackbits(expected[f"gt_masks_resized{i}"], axis=-1)[..., :width]
        masks[:count, :height, :width] = 255 * bits
        targets.append(
            Targets(
                boxes=_padded(expected[f"gt_boxes_resized{i}"], 8),
                classes=_padded(expected[f"gt_labels{i}"].astype(np.int32), 8),
                masks=masks,
                polygons=np.zeros((8, 0, 3), np.float32),
                valid=np.arange(8) < count,
            )
        )
    batch = Batch(
        images=images,
        image_sizes=sizes,
        scales=np.ones((2, 2), np.float32),
        image_index=np.arange(2, dtype=np.int32),
        targets=jax.tree.map(lambda *rows: np.stack(rows), *targets),
    )
    batch = jax.tree.map(jnp.asarray, batch)
    config = small_config()
    config.model.mask_targets.kind, config.data.mask_frame = "whole", "image"
    model = build_model(config.model)

    def loss_fn(params, name):
        outputs = model.apply(
            {**variables, "params": params}, batch, None, train=True, method="forward_train"
        )
        terms = loss_terms(outputs, as_recipe(config).loss, model.rpn.batch_size_per_image)
        return terms[name], (outputs, terms)

    @jax.jit
    def run(params):
        grads, (outputs, terms) = jax.grad(loss_fn, has_aux=True)(params, "loss/total")
        return outputs, terms, grads

    boxes = their_proposals("small_train")
    proposals = Proposals(
        boxes=jnp.asarray(boxes),
        scores=jnp.ones(boxes.shape[:2]),
        valid=jnp.ones(boxes.shape[:2], bool),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MaskRCNN, "propose", lambda *args, **options: proposals)
        return jax.device_get(run(variables["params"]))


def _padded(rows, count):
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])


@pytest.mark.parametrize("image", IMAGES)
def test_anchor_labels_and_samples(training, image):
    outputs, _, _ = training
    expected = golden("small_train")
    np.testing.assert_array_equal(outputs.anchor_labels[image], expected[f"rpn_labels{image}"])
    foreground = np.flatnonzero(outputs.sampled_labels[image] == 1)
    np.testing.assert_array_equal(foreground, expected[f"rpn_pos_idx{image}"])
    background = np.flatnonzero(outputs.sampled_labels[image] == 0)
    np.testing.assert_array_equal(background, expected[f"rpn_neg_idx{image}"])
    # Anchors are at least 22 pixels wide, weights 1.
    assert_within(
        outputs.anchor_deltas[image][foreground], expected[f"rpn_reg_targets_pos{image}"],
        rounding_bound(2 * 8, 2 * SIDE / 22),
    )  # fmt: skip


@pytest.mark.parametrize("image", IMAGES)
def test_sampled_rois(training, image):
    """Ours come foreground first, torchvision's by index: both are sorted by their boxes."""
    rois = jax.tree.map(lambda leaf: leaf[image], training[0].rois)
    expected = golden("small_train")
    boxes, labels = expected[f"roi_boxes{image}"], expected[f"roi_labels{image}"]
    ours, theirs = np.lexsort(rois.boxes.T), np.lexsort(boxes.T)
    assert rois.valid.all()
    np.testing.assert_array_equal(rois.boxes[ours], boxes[theirs])
    np.testing.assert_array_equal(rois.classes[ours], labels[theirs])
    targets = np.where(labels[:, None] > 0, expected[f"roi_reg_targets{image}"], 0.0)
    # Weights of 10; about six roundings, of coordinates up to the side of the canvas.
    sides = np.tile(rois.boxes[:, 2:] - rois.boxes[:, :2], 2)
    bound = rounding_bound(2 * 6, 10 * SIDE / sides)
    assert_within(rois.deltas[ours], targets[theirs], bound[ours])


def test_mask_targets(training):
    outputs, expected = training[0], golden("small_train")
    assert outputs.mask_rois.foreground.all()
    assert_within(outputs.mask_targets, expected["mask_targets"], 2 * placing_bound(SIDE))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("rpn_cls", "objectness"), ("rpn_box", "rpn_box_reg"), ("box_cls", "classifier"),
     ("box_reg", "box_reg"), ("mask", "mask")],
)  # fmt: skip
def test_losses(training, ours, theirs):
    expected = float(golden("small_train")[f"loss_{theirs}"])
    assert float(training[1][f"loss/{ours}"]) == pytest.approx(expected, rel=sum_bound(TERMS))


# A difference in any of at least 16 directions lies along the gradient by a quarter.
NORMS = kink_bound(TERMS) / 4


def test_gradient_norms(training):
    expected = golden("small_train")
    names = to_torchvision({"params": training[2], "batch_stats": {}}, norm_eps=1e-5)
    for name, norm in zip(expected["param_names"], expected["grad_norm_total"], strict=True):
        ours = float(np.linalg.norm(np.asarray(names[str(name)], np.float64)))
        assert ours == pytest.approx(float(norm), rel=NORMS), name

"""The whole R-50 model against NVIDIA's TensorFlow 2 code: every stage, losses and gradients.

The reference ran on two images on a 256 x 384 canvas. Where the recipe in configs/coco.py departs
from their code on purpose, the entries below set it back: no pre-NMS top-k (their limit only caps
what NMS returns), and mask crops read without the half pixel.

Stages behind a decision get the reference's own proposals: IoUs of 0.700001 are among them, and
which boxes survive depends on the rounding of the stages before. Detections of the whole are
compared in `tests/parity/test_complete_nvidia.py`.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.configs import coco
from mask_rcnn_jax.data.resize import resize_image, resize_plan
from mask_rcnn_jax.models import sampling
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.ops import matching
from mask_rcnn_jax.structures import Batch, Proposals, Targets
from mask_rcnn_jax.training.step import loss_terms
from mask_rcnn_jax.weights.convert import to_flax
from tests.bounds import assert_within, kink_bound, network_bound, rounding_bound, sum_bound
from tests.helpers import load_golden
from tests.models.nvidia_weights import nvidia_weights
from tests.survivors import Survivors, pair_survivors

pytestmark = pytest.mark.slow  # a minute

XYXY = [1, 0, 3, 2]  # from y1, x1, y2, x2
EVERYTHING = 100_000
# More proposals than any recipe has: without optimization they take longer to sort out.
OPTIMIZED = {"xla_backend_optimization_level": 1}
SIDE = 384.0  # of the canvas; no coordinate is larger
# Products per output: of the stem, of 3, 4, 6 and 3 blocks, of the pyramid, of the widest head.
TERMS = 147 + sum(n * 14 * c for n, c in ((3, 64), (4, 128), (6, 256), (3, 512))) + 4352 + 14592


def golden(name):
    return load_golden(f"nvidia_tf2/nv_{name}")


def their_config():
    config = coco.get_config()
    config.data.update(image_size=(256, 384), image_dtype="float32")
    config.model.update(
        num_classes=90,
        rpn=dict(pre_nms_topk_train=EVERYTHING, pre_nms_topk_test=EVERYTHING),
        mask_targets=dict(aligned=False),
    )
    config.eval.update(pre_nms_topk=EVERYTHING)
    return config


@pytest.fixture(scope="module")
def weights():
    return nvidia_weights()


@pytest.fixture(scope="module")
def variables(weights):
    return jax.tree.map(jnp.asarray, to_flax(weights, norm="frozen", eps=1e-5)[0])


@pytest.fixture(scope="module")
def inputs():
    """Canvases [2, 256, 384, 3] and image sizes by our own resizing."""
    options, images, sizes = as_recipe(their_config()).data, [], []
    for i in (0, 1):
        image = golden("eval")[f"img{i}"]
        plan = resize_plan(*image.shape[:2], options)
        images.append(resize_image(image, plan, options))
        sizes.append(plan.size)
    return np.stack(images), np.array(sizes, np.int32)


def test_resized_images(inputs):
    images, sizes = inputs
    expected, model = golden("eval"), their_config().model
    np.testing.assert_array_equal(sizes, expected["image_info"][:, :2])
    ours = (images - model.input.mean) / np.array(model.input.std)
    for i, (height, width) in enumerate(sizes):
        ours[i, height:] = ours[i, :, width:] = 0
    np.testing.assert_allclose(ours[:, ::4, ::4], expected["images_sub4"], atol=1e-4)


def their_rpn_outputs():
    """Logits and deltas of every level."""
    expected = golden("eval")
    logits = [expected[f"rpn_logits_P{k}"].reshape(2, -1) for k in range(2, 7)]
    deltas = [expected[f"rpn_deltas_P{k}"].reshape(2, -1, 4)[..., XYXY] for k in range(2, 7)]
    return logits, deltas


@pytest.fixture(scope="module")
def stages(variables, inputs):
    def run(model, images, sizes):
        pyramid, extent = model.pyramid(images, sizes, train=False)
        logits, deltas = model.rpn_head(pyramid)
        given = [[jnp.asarray(level) for level in levels] for levels in their_rpn_outputs()]
        proposals, train_proposals = (
            model.propose(*given, sizes, extent, train=train) for train in (False, True)
        )
        roi_features = model.pool(
            pyramid, jnp.asarray(golden("eval")["proposals"][..., XYXY]), 7, extent
        )
        return (
            pyramid, logits, deltas, proposals, train_proposals, roi_features[:, :1],
            model.box_head(roi_features),
        )  # fmt: skip

    model = build_model(their_config().model)
    run_all = jax.jit(
        lambda v, *args: model.apply(v, *args, method=run), compiler_options=OPTIMIZED
    )
    outputs = run_all(variables, *inputs)
    names = ("pyramid", "logits", "deltas", "proposals", "train_proposals", "roi_features",
             "box_head")  # fmt: skip
    return dict(zip(names, jax.device_get(outputs), strict=True))


@pytest.mark.parametrize("level", range(2, 7))
def test_pyramid(stages, level):
    expected, ours = golden("eval"), stages["pyramid"][level - 2]
    stride = int(expected[f"P{level}_stride"])
    theirs = expected[f"P{level}_sub"]
    assert_within(ours[:, ::stride, ::stride, :16], theirs, network_bound(TERMS, theirs))
    theirs = expected[f"P{level}_mean"]
    assert_within(ours.mean(axis=(1, 2)), theirs, network_bound(TERMS, theirs))


@pytest.mark.parametrize("level", range(2, 7))
def test_rpn_head(stages, level):
    for name, theirs in zip(("logits", "deltas"), their_rpn_outputs(), strict=True):
        ours, theirs = stages[name][level - 2], theirs[level - 2]
        assert_within(ours, theirs, network_bound(TERMS, theirs), name)


@pytest.mark.parametrize("image", [0, 1])
@pytest.mark.parametrize("phase", ["eval", "train"])
def test_proposals(stages, phase, image):
    name = "proposals" if phase == "eval" else "train_proposals"
    scores = golden(phase)["proposal_scores" if phase == "eval" else "train_proposal_scores"]
    theirs = Survivors(golden(phase)[name][image][:, XYXY], scores[image])
    ours = Survivors(stages[name].boxes[image], stages[name].scores[image])
    # Decoding has about ten roundings, of coordinates up to the side of the canvas.
    close = dict(box_close=rounding_bound(20, 2 * SIDE), score_close=1e-6)
    rows, their_rows = pair_survivors(ours, theirs, iou_thresh=0.7, **close)
    np.testing.assert_allclose(ours.scores[rows], theirs.scores[their_rows], atol=1e-6)


def test_box_head(stages):
    expected = golden("eval")
    theirs = expected["box_roi_features"]  # of the first RoI
    # A sample is placed at up to a quarter of the side, with six roundings; from one cell of a map
    # to the next is at most twice its largest value.
    sampling = rounding_bound(2 * 6, SIDE / 4) * 2 * np.abs(theirs).max()
    assert_within(stages["roi_features"], theirs, network_bound(TERMS, theirs) + sampling)
    logits, deltas = stages["box_head"]
    theirs = expected["class_outputs"]  # of the first RoIs, as those below
    assert_within(logits[:, : theirs.shape[1]], theirs, network_bound(TERMS, theirs))
    theirs = expected["box_outputs"].reshape(2, 32, 91, 4)[..., XYXY]
    assert_within(deltas[:, :32], theirs, network_bound(TERMS, theirs))


def _highest_rows(key, labels, *, num, fg_fraction):
    """`matching.sample` from the other end, as their sampler does when nothing is shuffled."""
    idxs, chosen, valid = matching.sample(None, labels[::-1], num=num, fg_fraction=fg_fraction)
    return jnp.where(valid, labels.shape[0] - 1 - idxs, 0), chosen, valid


@pytest.fixture(scope="module")
def training(variables, inputs):
    """Outputs, losses and gradients of their training batch, sampled as their code does without
    its shuffles: the first anchors, the last RoIs of each kind."""
    expected, config = golden("train"), their_config()
    classes = expected["gt_classes"][..., 0].astype(np.int32)
    valid = classes > 0
    masks = np.zeros((2, 100, 112, 112), np.float32)
    masks[:, :16] = 255 * expected["cropped_gt_masks_first16"][:, :, 2:-2, 2:-2]
    batch = Batch(
        images=inputs[0],
        image_sizes=inputs[1],
        scales=np.ones((2, 2), np.float32),
        image_index=np.arange(2, dtype=np.int32),
        targets=Targets(
            boxes=np.where(valid[..., None], expected["gt_boxes"][..., XYXY], 0),
            classes=np.where(valid, classes, 0),
            masks=masks,
            polygons=np.zeros((2, 100, 0, 3), np.float32),
            valid=valid,
        ),
    )
    batch = jax.tree.map(jnp.asarray, batch)
    model = build_model(config.model)

    def loss_fn(params):
        outputs = model.apply(
            {**variables, "params": params}, batch, None, train=True, method="forward_train"
        )
        terms = loss_terms(outputs, as_recipe(config).loss, model.rpn.batch_size_per_image)
        return terms["loss/total"], (outputs, terms)

    proposals = Proposals(
        boxes=jnp.asarray(expected["train_proposals"][..., XYXY]),
        scores=jnp.asarray(expected["train_proposal_scores"]),
        valid=jnp.ones((2, 1000), bool),
    )
    with pytest.MonkeyPatch.context() as patch:
        replaced = SimpleNamespace(match_rois=matching.match_rois, sample=_highest_rows)
        patch.setattr(sampling, "matching", replaced)
        patch.setattr(MaskRCNN, "propose", lambda *args, **options: proposals)
        gradient = jax.jit(jax.grad(loss_fn, has_aux=True), compiler_options=OPTIMIZED)
        grads, (outputs, terms) = gradient(variables["params"])
    return jax.device_get((outputs, terms, grads))


@pytest.mark.parametrize("image", [0, 1])
def test_matched_anchors(training, image):
    theirs = golden("train")[f"rpn_match_results{image}"]
    labels = np.where(theirs >= 0, 1, np.where(theirs == -1, 0, -1))
    np.testing.assert_array_equal(training[0].anchor_labels[image], labels)


def test_sampled_anchors_and_their_targets(training):
    expected, outputs = golden("train"), training[0]
    score_targets = [expected[f"score_targets_{k}"].reshape(2, -1) for k in range(2, 7)]
    np.testing.assert_array_equal(outputs.sampled_labels, np.concatenate(score_targets, axis=1))
    box_targets = [expected[f"box_targets_{k}"].reshape(2, -1, 4) for k in range(2, 7)]
    # Anchors are at least 22 pixels wide, weights 1.
    bound = rounding_bound(2 * 8, 2 * SIDE / 22)
    assert_within(outputs.anchor_deltas, np.concatenate(box_targets, axis=1)[..., XYXY], bound)


@pytest.mark.parametrize("image", [0, 1])
def test_sampled_rois(training, image):
    """The order differs: rows are sorted by their boxes on both sides."""
    rois, expected = jax.tree.map(lambda leaf: leaf[image], training[0].rois), golden("train")
    boxes = expected["roi_boxes"][image][:, XYXY]
    ours, theirs = np.lexsort(rois.boxes.T), np.lexsort(boxes.T)
    np.testing.assert_array_equal(rois.boxes[ours], boxes[theirs])
    np.testing.assert_array_equal(rois.classes[ours], expected["roi_class_targets"][image][theirs])
    targets = expected["roi_encoded_box_targets"][image][:, XYXY]
    # Weights of 10; about six roundings, of coordinates up to the side of the canvas.
    sides = np.tile(rois.boxes[:, 2:] - rois.boxes[:, :2] + 1, 2)
    bound = rounding_bound(2 * 6, 10 * SIDE / sides)
    assert_within(rois.deltas[ours], targets[theirs], bound[ours])


LOSSES = {"rpn_cls": "rpn_score_loss", "rpn_box": "rpn_box_loss", "box_cls": "fast_rcnn_class_loss",
          "box_reg": "fast_rcnn_box_loss", "mask": "mask_rcnn_loss"}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses(training, name):
    expected = float(golden("train")[f"loss_{LOSSES[name]}"])
    assert float(training[1][f"loss/{name}"]) == pytest.approx(expected, rel=sum_bound(TERMS))


def _trained_kernels(variables):
    """Kernels that their L2 loss sees: all but those of the stem and the first group."""
    return {
        path: leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"])
        if path[-1].key == "kernel" and not path[1].key.startswith(("stem", "res2"))
    }


def test_l2_loss(variables):
    """Weight decay is part of the optimizer here; as a loss it would be theirs."""
    total = sum(float(np.sum(np.square(k, dtype=np.float64))) for k in
                _trained_kernels(variables).values())  # fmt: skip
    expected = float(golden("train")["loss_l2_regularization_loss"])
    assert 1e-4 * total / 2 == pytest.approx(expected, rel=1e-4)


# A difference in any of at least 16 directions lies along the gradient by a quarter.
NORMS = kink_bound(TERMS) / 4


def test_gradient_norms(training, variables, weights):
    """Gradients with weight decay, parameter by parameter."""
    expected, grads = golden("train"), dict(jax.tree_util.tree_leaves_with_path(training[2]))
    # Which of our arrays holds which of theirs: convert arrays that hold their own number.
    names = list(weights)
    numbered = {name: np.full(weights[name].shape, i, np.float32) for i, name in enumerate(names)}
    tree = to_flax(numbered, norm="frozen", eps=1e-5)[0]["params"]
    ours_of = {
        names[int(leaf.ravel()[0])]: path
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    kernels = _trained_kernels(variables)
    for name, norm in zip(expected["param_names"], expected["grad_norm_total"], strict=True):
        path = ours_of[str(name)]
        grad = grads[path] + (1e-4 * kernels[path] if path in kernels else 0.0)
        assert float(np.linalg.norm(grad)) == pytest.approx(float(norm), rel=kink_bound(TERMS)), (
            name
        )

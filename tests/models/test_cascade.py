"""Three box heads in a row: detectron2's values on the model of test_strong_models.py, and what
those do not cover."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.models.cascade import Cascade, label_rois, refine
from mask_rcnn_jax.models.roi_heads import BoxHead
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.classifier import Classifier
from mask_rcnn_jax.ops.losses import box_losses
from mask_rcnn_jax.structures import Proposals, Targets
from mask_rcnn_jax.training.step import loss_terms
from mask_rcnn_jax.weights.convert import to_flax
from tests import small_trunk
from tests.helpers import any_variables, assert_finite_tree, load_golden, tiny_batch, tiny_config
from tests.models.test_strong_models import (
    DETECTRON2,
    IMAGES,
    assert_gradient_norms,
    assert_near,
    assert_running_statistics,
    assert_sampled,
    every_row,
    predicted,
    their_proposals,
    trained,
)
from tests.models.test_strong_models import inputs as _inputs
from tests.models.test_strong_models import resized as _resized
from tests.survivors import Survivors, pair_survivors

CODER = BoxCoder()
HEAD = BoxHead(2, class_agnostic=True)
inputs, resized = _inputs, _resized  # fixtures


@pytest.fixture(scope="module")
def system():
    return DETECTRON2


def golden(phase):
    return load_golden(f"modern/cascade_small_{phase}", whole=True)


def config():
    config = DETECTRON2.config()
    box_head = dict(num_convs=0, num_fcs=2, channels=64, norm="none", class_agnostic=True)
    config.model.update(box_head=box_head, cascade=dict(fg_iou_thresh=(0.6, 0.7)))
    return config


def weights():
    trunk = {n: a for n, a in DETECTRON2.weights().items() if "roi_heads.box" not in n}
    return trunk | golden("weights")


@pytest.fixture(scope="module")
def variables():
    model = config().model
    form = dict(norm=model.backbone.norm, eps=model.backbone.norm_eps, model=model)
    loaded, source = to_flax(weights(), **form)
    assert source == "detectron2"
    return jax.tree.map(jnp.asarray, loaded)


@pytest.fixture(scope="module")
def prediction(variables, inputs):
    proposals = every_row(np.stack([golden("eval")[f"proposals{i}"] for i in IMAGES]))
    return predicted(config(), variables, inputs, proposals)


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.slow
def test_every_stage_in_prediction(prediction, inputs, image):
    expected, (_, stages) = golden("eval"), prediction
    height, width = inputs[1][image]
    scores, last = stages["scores_and_first_boxes"]
    assert len(stages["heads"]) == 3
    for k, (logits, deltas) in enumerate(stages["heads"]):
        theirs = expected[f"stage{k}_cls_logits{image}"]
        assert_near(logits[image], np.roll(theirs, 1, axis=1))
        assert_near(deltas[image, :, 1], expected[f"stage{k}_box_deltas{image}"])
        boxes = expected[f"stage{k}_boxes{image}"]
        if k < 2:
            boxes = np.clip(boxes, 0, [width, height, width, height])
        ours = stages["pools"][k + 1][0][image] if k < 2 else last[image]
        np.testing.assert_allclose(ours, boxes, rtol=0, atol=1e-2)
    theirs = np.roll(expected[f"mean_scores{image}"], 1, axis=1)
    np.testing.assert_allclose(scores[image], theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.slow
def test_detections(prediction, image):
    expected = golden("eval")
    one = jax.tree.map(lambda leaf: leaf[image], prediction[0])
    ours = Survivors(*(leaf[one.valid] for leaf in (one.boxes, one.scores, one.classes)))
    names = ("det_boxes_resized", "det_scores", "det_labels")
    boxes, scores, labels = (expected[f"{name}{image}"] for name in names)
    theirs = Survivors(boxes, scores, labels + 1)
    close = dict(iou_thresh=0.5, box_close=1e-2, score_close=1e-4)
    rows, their_rows = pair_survivors(ours, theirs, **close)
    assert len(rows) == len(ours.scores) == len(scores) == 60
    masks = one.masks[one.valid][rows]
    theirs = expected[f"mask_probs{image}"][their_rows]
    np.testing.assert_allclose(masks, theirs, rtol=0, atol=1e-2)


@pytest.fixture(scope="module")
def training(variables, inputs, resized):
    # Up to the first head, all is as without a cascade.
    proposals = their_proposals(DETECTRON2, "train")
    return trained(DETECTRON2, config(), variables, inputs, resized, proposals)


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.slow
def test_sampled_anchors_and_rois(training, image):
    assert_sampled(DETECTRON2, training[0], image)


@pytest.mark.slow
def test_losses_of_every_stage(training):
    outputs, terms, *_ = training
    expected, totals = golden("train"), np.zeros(2)
    values = jax.jit(
        lambda heads: [
            box_losses(
                head.class_logits, head.box_deltas, head.rois.classes, head.rois.deltas,
                head.rois.valid, as_recipe(config()).loss,
            )
            for head in heads
        ]
    )([outputs, *outputs.stages])  # fmt: skip
    for k, stage in enumerate(values):
        for j, name in enumerate(("cls", "box_reg")):
            exact = float(expected[f"f64/loss_{name}_stage{k}"])
            assert float(stage[j]) == pytest.approx(exact, rel=1e-5), (k, name)
            totals[j] += exact
    names = {"rpn_cls": "rpn_cls", "rpn_box": "rpn_loc", "mask": "mask"}
    for ours, theirs in names.items():
        exact = float(expected[f"f64/loss_{theirs}"])
        assert float(terms[f"loss/{ours}"]) == pytest.approx(exact, rel=1e-5), ours
    assert float(terms["loss/box_cls"]) == pytest.approx(totals[0], rel=1e-5)
    assert float(terms["loss/box_reg"]) == pytest.approx(totals[1], rel=1e-5)


@pytest.mark.slow
def test_gradient_norms(training):
    assert_gradient_norms(training[3], golden("train"), weights())


@pytest.mark.slow
def test_running_statistics_after_the_step(training):
    theirs = DETECTRON2.golden("train")
    theirs = {name: array for name, array in theirs.items() if "box_head" not in name}
    assert_running_statistics(training[2], theirs, weights())


def targets_of(boxes, classes):
    count = len(boxes)
    return Targets(
        np.float32(boxes), np.int32(classes), np.zeros((count, 2, 2), np.float32),
        np.array(classes) > 0, np.zeros((count, 0, 3), np.float32),
    )  # fmt: skip


@pytest.mark.parametrize(("thresh", "classes"), [(0.5, [2, 2, 0, 0]), (0.6, [2, 2, 0, 0]),
                                                 (0.7, [2, 0, 0, 0])])  # fmt: skip
def test_boxes_are_labeled_anew(thresh, classes):
    """IoU 1, .65, 0 with an object of 10 x 10 pixels, and padding on top of it."""
    truth = targets_of([[0, 0, 10, 10], [50, 50, 90, 90]], [2, 0])
    boxes = np.float32([[0, 0, 10, 10], [0, 0, 6.5, 10], [50, 50, 90, 90], [0, 0, 10, 10]])
    label = jax.jit(label_rois, static_argnums=(3, 4))
    rois = jax.device_get(label(boxes, np.array([1, 1, 1, 0], bool), truth, thresh, CODER))
    assert rois.classes.tolist() == classes
    np.testing.assert_array_equal(rois.foreground, np.array(classes) > 0)
    np.testing.assert_array_equal(rois.valid, [True, True, True, False])
    assert not rois.deltas[2:].any()
    expected = CODER.encode_rois(jnp.asarray(truth.boxes[0]), jnp.asarray(boxes[1]))
    expected *= classes[1] > 0
    np.testing.assert_allclose(rois.deltas[1], expected)


def test_refined_boxes_stay_inside_without_gradient():
    coder = Cascade((HEAD, HEAD), (0.6, 0.7)).coders(CODER)[2]
    assert coder.weights == (30.0, 30.0, 15.0, 15.0)
    boxes = np.float32([[[10, 10, 30, 20], [80, 80, 120, 100]]])
    deltas = np.zeros((1, 2, 3, 4), np.float32)
    deltas[..., 0] = 30.0  # one width to the right

    def moved(deltas):
        boxes_now = refine(jnp.asarray(boxes), deltas, jnp.array([[100, 110]]), coder)
        return boxes_now.sum(), boxes_now

    grad, boxes_now = jax.jit(jax.grad(moved, has_aux=True))(deltas)
    np.testing.assert_allclose(boxes_now[0], [[30, 10, 50, 20], [110, 80, 110, 100]])
    assert not np.any(grad)


def test_features_keep_their_value_and_get_a_share_of_the_gradient():
    x = jnp.float32([1.5, -2e5])
    cascade = Cascade((HEAD, HEAD), (0.6, 0.7))
    np.testing.assert_array_equal(cascade.scale_gradient(x), x)
    grad = jax.grad(lambda x: (3 * cascade.scale_gradient(x)).sum())(x)
    np.testing.assert_allclose(grad, [1, 1])
    assert Cascade().scale_gradient(x) is x


def tiny_cascade(**changes):
    config = tiny_config()
    config.model.backbone = small_trunk.SECTION
    config.model.box_head.class_agnostic = True
    config.model.cascade.fg_iou_thresh = (0.6, 0.7)
    config.model.update(changes)
    return config


@pytest.mark.parametrize("objects", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.slow
def test_a_batch_without_objects_and_boxes_outside_are_finite(objects):
    """Without objects all RoIs of all stages are background; a wild head throws boxes out."""
    config = tiny_cascade(mask_head=dict(name="none"))
    model = build_model(config.model)
    variables = any_variables(model)
    names = set(variables["params"]["cascade"])
    assert names == {"heads_0", "heads_1"}
    variables["params"]["box_head"]["bbox_pred"]["bias"] += 1e3
    batch = jax.tree.map(jnp.asarray, tiny_batch(2))
    if not objects:
        targets = jax.tree.map(jnp.zeros_like, batch.targets)
        batch = batch.replace(targets=targets)
    keys = jax.random.split(jax.random.key(0), 2)

    def loss(params):
        outputs = model.apply({**variables, "params": params}, batch, keys, train=True,
                              method="forward_train", mutable=["batch_stats"])[0]  # fmt: skip
        terms = loss_terms(outputs, as_recipe(config).loss, model.rpn.batch_size_per_image)
        return terms["loss/total"], (terms, outputs)

    grads, (terms, outputs) = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    assert_finite_tree((grads, terms))
    first, second = (stage.rois for stage in outputs.stages)
    assert (second.valid <= first.valid).all() and (first.valid <= outputs.rois.valid).all()
    assert not first.valid.all()
    assert not first.boxes[~first.valid].any()
    if not objects:
        assert not first.foreground.any() and not second.foreground.any()
        assert float(terms["loss/box_reg"]) == 0.0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            dict(fg_iou_thresh=(0.6,)),
            r"model.cascade.weight_factors is \(2.0, 3.0\), expected one for each of",
        ),
        (
            dict(fg_iou_thresh=(0.6, 0.7), box_weights=((1.0, 1.0, 1.0, 0.0),) * 2),
            r"model.cascade.box_weights is .*, expected four numbers above 0 for each of 2 stages",
        ),
        (dict(fg_iou_thresh=(0.6, 1.0)), r"model.cascade.fg_iou_thresh is \(0.6, 1.0\), expected"),
        (
            dict(fg_iou_thresh=(0.6, 0.7), weight_factors=(2.0, -3.0)),
            r"model.cascade.weight_factors is \(2.0, -3.0\), expected above 0",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused(section, message):
    config = tiny_cascade()
    config.model.cascade.update(section)
    with pytest.raises(ValueError, match=message):
        build_model(config.model)


def test_boxes_of_a_class_are_refined_by_those_of_the_class():
    """Of the RoI's in training, of the most probable one for background and in prediction."""
    cascade = Cascade((BoxHead(3), BoxHead(3)), (0.6, 0.7))
    rng = np.random.default_rng(0)
    deltas = rng.normal(size=(1, 3, 4, 4)).astype(np.float32)
    logits = np.float32([[[9, 1, 2, 3], [9, 1, 5, 3], [0, 7, 1, 1]]])
    found = cascade.shared_deltas(logits, deltas)
    np.testing.assert_array_equal(found[0, :, 0], deltas[0, [0, 1, 2], [3, 2, 1]])
    found = cascade.shared_deltas(logits, deltas, jnp.array([[1, 0, 3]]))
    np.testing.assert_array_equal(found[0, :, 0], deltas[0, [0, 1, 2], [1, 2, 3]])
    shared = Cascade((HEAD, HEAD), (0.6, 0.7)).shared_deltas(logits, deltas)
    np.testing.assert_array_equal(shared, deltas)


def test_a_stage_may_have_weights_and_scores_of_its_own():
    weights = ((20.0, 20.0, 10.0, 10.0), (30.3, 30.3, 14.9, 14.9))
    cascade = Cascade((HEAD, HEAD), (0.6, 0.7), box_weights=weights, mean_of="logits")
    found = [coder.weights for coder in cascade.coders(CODER)]
    assert found == [CODER.weights, *weights]
    proposals = Proposals(
        boxes=jnp.ones((1, 1, 4)), scores=jnp.ones((1, 1)), valid=jnp.ones((1, 1))
    )
    given = iter(jnp.float32([[[[3.0, 1.0, 2.0]]], [[[0.0, 4.0, 1.0]]]]))
    run = lambda head, boxes: (next(given), jnp.zeros((1, 1, 3, 4)))  # noqa: E731
    start = (jnp.float32([[[0.0, 1.0, 3.0]]]), jnp.zeros((1, 1, 3, 4)), proposals)
    sizes = jnp.array([[8, 8]])
    logits, *_ = cascade.predict_stages(*start, sizes, run, CODER, Classifier())
    np.testing.assert_allclose(logits, [[[1.0, 2.0, 2.0]]])

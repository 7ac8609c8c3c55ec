"""The whole forward pass: proposals, detections and what padding may not change."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models import task_heads
from mask_rcnn_jax.models.build import (
    abstract_variables,
    build_model,
    init_variables,
    resolve_precision,
)
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.roi_heads import MaskHead
from mask_rcnn_jax.models.rpn import RPN
from mask_rcnn_jax.models.sampling import RoISampling
from mask_rcnn_jax.ops.boxes import BoxCoder, decode
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.structures import Proposals, Targets
from tests import small_trunk
from tests.bounds import assert_gradients_close, assert_within, network_bound
from tests.helpers import any_variables, drawn, random_boxes, tiny_batch, tiny_config


@pytest.fixture(scope="module")
def model():
    config = tiny_config()
    config.model.backbone = small_trunk.SECTION
    return build_model(config.model)


DETECT = Detect(score_threshold=0.0, pre_nms_topk=60, detections_per_image=5)


@pytest.fixture(scope="module")
def predict(model):
    @jax.jit
    def run(variables, images, sizes):  # constants would take longer to compile
        return model.apply(variables, images, sizes, DETECT, method="predict")

    # Twice as large, or scores and masks hardly depend on the image.
    return partial(run, jax.tree.map(lambda leaf: 2 * leaf, any_variables(model)))


def slow_nms(boxes, thresh):
    """Rows kept by greedy NMS of boxes sorted by falling score."""
    keep = []
    for i, box in enumerate(boxes):
        for k in keep:
            other = boxes[k]
            side = np.minimum(box[2:], other[2:]) - np.maximum(box[:2], other[:2])
            inter = np.prod(np.maximum(side, 0))
            union = np.prod(box[2:] - box[:2]) + np.prod(other[2:] - other[:2]) - inter
            if inter > thresh * union:
                break
        else:
            keep.append(i)
    return keep


def test_detections_equal_a_slow_nms_per_class():
    rng = np.random.default_rng(0)
    rows, classes, limit = 40, 3, 12
    logits = rng.normal(scale=2.0, size=(1, rows, classes + 1)).astype(np.float32)
    deltas = rng.normal(scale=0.5, size=(1, rows, classes + 1, 4)).astype(np.float32)
    boxes = random_boxes(rng, rows, 60.0)
    valid = np.arange(rows) < 35
    proposals = Proposals(boxes=jnp.asarray(boxes)[None], scores=jnp.ones((1, rows)),
                          valid=jnp.asarray(valid)[None])  # fmt: skip
    weights = (10.0, 10.0, 5.0, 5.0)
    detect = Detect(pre_nms_topk=rows * classes, detections_per_image=limit)
    arrays = jnp.asarray(logits), jnp.asarray(deltas), proposals, jnp.array([[64, 64]])
    selected = jax.jit(partial(detect, coder=BoxCoder(weights)))(*arrays)
    found, scores, labels, ok = (np.asarray(x)[0] for x in selected)

    probability = np.exp(logits[0]) / np.exp(logits[0]).sum(axis=1, keepdims=True)
    expected = []
    for label in range(1, classes + 1):
        rows_in = [r for r in range(rows) if valid[r] and probability[r, label] > 0.05]
        rows_in.sort(key=lambda r: -probability[r, label])
        chosen = jnp.asarray(deltas[0, rows_in, label]), jnp.asarray(boxes[rows_in])
        decoded = np.clip(decode(*chosen, weights=weights, offset=0.0), 0, 64)
        expected += [
            (probability[rows_in[k], label], label, decoded[k]) for k in slow_nms(decoded, 0.5)
        ]
    expected = sorted(expected, key=lambda e: -e[0])[:limit]
    assert ok.sum() == len(expected)
    np.testing.assert_allclose(scores[ok], [e[0] for e in expected], rtol=1e-5)
    np.testing.assert_array_equal(labels[ok], [e[1] for e in expected])
    np.testing.assert_allclose(found[ok], [e[2] for e in expected], atol=1e-3)
    assert not found[~ok].any() and not scores[~ok].any() and not labels[~ok].any()


def test_proposals_are_inside_the_image_sorted_and_padded(model):
    rng = np.random.default_rng(1)
    anchors = model.anchor_grid(ValidExtent((64, 64), None))
    logits = [jnp.asarray(rng.normal(size=(2, len(a))), jnp.float32) for a in anchors.boxes]
    deltas = [jnp.asarray(rng.normal(size=(2, len(a), 4)), jnp.float32) for a in anchors.boxes]
    sizes = jnp.array([[64, 40], [30, 64]])
    rpn = RPN(pre_nms_topk_test=50, post_nms_topk_test=400, min_size=-1.0)
    coder = BoxCoder(inclusive="decoder")
    propose = jax.jit(partial(rpn.proposals, anchors=anchors, coder=coder, train=False))
    proposals = propose(logits, deltas, sizes)
    assert proposals.boxes.shape == (2, 400, 4)
    for b in range(2):
        valid = np.asarray(proposals.valid[b])
        boxes, scores = np.asarray(proposals.boxes[b]), np.asarray(proposals.scores[b])
        assert 0 < valid.sum() < 400 and valid[: valid.sum()].all()
        assert not boxes[~valid].any() and not scores[~valid].any()
        assert (np.diff(scores[valid]) <= 0).all()
        assert (boxes[valid] >= 0).all()
        height, width = sizes[b]
        assert boxes[:, [0, 2]].max() <= width - 1 and boxes[:, [1, 3]].max() <= height - 1


def test_sampled_rois_start_with_foreground_and_regress_to_their_object():
    rng = np.random.default_rng(2)
    gt = random_boxes(rng, 3)
    near = gt[rng.integers(0, 3, 20)] + rng.normal(scale=0.5, size=(20, 4))
    boxes = np.concatenate([near, random_boxes(rng, 30, 20.0)]).astype(np.float32)
    targets = Targets(
        boxes=jnp.asarray(np.concatenate([gt, np.zeros((2, 4), np.float32)])),
        classes=jnp.array([1, 2, 3, 0, 0]), masks=jnp.zeros((5, 8, 8), jnp.uint8),
        polygons=jnp.zeros((5, 0, 3)),
        valid=jnp.array([True, True, True, False, False]),
    )  # fmt: skip
    proposals = Proposals(boxes=jnp.asarray(boxes), scores=jnp.ones(50), valid=jnp.ones(50, bool))
    sample, coder = RoISampling(batch_size_per_image=32, fg_strict=True), BoxCoder()
    draw = jax.jit(partial(sample, coder=coder))
    rois = draw(jax.random.key(0), proposals, targets)
    assert rois.foreground.tolist() == [True] * 8 + [False] * 24
    assert (np.asarray(rois.classes) > 0).tolist() == rois.foreground.tolist()
    back = decode(rois.deltas, rois.boxes, weights=coder.weights, offset=0.0)
    matched = np.asarray(targets.boxes)[rois.matched_idxs]
    np.testing.assert_allclose(back[:8], matched[:8], atol=1e-3)

    nothing = targets.replace(valid=jnp.zeros(5, bool))
    rois = draw(jax.random.key(0), proposals, nothing)
    assert not rois.foreground.any() and not rois.classes.any() and rois.valid.sum() == 32


def test_other_images_of_the_batch_change_nothing(predict):
    batch = tiny_batch(2)
    both = predict(batch.images, batch.image_sizes)
    other = predict(batch.images[[0, 0]], batch.image_sizes)
    for together, alone in zip(jax.tree.leaves(both), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(together[0], alone[0], atol=1e-5)  # the same program


def test_pixels_beyond_the_image_change_nothing(predict):
    batch = tiny_batch(2)
    sizes = np.array([[40, 64], [64, 48]], np.int32)
    dirty = batch.images.copy()
    dirty[0, 40:], dirty[1, :, 48:] = 255, 7
    for clean, found in zip(
        jax.tree.leaves(predict(batch.images, sizes)), jax.tree.leaves(predict(dirty, sizes)),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(clean, found)


def masks_of(model, count):
    """A function of variables that gives the masks of so many boxes in each of two images."""
    batch, rng = tiny_batch(2), np.random.default_rng(count)
    boxes = jnp.asarray(random_boxes(rng, 2 * count, 60.0).reshape(2, count, 4))
    classes = jnp.asarray(rng.integers(1, 3, (2, count)))
    given = batch.images, batch.image_sizes, boxes, classes
    return jax.jit(lambda variables: model.apply(variables, *given, method="predict_masks"))


@pytest.mark.slow
def test_masks_of_many_objects_are_found_in_parts(model, monkeypatch):
    variables = any_variables(model)
    at_once = masks_of(model, 11)(variables)
    for most in (4, 10):  # 3 parts of 4, and 2 of 6: one more than there are
        monkeypatch.setattr(task_heads, "MASKS_AT_ONCE", most)
        in_parts = masks_of(model, 11)(variables)
        assert in_parts.shape == at_once.shape == (2, 11, 28, 28)
        np.testing.assert_allclose(in_parts, at_once, atol=1e-6)


def test_memory_of_masks_does_not_grow_with_objects(model):
    """But for the masks themselves: the head's largest maps would take 400 MB each."""

    def memory(count):
        lowered = masks_of(model, count).lower(abstract_variables(model))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    results = 2 * 2000 * 28 * 28 * 4
    assert memory(2000) < memory(250) + 3 * results


def test_without_a_class_count_the_model_is_refused():
    config = tiny_config()
    config.model.num_classes = 0
    with pytest.raises(ValueError, match="num_classes is 0"):
        build_model(config.model)


def test_mask_head_gives_the_logits_of_each_rois_class():
    """The same layers of Flax, all classes, then a choice; and the same gradients."""
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(2, 3, 6, 6, 8)), jnp.float32)
    classes = jnp.array([[0, 2, 4], [1, 1, 3]])
    head = MaskHead(4, 8, "he", jnp.float32)
    params = drawn(head, features, classes)["params"]
    params["mask_predictor"]["bias"] = jnp.arange(5.0)
    weights = jnp.asarray(rng.normal(size=(6, 12, 12)), jnp.float32)

    def all_classes(params):
        x = features.reshape(6, 6, 6, 8)
        for i in range(1, 5):
            x = nn.relu(nn.Conv(8, (3, 3)).apply({"params": params[f"mask_fcn{i}"]}, x))
        up = nn.ConvTranspose(8, (2, 2), (2, 2), transpose_kernel=True)
        x = nn.relu(up.apply({"params": params["mask_deconv"]}, x))
        logits = nn.Conv(5, (1, 1)).apply({"params": params["mask_predictor"]}, x)
        return jnp.stack([logits[i, ..., k] for i, k in enumerate(classes.reshape(-1))])

    def chosen(params):
        return head.apply({"params": params}, features, classes).reshape(6, 12, 12)

    def run(logits_of):
        def loss(params):
            logits = logits_of(params)
            return jnp.sum(logits * weights), logits

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    terms = 4 * 9 * 8 + 2 * 8  # products per output, of all layers
    (ours, logits), (theirs, expected) = run(chosen), run(all_classes)
    assert_within(logits, expected, network_bound(terms, expected))
    assert_gradients_close(ours, theirs, terms)


@pytest.mark.parametrize(
    ("precision", "products"),
    [
        ("float32", "HIGHEST"),
        ("tf32", "HIGH"),
        ("bfloat16", "None"),
        pytest.param("float16", "None", marks=pytest.mark.slow),
    ],
)
def test_the_precision_says_what_float32_products_are_rounded_to(precision, products):
    """Those of the trunk and the heads. What is asked for explicitly, as masks do, stays."""
    config = tiny_config()
    model = build_model(config.model, precision=precision, implementation="xla")
    variables = abstract_variables(build_model(config.model))
    predict = partial(model.apply, detect=as_recipe(config).eval, method="predict")
    batch = tiny_batch(1)
    program = str(jax.make_jaxpr(predict)(variables, batch.images, batch.image_sizes))
    found = re.findall(r"precision=\(?(?:Precision\.)?(\w+)", program)
    assert len(found) > 20 and found.count(products) >= 0.9 * len(found), found


def test_auto_is_the_precision_that_is_faster():
    expected = {(7, 0): "float16", (7, 5): "float16", (8, 0): "bfloat16", (12, 0): "bfloat16"}
    for platform in ("cuda", "gpu"):
        assert {c: resolve_precision("auto", platform, c) for c in expected} == expected
    assert resolve_precision("auto", "cuda") == resolve_precision("auto", "tpu") == "bfloat16"
    assert resolve_precision("auto", "cpu") == resolve_precision("auto") == "float32"
    assert resolve_precision("float16", "cpu") == "float16"
    assert build_model(tiny_config().model, precision="auto").precision.dtype == jnp.float32


def test_an_unknown_precision_or_recomputation_is_refused():
    config = tiny_config()
    with pytest.raises(ValueError, match="train.precision is 'int8', expected one of .*'tf32'"):
        build_model(config.model, precision="int8")
    with pytest.raises(ValueError, match="train.remat is 'most', expected one of .*'heads'"):
        build_model(config.model, remat="most")


@pytest.mark.slow
def test_what_is_given_is_not_drawn_and_changes_nothing_else():
    config = tiny_config()
    config.model.backbone = small_trunk.SECTION
    model = build_model(config.model)
    drawn, wanted = init_variables(model, 5), abstract_variables(model)
    head = jax.tree.map(lambda x: np.full(x.shape, 7, x.dtype), wanted["params"]["box_head"])
    given = {**wanted, "params": {**wanted["params"], "box_head": head}}
    found = init_variables(model, 5, given)
    expected = {**drawn, "params": {**drawn["params"], "box_head": head}}
    jax.tree.map(np.testing.assert_array_equal, found, expected)

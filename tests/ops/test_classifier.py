"""Scores and losses of many classes, against detectron2's rules written slowly in NumPy."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax import parts
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.ops import losses
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.classifier import Classifier
from mask_rcnn_jax.ops.losses import LossOptions
from mask_rcnn_jax.structures import Proposals
from tests.helpers import assert_finite_with_grad
from tests.ops.test_losses import roi_problem


def slow_loss(logits, classes, valid, drawn):
    """Sum of binary cross-entropies over the drawn classes / RoIs (FastRCNNOutputLayers)."""
    total, count = 0.0, 0
    for image, roi in itertools.product(*map(range, classes.shape)):
        if not valid[image, roi]:
            continue
        count += 1
        for k in range(1, logits.shape[-1]):
            if drawn[image, k - 1]:
                score = 1 / (1 + np.exp(-np.float64(logits[image, roi, k])))
                total -= np.log(score if classes[image, roi] == k else 1 - score)
    return total / max(count, 1)


def random_drawn(rng, batch=2, classes=4):
    return jnp.asarray(rng.random((batch, classes)) < 0.6)


def test_scores_by_hand():
    logits = jnp.array([[9.0, 0.0, np.log(3)]])  # background, two classes
    np.testing.assert_allclose(Classifier("sigmoid").scores(logits), [[0.5, 0.75]], rtol=1e-6)
    np.testing.assert_allclose(Classifier().scores(logits), jax.nn.softmax(logits)[:, 1:])


@pytest.mark.parametrize("seed", range(3))
def test_the_sigmoid_loss_equals_the_slow_oracle(seed):
    rng = np.random.default_rng(seed)
    logits, deltas, classes, targets, valid = roi_problem(rng)
    for drawn in (random_drawn(rng), None):
        classifier = Classifier("sigmoid", federated_classes=0 if drawn is None else 3)
        everything = np.ones((2, 4), bool) if drawn is None else np.asarray(drawn)
        expected = slow_loss(*map(np.asarray, (logits, classes, valid)), everything)
        actual = classifier.loss(logits, classes, valid, drawn)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
        together = losses.box_losses(
            logits, deltas, classes, targets, valid, LossOptions(),
            lambda *given, d=drawn, c=classifier: c.loss(*given, d),
        )  # fmt: skip
        plain = losses.box_losses(logits, deltas, classes, targets, valid, LossOptions())
        assert together[0] == actual and together[1] == plain[1]
        assert plain[0] == Classifier().loss(logits, classes, valid)


def test_only_drawn_classes_of_valid_rois_get_gradients():
    rng = np.random.default_rng(5)
    logits, _, classes, _, valid = roi_problem(rng)
    drawn = random_drawn(rng)
    grads = jax.grad(Classifier("sigmoid").loss)(logits, classes, valid, drawn)
    expected = np.zeros(logits.shape)
    scores = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    label = np.arange(5) == np.asarray(classes)[..., None]
    expected[..., 1:] = ((scores - label) / np.asarray(valid).sum())[..., 1:]
    expected[..., 1:] *= np.asarray(drawn)[:, None]
    expected *= np.asarray(valid)[..., None]
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("is_valid", [True, False])
def test_extreme_logits_and_empty_images_have_finite_gradients(kind, size, is_valid):
    logits, _, classes, _, valid = roi_problem(np.random.default_rng(1))
    valid, classifier = jnp.full_like(valid, is_valid), Classifier(kind)
    assert_finite_with_grad(lambda x: classifier.loss(x, classes, valid), size * logits)
    if not is_valid:
        assert classifier.loss(logits, classes, valid) == 0.0


def draw(classes, num, counts=(), *, total, seed=0, valid=None, power=0.5):
    classes = jnp.asarray(classes)
    valid = jnp.ones(classes.shape, bool) if valid is None else jnp.asarray(valid)
    classifier = Classifier("sigmoid", num, power, tuple(counts))
    keys = None if seed is None else jax.random.split(jax.random.key(seed), len(classes))
    return np.asarray(jitted_draw(classifier, keys, classes, valid, total))


jitted_draw = jax.jit(Classifier.draw, static_argnums=(0, 4), static_argnames="stage")


@pytest.mark.parametrize("seed", range(5))
def test_drawn_are_the_classes_of_the_image_and_others_up_to_the_number(seed):
    """detectron2's get_fed_loss_classes: background is among the unique classes that it counts."""
    rois = [[3, 3, 7, 0, 0], [9, 9, 9, 9, 9], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]]
    drawn = draw(rois, 5, total=12, seed=seed)
    assert drawn.dtype == bool and drawn.shape == (4, 12)
    for image, mask in zip(rois, drawn, strict=True):
        unique = set(image)
        assert {k - 1 for k in unique - {0}} <= set(np.flatnonzero(mask))
        assert mask.sum() == 5 - (0 in unique)
    assert (drawn[3] == [True] * 5 + [False] * 7).all()  # no place is left for others


def test_drawing_differs_by_image_and_key():
    rois = np.zeros((20, 3), np.int32)
    first, second = (draw(rois, 9, total=40, seed=seed) for seed in (0, 1))
    assert len(np.unique(first, axis=0)) == 20 and (first != second).any()
    np.testing.assert_array_equal(first, draw(rois, 9, total=40, seed=0))
    alone = jitted_draw(
        Classifier("sigmoid", 9), jax.random.split(jax.random.key(0), 20)[7:8],
        jnp.asarray(rois[7:8]), jnp.ones((1, 3), bool), 40,
    )  # fmt: skip
    np.testing.assert_array_equal(alone[0], first[7])


def test_rows_that_are_not_valid_bring_no_class():
    drawn = draw([[3, 0, 5]], 1, total=6, valid=[[True, False, False]])
    assert np.flatnonzero(drawn[0]).tolist() == [2]
    drawn = draw([[3, 0, 5]], 3, total=6, valid=[[False, False, False]])
    assert drawn.sum() == 3


def test_a_class_without_images_is_never_drawn_at_random():
    counts = [5, 0, 1, 0, 0, 9]
    for seed in range(5):
        drawn = draw([[0, 4]], 50, counts, total=6, seed=seed)
        assert np.flatnonzero(drawn[0]).tolist() == [0, 2, 3, 5]


def test_without_keys_the_most_frequent_are_taken():
    drawn = draw([[2, 0]], 4, [5, 8, 1, 7, 9], total=5, seed=None)
    assert np.flatnonzero(drawn[0]).tolist() == [1, 3, 4]


def inclusion(weights, num):
    """Probability of each to be among `num` drawn one after the other without replacement."""
    found = np.zeros(len(weights))
    for order in itertools.permutations(range(len(weights)), num):
        probability, left = 1.0, sum(weights)
        for k in order:
            probability *= weights[k] / left
            left -= weights[k]
        found[list(order)] += probability
    return found


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_others_are_drawn_by_their_frequency(power):
    """As torch.multinomial without replacement; within five standard deviations of 4000 draws."""
    counts, trials = np.array([1, 4, 9, 100, 25]), 4000
    drawn = draw(np.full((trials, 2), 2), 3, counts.tolist(), total=5, power=power)
    weights = counts.astype(float) ** power
    weights[1] = 0  # class 2 is in every image
    expected = inclusion(weights[[0, 2, 3, 4]], 2)
    found = drawn.mean(axis=0)
    assert found[1] == 1
    sigma = np.sqrt(expected * (1 - expected) / trials)
    assert (np.abs(found[[0, 2, 3, 4]] - expected) < 5 * sigma).all()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "sofmax"}, r"^model.classifier.kind is 'sofmax', expected one of \['softmax'"),
        ({"federated_classes": 5}, "^model.classifier.federated_classes is 5, expected 0 unless"),
        (
            {"kind": "sigmoid", "federated_classes": -1},
            "^model.classifier.federated_classes is -1, expected 0 or more$",
        ),
        ({"frequency_power": -0.5}, "^model.classifier.frequency_power is -0.5, expected at least"),
        ({"image_counts": (1,)}, "^model.classifier has no entry 'image_counts'"),
    ],
)
def test_a_wrong_section_is_named(section, message):
    with pytest.raises(ValueError, match=message):
        parts.build(Classifier, section, "model.classifier", image_counts=())


def test_detections_have_sigmoid_scores():
    """One RoI may be several classes; background, however likely, suppresses none."""
    proposals = Proposals(
        boxes=jnp.array([[[10.0, 10.0, 30.0, 40.0], [50.0, 5.0, 60.0, 20.0]]]),
        scores=jnp.ones((1, 2)),
        valid=jnp.ones((1, 2), bool),
    )
    logits = jnp.array([[[20.0, 2.0, 1.0, -9.0], [0.0, -4.0, -3.5, -9.0]]])
    detect = Detect(score_threshold=0.02, detections_per_image=4)
    run = jax.jit(partial(detect, coder=BoxCoder(), classifier=Classifier("sigmoid")))
    boxes, scores, classes, valid = run(
        logits, jnp.zeros((1, 2, 4, 4)), proposals, jnp.array([[48, 64]])
    )
    assert valid[0].tolist() == [True, True, True, False]
    assert classes[0].tolist() == [1, 2, 2, 0]
    expected = 1 / (1 + np.exp([-2.0, -1.0, 3.5]))
    np.testing.assert_allclose(scores[0, :3], expected, rtol=1e-5)
    np.testing.assert_allclose(boxes[0, 2], proposals.boxes[0, 1], rtol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_mean_logits_have_the_mean_scores(kind):
    classifier, rng = Classifier(kind=kind), np.random.default_rng(0)
    logits = [jnp.float32(rng.normal(size=(2, 5, 4)) * 10 ** (2 * i)) for i in range(3)]
    expected = np.mean([classifier.scores(one) for one in logits], axis=0)
    ours = classifier.scores(classifier.mean_logits(logits))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-7)
    assert classifier.mean_logits(logits[:1]) is logits[0]


def test_each_stage_draws_for_itself():
    classifier = Classifier(kind="sigmoid", federated_classes=10)
    keys = jax.random.split(jax.random.key(0), 2)
    classes, valid = jnp.ones((2, 3), jnp.int32), jnp.ones((2, 3), bool)
    drawn = [jitted_draw(classifier, keys, classes, valid, 40, stage=k) for k in (0, 1, 2)]
    assert all((each.sum(axis=1) == 10).all() for each in drawn)
    assert not any((drawn[i] == drawn[j]).all() for i, j in ((0, 1), (0, 2), (1, 2)))

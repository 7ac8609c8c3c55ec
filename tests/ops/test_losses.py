import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops import losses
from mask_rcnn_jax.ops.losses import LossOptions
from tests.bounds import assert_within, rounding_bound, sum_bound
from tests.helpers import assert_finite_with_grad, assert_tree_close, load_golden

SWAP = [1, 0, 3, 2]  # NVIDIA's deltas are dy, dx, dh, dw
# As NVIDIA's TensorFlow code has them; other systems are named where they are tested.
NVIDIA = LossOptions(
    rpn_cls_average="budget",
    rpn_box_loss="huber",
    rpn_box_average="matched_per_level",
    box_average="foreground",
)
BUDGET = 8
rpn_losses = jax.jit(losses.rpn_losses, static_argnames=("options", "batch_per_image"))
box_losses = jax.jit(losses.box_losses, static_argnames="options")


def slow_cross_entropy(logit, label):
    probability = 1 / (1 + np.exp(-np.float64(logit)))
    return -np.log(probability if label else 1 - probability)


def slow_huber(x, delta):
    return 0.5 * x * x if abs(x) <= delta else delta * (abs(x) - 0.5 * delta)


def rpn_problem(rng, sizes=(12, 5), batch=2):
    """Logits and deltas per level, then labels of all kinds; some targets are exactly 0."""
    count = sum(sizes)
    logits = [rng.normal(0, 2, (batch, n)).astype(np.float32) for n in sizes]
    deltas = [rng.normal(0, 0.3, (batch, n, 4)).astype(np.float32) for n in sizes]
    matched = rng.choice([-1, 0, 1], (batch, count)).astype(np.int32)
    sampled = np.where(rng.random((batch, count)) < 0.6, matched, -1).astype(np.int32)
    targets = rng.normal(0, 0.3, (batch, count, 4)).astype(np.float32)
    targets[rng.random(targets.shape) < 0.2] = 0.0
    return jax.tree.map(jnp.asarray, (logits, deltas, sampled, matched, targets))


def roi_problem(rng, batch=2, rois=9, classes=5):
    logits = rng.normal(0, 2, (batch, rois, classes)).astype(np.float32)
    deltas = rng.normal(0, 1, (batch, rois, classes, 4)).astype(np.float32)
    labels = rng.integers(0, classes, (batch, rois)).astype(np.int32)
    targets = rng.normal(0, 1, (batch, rois, 4)).astype(np.float32)
    valid = rng.random((batch, rois)) < 0.8
    return tuple(jnp.asarray(x) for x in (logits, deltas, labels, targets, valid))


def test_huber_by_hand():
    x = jnp.array([0.0, 0.05, -1.0, 1.0])
    expected = [0.0, 0.00125, 0.104938, 0.104938]
    np.testing.assert_allclose(losses.huber(x, 1 / 9), expected, rtol=1e-5)
    np.testing.assert_allclose(losses.huber(jnp.array(2.0), 1.0), 1.5)
    # Inside the slope is x, outside it is delta.
    slopes = jax.vmap(jax.grad(lambda x: losses.huber(x, 0.5)))(
        jnp.array([0.0, 0.2, -0.4, 3.0, -3.0])
    )
    np.testing.assert_allclose(slopes, [0.0, 0.2, -0.4, 0.5, -0.5], rtol=1e-6)


def test_huber_equals_torchvision_smooth_l1():
    golden = load_golden("torchvision/ops")
    error = jnp.asarray(golden["sl1_p"] - golden["sl1_t"])
    total = losses.huber(error, 1 / 9).sum() * 9
    np.testing.assert_allclose(total, golden["sl1_sum_beta_1_9"], rtol=1e-5)


def test_sigmoid_cross_entropy_by_hand():
    logits, labels = jnp.array([0.0, 2.0, 200.0, -200.0]), jnp.array([1.0, 0.0, 0.0, 0.0])
    expected = [np.log(2), 2 + np.log1p(np.exp(-2)), 200.0, 0.0]
    np.testing.assert_allclose(losses.sigmoid_cross_entropy(logits, labels), expected, rtol=1e-6)
    slope = jax.vmap(jax.grad(losses.sigmoid_cross_entropy))(logits, labels)
    np.testing.assert_allclose(slope, [-0.5, 1 / (1 + np.exp(-2)), 1.0, 0.0], rtol=1e-6)


def test_rpn_losses_equal_slow_oracle():
    problem = rpn_problem(np.random.default_rng(0))
    logits, deltas, sampled, matched, targets = jax.tree.map(np.asarray, problem)
    objectness, box, start = 0.0, 0.0, 0
    for level_logits, level_deltas in zip(logits, deltas, strict=True):
        errors = []
        for b, a in np.ndindex(*level_logits.shape):
            at = (b, start + a)
            if sampled[at] >= 0:
                objectness += slow_cross_entropy(level_logits[b, a], sampled[at])
            if matched[at] == 1:
                errors += [
                    slow_huber(level_deltas[b, a, i] - targets[at][i], 1 / 9)
                    for i in range(4)
                    if targets[at][i] != 0
                ]
        box += np.mean(errors)
        start += level_logits.shape[1]
    actual = rpn_losses(*problem, NVIDIA, batch_per_image=BUDGET)
    assert_tree_close(actual, (objectness / 16, box), rtol=1e-5)


def test_box_losses_equal_slow_oracle():
    problem = roi_problem(np.random.default_rng(1))
    logits, deltas, labels, targets, valid = (np.asarray(x) for x in problem)
    entropies, errors = [], []
    for at in zip(*np.nonzero(valid), strict=True):
        scores = np.exp(logits[at].astype(np.float64))
        entropies.append(-np.log(scores[labels[at]] / scores.sum()))
        if labels[at] > 0:
            errors += [slow_huber(d, 1.0) for d in deltas[at][labels[at]] - targets[at]]
    actual = box_losses(*problem, NVIDIA)
    assert_tree_close(actual, (np.mean(entropies), np.mean(errors)), rtol=1e-5)


@pytest.mark.parametrize("average", ["sampled", "budget"])
@pytest.mark.parametrize("beta", [0.0, 1 / 9])
def test_rpn_losses_of_the_torch_family(average, beta):
    """Sampled foreground only, all levels in one sum: torchvision divides by what was sampled,
    Detectron2 (with L1) by the budget."""
    problem = rpn_problem(np.random.default_rng(8))
    logits, deltas, sampled, _, targets = jax.tree.map(np.asarray, problem)
    logits, deltas = np.concatenate(logits, axis=1), np.concatenate(deltas, axis=1)
    count = (sampled >= 0).sum() if average == "sampled" else 2 * 8
    objectness = sum(
        slow_cross_entropy(logits[at], sampled[at])
        for at in zip(*np.nonzero(sampled >= 0), strict=True)
    )
    error = (deltas - targets)[sampled == 1].ravel()
    box = sum(slow_huber(e, beta) / beta if beta else abs(e) for e in error)
    options = LossOptions(rpn_cls_average=average, rpn_box_average=average, rpn_box_beta=beta)
    actual = rpn_losses(*problem, options, batch_per_image=BUDGET)
    assert_tree_close(actual, (objectness / count, box / count), rtol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 1 / 9, 1.0])
def test_box_loss_over_all_rois(beta):
    problem = roi_problem(np.random.default_rng(9))
    _, deltas, labels, targets, valid = (np.asarray(x) for x in problem)
    total = 0.0
    for at in zip(*np.nonzero(valid & (labels > 0)), strict=True):
        for e in deltas[at][labels[at]] - targets[at]:
            total += slow_huber(e, beta) / beta if beta else abs(e)
    actual = box_losses(*problem, LossOptions(box_beta=beta, box_average="rois"))[1]
    np.testing.assert_allclose(actual, total / valid.sum(), rtol=1e-5)


def test_smooth_l1_by_hand():
    x = jnp.array([0.0, 0.05, -1.0, 2.0])
    np.testing.assert_allclose(losses.smooth_l1(x, 1 / 9)[2], 0.944444, rtol=1e-5)
    np.testing.assert_allclose(losses.smooth_l1(x, 1 / 9) / 9, losses.huber(x, 1 / 9), rtol=1e-6)
    np.testing.assert_array_equal(losses.smooth_l1(x, 0.0), jnp.abs(x))


def test_mask_loss_equals_slow_oracle():
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, (2, 3, 4, 4)).astype(np.float32)
    targets = (rng.random((2, 3, 4, 4)) < 0.5).astype(np.float32)
    fg = np.array([[True, True, False], [True, False, False]])
    pixels = zip(logits[fg].ravel(), targets[fg].ravel(), strict=True)
    expected = np.mean([slow_cross_entropy(x, label) for x, label in pixels])
    actual = losses.mask_loss(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(fg))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_padding_changes_nothing():
    """More invalid RoIs, with nonsense in them, leave losses and gradients alone."""
    problem = roi_problem(np.random.default_rng(3))
    nonsense = [jnp.full_like(x[:, :4], 7) for x in problem[:4]] + [jnp.zeros((2, 4), bool)]
    padded = [jnp.concatenate(pair, axis=1) for pair in zip(problem, nonsense, strict=True)]
    padded[0] = padded[0].at[:, 9:].set(1e30)

    def both(logits, deltas, *rest):
        return sum(losses.box_losses(logits, deltas, *rest, NVIDIA))

    value_and_grad = jax.jit(jax.value_and_grad(both, argnums=(0, 1)))
    few, few_grads = value_and_grad(*problem)
    many, many_grads = value_and_grad(*padded)
    assert_within(few, many, rounding_bound(2 * 40, many))
    for alone, with_padding in zip(few_grads, many_grads, strict=True):
        # A probability less one: small where both are close.
        bound = rounding_bound(2 * 20, np.abs(alone).max())
        assert_within(with_padding[:, :9], alone, bound)
        np.testing.assert_array_equal(with_padding[:, 9:], 0.0)


def test_nothing_to_learn_from_gives_zero_and_finite_gradients():
    logits, deltas, sampled, matched, targets = rpn_problem(np.random.default_rng(4))

    def rpn(logits, deltas, label):
        labels = jnp.full_like(sampled, label)
        return rpn_losses(logits, deltas, labels, labels, targets, NVIDIA, batch_per_image=BUDGET)

    for label in (-1, 0):
        assert_finite_with_grad(lambda a, b, label=label: rpn(a, b, label), logits, deltas)
    assert_tree_close(rpn(logits, deltas, -1), (0.0, 0.0))

    logits, deltas, labels, targets, valid = roi_problem(np.random.default_rng(5))
    for labels, valid in ((labels, valid & False), (labels * 0, valid | True)):  # noqa: B020
        assert_finite_with_grad(
            lambda a, b, c=labels, v=valid: box_losses(a, b, c, targets, v, NVIDIA), logits, deltas
        )
        assert box_losses(logits, deltas, labels, targets, valid, NVIDIA)[1] == 0.0

    masks = jnp.ones((2, 3, 4, 4))
    nothing = jnp.zeros((2, 3), bool)
    assert_finite_with_grad(lambda x: losses.mask_loss(x, masks, nothing), masks * 100)
    assert losses.mask_loss(masks, masks, nothing) == 0.0


def test_half_precision_inputs_are_summed_in_float32():
    problem = roi_problem(np.random.default_rng(6))
    logits, deltas = problem[0].astype(jnp.bfloat16), problem[1].astype(jnp.bfloat16)
    half = box_losses(logits, deltas, *problem[2:], NVIDIA)
    full = box_losses(logits.astype(jnp.float32), deltas.astype(jnp.float32), *problem[2:], NVIDIA)
    assert {x.dtype for x in half} == {jnp.dtype(jnp.float32)}
    assert_tree_close(half, full, rtol=rounding_bound(2 * 40, 1.0))


def test_jit_equals_eager():
    problem = rpn_problem(np.random.default_rng(7))
    eager = losses.rpn_losses(*problem, NVIDIA, batch_per_image=BUDGET)
    jitted = rpn_losses(*problem, NVIDIA, batch_per_image=BUDGET)
    assert_tree_close(jitted, eager, rtol=rounding_bound(2 * 150, 1.0))


def test_rpn_losses_equal_nvidia():
    """Logits from their evaluation run: the same images and weights, nothing random in between."""
    outputs = load_golden("nvidia_tf2/nv_eval")
    golden = load_golden("nvidia_tf2/nv_train")
    levels = range(2, 7)
    logits = [jnp.asarray(outputs[f"rpn_logits_P{k}"].reshape(2, -1)) for k in levels]
    deltas = [outputs[f"rpn_deltas_P{k}"].reshape(2, -1, 4)[..., SWAP] for k in levels]
    targets = [golden[f"box_targets_{k}"].reshape(2, -1, 4)[..., SWAP] for k in levels]
    sampled = [golden[f"score_targets_{k}"].reshape(2, -1) for k in levels]
    matched = np.stack([golden["rpn_match_results0"], golden["rpn_match_results1"]]) >= 0
    actual = rpn_losses(
        logits,
        [jnp.asarray(d) for d in deltas],
        jnp.asarray(np.concatenate(sampled, axis=1), jnp.int32),
        jnp.asarray(matched, jnp.int32),
        jnp.asarray(np.concatenate(targets, axis=1)),
        NVIDIA,
        batch_per_image=256,
    )
    expected = golden["loss_rpn_score_loss"], golden["loss_rpn_box_loss"]
    assert_tree_close(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("system", ["nvidia_tf2", "torchvision"])
def test_class_loss_equals(system):
    if system == "nvidia_tf2":
        golden = load_golden("nvidia_tf2/nv_train", whole=True)
        logits, labels = golden["class_outputs"], golden["roi_class_targets"]
        expected = golden["loss_fast_rcnn_class_loss"]
    else:
        golden = load_golden("torchvision/small_train")
        logits = golden["roi_cls_logits"].reshape(2, 64, 7)
        labels = np.stack([golden["roi_labels0"], golden["roi_labels1"]])
        expected = golden["loss_classifier"]
    zeros = jnp.zeros((*labels.shape, 4))
    actual, _ = box_losses(
        jnp.asarray(logits),
        jnp.zeros((*logits.shape, 4)),
        jnp.asarray(labels, jnp.int32),
        zeros,
        jnp.ones(labels.shape, bool),
        NVIDIA,
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_mask_loss_equals_torchvision():
    golden = load_golden("torchvision/small_train")
    logits, targets = golden["mask_logits_selected"][None], golden["mask_targets"][None]
    fg = jnp.ones(logits.shape[:2], bool)
    actual = losses.mask_loss(jnp.asarray(logits), jnp.asarray(targets), fg)
    np.testing.assert_allclose(actual, golden["loss_mask"], rtol=sum_bound(2 * targets.size))

"""Losses between a student and a teacher, against numbers by hand and slow NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops import distill_losses as losses
from mask_rcnn_jax.ops.classifier import Classifier
from tests.bounds import rounding_bound
from tests.helpers import assert_finite_with_grad

INSIDE = np.zeros((3, 4, 6), bool)  # of three images; the last has no cell
INSIDE[0, :3, :5], INSIDE[1, :4, :2] = True, True
CELLS = jnp.asarray(INSIDE)
MAP_LOSSES = {"pearson": losses.pearson_loss, "attention": losses.attention_loss}


def normal(seed: int, mean: float, scale: float, shape) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(mean, scale, shape), jnp.float32)


def maps(seed: int, channels: int = 5) -> jax.Array:
    return normal(seed, 2, 3, (*INSIDE.shape, channels))


def slow_pearson(student, teacher, inside):
    """1 - NumPy's correlation of each channel of each image; 0 for an image without cells."""
    total = 0.0
    for a, b, cells in zip(student, teacher, inside, strict=True):
        for channel in range(a.shape[-1]) if cells.any() else ():
            total += 1 - np.corrcoef(a[cells][:, channel], b[cells][:, channel])[0, 1]
    return total / (len(student) * student.shape[-1])


def slow_attention(student, teacher, inside):
    """1 - cosine of the sums of squares over the channels."""
    total = 0.0
    for a, b, cells in zip(student, teacher, inside, strict=True):
        if cells.any():
            p, q = (np.square(np.float64(x[cells])).sum(axis=-1) for x in (a, b))
            total += 1 - p @ q / np.linalg.norm(p) / np.linalg.norm(q)
    return total / len(student)


@pytest.mark.parametrize("name", MAP_LOSSES)
def test_losses_of_maps_equal_slow_numpy(name):
    slow = {"pearson": slow_pearson, "attention": slow_attention}[name]
    student, teacher = maps(0), maps(1)
    loss = jax.jit(MAP_LOSSES[name])(student, teacher, INSIDE)
    # The floor of a variance of 9 adds 1e-7 of it.
    np.testing.assert_allclose(loss, slow(student, teacher, INSIDE), rtol=2e-6)


def test_correlations_by_hand():
    ramp = jnp.arange(4.0).reshape(1, 1, 4, 1)
    inside = jnp.ones((1, 1, 4), bool)
    for other, expected in ((3 * ramp + 7, 0.0), (-ramp, 2.0), ((ramp - 1.5) ** 2, 1.0)):
        np.testing.assert_allclose(losses.pearson_loss(ramp, other, inside), expected, atol=2e-6)


def test_attention_by_hand_with_other_channels():
    """Attention (1, 0) and (1, 1): the cosine is 1 / sqrt 2. Scales do not matter."""
    student = jnp.array([[[[3.0, 4.0], [0.0, 0.0]]]])
    teacher = jnp.array([[[[1.0, 2.0, 2.0], [2.0, 2.0, 1.0]]]])
    inside = jnp.ones((1, 1, 2), bool)
    loss = losses.attention_loss(student, teacher, inside)
    np.testing.assert_allclose(loss, 1 - 0.5**0.5, rtol=1e-5)


@pytest.mark.parametrize("name", MAP_LOSSES)
def test_cells_outside_change_nothing(name):
    loss = jax.jit(jax.value_and_grad(MAP_LOSSES[name]))
    student, teacher, outside = maps(0), maps(1), ~INSIDE[..., None]
    expected, _ = loss(student, teacher, INSIDE)
    value, gradient = loss(np.where(outside, 1e6, student), np.where(outside, -9, teacher), INSIDE)
    assert value == expected
    assert not np.where(outside, gradient, 0).any() and np.where(outside, 0, gradient).any()


@pytest.mark.parametrize("name", MAP_LOSSES)
def test_maps_without_cells_or_variance_are_finite(name):
    for student in (jnp.zeros_like(maps(0)), jnp.full_like(maps(0), 5)):
        assert_finite_with_grad(lambda x: MAP_LOSSES[name](x, maps(1), CELLS), student)
        assert_finite_with_grad(lambda x: MAP_LOSSES[name](x, maps(1), CELLS & False), student)


def test_equal_outputs_are_no_loss_and_no_gradient():
    x, logits, fg = maps(0), maps(2)[0], jnp.array([True, False, True, True])
    for loss, argument in (
        *((lambda s, f=f: f(s, x, CELLS), x) for f in MAP_LOSSES.values()),
        (lambda s: losses.softmax_divergence(s, logits, 3.0).mean(), logits),
        (lambda s: losses.binary_divergence(s, logits, 3.0).mean(), logits),
        (lambda s: losses.mask_divergence(s, logits[:, :5], fg), logits[:, :5]),
    ):
        value, gradient = jax.jit(jax.value_and_grad(loss))(argument)
        # Logits up to 8 are compared, of which one side may be folded into a constant.
        np.testing.assert_allclose(value, 0, atol=rounding_bound(4, 8 * 3.0))
        np.testing.assert_allclose(gradient, 0, atol=1e-6)  # the scores' sum is 1 to rounding


def slow_divergence(theirs, ours):
    return sum(p * np.log(p / q) for p, q in zip(theirs, ours, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergences_equal_slow_numpy(temperature):
    ours, theirs = normal(3, 0, 3, (2, 7, 4))
    expected, binary = np.zeros(7), np.zeros((7, 4))
    for i in range(7):
        p, q = (np.exp(np.asarray(x[i], np.float64) / temperature) for x in (theirs, ours))
        expected[i] = temperature**2 * slow_divergence(p / p.sum(), q / q.sum())
        for k in range(4):
            p1, q1 = p[k] / (1 + p[k]), q[k] / (1 + q[k])
            binary[i, k] = temperature**2 * slow_divergence((p1, 1 - p1), (q1, 1 - q1))
    found = jax.jit(losses.softmax_divergence, static_argnums=2)(ours, theirs, temperature)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    found = jax.jit(losses.binary_divergence, static_argnums=2)(ours, theirs, temperature)
    np.testing.assert_allclose(found, binary, rtol=1e-5, atol=1e-6)


def test_extreme_logits_are_finite():
    for function in (losses.softmax_divergence, losses.binary_divergence):
        far = jnp.array([[1e4, -1e4, 0.0]])
        assert_finite_with_grad(lambda x, f=function, t=-far: f(x, t, 1.0), far)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_rois_that_are_no_rois_change_no_divergence(kind):
    """Sigmoid scores leave out background, and none valid is 0."""
    classifier = Classifier(kind=kind)
    ours, theirs = normal(4, 0, 2, (2, 2, 3, 5))
    valid = jnp.array([[True, True, False], [True, False, False]])
    rows = [(ours[0, 0], theirs[0, 0]), (ours[0, 1], theirs[0, 1]), (ours[1, 0], theirs[1, 0])]
    if kind == "softmax":
        each = [losses.softmax_divergence(a, b, 2.0) for a, b in rows]
    else:
        each = [losses.binary_divergence(a[1:], b[1:], 2.0).sum() for a, b in rows]
    junk = jnp.where(valid[..., None], ours, 1e3)
    found = classifier.divergence(junk, theirs, valid, 2.0)
    np.testing.assert_allclose(found, np.mean(each), rtol=1e-6)
    assert classifier.divergence(junk, theirs, valid & False, 2.0) == 0


def test_masks_of_a_teacher_with_more_cells_are_resampled():
    """Each of two cells lies on two of the teacher's; padding rows do not count."""
    teacher = jnp.array([[[1.0, 3, -4, -4]] * 4, [[9.0] * 4] * 4])
    student = jnp.array([[[2.0, -4], [2, -4]], [[0.0, 0], [0, 0]]])
    fg = jnp.array([True, False])
    resampled = jax.image.resize(teacher, student.shape, "linear")
    expected = losses.binary_divergence(student, resampled)[0].mean()
    assert losses.mask_divergence(student, teacher, fg) == expected > 0
    np.testing.assert_allclose(
        losses.mask_divergence(student, jnp.full((2, 4, 4), 2.0), fg),
        losses.binary_divergence(student[0], jnp.full((2, 2), 2.0)).mean(),
        rtol=1e-6,
    )
    assert losses.mask_divergence(student, teacher, fg & False) == 0

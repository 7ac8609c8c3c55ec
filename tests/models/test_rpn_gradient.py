"""The RPN head's gradient of few cells, which GPUs compute, equals the dense one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.models import rpn_gradient
from mask_rcnn_jax.models.rpn import RPNHead
from mask_rcnn_jax.platforms import traced_for

SHAPES = [(2, 6, 9, 4), (2, 3, 5, 4), (2, 1, 2, 4)]  # 142 cells
ANCHORS = 3
# Level, image, row, column: corners, neighbors that share pixels, the same place of two images.
CELLS = [
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 5, 8), (0, 1, 3, 4),
    (1, 0, 2, 0), (1, 1, 2, 0), (2, 1, 0, 1),
]  # fmt: skip


def cotangents(cells, rng):
    """Of logits [B, A] and deltas [B, A, 4] per level; of some cells for the logits alone."""
    logits = [np.zeros((*shape[:3], ANCHORS), np.float32) for shape in SHAPES]
    deltas = [np.zeros((*shape[:3], ANCHORS, 4), np.float32) for shape in SHAPES]
    for number, (level, *place) in enumerate(cells):
        logits[level][(*place, rng.integers(ANCHORS))] = rng.normal()
        if number % 2:
            deltas[level][(*place, rng.integers(ANCHORS))] = rng.normal(size=4)
    batch = SHAPES[0][0]
    return [x.reshape(batch, -1) for x in logits], [x.reshape(batch, -1, 4) for x in deltas]


def gradients(cells_per_image, grads, dtype):
    """Return the outputs, and the gradients of the variables and maps, in a GPU's form."""
    head = RPNHead(ANCHORS, 5, dtype, cells_per_image=cells_per_image, implementation="xla")
    rng = np.random.default_rng(0)
    maps = [jnp.asarray(rng.normal(size=shape), dtype) for shape in SHAPES]
    variables = head.init(jax.random.key(0), maps)
    leaves, tree = jax.tree.flatten(variables)
    variables = tree.unflatten([jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves])

    @jax.jit
    def run(variables, maps):
        out, pull = jax.vjp(head.apply, variables, maps)
        return out, pull(grads)

    with traced_for("cuda"):
        return run(variables, maps)


COUNTS = [(0, 2), (1, 2), (4, 2), (7, 4), (5, 2), (7, 1), (7, 70), (7, 71)]
BY_DAY = [(0, 2), (4, 2), (5, 2), (7, 71)]


@pytest.mark.parametrize(
    ("count", "cells_per_image", "dtype"),
    [
        pytest.param(*pair, dtype, marks=[] if pair in BY_DAY and exact else pytest.mark.slow)
        for pair in COUNTS
        for dtype, exact in ((jnp.float32, True), (jnp.bfloat16, pair == (4, 2)))
    ],
)
def test_gradients_are_the_dense_ones(count, cells_per_image, dtype, monkeypatch):
    """Up to two images' number of cells by the gathered pixels, beyond it by whole maps."""
    grads = cotangents(CELLS[:count], np.random.default_rng(1))
    expected = gradients(0, grads, dtype)
    is_sparse = count <= 2 * cells_per_image < 142
    unused = "_dense" if is_sparse else "_sparse"
    kept = rpn_gradient._dense

    def nan(*args):
        shapes = jax.eval_shape(kept, *args[-2:])
        return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)

    monkeypatch.setattr(rpn_gradient, unused, nan)
    found = gradients(cells_per_image, grads, dtype)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == theirs.dtype
        scale = max(1.0, float(jnp.max(jnp.abs(theirs.astype(jnp.float32)))))
        np.testing.assert_allclose(
            mine.astype(jnp.float32), theirs.astype(jnp.float32), rtol=0, atol=tolerance * scale
        )


def test_a_gradient_beside_the_losses_reaches_the_maps():
    """Whoever reads all anchors, as distillation does, gets the whole gradient."""
    rng = np.random.default_rng(2)
    logits, deltas = cotangents([], rng)
    grads = [np.float32(rng.normal(size=x.shape)) for x in logits], deltas
    found, expected = gradients(4, grads, jnp.float32), gradients(0, grads, jnp.float32)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)

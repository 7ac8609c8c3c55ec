"""Graphs for batches of any size, against JAX in several sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from mask_rcnn_jax.jax_to_onnx.graph import ANY, OPSETS  # noqa: E402
from mask_rcnn_jax.ops.nms import nms  # noqa: E402
from mask_rcnn_jax.ops.roi_align import RoIAlign, roi_align  # noqa: E402
from tests.helpers import random_boxes  # noqa: E402
from tests.jax_to_onnx.traced import convert  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 6, 5, 4)).astype(np.float32)  # [B, H, W, C]
SIZES = (1, 2, 3, 5)


def check(function, *arrays, **options):
    nodes, run = convert(function, *arrays, any_batch=True, **options)
    for size in SIZES:
        given = [array[:size] for array in arrays]
        expected = jax.tree.leaves(jax.jit(function)(*given))
        for ours, theirs in zip(run(*given), expected, strict=True):
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-5, atol=1e-5)
    return [node.op_type for node in nodes]


CASES = {
    "joined and split again": lambda x: x.reshape(-1, 4).reshape(-1, 5, 2, 2) * 2,
    "rows of all images": lambda x: nn.relu(x.reshape(-1, 4) @ jnp.asarray(X[0, 0].T)),
    "windows": lambda x: (
        x[:, :, :4].reshape(-1, 3, 2, 2, 2, 4).swapaxes(2, 3).reshape(-1, 2, 2, 4) + 1
    ),
    "joined with constants": lambda x: jnp.concatenate([x, jnp.ones((len(x), 2, 5, 4))], axis=1),
    "joined with itself": lambda x: jnp.concatenate([x, 2 * x]),
    "constants alone": lambda x: (jnp.zeros((len(x), 3)), jnp.tile(jnp.arange(4), (len(x), 2))),
    "a constant mask": lambda x: jnp.where(
        jnp.arange(6)[None, :, None, None] < jnp.full((len(x), 1, 1, 1), 4), x, 0
    ),
    "constants, computed": lambda x: (
        x + jnp.clip(jnp.full((len(x), 2), 7), 0, 5)[:, 1:, None, None]
    ),
    "repeated for each image": lambda x: jnp.repeat(x[:, 0, 0], 3, axis=0),
    "a table for each image": lambda x: (jnp.asarray(X[:1]) + jnp.zeros((len(x), 1, 1, 1))) * 2,
    "rows of each image": lambda x: jnp.take_along_axis(
        x.reshape(-1, 30, 4), jnp.argmax(x, 1).reshape(-1, 20)[:, :7, None], axis=1
    ),
    "top": lambda x: lax.top_k(x.reshape(len(x), -1), 9),
    "sums and extremes": lambda x: (jnp.mean(x, (1, 2)), jnp.max(x, 3), jnp.any(x > 1, (1, 2))),
    "cumulative": lambda x: jnp.cumsum(x, 2),
    "attention": lambda x: jnp.einsum("bhwc,bvwc->bwhv", x, x * 2),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 1), (0, 0))),
    "doubled": lambda x: jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2) + 1,
    "strided": lambda x: x[:, 1:6:2, ::3, 1],
    "group norm": lambda x: nn.GroupNorm(2, use_bias=False, use_scale=False).apply({}, x),
}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_any_size(name):
    check(CASES[name], X)


def test_layers_of_rows_follow_each_other_as_for_one_image():
    """A ReLU is behind its layer, so that int8 rounds what it leaves."""
    first, second = RNG.normal(size=(2, 4, 4)).astype(np.float32)

    def function(x):
        return nn.relu(nn.relu(x @ first + 1) @ second + first[None, :1])

    kinds = check(function, X[:, 0])
    assert kinds == ["Reshape", "Gemm", "Relu", "Gemm", "Relu", "Reshape"]


@pytest.mark.parametrize("opset", [OPSETS.start, OPSETS.stop - 1])
@pytest.mark.slow
def test_nms_and_pooling_of_a_batch_of_any_size(opset):
    boxes = np.stack([random_boxes(RNG, 40, 60) for _ in range(5)])
    boxes[:, 0] = 0, 0, 140, 140  # of the second level
    valid = RNG.random((5, 40)) > 0.2
    maps = [RNG.normal(size=(5, side, side, 3)).astype(np.float32) for side in (38, 19)]

    def function(boxes, valid, *maps):
        pooled = [
            roi_align(some, boxes[:, :9], RoIAlign(top, 2, 16, True, "zero", 0.0), output_size=3)
            for some, top in ((maps, 3), (maps[:1], 2))
        ]
        return nms(boxes, valid, iou_thresh=0.4, max_out=7), pooled

    kinds = check(function, boxes, valid, *maps, opset=opset)
    assert kinds.count("RoiAlign") == 3, "the test needs maps of several levels, and of one"


REFUSED = {
    "a part of a batch": lambda x: x[-1:],
    "a number of a whole batch": lambda x: x - jnp.mean(x, axis=0, keepdims=True),
    "numbers for each place in a batch": lambda x: x + jnp.arange(len(x))[:, None, None, None],
    "a number made of the batch's size": lambda x: x / len(x),
    "cumsum of .* numbers": lambda x: (
        x + jnp.cumsum(jnp.ones((len(x), 300, 300)), 1)[:, :1, :1, None]
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_depends_on_the_size_is_refused(what):
    with pytest.raises(ValueError, match=f"it cannot convert {what} without --batch"):
        convert(REFUSED[what], X, any_batch=True)


def test_a_size_that_is_open_is_no_size_of_a_fixed_batch():
    """Only graphs for batches of any size take multiples of `ANY` for batches."""
    x = RNG.normal(size=(2, ANY)).astype(np.float32)
    function = jax.jit(lambda x: jnp.concatenate([x[:, 1:], jnp.zeros((2, 1))], 1) + ANY)
    _, run = convert(function, x)
    np.testing.assert_allclose(run(x)[0], function(x), rtol=1e-6)

"""Graphs whose layers compute in float16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tests.jax_to_onnx.traced import converted  # noqa: E402

rng = np.random.default_rng(0)
WEIGHTS = {
    "params": {
        "first": {"kernel": rng.normal(0, 0.3, (3, 3, 4, 8)).astype(np.float32)},
        "second": {"kernel": rng.normal(0, 0.2, (3, 3, 8, 8)).astype(np.float32)},
        "dense": {"kernel": rng.normal(0, 0.2, (8, 4)).astype(np.float32)},
    }
}


def layers(variables, x):
    """A block with a shortcut, a doubled map, and boxes decoded from a layer."""
    params = variables["params"]
    numbers = ("NHWC", "HWIO", "NHWC")

    def conv(x, name):
        kernel = params[name]["kernel"]
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    x = jax.nn.relu(conv(x, "first") + 0.1)
    x = jax.nn.relu(x + conv(x, "second"))
    x = jnp.where(jnp.arange(8)[:, None] < 6, x, 0.0)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = conv(jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2), "second")
    deltas = x.reshape(1, -1, 8) @ params["dense"]["kernel"]
    corner = 1000.0 + jnp.arange(64.0)[None, :, None] / 16  # float16 has steps of 0.5 there
    return corner + deltas[..., :2] / 16, jnp.exp(deltas[..., 2:])


def test_layers_are_float16_and_what_follows_is_not():
    x = rng.normal(size=(1, 8, 8, 4)).astype(np.float32)
    nodes, found = converted(layers, x, variables=WEIGHTS, float16=True)
    expected = jax.jit(layers)(WEIGHTS, x)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.02)
    assert 0 < np.abs(found[0] - expected[0]).max()  # it was rounded
    kinds = [node.op_type for node in nodes]
    # Into float16 before the first layer, and out of it behind the last, for each output.
    first, *last = [i for i, kind in enumerate(kinds) if kind == "Cast"]
    assert len(last) == 2
    halves = {"Conv", "Relu", "Add", "Where", "MaxPool", "Resize"}
    assert halves <= set(kinds[first : last[0]])
    assert not {"Exp", "Div", "Mul"} & set(kinds[: last[0]])


def test_weights_beyond_float16_are_refused():
    large = jax.tree.map(lambda leaf: leaf * 1e6, WEIGHTS)
    with pytest.raises(ValueError, match="--float16: first/kernel.* has numbers above 65504"):
        converted(layers, np.ones((1, 8, 8, 4), np.float32), variables=large, float16=True)

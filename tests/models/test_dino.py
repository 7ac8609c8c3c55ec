"""DINO's vision transformer beside goldens (tests/weights/test_dino_files.py): what these leave
open, and what it promises to the rest of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.models import dino
from mask_rcnn_jax.models.dino import Dino
from mask_rcnn_jax.models.simple_pyramid import SimplePyramid
from mask_rcnn_jax.models.vit import antialiased
from mask_rcnn_jax.ops.extent import ValidExtent
from tests.helpers import assert_finite_tree, drawn

SMALL = dict(width=16, depth=2, num_heads=2, registers=3, drop_path=0.0)
IMAGES = (2, 48, 80, 3)


def noise(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def params_of(model, images=None):
    """Random ones; scales and the branches' factors are around 1."""
    images = noise(*IMAGES) if images is None else images
    params = drawn(model, images, train=False)["params"]

    def raise_gamma(path, leaf):
        return leaf + 1 if path[-1].key.startswith("gamma") else leaf

    return jax.tree_util.tree_map_with_path(raise_gamma, params)


def run(model, params, images, **options):
    options = {"train": False} | options
    return jax.jit(lambda p, x: model.apply({"params": p}, x, **options))(params, images)


def test_attention_against_loops():
    """Of a class token, a register and a map of 2 x 3: tokens of the map alone are rotated."""
    model, x = dino.Attention(2, "xla", jnp.float32), noise(1, 8, 16)
    p = drawn(model, x, None)["params"]
    ours = jax.jit(lambda p, x: model.apply({"params": p}, x, dino.rotary(2, 3, 8)))(p, x)
    p = jax.tree.map(np.float64, p)
    q, k, v = np.split(np.float64(x[0]) @ p["qkv"]["kernel"], 3, axis=1)
    q, v = q + p["q_bias"], v + p["v_bias"]
    out = np.zeros((8, 16))
    for head in range(2):
        c = slice(8 * head, 8 * head + 8)

        def turned(row, token, c=c):
            if token < 2:
                return row[c]
            y, x = divmod(token - 2, 3)
            places = (2 * (y + 0.5) / 2 - 1, 2 * (x + 0.5) / 3 - 1)
            angles = [2 * np.pi * at / 100 ** (i / 2) for at in places for i in range(2)]
            z = (row[c][:4] + 1j * row[c][4:]) * np.exp(1j * np.array(angles))
            return np.concatenate([z.real, z.imag])

        for i in range(8):
            logits = [turned(q[i], i) @ turned(k[j], j) / np.sqrt(8) for j in range(8)]
            weights = np.exp(np.array(logits) - max(logits))
            out[i, c] = weights / weights.sum() @ v[:, c]
    expected = out @ p["proj"]["kernel"] + p["proj"]["bias"]
    np.testing.assert_allclose(ours[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("old", "new"), [(5, 5), (5, 8), (7, 3), (1, 4)])
def test_antialiased_resizing_keeps_constants_and_equal_sizes(old, new):
    matrix = antialiased(old, new)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(matrix, matrix[::-1, ::-1], atol=1e-6)
    if old == new:
        np.testing.assert_allclose(matrix, np.eye(old), atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entries", "remats"),
    [
        (dict(gated=True, table_side=4), (False,)),
        ({}, (False, True)),
    ],
)
def test_every_parameter_has_a_finite_gradient(entries, remats):
    """Also of one cell, of black images, and where blocks are recomputed."""
    results = []
    for remat in remats:
        model = Dino(**SMALL | entries | dict(drop_path=0.4, remat=remat))
        params, keys = params_of(model), jax.random.split(jax.random.key(3), 2)

        def loss(p, x, model=model, keys=keys):
            (y,) = model.apply({"params": p}, x, train=True, keys=keys)
            return jnp.sum(y * noise(*y.shape))

        grad = jax.jit(jax.grad(loss))
        results.append(grad(params, noise(*IMAGES)))
    for path, leaf in flatten_dict(results[0], sep="/").items():
        assert np.any(leaf != 0), path
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(a).max()),
        results[0],
        results[-1],
    )
    assert_finite_tree(grad(params, np.zeros((2, 16, 16, 3), np.float32)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_half_precision_is_close(dtype):
    images = noise(*IMAGES)
    params = params_of(Dino(**SMALL))
    (exact,), (half,) = (run(Dino(**SMALL, dtype=d), params, images) for d in (jnp.float32, dtype))
    assert half.dtype == dtype
    error = np.abs(np.float32(half) - exact).max() / np.abs(exact).max()
    assert error < (0.1 if dtype == jnp.bfloat16 else 0.02)


def test_maps_of_several_layers_share_the_norm():
    images = noise(*IMAGES)
    model = Dino(**SMALL | dict(layers=(0, 1)))
    params = params_of(model)
    first, last = run(model, params, images)
    assert first.shape == last.shape == (2, 3, 5, 16)
    np.testing.assert_array_equal(run(Dino(**SMALL), params, images)[0], last)
    short = {name: leaf for name, leaf in params.items() if name != "block1"}
    (alone,) = run(Dino(**SMALL | dict(depth=1)), short, images)
    np.testing.assert_allclose(alone, first, rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_frozen_blocks_are_neither_trained_nor_differentiated(count):
    model = Dino(**SMALL | dict(frozen_blocks=count))
    params = params_of(model)

    def loss(p):
        (y,) = model.apply({"params": p}, noise(*IMAGES), train=True)
        return jnp.sum(y * noise(*y.shape))

    grads = jax.jit(jax.grad(loss))(params)
    moving = {name for name, g in grads.items() if any(np.any(x) for x in jax.tree.leaves(g))}
    assert moving | set(model.frozen) >= set(params)
    if count:
        assert moving == {"norm"} | {f"block{i}" for i in range(count, 2)}
        assert {"patch_embed", "cls_token", "block0"} <= set(model.frozen)
    assert ("norm" in model.frozen) == (count == 2)


def test_a_branch_is_dropped_by_image():
    model = Dino(**SMALL | dict(drop_path=0.6))
    images, keys = (
        np.repeat(noise(1, *IMAGES[1:]), 8, axis=0),
        jax.random.split(jax.random.key(1), 8),
    )
    params = params_of(model)
    (plain,) = run(model, params, images, keys=keys)
    assert np.ptp(plain, axis=0).max() < 1e-5
    (first,) = run(model, params, images, train=True, keys=keys)
    (turned,) = run(model, params, images, train=True, keys=keys[::-1])
    np.testing.assert_allclose(turned[::-1], first, rtol=0, atol=1e-5)
    assert len(np.unique(np.round(np.abs(first - plain).max(axis=(1, 2, 3)), 4))) > 1


def test_layers_are_numbered_from_the_embeddings():
    model = Dino(**SMALL)
    numbers = {name: model.layer_id(name) for name in params_of(model)}
    assert numbers == {"patch_embed": 0, "cls_token": 0, "register_tokens": 0, "block0": 1,
                       "block1": 2, "norm": 3}  # fmt: skip
    assert model.num_layers == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "num_heads is 3, expected a divisor of width=16 that leaves a mult"),
        ({"num_heads": 3, "table_side": 2}, "num_heads is 3, expected a divisor of width=16$"),
        ({"num_heads": 8}, "num_heads is 8, expected .* multiple of 4"),
        ({"layers": (0, 2)}, r"layers is \(0, 2\), expected blocks from 0 to 1"),
        ({"frozen_blocks": 3}, "frozen_blocks is 3, expected from 0 to depth=2"),
        ({"drop_path": 1.0}, "drop_path is 1.0, expected at least 0 and below 1"),
        ({"layer_scale": 0.0}, "layer_scale is 0.0, expected above 0"),
        ({"registers": -1}, "registers is -1, expected at least 0"),
    ],
)
def test_no_such_trunk_is_built(fields, message):
    with pytest.raises(ValueError, match=message):
        Dino(**SMALL | fields)


def pyramid(maps, features):
    """Of random parameters, which are the same for all `maps`."""
    model, extent = SimplePyramid(8, maps=maps), ValidExtent((48, 80), None)
    params = drawn(SimplePyramid(8), features[-1:], extent)
    return jax.jit(lambda f: model.apply(params, f, extent))(features)


@pytest.mark.slow
def test_a_pyramid_of_several_maps():
    features = list(noise(4, 1, 3, 5, 16))
    mean, each = pyramid("mean", features), pyramid("each", features)
    alone = [pyramid("last", [x]) for x in features]
    for i, source in enumerate([0, 1, 2, 3, 3]):  # P6 is from P5
        np.testing.assert_allclose(each[i], alone[source][i], rtol=0, atol=1e-5)
    expected = pyramid("last", [np.mean(features, axis=0)])
    for one, other in zip(mean, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(pyramid("last", features)[2], alone[3][2])
    with pytest.raises(
        ValueError, match="model.fpn.maps is 'each', which takes 4 maps; the back.* 2"
    ):
        pyramid("each", features[:2])

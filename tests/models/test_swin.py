"""What Swin transformers promise to the rest of the model; their maps are compared with those of
other libraries in tests/weights/test_swin_files.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.models.shifted_windows import distances, from_windows, to_windows
from mask_rcnn_jax.models.swin import Attention, Swin
from mask_rcnn_jax.models.swin_v2 import CosineAttention, SwinV2
from mask_rcnn_jax.ops.extent import ValidExtent
from tests.helpers import assert_finite_tree
from tests.models.swin_weights import random_array

QUICK = {"xla_backend_optimization_level": 0}  # compiling takes far longer than running
SIZES = dict(depths=(2, 1, 1, 2), width=8, num_heads=(1, 2, 2, 4), windows=(3, 3, 2, 2))
SIZE, CANVAS = (64, 96), (96, 160)
both = pytest.mark.parametrize("kind", [Swin, SwinV2])


def abstract_params(model, size=SIZE):
    images = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
    init = lambda x: model.init(jax.random.key(0), x, train=False)  # noqa: E731
    return jax.eval_shape(init, images)["params"]


def random_params(model):
    def fill(path, leaf):
        name = "/".join(entry.key for entry in path)
        if name.endswith("kernel"):
            return random_array(f"{name}.weight", leaf.shape[::-1]).T
        return random_array(name.replace("scale", "weight"), leaf.shape)

    return jax.tree_util.tree_map_with_path(fill, abstract_params(model))


def random_images(batch=1, size=SIZE, seed=1):
    return np.random.default_rng(seed).normal(size=(batch, *size, 3)).astype(np.float32)


def weigh(maps):
    """A number that depends on every entry of the maps."""
    rng, total = np.random.default_rng(5), 0.0
    for x in maps:
        total = total + (x.astype(jnp.float32) * rng.normal(size=x.shape).astype(np.float32)).sum()
    return total


@both
def test_a_larger_canvas_changes_nothing(kind):
    """Whatever is outside the images; no side of a map is a multiple of its windows."""
    model, images = kind(**SIZES, shift_single=True), random_images()
    params, canvas = random_params(model), random_images(size=CANVAS, seed=7)
    canvas[:, : SIZE[0], : SIZE[1]] = images

    def run(params, canvas, size):
        extent = ValidExtent(CANVAS, size)
        inside = model.apply({"params": params}, canvas, train=False, extent=extent)
        return inside, model.apply({"params": params}, canvas[:, :64, :96], train=False)

    compiled = jax.jit(run, compiler_options=QUICK)
    for ours, alone in zip(*compiled(params, canvas, jnp.array(SIZE)), strict=True):
        inside = ours[:, : alone.shape[1], : alone.shape[2]]
        np.testing.assert_allclose(inside, alone, rtol=0, atol=1e-4 * np.abs(alone).max())


@pytest.mark.slow
@both
def test_gradients_are_slopes(kind):
    """Along a direction in all parameters, and that of each kind has one."""
    model, images = kind(**SIZES), random_images()
    params = random_params(model)
    rng = np.random.default_rng(3)
    step = jax.tree.map(lambda a: np.float32(rng.normal(size=a.shape)), params)

    def loss(p):
        return weigh(model.apply({"params": p}, images, train=True))

    grads = jax.jit(jax.grad(loss), compiler_options=QUICK)(params)
    assert all(np.any(grad) for grad in jax.tree.leaves(grads))
    value, size = jax.jit(loss, compiler_options=QUICK), 1e-3
    ends = [value(jax.tree.map(lambda a, d, s=s: a + s * d, params, step)) for s in (size, -size)]
    slope = (float(ends[0]) - float(ends[1])) / (2 * size)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(step), strict=True)
    expected = sum(float(np.vdot(grad, d)) for grad, d in pairs)
    assert slope == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@both
def test_half_precision_is_close(kind, dtype):
    images, params = random_images(), random_params(kind(**SIZES))
    results = []
    for precision in (jnp.float32, dtype):
        model = kind(**SIZES, dtype=precision)

        def loss(p, model=model):
            maps = model.apply({"params": p}, images, train=True)
            return weigh(maps), maps

        results.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))
    (_, exact), (_, half) = (maps for maps, _ in results)
    assert_finite_tree(results[1][1])
    for one, other in zip(half, exact, strict=True):
        assert one.dtype == dtype
        error = np.abs(np.float32(one) - other).mean() / np.abs(other).mean()
        assert error < (0.1 if dtype == jnp.bfloat16 else 0.02)


@pytest.mark.slow
def test_keys_of_nothing_have_finite_gradients_in_float16():
    """They have no length: zeros fill the last windows, and keys have no bias."""
    layer = CosineAttention(2, 3, (0, 0), jnp.float16, 3)
    x = np.float16(random_images(size=(3, 4))[..., :1] * np.ones(8))  # a window and a third
    variables = layer.init(jax.random.key(0), x, None)
    grads = jax.grad(lambda v: weigh([layer.apply(v, x, None)]))(variables)
    assert_finite_tree(grads)


@pytest.mark.slow
@both
def test_recomputing_blocks_changes_nothing(kind):
    """With dropped branches, whose draws are repeated."""
    images, params = random_images(2), random_params(kind(**SIZES))
    keys, results = jax.random.split(jax.random.key(3), 2), []
    for remat in (False, True):
        model = kind(**SIZES, drop_path=0.5, remat=remat)

        def loss(p, model=model):
            return weigh(model.apply({"params": p}, images, train=True, keys=keys))

        results.append(jax.jit(jax.value_and_grad(loss))(params))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(a).max()),
        *results,
    )


@both
def test_recomputed_blocks_have_the_same_names(kind):
    one, other = (abstract_params(kind(**SIZES, remat=r)) for r in (False, True))
    assert jax.tree.map(np.shape, one) == jax.tree.map(np.shape, other)
    names = {name for path in flatten_dict(one) for name in path}
    assert names >= set(kind().exempt_from_decay)


@pytest.mark.parametrize("shifts", [(0, 0), (1, 1), (0, 2)])
def test_windows_are_put_back(shifts):
    x = random_images(2, (7, 4))
    windows, labels = to_windows(x, 3, shifts, None)
    assert windows.shape == (2 * 6, 9, 3) and (labels is None) == (not any(shifts))
    np.testing.assert_array_equal(from_windows(windows, 3, shifts, x.shape), x)


def test_shifted_windows_keep_apart_what_was_apart():
    """Cells see each other in [0, 2), [2, 5) and [5, 9) of the rows: those of the last window up to
    its end, and nothing behind; in the columns all of [1, 4)."""
    x = np.indices((8, 6)).transpose(1, 2, 0)[None].astype(np.float32) + 1
    windows, labels = to_windows(x, 3, (2, 2), jnp.array([7, 4]))
    seen = {}
    for cells, own in zip(np.asarray(windows), np.asarray(labels), strict=True):
        for cell, label in zip(cells - 1, own, strict=True):
            seen[tuple(cell)] = {tuple(c) for c in (cells - 1)[own == label] if c.min() >= 0}
    assert {row for row, _ in seen[0, 2]} == {0, 1}
    assert {row for row, _ in seen[3, 2]} == {2, 3, 4}
    assert {row for row, _ in seen[6, 3]} == {5, 6, 7}
    assert {column for _, column in seen[3, 3]} == {2, 3, 4}


def test_a_bias_belongs_to_a_distance():
    places = distances(2)
    assert places.shape == (4, 4) and (np.diag(places) == 4).all()  # (0, 0) of 3 x 3
    assert places[0, 3] == 0 and places[3, 0] == 8 and places[2, 1] == 6  # one down, one left


def test_a_branch_is_dropped_by_image():
    model, images = Swin(**SIZES, drop_path=0.9), np.repeat(random_images(1, (32, 32)), 4, axis=0)
    params, keys = random_params(model), jax.random.split(jax.random.key(1), 4)

    def run(params, keys):
        return model.apply({"params": params}, images, train=True, keys=keys)[-1]

    run = jax.jit(run, compiler_options=QUICK)
    first, turned = np.asarray(run(params, keys)), np.asarray(run(params, keys[::-1]))
    np.testing.assert_allclose(turned[::-1], first, rtol=0, atol=1e-5)
    assert not np.allclose(first[0], first[1])


# torchvision's counts, without the classifier, whose norm is one of our four; the second version
# has biases of keys there, which are not used.
@pytest.mark.parametrize(
    ("kind", "depths", "width", "count"),
    [
        (Swin, (2, 2, 6, 2), 96, 28_288_354 - 769_000),
        (Swin, (2, 2, 18, 2), 128, 87_768_224 - 1_025_000),
        (SwinV2, (2, 2, 6, 2), 96, 28_351_570 - 769_000 - 4_416),
    ],
)
def test_sizes_have_torchvision_s_number_of_parameters(kind, depths, width, count):
    heads = tuple(width // 32 * 2**i for i in range(4))
    params = abstract_params(kind(depths=depths, width=width, num_heads=heads))
    norms = 2 * 7 * width  # of the first three maps
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) - norms == count


def test_numbers_of_layers_are_simmim_s():
    model = Swin(depths=(2, 2, 6, 2))
    numbers = {"stem_norm": 0, "res2_0": 1, "res2_1": 2, "down3_norm": 2, "res3_0": 3,
               "down4_reduction": 4, "res4_5": 10, "res5_1": 12, "output2_norm": 13}  # fmt: skip
    assert {name: model.layer_id(name) for name in numbers} == numbers
    assert model.num_layers == 12


def test_attention_is_a_mean_of_what_it_sees():
    """One window: with queries of zeros, every cell becomes the mean of all nine."""
    layer, x = Attention(2, window=3, shifts=(0, 0), dtype=jnp.float32), random_images(1, (3, 3))
    x = np.concatenate([x, x[..., :1]], axis=-1)
    params = layer.init(jax.random.key(0), x, None)["params"]
    params = jax.tree.map(jnp.zeros_like, params)
    params["qkv"]["kernel"] = jnp.eye(4, 12, 8)
    params["proj"]["kernel"] = jnp.eye(4)
    found = layer.apply({"params": params}, x, None)
    expected = np.broadcast_to(x.mean(axis=(1, 2), keepdims=True), x.shape)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Swin, {"depths": (2, 2, 6)}, r"depths is \(2, 2, 6\), expected 4 numbers of at least 1"),
        (
            Swin,
            {"windows": (7, 7, 7, 1)},
            r"windows is \(7, 7, 7, 1\), expected 4 numbers of at le",
        ),
        (Swin, {"num_heads": (3, 6, 12, 25)}, "expected a divisor of 768 channels for 25"),
        (Swin, {"drop_path": 1.0}, "drop_path is 1.0, expected at least 0 and below 1"),
        (Swin, {"width": 0}, "width is 0, expected at least 1"),
        (SwinV2, {"pretrained_windows": (8, 8)}, r"pretrained_windows is \(8, 8\), expected 4 num"),
        (SwinV2, {"pretrained_windows": (1, 0, 0, 0)}, "expected 4 numbers, 0 or at least 2"),
    ],
)
def test_no_such_trunk_is_built(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)

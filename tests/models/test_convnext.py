"""ConvNeXt against a slow reference in float64, and what it promises to the rest of the model."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.models import convnext
from mask_rcnn_jax.models.convnext import Block, ConvNeXt
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.recipe.optimizer import Optimizer
from mask_rcnn_jax.training.optim import make_optimizer
from tests.helpers import assert_finite_tree

DEPTHS, WIDTH = (1, 2, 1, 1), 4
SIZE = (32, 64)  # the last map is 1 x 2
erf = np.vectorize(math.erf)


def trunk(**changes):
    return ConvNeXt(**dict(depths=DEPTHS, width=WIDTH, drop_path=0.0) | changes)


def random_params(model, seed=0):
    """Every parameter a random number: no gamma is nearly zero, no scale one."""
    shapes = abstract_params(model)
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = path[-1].key
        if name == "kernel":
            return rng.normal(0, 1 / np.sqrt(np.prod(leaf.shape[:-1])), leaf.shape)
        return rng.uniform(0.5, 1.5, leaf.shape) if name == "scale" else rng.normal(size=leaf.shape)

    filled = jax.tree_util.tree_map_with_path(fill, shapes)
    return jax.tree.map(np.float32, filled)


def abstract_params(model, size=SIZE):
    images = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
    key = jax.random.key(0)
    return jax.eval_shape(lambda x: model.init(key, x, train=False), images)["params"]


def random_images(batch=2, size=SIZE, seed=1):
    return np.random.default_rng(seed).normal(size=(batch, *size, 3)).astype(np.float32)


def slow_conv(x, layer, stride):
    """Convolution whose windows touch, by the sum over the places in a window."""
    kernel, total = layer["kernel"], layer["bias"]
    for i, j in np.ndindex(kernel.shape[:2]):
        total = total + x[:, i::stride, j::stride] @ kernel[i, j]
    return total


def slow_depthwise(x, layer):
    """7x7 with three zeros on every side; each channel by itself."""
    height, width = x.shape[1:3]
    padded = np.pad(x, ((0, 0), (3, 3), (3, 3), (0, 0)))
    total = layer["bias"]
    for i, j in np.ndindex(7, 7):
        kernel = layer["kernel"][i, j, 0]
        total = total + padded[:, i : i + height, j : j + width] * kernel
    return total


def slow_norm(x, layer):
    centered = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-6)
    return centered / deviation * layer["scale"] + layer["bias"]


def slow_block(x, p):
    y = slow_norm(slow_depthwise(x, p["dwconv"]), p["norm"])
    y = y @ p["fc1"]["kernel"] + p["fc1"]["bias"]
    y = y * (1 + erf(y / math.sqrt(2))) / 2
    return x + p["gamma"] * (y @ p["fc2"]["kernel"] + p["fc2"]["bias"])


def slow_trunk(p, x, depths=DEPTHS):
    p = jax.tree.map(np.float64, p)
    x = slow_norm(slow_conv(np.float64(x), p["stem_conv"], 4), p["stem_norm"])
    maps = []
    for stage, depth in enumerate(depths, start=2):
        if stage > 2:
            x = slow_conv(slow_norm(x, p[f"down{stage}_norm"]), p[f"down{stage}_conv"], 2)
        for i in range(depth):
            x = slow_block(x, p[f"res{stage}_{i}"])
        maps.append(slow_norm(x, p[f"output{stage}_norm"]))
    return maps


def weigh(maps):
    """A number that depends on every entry of the maps."""
    rng, total = np.random.default_rng(5), 0.0
    for x in maps:
        total = total + (x * rng.normal(size=x.shape).astype(np.float32)).sum()
    return total


@pytest.fixture(scope="module")
def case():
    """Parameters, images, maps, their weighted sum and its gradients."""
    model, images = trunk(), random_images()
    params = random_params(model)

    def loss(p):
        maps = model.apply({"params": p}, images, train=True)
        return weigh(maps), maps

    (value, maps), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return params, images, maps, value, grads


def test_every_map_is_the_reference_s(case):
    params, images, maps, _, _ = case
    shapes = [(2, 8, 16, 4), (2, 4, 8, 8), (2, 2, 4, 16), (2, 1, 2, 32)]
    assert [x.shape for x in maps] == shapes
    for ours, theirs in zip(maps, slow_trunk(params, images), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("path", "entry"),
    [
        ("stem_conv/kernel", (1, 2, 0, 3)),
        ("stem_norm/scale", (1,)),
        ("res2_0/dwconv/kernel", (0, 6, 0, 2)),
        ("res3_1/dwconv/bias", (3,)),
        ("res3_1/norm/bias", (0,)),
        ("res3_0/fc1/kernel", (1, 30)),
        ("res4_0/fc2/kernel", (40, 7)),
        ("res4_0/gamma", (5,)),
        ("down5_conv/kernel", (1, 0, 3, 9)),
        ("down3_norm/scale", (2,)),
        ("output5_norm/bias", (31,)),
    ],
)
def test_gradients_are_the_reference_s_slopes(case, path, entry):
    params, images, _, _, grads = case
    step, values = 1e-5, []
    for sign in (1, -1):
        moved = {name: np.float64(leaf) for name, leaf in flatten_dict(params, sep="/").items()}
        moved[path][entry] += sign * step
        values.append(weigh(slow_trunk(unflatten_dict(moved, sep="/"), images)))
    slope = (values[0] - values[1]) / (2 * step)
    grad = np.asarray(flatten_dict(grads, sep="/")[path])
    assert abs(grad[entry] - slope) < 1e-4 * np.abs(grad).max()


def test_recomputed_blocks_have_the_same_names():
    shapes = [jax.tree.map(np.shape, abstract_params(trunk(remat=r))) for r in (False, True)]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_recomputing_blocks_changes_nothing():
    """With dropped branches, whose draws are repeated."""
    images, params = random_images(), random_params(trunk())
    keys = jax.random.split(jax.random.key(3), 2)
    results = []
    for remat in (False, True):
        model = trunk(drop_path=0.5, remat=remat)

        def loss(p, model=model):
            return weigh(model.apply({"params": p}, images, train=True, keys=keys))

        results.append(jax.jit(jax.value_and_grad(loss))(params))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(a).max()),
        *results,
    )


def test_a_branch_is_dropped_by_image():
    """By its key and the number of its block, whatever its place in the batch."""
    x = np.repeat(random_images(1, (3, 5)), 8, axis=0)
    options = dict(layer_scale=1.0, drop_rate=0.5, hidden=4 * x.shape[-1], dtype=jnp.float32)
    blocks = {n: Block(number=n, **options) for n in (1, 2)}
    params = blocks[1].init(jax.random.key(0), x, None, None)
    keys = jax.random.split(jax.random.key(1), 8)

    @jax.jit
    def run(params, x, keys):
        return [blocks[1].apply(params, x, None, None)] + [
            blocks[n].apply(params, x, None, k) for n, k in ((1, keys), (1, keys[::-1]), (2, keys))
        ]

    whole, first, turned, other = map(np.asarray, run(params, x, keys))
    np.testing.assert_array_equal(turned[::-1], first)
    dropped = (first == x).all(axis=(1, 2, 3))
    assert 0 < dropped.sum() < 8
    kept = x + 2 * (whole - x)  # by 1 - 0.5
    np.testing.assert_allclose(first[~dropped], kept[~dropped], rtol=0, atol=1e-6)
    assert not np.array_equal(dropped, (other == x).all(axis=(1, 2, 3)))


def test_rates_rise_from_zero_over_all_stages(monkeypatch):
    seen = []
    monkeypatch.setattr(convnext, "drop_path", lambda y, *drawn: seen.append(drawn) or y)
    model = trunk(depths=(2, 1, 1, 1), drop_path=0.4)
    keys, images = jax.random.split(jax.random.key(0), 1), jnp.zeros((1, 32, 32, 3))
    jax.eval_shape(lambda: model.init(keys[0], images, train=True, keys=keys))
    rates, given, numbers = zip(*seen, strict=True)
    np.testing.assert_allclose(rates, [0, 0.1, 0.2, 0.3, 0.4])
    assert numbers == (0, 1, 2, 3, 4) and all(k is not None for k in given)
    seen.clear()
    jax.eval_shape(lambda: model.init(keys[0], images, train=False, keys=keys))
    assert all(given is None for _, given, _ in seen)


def test_a_larger_canvas_changes_nothing(case):
    """Whatever is outside the images; the part beyond keeps to itself."""
    params, images, maps, _, _ = case
    canvas = random_images(size=(64, 96), seed=7)
    canvas[:, : SIZE[0], : SIZE[1]] = images

    @jax.jit
    def run(params, canvas, size):
        extent = ValidExtent((64, 96), size)
        return trunk().apply({"params": params}, canvas, train=False, extent=extent)

    for ours, alone in zip(run(params, canvas, jnp.array(SIZE)), maps, strict=True):
        inside = ours[:, : alone.shape[1], : alone.shape[2]]
        np.testing.assert_allclose(inside, alone, rtol=0, atol=1e-5 * np.abs(alone).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_half_precision_is_close(case, dtype):
    params, images, maps, _, _ = case
    model = trunk(dtype=dtype)

    def loss(p):
        maps = model.apply({"params": p}, images, train=True)
        return sum(jnp.mean(x.astype(jnp.float32)) for x in maps), maps

    (_, half), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert_finite_tree(grads)
    for one, other in zip(half, maps, strict=True):
        assert one.dtype == dtype
        error = np.abs(np.float32(one) - other).max() / np.abs(other).max()
        assert error < (0.1 if dtype == jnp.bfloat16 else 0.02)


# torchvision's counts, without the classifier's norm and fully connected layer.
@pytest.mark.parametrize(
    ("depths", "width", "count"),
    [((3, 3, 9, 3), 96, 28_589_128 - 769_000 - 1_536),
     pytest.param((3, 3, 27, 3), 96, 50_223_688 - 770_536, marks=pytest.mark.slow),
     pytest.param((3, 3, 27, 3), 128, 88_591_464 - 1_025_000 - 2_048, marks=pytest.mark.slow)],
)  # fmt: skip
def test_sizes_have_torchvision_s_number_of_parameters(depths, width, count):
    params = abstract_params(ConvNeXt(depths=depths, width=width), (64, 96))
    norms = sum(leaf.size for name in params if "output" in name for leaf in params[name].values())
    assert norms == 2 * 15 * width
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) - norms == count


def test_untrained_branches_are_small():
    block = Block(layer_scale=1e-6, drop_rate=0.0, number=0, hidden=64, dtype=jnp.float32)
    init = jax.jit(lambda key: block.init(key, jnp.zeros((1, 2, 3, 16)), None, None))
    params = init(jax.random.key(0))["params"]
    np.testing.assert_array_equal(params["gamma"], np.full(16, 1e-6, np.float32))
    assert 0.018 < np.std(params["fc1"]["kernel"]) < 0.022
    assert not np.any(params["fc1"]["bias"])


LAYERS = {  # by mmdetection's get_layer_id_for_convnext, for 6 and 12 layers
    (3, 3, 9, 3): {"stem_conv": 0, "stem_norm": 0, "res2_0": 1, "res2_2": 1, "down3_norm": 2,
                   "down3_conv": 2, "res3_1": 2, "down4_conv": 3, "res4_0": 3, "res4_2": 3,
                   "res4_3": 4, "res4_8": 5, "down5_norm": 6, "down5_conv": 6, "res5_0": 6,
                   "res5_2": 6, "output2_norm": 7, "output5_norm": 7},
    (3, 3, 27, 3): {"stem_conv": 0, "res2_1": 1, "down3_conv": 2, "res4_8": 5, "res4_9": 6,
                    "res4_26": 11, "down5_conv": 12, "res5_1": 12, "output4_norm": 13},
}  # fmt: skip


@pytest.mark.parametrize("depths", LAYERS)
def test_numbers_of_layers_are_mmdetection_s(depths):
    model = ConvNeXt(depths=depths)
    assert {name: model.layer_id(name) for name in LAYERS[depths]} == LAYERS[depths]
    assert model.num_layers == {9: 6, 27: 12}[depths[2]]


def test_rates_and_decay_by_layer():
    """Of the rate 1 and decay .5, for all gradients 0 or parameters 1."""
    model = trunk()
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), abstract_params(model))
    values = {"backbone": ones, "rpn_head": {"conv": {"kernel": np.ones(2, np.float32)}}}
    everything = ("kernel", "bias", "scale", "other")
    options = dict(name="sgd", momentum=0.0, decay_on=everything, layer_decay=0.5)
    tx = make_optimizer(Optimizer(**options, weight_decay=1.0), lambda step: 1.0, model)
    zeros = jax.tree.map(np.zeros_like, values)
    updates = jax.jit(lambda grads: tx.update(grads, tx.init(values), values)[0])(zeros)
    for path, update in flatten_dict(updates, sep="/").items():
        module, layer, *_ = path.split("/")
        number = model.layer_id(layer) if module == "backbone" else 5
        expected = -(0.5 ** (5 - number)) if path.endswith("kernel") else 0.0
        np.testing.assert_allclose(update, np.full_like(update, expected), err_msg=path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depths": (3, 3, 9)}, r"depths is \(3, 3, 9\), expected 4 numbers of at least 1"),
        ({"depths": (3, 0, 9, 3)}, r"depths is \(3, 0, 9, 3\)"),
        ({"width": 0}, "width is 0, expected at least 1"),
        ({"layer_scale": 0.0}, "layer_scale is 0.0, expected above 0"),
        ({"drop_path": 1.0}, "drop_path is 1.0, expected at least 0 and below 1"),
    ],
)
def test_no_such_trunk_is_built(fields, message):
    with pytest.raises(ValueError, match=message):
        ConvNeXt(**fields)

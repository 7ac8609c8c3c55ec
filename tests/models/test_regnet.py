"""RegNet against a slow reference in float64, and its published sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.models.regnet import RegNet
from mask_rcnn_jax.ops.extent import ValidExtent
from tests.helpers import assert_finite_tree

# Stages of 1, 1, 3 and 1 blocks with 1, 2, 4 and 8 groups.
SMALL = dict(depth=6, initial_width=8, slope=8.0, multiplier=2.0, group_width=8, se_ratio=0.25)
BLOCKS = {"res2": 1, "res3": 1, "res4": 3, "res5": 1}
SIZE = (32, 64)  # the last map is 1 x 2


def trunk(**changes):
    return RegNet(**SMALL | dict(norm="batch", frozen_stages=0) | changes)


def abstract(model, size=SIZE):
    images = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
    return jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), images)


def random_variables(model, seed=0):
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        if path[-1].key == "kernel":
            return rng.normal(0, 1.2 / np.sqrt(np.prod(leaf.shape[:-1])), leaf.shape)
        positive = path[-1].key in ("scale", "var")
        return rng.uniform(0.5, 1.5, leaf.shape) if positive else rng.normal(0, 0.3, leaf.shape)

    return jax.tree.map(np.float32, jax.tree_util.tree_map_with_path(fill, abstract(model)))


def random_images(batch=2, size=SIZE, seed=1):
    return np.random.default_rng(seed).normal(size=(batch, *size, 3)).astype(np.float32)


def slow_conv(x, kernel, stride):
    """By the sum over the places in a window; every group of outputs has inputs of its own."""
    side, _, inputs, outputs = kernel.shape
    pad, groups = side // 2, x.shape[-1] // inputs
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    height, width = (-(-length // stride) for length in x.shape[1:3])
    share, total = outputs // groups, np.zeros((len(x), height, width, outputs))
    for i, j in np.ndindex(side, side):
        seen = padded[:, i : i + stride * height : stride, j : j + stride * width : stride]
        for group in range(groups):
            into = slice(group * share, (group + 1) * share)
            part = seen[:, :height, :width, group * inputs : (group + 1) * inputs]
            total[..., into] += part @ kernel[i, j][:, into]
    return total


def slow_layer(x, v, name, stride=1):
    """Convolution and batch norm with stored statistics."""
    norm = name.replace("_conv", "") + "_norm"
    scale = v["params"][norm]["scale"] / np.sqrt(v["batch_stats"][norm]["var"] + 1e-5)
    shift = v["params"][norm]["bias"] - v["batch_stats"][norm]["mean"] * scale
    return slow_conv(x, v["params"][name]["kernel"], stride) * scale + shift


def slow_block(x, v, stride):
    y = np.maximum(slow_layer(x, v, "a"), 0)
    y = np.maximum(slow_layer(y, v, "b", stride), 0)
    if "se_fc1" in v["params"]:
        first, second = (v["params"][f"se_fc{i}"] for i in (1, 2))
        mean = y.mean(axis=(1, 2))
        hidden = np.maximum(mean @ first["kernel"][0, 0] + first["bias"], 0)
        factor = 1 / (1 + np.exp(-(hidden @ second["kernel"][0, 0] + second["bias"])))
        y = y * factor[:, None, None]
    y = slow_layer(y, v, "c")
    return np.maximum(y + (slow_layer(x, v, "shortcut", stride) if stride > 1 else x), 0)


def slow_trunk(v, x):
    v = jax.tree.map(np.float64, v)
    x, maps = np.maximum(slow_layer(np.float64(x), v, "stem_conv", 2), 0), []
    for stage, blocks in BLOCKS.items():
        for i in range(blocks):
            name = f"{stage}_{i}"
            x = slow_block(x, {part: v[part][name] for part in v}, 1 if i else 2)
        maps.append(x)
    return maps


def weigh(maps):
    """A number that depends on every entry of the maps."""
    rng, total = np.random.default_rng(5), 0.0
    for x in maps:
        total = total + (x * rng.normal(size=x.shape).astype(np.float32)).sum()
    return total


@pytest.fixture(scope="module")
def case():
    """Variables, images, maps and the gradients of their weighted sum; the stem is frozen."""
    model, images = trunk(frozen_stages=1), random_images()
    variables = random_variables(model)

    def loss(params):
        maps = model.apply({**variables, "params": params}, images, train=False)
        return weigh(maps), maps

    grads, maps = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    return variables, images, maps, grads


def test_every_map_is_the_reference_s(case):
    variables, images, maps, _ = case
    shapes = [(2, 8, 16, 8), (2, 4, 8, 16), (2, 2, 4, 32), (2, 1, 2, 64)]
    assert [x.shape for x in maps] == shapes
    for ours, theirs in zip(maps, slow_trunk(variables, images), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


def test_without_squeeze_and_excitation():
    model, images = trunk(se_ratio=0.0), random_images(1)
    variables = random_variables(model)
    assert not any("se_" in path for path in flatten_dict(variables["params"], sep="/"))
    maps = jax.jit(lambda v: model.apply(v, images, train=False))(variables)
    for ours, theirs in zip(maps, slow_trunk(variables, images), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("path", "entry"),
    [
        ("res2_0/shortcut/kernel", (0, 0, 30, 2)),
        ("res3_0/b/kernel", (0, 2, 5, 13)),
        ("res4_1/b/kernel", (2, 1, 7, 9)),
        ("res4_2/se_fc1/kernel", (0, 0, 11, 3)),
        ("res4_0/se_fc2/bias", (20,)),
        ("res5_0/c/kernel", (0, 0, 40, 7)),
        ("res5_0/a_norm/bias", (5,)),
    ],
)
def test_gradients_are_the_reference_s_slopes(case, path, entry):
    variables, images, _, grads = case
    step, values = 1e-6, []
    for sign in (1, -1):
        flat = flatten_dict(variables["params"], sep="/")
        moved = {name: np.float64(leaf) for name, leaf in flat.items()}
        moved[path][entry] += sign * step
        params = unflatten_dict(moved, sep="/")
        values.append(weigh(slow_trunk({**variables, "params": params}, images)))
    slope = (values[0] - values[1]) / (2 * step)
    grad = np.asarray(flatten_dict(grads, sep="/")[path])
    assert abs(grad[entry] - slope) < 1e-4 * np.abs(grad).max()


def test_frozen_stages_have_no_gradient_and_the_others_do(case):
    for name, layer in case[3].items():
        largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(layer))
        assert (largest == 0) == name.startswith("stem"), name
    assert trunk(frozen_stages=3).frozen == ("stem", "res2", "res3")


def test_a_larger_canvas_changes_nothing(case):
    """Whatever is outside the images: means leave it out, too."""
    variables, images, maps, _ = case
    canvas = random_images(size=(64, 96), seed=7)
    canvas[:, : SIZE[0], : SIZE[1]] = images

    @jax.jit
    def run(variables, canvas, size):
        extent = ValidExtent((64, 96), size)
        return trunk().apply(variables, canvas, train=False, extent=extent)

    for ours, alone in zip(run(variables, canvas, jnp.array(SIZE)), maps, strict=True):
        inside = ours[:, : alone.shape[1], : alone.shape[2]]
        np.testing.assert_allclose(inside, alone, rtol=0, atol=1e-5 * np.abs(alone).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_close(case, dtype):
    variables, images, maps, _ = case
    model = trunk(dtype=dtype)

    def loss(params):
        maps = model.apply({**variables, "params": params}, images, train=False)
        return sum(jnp.mean(x.astype(jnp.float32)) for x in maps), maps

    grads, half = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    assert_finite_tree(grads)
    for one, other in zip(half, maps, strict=True):
        assert one.dtype == dtype
        error = np.abs(np.float32(one) - other).max() / np.abs(other).max()
        assert error < (0.05 if dtype == jnp.bfloat16 else 0.01)


def test_recomputed_blocks_have_the_same_names():
    shapes = [jax.tree.map(np.shape, abstract(trunk(remat=r))) for r in (False, True)]
    assert shapes[0] == shapes[1]


ENTRIES = ("depth", "initial_width", "slope", "multiplier", "group_width")
# The paper's models: entries, then depths and widths of its tables.
PUBLISHED = [
    ((13, 24, 36.44, 2.49, 8), (1, 1, 4, 7), (24, 56, 152, 368)),
    ((22, 24, 24.48, 2.54, 16), (1, 2, 7, 12), (32, 64, 160, 384)),
    ((18, 80, 34.01, 2.25, 24), (2, 4, 10, 2), (72, 168, 408, 912)),
    ((23, 96, 38.65, 2.43, 40), (2, 5, 14, 2), (80, 240, 560, 1360)),
    ((17, 184, 60.83, 2.07, 56), (2, 4, 10, 1), (168, 392, 784, 1624)),
    ((23, 320, 69.86, 2.0, 168), (2, 7, 13, 1), (336, 672, 1344, 2520)),
    ((15, 48, 32.54, 2.32, 16), (1, 3, 7, 4), (48, 112, 256, 608)),
    ((22, 96, 31.41, 2.24, 64), (2, 6, 12, 2), (128, 192, 512, 1088)),
    ((20, 232, 115.89, 2.53, 232), (2, 5, 12, 1), (232, 696, 1392, 3712)),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "depths", "widths"), PUBLISHED)
def test_stages_are_the_paper_s(entries, depths, widths):
    stages = RegNet(**dict(zip(ENTRIES, entries, strict=True))).stages
    assert stages == [(w, d, w // entries[-1]) for w, d in zip(widths, depths, strict=True)]


def test_y_400mf_has_torchvision_s_number_of_parameters():
    """Without the classifier's; for others see `tests/weights/test_regnet_files.py`."""
    entries = dict(zip(ENTRIES, (16, 48, 27.89, 2.09, 8), strict=True))
    params = abstract(RegNet(**entries, se_ratio=0.25, norm="affine"))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 4_344_144 - 441_000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"initial_width": 12}, "initial_width is 12, expected a multiple of 8"),
        ({"multiplier": 1.0}, "multiplier is 1.0, expected above 1"),
        ({"slope": -1.0}, "slope is -1.0, expected at least 0"),
        ({"group_width": 0}, "group_width is 0, expected at least 1"),
        ({"se_ratio": -0.5}, "se_ratio is -0.5, expected at least 0"),
        ({"depth": 5}, r"depth, .* multiplier give stages of widths \[8, 16, 32\], expected 4"),
        ({"depth": 0}, r"give stages of widths \[\], expected 4"),
        ({"norm": "group"}, "width of a stage is 8, expected a multiple of 32 with norm='group'"),
    ],
)
def test_no_such_trunk_is_built(fields, message):
    with pytest.raises(ValueError, match=message):
        trunk(**fields)

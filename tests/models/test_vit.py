"""The vision transformer and its pyramid: detectron2's values, and what those do not cover."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.models import vit
from mask_rcnn_jax.models.simple_pyramid import SimplePyramid
from mask_rcnn_jax.models.vit import Block, ViT
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.recipe.optimizer import Optimizer
from mask_rcnn_jax.training.optim import make_optimizer
from mask_rcnn_jax.weights.convert import identify, to_flax
from tests.helpers import assert_finite_tree, drawn, load_golden, shared

TINY = dict(
    width=64,
    depth=4,
    num_heads=4,
    global_blocks=(1, 3),
    window=7,
    image_size=224,
    pretrain_size=160,
)
SMALL = TINY | dict(
    width=16, depth=2, num_heads=2, global_blocks=(1,), window=3, image_size=64, pretrain_size=32
)


class Trunk(nn.Module):
    """Backbone and pyramid under their names in the detector; None: the backbone alone."""

    backbone: ViT
    fpn: SimplePyramid | None = None

    def __call__(self, x, keys=None, train=False):
        maps = self.backbone(x, train=train, keys=keys)
        if self.fpn is None:
            return maps
        return self.fpn(maps, ValidExtent(x.shape[1:3], None), train)


def tiny(**changes):
    return Trunk(ViT(**TINY | changes), SimplePyramid(64))


def small(dtype=jnp.float32, **changes):
    return Trunk(ViT(**SMALL | changes, dtype=dtype), SimplePyramid(8, dtype=dtype))


def noise(*shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


def without_pyramid(**changes):
    """Model, parameters and a batch of noise."""
    model, images = Trunk(ViT(**SMALL | changes)), noise(2, 48, 64, 3)
    return model, drawn(model, images)["params"], images


@pytest.fixture(scope="module")
def small_case():
    """Parameters of `small()` and a batch of noise."""
    images = noise(2, 48, 64, 3)
    return drawn(small(), images)["params"], images


def their_names():
    names = load_golden("modern/vitdet_tiny_weights", whole=True)
    return {f"backbone.{name}": array for name, array in names.items()}


@pytest.fixture(scope="module")
def params():
    loaded, source = to_flax(their_names(), norm=None, eps=1e-5)
    assert source == "detectron2_vitdet" and not loaded["batch_stats"]
    return loaded["params"]


def nhwc(x):
    return jnp.asarray(x.transpose(0, 2, 3, 1))


@pytest.mark.parametrize("case", ["sq", "rect"])
def test_every_map_is_detectron2s(params, case):
    golden = load_golden("modern/vitdet_tiny", whole=True)
    capture = dict(capture_intermediates=lambda module, _: isinstance(module, Block))
    run = jax.jit(lambda p, x: tiny().apply({"params": p}, x, **capture))
    maps, rest = run(params, nhwc(golden[f"{case}/input"]))
    blocks = rest["intermediates"]["backbone"]
    assert len(blocks) == 4
    for i in range(4):
        ours = blocks[f"block{i}"]["__call__"][0]
        np.testing.assert_allclose(ours, golden[f"{case}/block{i}"], rtol=0, atol=1e-4)
    for level, ours in enumerate(maps, start=2):
        theirs = golden[f"{case}/p{level}"].transpose(0, 2, 3, 1)
        ours = ours[..., ::4] if level == 2 else ours
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4, err_msg=f"p{level}")


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_are_detectron2s(params, remat):
    golden = load_golden("modern/vitdet_tiny", whole=True)
    image = nhwc(golden["sq/input"])

    def loss(p):
        total = 0.0
        for level, x in enumerate(tiny(remat=remat).apply({"params": p}, image, train=True), 2):
            shape = tuple(x.shape[i] for i in (0, 3, 1, 2))
            u = np.random.Generator(np.random.PCG64([9, level])).standard_normal(shape)
            total += jnp.sum(x * nhwc(np.float32(u)))
        return total

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert float(value) == pytest.approx(float(golden["grad/loss"]), rel=1e-4, abs=1e-3)
    paths = identify(list(their_names()))[1]
    flat = flatten_dict(grads, sep="/")
    assert len(flat) == len(golden["grad/names"])
    for name, norm in zip(golden["grad/names"], golden["grad/norms"], strict=True):
        ours = np.linalg.norm(np.float64(flat[paths[f"backbone.{name}"]]))
        assert ours == pytest.approx(norm, rel=1e-4, abs=1e-6), name
    for name in ("net.pos_embed", "net.blocks.0.attn.rel_pos_h", "net.blocks.1.attn.rel_pos_w",
                 "net.blocks.3.norm2.weight"):  # fmt: skip
        theirs = golden[f"grad/{name}"]
        ours = flat[paths[f"backbone.{name}"]]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


def test_attention_against_loops():
    """Two cells at a time, on a map that is not square and has other sizes than the tables."""
    model = vit.Attention(2, 4, "xla", jnp.float32)
    x = noise(1, 2, 3, 6)
    p = jax.tree.map(lambda leaf: 5 * leaf, drawn(model, x)["params"])
    ours = jax.jit(model.apply)({"params": p}, x)
    p = jax.tree.map(np.float64, p)
    qkv = np.float64(x).reshape(6, 6) @ p["qkv"]["kernel"] + p["qkv"]["bias"]
    q, k, v = qkv.reshape(6, 3, 2, 3).transpose(1, 2, 0, 3)
    tables = []
    for name, size in (("rel_pos_h", 2), ("rel_pos_w", 3)):
        places = np.clip((np.arange(2 * size - 1) + 0.5) * 7 / (2 * size - 1) - 0.5, 0, 6)
        columns = [np.interp(places, np.arange(7), column) for column in p[name].T]
        tables.append(np.stack(columns, axis=1))
    out = np.zeros((6, 2, 3))
    for head in range(2):
        for i, (yi, xi) in enumerate(np.ndindex(2, 3)):
            logits = np.zeros(6)
            for j, (yj, xj) in enumerate(np.ndindex(2, 3)):
                query = q[head, i]
                logits[j] = query @ k[head, j] / np.sqrt(3)
                logits[j] += query @ tables[0][yi - yj + 1] + query @ tables[1][xi - xj + 2]
            weights = np.exp(logits - logits.max())
            out[i, head] = weights / weights.sum() @ v[head]
    expected = out.reshape(6, 6) @ p["proj"]["kernel"] + p["proj"]["bias"]
    np.testing.assert_allclose(ours[0].reshape(6, 6), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (4, 7), (7, 2)])
def test_windows_return_every_cell(size):
    x = jax.random.normal(jax.random.key(0), (2, *size, 5))
    windows = vit.to_windows(x, 3)
    assert windows.shape == (2 * -(-size[0] // 3) * -(-size[1] // 3), 3, 3, 5)
    np.testing.assert_array_equal(vit.from_windows(windows, size), x)
    np.testing.assert_array_equal(windows[0, : size[0], : size[1]], x[0, :3, :3])
    assert float(windows.sum()) == pytest.approx(float(x.sum()), rel=1e-4)


@pytest.mark.parametrize("kernel", [vit.linear, vit.cubic])
@pytest.mark.parametrize(("old", "new"), [(7, 7), (7, 3), (1, 5), (4, 9)])
def test_interpolation_keeps_constants_and_equal_sizes(kernel, old, new):
    matrix = vit.interpolation(old, new, kernel)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(matrix, matrix[::-1, ::-1], atol=1e-6)
    if old == new:
        np.testing.assert_array_equal(matrix, np.eye(old))


def test_interpolation_by_hand():
    """To twice the size: centers a quarter to either side."""
    row = vit.interpolation(3, 6, vit.linear)[2]
    np.testing.assert_allclose(row, [0.25, 0.75, 0])
    row = vit.interpolation(4, 8, vit.cubic)[3]
    np.testing.assert_allclose(row, [-0.10546875, 0.87890625, 0.26171875, -0.03515625])


@partial(jax.jit, static_argnames=("model", "train"))
def run(model, params, images, keys=None, train=False):
    return model.apply({"params": params}, images, keys, train)


def test_paths_are_dropped_by_image():
    """By its key alone, whatever its place in the batch; only in training."""
    model, params, images = without_pyramid(depth=3, drop_path=0.6)
    images = jnp.concatenate([images[:1]] * 16)
    keys = jax.random.split(jax.random.key(0), 16)
    (plain,) = run(model, params, images)
    np.testing.assert_array_equal(run(model, params, images, keys)[0], plain)
    (dropped,) = run(model, params, images, keys, train=True)
    moved = np.abs(dropped - plain).max(axis=(1, 2, 3))
    assert len(np.unique(np.round(moved, 4))) > 4
    (again,) = run(model, params, images, keys[::-1], train=True)
    np.testing.assert_allclose(again[::-1], dropped, rtol=0, atol=1e-5)


def test_dropped_paths_keep_the_mean():
    keys = jax.random.split(jax.random.key(0), 4000)
    x = jnp.ones((4000, 1, 1, 1))
    out = vit.drop_path(x, 0.25, keys, 3)
    assert set(np.unique(out)) == {0.0, np.float32(1 / 0.75)}
    assert float(out.mean()) == pytest.approx(1.0, abs=0.03)
    assert not np.array_equal(out, vit.drop_path(x, 0.25, keys, 4))
    assert vit.drop_path(x, 0.0, keys, 0) is x and vit.drop_path(x, 0.5, None, 0) is x


def test_the_first_block_is_always_there_and_the_last_seldom(monkeypatch):
    rates = []
    monkeypatch.setattr(vit, "drop_path", lambda x, rate, keys, n: rates.append(rate) or x)
    golden = json.loads(shared("goldens/modern/vitdet_tiny_meta.json").read_text())
    model = ViT(**SMALL | dict(depth=12, drop_path=0.1))
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    jax.eval_shape(lambda key, x: model.init(key, x, train=True), jax.random.key(0), images)
    assert rates[::2] == rates[1::2]
    np.testing.assert_allclose(rates[::2], golden["drop_path_rates"], rtol=1e-6)


@pytest.mark.slow
def test_recomputing_blocks_changes_nothing():
    """With dropped paths, whose draws are repeated."""
    results = []
    for remat in (False, True):
        model, params, images = without_pyramid(drop_path=0.5, remat=remat)
        keys = jax.random.split(jax.random.key(3), 2)

        def loss(p, model=model, images=images, keys=keys):
            maps = model.apply({"params": p}, images, keys, train=True)
            return sum(jnp.sum(jnp.square(x)) for x in maps)

        results.append(jax.jit(jax.value_and_grad(loss))(params))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(a).max()),
        *results,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_close_and_bounded(dtype, small_case):
    """A residual stream of hundreds, as large models have it, stays finite."""
    params, images = small_case
    exact = run(small(), params, images)
    half = run(small(dtype), params, images)
    for one, other in zip(half, exact, strict=True):
        assert one.dtype == dtype
        error = np.abs(np.float32(one) - other).max() / np.abs(other).max()
        assert error < (0.1 if dtype == jnp.bfloat16 else 0.02)
    positions = 1000 * params["backbone"]["pos_embed"]
    params = {**params, "backbone": {**params["backbone"], "pos_embed": positions}}

    def total(p):
        maps = small(dtype).apply({"params": p}, images)
        return sum(jnp.mean(x.astype(jnp.float32)) for x in maps)

    assert_finite_tree(jax.jit(jax.value_and_grad(total))(params))


def test_the_fused_kernel_is_for_half_precision_on_a_gpu(small_case):
    params, images = small_case
    with pytest.raises(ValueError, match="attention is 'cudnn', which needs train.precision"):
        run(small(attention="cudnn"), params, images)
    halves = [run(small(jnp.bfloat16, attention=a), params, images) for a in ("xla", "cudnn")]
    jax.tree.map(np.testing.assert_array_equal, *halves)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 32, 160, 3), (1, 96, 64, 3)])
def test_any_size_has_maps(shape):
    """Smaller than a window, longer than the tables, black."""
    images = noise(*shape)
    params = drawn(small(), images)["params"]

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def run(p, images):
        maps = small().apply({"params": p}, images)
        return sum(jnp.sum(x) for x in maps), maps

    for batch in (images, jnp.zeros(shape)):
        grads, maps = run(params, batch)
        assert_finite_tree((grads, maps))
        for level, x in enumerate(maps, start=2):
            assert x.shape[1:3] == tuple(-(-side // 2**level) for side in shape[1:3])


def test_maps_end_with_the_images():
    """The pyramid is zero outside the valid extent, and convolutions see zeros there."""
    fpn = SimplePyramid(8)
    x = noise(1, 6, 8, 16)
    extent = ValidExtent((96, 128), jnp.array([64, 96]))
    params = drawn(fpn, [x], extent)
    whole, cut = (jax.jit(lambda y, e=e: fpn.apply(params, [y], e))(y) for y, e in (
        (x, extent), (x[:, :4, :6], ValidExtent((64, 96), None))
    ))  # fmt: skip
    for a, b in zip(whole, cut, strict=True):
        rows, columns = b.shape[1:3]
        np.testing.assert_allclose(a[:, :rows, :columns], b, rtol=0, atol=1e-5)
        assert not a[:, rows:].any() and not a[:, :, columns:].any()


@pytest.mark.parametrize("shift", [True, False])
def test_rates_and_decay_of_layers(shift):
    """Rates are those of detectron2's function; norms and positions of the trunk do not decay."""
    golden = json.loads(shared("goldens/modern/vitdet_tiny_meta.json").read_text())
    backbone = ViT(**SMALL | dict(depth=12, global_blocks=(11,)))
    model = Trunk(backbone, SimplePyramid(8))
    images = jnp.zeros((1, 32, 32, 3))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), images))["params"]
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), params)
    params["rpn_head"] = {"conv": {"kernel": np.ones(2, np.float32)}}
    everything = ("kernel", "bias", "scale", "other")
    options = Optimizer(
        name="sgd", momentum=0.0, weight_decay=float(shift), decay_on=everything, layer_decay=0.7
    )
    tx = make_optimizer(options, lambda step: 1.0, backbone)
    grads = jax.tree.map(np.zeros_like if shift else np.ones_like, params)
    update = jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params)[0])
    updates = flatten_dict(update(grads, params), sep="/")
    if not shift:
        names = {
            "backbone.net.pos_embed": "backbone/pos_embed",
            "backbone.net.patch_embed.proj.weight": "backbone/patch_embed/kernel",
            "backbone.net.blocks.0.attn.qkv.weight": "backbone/block0/attn/qkv/kernel",
            "backbone.net.blocks.11.mlp.fc2.bias": "backbone/block11/fc2/bias",
            "backbone.simfp_2.0.weight": "fpn/up2_first/kernel",
            "proposal_generator.rpn_head.conv.conv0.weight": "rpn_head/conv/kernel",
        }
        for theirs, factor in golden["lr_decay_B_0.7_12"].items():
            np.testing.assert_allclose(-updates[names[theirs]], factor, rtol=1e-5)
        return
    still = {name for name, update in updates.items() if not np.any(update)}
    norms = {f"backbone/block{i}/norm{k}/{leaf}" for i in range(12) for k in (1, 2)
             for leaf in ("scale", "bias")}  # fmt: skip
    assert still == norms | {"backbone/pos_embed"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 5}, "num_heads is 5, expected a divisor of width=64"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"drop_path": 1.0}, "drop_path is 1.0, expected at least 0 and below 1"),
        ({"depth": 0, "global_blocks": ()}, "depth is 0, expected at least 1"),
        ({"window": 0}, "window is 0, expected at least 1"),
        ({"global_blocks": (4,)}, r"global_blocks is \(4,\), expected blocks from 0 to 3"),
        ({"image_size": 1000}, "image_size is 1000, expected a multiple of 16"),
        ({"pretrain_size": 0}, "pretrain_size is 0"),
    ],
)
def test_what_no_transformer_has_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ViT(**TINY | fields)

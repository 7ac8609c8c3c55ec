"""Weights for red, green and blue in a model of other bands."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.models.build import abstract_variables
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.convert import to_ours_flat
from mask_rcnn_jax.weights.stem import adapted

RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(7, 7, 3, 16)).astype(np.float32)
FOUR = ("nir", "red", "green", "blue")


def timms(kernel, channels):
    """`adapt_input_conv` of timm, on its layout [out, in, h, w], of three channels."""
    weight = kernel.transpose(3, 2, 0, 1)
    if channels == 1:
        weight = weight.sum(axis=1, keepdims=True)
    elif channels != 3:
        repeat = -(-channels // 3)
        weight = np.tile(weight, (1, repeat, 1, 1))[:, :channels] * (3 / channels)
    return weight.transpose(2, 3, 1, 0)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 13])
def test_repeated_channels_are_timms(channels):
    found = adapted(KERNEL, [f"b{n}" for n in range(channels)], "repeat")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, timms(KERNEL, channels), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bgr", [False, True])
@pytest.mark.parametrize("how", ["mean", "repeat", "names"])
@pytest.mark.parametrize("names", [("a",), ("blue", "a"), FOUR, ("blue", "green", "red")])
def test_a_gray_image_gives_the_same_map(names, how, bgr):
    """Where all bands are equal, the sum over channels is that of the weights."""
    found = adapted(KERNEL, names, how, bgr)
    if how == "mean" or (how == "repeat" and len(names) in (1, 3)):
        np.testing.assert_allclose(found.sum(2), KERNEL.sum(2), rtol=1e-4, atol=1e-5)
    # In the order of the model's input, whichever that is.
    other = adapted(KERNEL[:, :, ::-1], names, how, not bgr)
    np.testing.assert_array_equal(found, other[:, :, ::-1])


def test_named_bands_take_their_colors():
    found = adapted(KERNEL, FOUR, "names") * (4 / 3)
    np.testing.assert_allclose(found[:, :, 1:], KERNEL, rtol=1e-5)
    np.testing.assert_allclose(found[:, :, 0], KERNEL.mean(axis=2), rtol=1e-4, atol=1e-6)
    turned = adapted(KERNEL, ("blue", "green", "red"), "names")
    np.testing.assert_allclose(turned, KERNEL[:, :, ::-1], rtol=1e-6)


RECIPES = {
    "coco_nvidia_pytorch": {"model.backbone.depth": 18},  # blue, green, red
    "coco_convnext": {},
    "coco_vitdet": {"model.backbone.depth": 1, "model.backbone.global_blocks": (0,)},
}


def model_of(recipe, entries, bands=(), **more):
    count = {"data.bands.names": bands} if bands else {}
    flat = {f"model.input.{name}": (100.0,) * len(bands) for name in ("mean", "std")}
    config = mrcnn.load_config(
        recipe, {"model.num_classes": 2} | entries | count | (flat if bands else {}) | more
    )
    return config.model, mrcnn.build_model(config.model)


def zeros(model):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_variables(model))


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=pytest.mark.slow if r != "coco_vitdet" else ()) for r in RECIPES],
)
def test_a_run_starts_with_the_colors_of_any_backbone(recipe, tmp_path, caplog):
    entries = RECIPES[recipe]
    colors = zeros(model_of(recipe, entries)[1])
    drawn = jax.tree.map(lambda a: RNG.random(a.shape, np.float32), colors["params"]["backbone"])
    path = tmp_path / "colors.safetensors"
    stats = {k: v for k, v in colors["batch_stats"].items() if k == "backbone"}
    save_file(to_ours_flat({"params": {"backbone": drawn}, "batch_stats": stats}), path)
    options, model = model_of(recipe, entries, FOUR, **{"model.init_from": str(path)})
    ours = zeros(model)
    with pytest.raises(ValueError, match="takes red, green and blue, the images have 4 bands; mod"):
        pretrained.initialize_from(ours, options, FOUR)
    caplog.set_level("INFO", logger="absl")
    options = replace(options, adapt_input="names")
    found = pretrained.initialize_from(ours, options, FOUR)["params"]["backbone"]
    found, drawn = (flatten_dict(tree, sep="/") for tree in (found, drawn))
    changed = [n for n in drawn if n in found and not np.array_equal(found[n], drawn[n])]
    assert changed in (["stem_conv/kernel"], ["patch_embed/kernel"])
    bgr = options.input.channel_order == "bgr"
    expected = adapted(drawn[changed[0]], FOUR, "names", bgr)
    np.testing.assert_array_equal(found[changed[0]], expected)
    lines = [r.getMessage() for r in caplog.records if "fitted from" in r.getMessage()]
    assert len(lines) == 1 and lines[0].startswith(f"{path}: first convolution fitted from red, ")


def test_three_other_bands_are_named(tmp_path, caplog):
    names = ("nir", "red", "green")
    options, model = model_of("coco_vitdet", RECIPES["coco_vitdet"], names)
    ours, path = zeros(model), tmp_path / "colors.safetensors"
    save_file(to_ours_flat({"batch_stats": {}} | ours), path)
    caplog.set_level("INFO", logger="absl")
    pretrained.initialize_from(ours, replace(options, init_from=str(path)), names)
    assert "what it has for red, green, blue is for nir, red, green" in caplog.text

"""Pruning: a narrower model computes what the whole one does with zeros; the rules; pruned runs."""

import json
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.config import as_recipe, load_config, write_workdir
from mask_rcnn_jax.models import resnet
from mask_rcnn_jax.models.build import (
    ModelOptions,
    abstract_variables,
    build_model,
    named_section,
)
from mask_rcnn_jax.models.channels import Channels
from mask_rcnn_jax.parts import to_section
from mask_rcnn_jax.pruning.channel_groups import (
    Axis,
    Group,
    Term,
    count_operations,
    find_groups,
    find_operations,
    with_widths,
)
from mask_rcnn_jax.pruning.choice import Limits, keep_above, keep_operations, prune
from mask_rcnn_jax.pruning.run import one_prediction, prune_run, write_checkpoint
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.structures import Proposals
from mask_rcnn_jax.weights.restore import load_variables, make_model, restore
from tests.commands.command import error_line, run_inside
from tests.helpers import tiny_config

CLASSES = [{"id": 4, "name": "a"}, {"id": 9, "name": "b"}]
IMAGE, INSIDE = (64, 96), (50, 93)
BOXES = [[3, 5, 40, 30], [10, 2, 90, 48], [20, 20, 28, 33]]


def basic():
    """Two convolutions in a block, with fixed norms."""
    config = tiny_config()
    config.model.backbone.norm = "frozen"
    return config


def strong():
    """Bottlenecks, live batch norms everywhere, two convolutions in the RPN and the box head."""
    config = tiny_config()
    config.model.backbone.update(depth=50, norm="batch")
    config.model.fpn.norm = "batch"
    config.model.rpn.num_convs = 2
    config.model.box_head.update(num_convs=2, conv_channels=24, num_fcs=1, norm="batch")
    config.model.mask_head.norm = "batch"
    return config


def grouped():
    """Group norm in every part, whose groups stay whole."""
    config = tiny_config()
    config.model.backbone.update(depth=50, norm="group")
    for part in ("fpn", "mask_head"):
        config.model[part].update(channels=64, norm="group")
    config.model.box_head.update(num_convs=1, conv_channels=64, norm="group")
    return config


def resnext():
    config = tiny_config()
    config.model.backbone.update(depth=50, norm="affine", groups=8, width_per_group=4)
    return config


def regnet():
    config = tiny_config()
    widths = dict(depth=6, initial_width=16, slope=16.0, multiplier=2.0, group_width=4)
    trunk = named_section("backbone", "regnet", **widths, se_ratio=0.25, norm="affine")
    config.model.backbone = trunk
    return config


def mobilenet():
    config = tiny_config()
    trunk = named_section("backbone", "mobilenetv4", multiplier=0.25, norm="affine")
    config.model.backbone = trunk
    return config


def cascade():
    config = tiny_config()
    config.model.box_head.class_agnostic = True
    config.model.cascade.fg_iou_thresh = (0.6, 0.7)
    return config


def convnext():
    config = tiny_config()
    sizes = dict(depths=(1, 1, 1, 1), width=8, layer_scale=1.0)
    config.model.backbone = named_section("backbone", "convnext", **sizes)
    return config


def swin():
    config = tiny_config()
    sizes = dict(depths=(1, 1, 1, 1), width=8, num_heads=(1, 2, 2, 4), windows=(3, 3, 2, 2))
    config.model.backbone = named_section("backbone", "swin", **sizes)
    return config


def swin_v2():
    config = swin()
    config.model.backbone.name = "swin_v2"
    return config


def vitdet():
    config = tiny_config()
    sizes = dict(width=32, depth=2, num_heads=2, global_blocks=(1,), window=3, image_size=64)
    config.model.backbone = named_section("backbone", "vit", **sizes, pretrain_size=32)
    config.model.fpn = named_section("fpn", "simple", channels=32)
    config.model.input.pad_multiple = 0
    return config


def dino():
    config = vitdet()
    trunk = dict(width=32, depth=2, num_heads=2, layer_scale=1.0, table_side=3)
    config.model.backbone = named_section("backbone", "dino", **trunk, gated=True)
    return config


@pytest.fixture(autouse=True)
def _few_blocks(monkeypatch):
    """Bottlenecks start at 50 layers, which would take long to compile."""
    monkeypatch.setitem(resnet.BLOCKS_PER_STAGE, 50, (1, 2, 1, 1))


def random_variables(model):
    """Arrays of every kind that are neither 0 nor 1, as after training."""
    rng, arrays = np.random.default_rng(0), {}
    for path, leaf in flatten_dict(abstract_variables(model)).items():
        if path[-1] in ("scale", "var", "gamma"):
            values = rng.uniform(0.5, 1.5, leaf.shape)
        else:
            size = 0.1 if path[-1] in ("bias", "mean") else (2 / np.prod(leaf.shape[:-1])) ** 0.5
            values = rng.normal(0, size, leaf.shape)
        arrays[path] = values.astype(np.float32)
    return {"batch_stats": {}, **unflatten_dict(arrays)}


@cache
def groups_of(make):
    return find_groups(as_recipe(make()).model)


def raw_outputs(model, images, sizes):
    """Logits and deltas of the RPN and of all box heads, and mask logits, for fixed boxes."""
    pyramid, extent = model.pyramid(images, sizes, train=False)
    boxes = jnp.asarray([BOXES], jnp.float32)
    proposals = Proposals(boxes, jnp.ones((1, 3)), jnp.ones((1, 3), bool))
    found = [*model.rpn_outputs(pyramid, extent)]
    found += model.box_outputs(pyramid, proposals, sizes, extent)[:2]
    pooled = model.pool(pyramid, boxes, model.roi_size("mask"), extent)
    return [*found, model.mask_head(pooled, jnp.asarray([[1, 2, 1]]))]


@partial(jax.jit, static_argnums=0)
def apply(model, variables, images, sizes):
    return model.apply(variables, images, sizes, method=raw_outputs)


def run(model, variables):
    images = np.random.default_rng(1).integers(0, 256, (1, *IMAGE, 3), np.uint8)
    return jax.device_get(apply(model, variables, images, np.asarray([INSIDE], np.int32)))


def some_of(groups, seed=2):
    """Channels that stay, some units of every group."""
    rng, kept = np.random.default_rng(seed), {}
    for name, group in groups.items():
        units = group.channels.count // group.channels.unit
        chosen = np.sort(rng.choice(units, rng.integers(1, units), replace=False))
        unit = group.channels.unit
        kept[name] = (chosen[:, None] * unit + np.arange(unit)).reshape(-1)
    return kept


def with_zeros(variables, groups, kept):
    """The whole model with 0 for all that writes the other channels."""
    arrays = {"/".join(path): np.array(a) for path, a in flatten_dict(dict(variables)).items()}
    for name, group in groups.items():
        gone = np.setdiff1d(np.arange(group.channels.count), kept[name])
        for path, axis, _, is_output in group.axes:
            if is_output and not path.endswith(("/mean", "/var")):
                np.moveaxis(arrays[path], axis, 0)[gone] = 0
    return {"batch_stats": {}, **unflatten_dict(arrays, sep="/")}


slow = partial(pytest.param, marks=pytest.mark.slow)
SLOW = [strong, grouped, resnext, regnet, mobilenet, cascade, convnext, swin, swin_v2, vitdet, dino]


@pytest.mark.parametrize("make", [basic, *map(slow, SLOW)])
@pytest.mark.slow
def test_a_pruned_model_computes_what_zeros_would(make):
    options = as_recipe(make()).model
    model = build_model(options)
    variables, groups = random_variables(model), groups_of(make)
    kept = some_of(groups)
    pruned, narrower = prune(variables, options, groups, kept)
    small = build_model(narrower)
    shapes = {p: np.shape(a) for p, a in flatten_dict(dict(pruned)).items()}
    assert shapes != {p: np.shape(a) for p, a in flatten_dict(dict(variables)).items()}
    found, expected = run(small, pruned), run(model, with_zeros(variables, groups, kept))
    full = run(model, variables)
    for ours, theirs, before in zip(*map(jax.tree.leaves, (found, expected, full)), strict=True):
        largest = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * largest)
        assert np.abs(before - theirs).max() > 1e-2 * largest  # the zeros matter


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (basic, {"backbone/res2": 64, "backbone/res5_0/conv1": 512, "fpn/fpn_output": 32}),
        (
            grouped,
            {"backbone/stem": (64, 2), "backbone/res4": (1024, 32), "fpn/fpn_lateral": (64, 2)},
        ),
        slow(resnext, {"backbone/res3_0/conv1": (64, 8), "backbone/res3": 512}),
        slow(regnet, {"backbone/res2_0/b": (16, 4), "backbone/res5": 128}),
        slow(mobilenet, {"backbone/res4_1/pw_exp": 48, "backbone/res3_0": 24, "backbone/res5": 32}),
        slow(cascade, {"box_head/fc1": 32, "cascade/heads_1/fc2": 32}),
        slow(convnext, {"backbone/res3_0/fc1": 64}),
        slow(swin, {"backbone/res3_0/fc1": 64}),
        slow(swin_v2, {"backbone/res5_0/fc1": 256}),
        slow(dino, {"backbone/block0/fc1": 128}),
        slow(vitdet, {"backbone/block1/fc1": 128, "mask_head/mask_deconv": 32}),
    ],
)
def test_parts_declare_their_channels(make, expected):
    groups = groups_of(make)
    for name, channels in expected.items():
        count, unit = channels if isinstance(channels, tuple) else (channels, 1)
        assert groups[name].channels == Channels(count, unit, count), name
    if make is basic:
        assert "backbone/stem" not in groups  # the first stage adds the stem's map
        assert not any("conv2" in name for name in groups if name.startswith("backbone"))
    if make in (convnext, swin, swin_v2, vitdet, dino):  # layer norm looks at all other channels
        assert all(name.endswith("/fc1") for name in groups if name.startswith("backbone"))


def test_where_the_channels_of_a_group_are():
    groups = groups_of(basic)
    assert set(groups["fpn/fpn_output"].axes) == {
        *(Axis(f"params/fpn/fpn_output{i}/kernel", 3, 1, True) for i in range(2, 6)),
        *(Axis(f"params/fpn/fpn_output{i}/bias", 0, 1, True) for i in range(2, 6)),
        Axis("params/rpn_head/conv/kernel", 2, 1, False),
        Axis("params/box_head/fc1/kernel", 0, 49, False),
        Axis("params/mask_head/mask_fcn1/kernel", 2, 1, False),
    }
    assert set(groups["mask_head/mask_deconv"].axes) == {
        Axis("params/mask_head/mask_deconv/kernel", 2, 1, True),
        Axis("params/mask_head/mask_deconv/bias", 0, 1, True),
        Axis("params/mask_head/mask_predictor/kernel", 2, 1, False),
    }


# --- the rules


def layers(*norms, unit=1):
    """Variables of 1 x 1 convolutions, with two inputs, whose filters have these norms; a group."""
    params, axes = {}, []
    for i, values in enumerate(norms):
        kernel = np.asarray(values, np.float32) * np.asarray([[0.6], [-0.8]], np.float32)
        params[f"layer{i}"] = {"kernel": kernel[None, None]}
        axes.append(Axis(f"params/layer{i}/kernel", 3, 1, True))
    count = len(norms[0])
    return params, Group(Channels(count, unit, count), tuple(axes))


def kept_of(*norms, threshold=0.5, unit=1, **limits):
    params, group = layers(*norms, unit=unit)
    chosen = dict(granularity=1, min_channels=1) | limits
    kept = keep_above(
        {"params": params, "batch_stats": {}}, {"x": group}, threshold, Limits(**chosen)
    )
    return list(kept["x"])


def test_taos_rule_by_hand():
    norms = [1.0, 4.0, 2.0, 3.0, 0.5, 2.1]
    assert kept_of(norms) == [1, 3, 5]  # above half of the largest; 2.0 is not above
    assert kept_of(norms, granularity=4) == [1, 2, 3, 5]
    assert kept_of(norms, threshold=0.99, granularity=2) == [1, 3]
    assert kept_of(norms, threshold=5.0, min_channels=4) == [1, 2, 3, 5]
    assert kept_of(norms, threshold=5.0, min_channels=16) == [0, 1, 2, 3, 4, 5]
    assert kept_of(norms, granularity=4, min_channels=5) == [0, 1, 2, 3, 4, 5]
    whole = np.sqrt(1 + 16 + 4 + 9 + 0.25 + 2.1**2)
    assert kept_of(norms, threshold=2.05 / whole, normalizer="l2") == [1, 3, 5]
    assert kept_of([2.0] * 4, threshold=5.0, min_channels=2) == [0, 1]  # the first of equals
    assert kept_of([0.0] * 3, threshold=0.1, min_channels=2) == [0, 1]


def test_tied_layers_decide_together():
    first, second = [4.0, 1.0, 3.0, 1.0], [1.0, 2.0, 1.6, 0.0]  # relative: 1 .25 .75 .25, .5 1 .8 0
    assert kept_of(first, second, threshold=0.7) == [0, 1, 2]
    assert kept_of(first, second, threshold=0.7, equalization="intersection") == [2]
    assert kept_of(first, second, threshold=0.7, equalization="arithmetic_mean") == [0, 2]
    assert kept_of(first, second, threshold=0.72, equalization="geometric_mean") == [2]
    assert kept_of(first, second, threshold=0.7, equalization="geometric_mean") == [0, 2]


def test_nothing_to_prune_is_an_error():
    with pytest.raises(ValueError, match="no channels to prune"):
        kept_of([1.0, 2.0], exclude=("x",))
    with pytest.raises(ValueError, match="no channels to prune"):
        keep_above({"params": {}, "batch_stats": {}}, {}, 0.5, Limits())


def test_neighbors_of_a_unit_stay_together():
    norms = [3.0, 4.0, 0.1, 0.1, 1.0, 5.0]  # of units: 5, .14, 5.1
    assert kept_of(norms, unit=2) == [0, 1, 4, 5]
    assert kept_of(norms, unit=2, threshold=0.99) == [4, 5]
    assert kept_of(norms, unit=2, threshold=0.99, granularity=4) == [0, 1, 4, 5]


@pytest.mark.parametrize("normalizer", ["max", "l2"])
@pytest.mark.parametrize("equalization", ["union", "intersection", "arithmetic_mean"])
def test_taos_rule_against_a_slow_one(normalizer, equalization):
    rng = np.random.default_rng(5)
    for trial in range(20):
        norms = rng.uniform(0.0, 2.0, (rng.integers(1, 4), 40))
        threshold = rng.uniform(0.0, 0.25 if normalizer == "l2" else 1.0)
        granularity, least = int(rng.integers(1, 9)), int(rng.integers(1, 20))
        merged = []
        for channel in range(40):
            of_layers = []
            for layer in norms:
                whole = max(layer) if normalizer == "max" else sum(x * x for x in layer) ** 0.5
                of_layers.append(layer[channel] / whole)
            how = {"union": max, "intersection": min}
            merged.append(how.get(equalization, lambda x: sum(x) / len(x))(of_layers))
        count = max(sum(value > threshold for value in merged), least)
        while count % granularity:
            count += 1
        order = sorted(range(40), key=lambda channel: -merged[channel])
        limits = dict(granularity=granularity, min_channels=least, equalization=equalization)
        found = kept_of(*norms, threshold=threshold, normalizer=normalizer, **limits)
        assert found == sorted(order[: min(count, 40)]), trial


def test_a_target_is_met_and_no_more_than_needed():
    rng, names = np.random.default_rng(3), ("a", "b", "c")
    params, groups = {}, {}
    for name in names:
        made, group = layers(rng.uniform(0.1, 1.0, 32))
        params[name] = made["layer0"]
        groups[name] = group._replace(axes=(Axis(f"params/{name}/kernel", 3, 1, True),))
    terms = [Term("", 5, ("a", "b")), Term("", 900, ("b", "c")), Term("", 40_000, ())]
    variables = {"params": params, "batch_stats": {}}
    total = 5 * 32 * 32 + 900 * 32 * 32 + 40_000
    for share in (0.9, 0.5, 0.2):
        limits = Limits(granularity=1, min_channels=2)
        kept = keep_operations(variables, groups, terms, share, limits)
        a, b, c = (len(kept[name]) for name in names)
        assert 5 * a * b + 900 * b * c + 40_000 <= share * total
        # One more channel of the two that cost the most would be too many.
        assert 5 * a * (b + 1) + 900 * (b + 1) * (c + 1) + 40_000 > share * total
        assert a > max(b, c)  # costs the least
        for name in names:  # the largest filters
            norms = np.linalg.norm(params[name]["kernel"][0, 0], axis=0)
            np.testing.assert_array_equal(
                kept[name], np.sort(np.argsort(-norms)[: len(kept[name])])
            )
    with pytest.raises(ValueError, match="target_operations is 0.04, but with at least 2 channels"):
        keep_operations(variables, groups, terms, 0.04, limits)


def test_more_channels_stay_under_a_target_than_above_a_threshold():
    """16 as in TAO, and 32."""
    params, group = layers(np.linspace(0.1, 1.0, 64))
    variables, groups = {"params": params, "batch_stats": {}}, {"x": group}
    assert len(keep_above(variables, groups, 5.0, Limits())["x"]) == 16
    target = partial(keep_operations, variables, groups, [Term("", 1, ("x",))])
    assert len(target(0.5, Limits())["x"]) == 32
    assert len(target(0.25, Limits(min_channels=16))["x"]) == 16
    with pytest.raises(ValueError, match="target_operations is 0.4, but with at least 32 channels"):
        target(0.4, Limits())


def test_the_norm_behind_a_layer_counts_toward_a_target():
    params, group = layers([1.0, 1.0, 1.0, 1.0])
    params = {"part": {"conv1": params["layer0"], "norm1": {"scale": np.float32([1, -3, 2, 4])}}}
    stats = {"part": {"norm1": {"var": np.float32([1, 1, 1, 16])}}}
    group = group._replace(axes=(Axis("params/part/conv1/kernel", 3, 1, True),))
    variables, limits = {"params": params, "batch_stats": stats}, Limits("max", "union", 1, 1)
    kept = keep_operations(variables, {"x": group}, [Term("", 1, ("x",))], 0.5, limits)
    assert list(kept["x"]) == [1, 2]


def test_the_layers_that_read_channels_count_toward_a_target():
    """Shares of what writes them: 1/4 each; of a reader, with two places for each: 1, 0, 2, 1."""
    params, group = layers([1.0, 1.0, 1.0, 1.0])
    reader = np.sqrt(np.float32([0.5, 0, 1, 0.5] * 2))[:, None]
    params["fc1"] = {"kernel": reader}
    group = group._replace(axes=(*group.axes, Axis("params/fc1/kernel", 0, 2, False)))
    variables, limits = {"params": params, "batch_stats": {}}, Limits(granularity=1, min_channels=1)
    operations = [Term("", 1, ("x",))]
    for share, expected in ((0.75, [0, 2, 3]), (0.25, [2])):
        kept = keep_operations(variables, {"x": group}, operations, share, limits)
        assert list(kept["x"]) == expected


def test_groups_of_many_layers_lose_less():
    """The least sum of squared losses: "b" has three layers for each of "a", and loses a third."""
    rng, groups, params = np.random.default_rng(0), {}, {}
    for name, count in (("a", 1), ("b", 3)):
        made, group = layers(*rng.uniform(0.99, 1.0, (count, 120)))
        params |= {f"{name}{layer}": value for layer, value in made.items()}
        axes = (
            axis._replace(path=axis.path.replace("layer", f"{name}layer")) for axis in group.axes
        )
        groups[name] = group._replace(axes=tuple(axes))
    variables, limits = {"params": params, "batch_stats": {}}, Limits(granularity=1, min_channels=1)
    terms = [Term("", 1, ("a",)), Term("", 1, ("b",))]
    kept = keep_operations(variables, groups, terms, 0.8, limits)
    assert [120 - len(kept[name]) for name in "ab"] == [36, 12]


def test_operations_by_hand():
    recipe, canvas = as_recipe(basic()), IMAGE

    def predict(model, variables):
        arguments = jnp.zeros((1, *canvas, 3), jnp.uint8), jnp.ones((1, 2), jnp.int32)
        return model.apply(variables, *arguments, recipe.eval, method="predict")

    groups, terms = groups_of(basic), find_operations(recipe.model, predict)
    channels = {name: group.channels for name, group in groups.items()}
    cells = [16 * 24, 8 * 12, 4 * 6, 2 * 3, 1 * 2]
    for output, lateral, rpn, fc1, fc2, fcn, deconv in ((32,) * 7, (8, 16, 24, 4, 12, 20, 28)):
        new = {"fpn/fpn_output": output, "fpn/fpn_lateral": lateral, "rpn/conv": rpn}
        new |= {"box_head/fc1": fc1, "box_head/fc2": fc2, "mask_head/mask_deconv": deconv}
        new |= {f"mask_head/mask_fcn{i}": fcn for i in range(1, 5)}
        channels |= {name: replace(channels[name], count=count) for name, count in new.items()}
        found = count_operations(terms, channels)
        inputs = (64, 128, 256, 512)
        ours = sum(
            n * (c * lateral + 9 * lateral * output) for n, c in zip(cells, inputs, strict=False)
        )
        assert found["fpn"] == ours
        per_cell = 9 * output * rpn + rpn * 3 * (1 + 4)
        assert found["rpn_head"] == sum(cells) * per_cell
        assert found["box_head"] == 20 * (49 * output * fc1 + fc1 * fc2 + fc2 * (3 + 12))
        pixels = 196 * 9 * (output * fcn + 3 * fcn * fcn) + 196 * 4 * fcn * deconv
        chosen = 196 * 4 * deconv + 3 * deconv + 3  # the class's row by a product, and its mask
        assert found["mask_head"] == 5 * (pixels + chosen)


# --- runs


def test_operations_of_any_bands():
    config = basic()
    config.data.bands = {"names": ("a", "b")}
    config.model.input.update(mean=(100.0,) * 2, std=(50.0,) * 2)
    recipe = as_recipe(config)
    assert find_operations(recipe.model, one_prediction(recipe.data, recipe.eval))


@cache
def whole():
    recipe = as_recipe(basic())
    return recipe, random_variables(build_model(recipe.model))


@pytest.fixture
def workdir(tmp_path):
    recipe, variables = whole()
    write_workdir(tmp_path / "run", recipe, CLASSES)
    write_checkpoint(tmp_path / "run", variables)
    return tmp_path / "run"


@pytest.mark.slow
def test_a_pruned_run_is_taken_like_a_run(workdir, capsys):
    output = workdir.parent / "half"
    flags = ["--workdir", workdir, "--output", output, "--target_operations=0.5"]
    flags += ["--min_channels=16"]
    assert run_inside("prune", *flags, "--exclude=mask_head", "--exclude=backbone/res4") == 0
    text = capsys.readouterr().out
    share = float(text.split(" of the multiply-adds")[0].splitlines()[-1])
    assert 0.4 < share <= 0.5 and " at 64 x 64" in text
    restored = restore(None, output)
    assert restored.categories == CLASSES and restored.checkpoint.step == 0
    model = restored.recipe.model
    assert not model.mask_head.widths and "res4" not in dict(model.backbone.widths)
    widths = dict(model.fpn.widths)
    assert restored.variables["params"]["fpn"]["fpn_output3"]["kernel"].shape == (
        *(3, 3), widths["fpn_lateral"], widths["fpn_output"],
    )  # fmt: skip
    # Its config alone trains it further, and can be given on the command line.
    config = load_config(output)
    assert config.model.init_from == str(output)
    start = load_variables(config.model.init_from, config)
    jax.tree.map(np.testing.assert_array_equal, start, restored.variables)
    again = load_config("quickstart", {"model.fpn.widths": config.model.fpn.widths})
    assert dict(again.model.fpn.widths) == widths


@pytest.mark.slow
def test_a_pruned_run_is_pruned_again(workdir):
    once, twice = workdir.parent / "once", workdir.parent / "twice"
    prune_run(workdir, once, target_operations=0.6, limits=Limits(min_channels=16))
    prune_run(once, twice, threshold=2.0, limits=Limits(granularity=4, min_channels=4))
    before, after = (dict(load_config(folder).model.fpn.widths) for folder in (once, twice))
    assert after == {"fpn_lateral": 4, "fpn_output": before["fpn_output"]}  # whole, as in TAO
    restore(None, twice)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--threshold", "--target_operations"]),
        (["--threshold=0.5", "--target_operations=0.5"], ["exactly one"]),
        (["--target_operations=0"], ["--target_operations is 0", "above 0"]),
        (["--target_operations=1.5"], ["target_operations", "1.0"]),
        (["--threshold=0.5", "--exclude=backbone/res9"], ["--exclude is 'backbone/res9'", "res2"]),
        (["--threshold=0.5", "--granularity=0"], ["granularity"]),
        (["--threshold=0.5", "--equalization=sum"], ["equalization", "union"]),
        (["--target_operations=0.5", "--normalizer=l2"], ["--normalizer", "--threshold"]),
    ],
)
def test_mistakes_are_one_line(flags, words, workdir, capsys):
    code = run_inside("prune", "--workdir", workdir, "--output", workdir.parent / "out", *flags)
    line = error_line(code, capsys.readouterr().err)
    assert all(word in line for word in words), line
    assert not (workdir.parent / "out").exists()


def test_other_mistakes(workdir, tmp_path):
    with pytest.raises(ValueError, match="--output is .*run, which is there already"):
        prune_run(workdir, workdir, threshold=0.5)
    config = to_section(whole()[0].model)
    for widths, words in (
        ((("fpn_top", 8),), "model.fpn.widths names 'fpn_top', expected names of"),
        ((("fpn_output", 0),), "model.fpn.widths has 0 for 'fpn_output', expected at least 1"),
        (((3, "fpn_output"),), "model.fpn.widths is .* expected tuple"),
    ):
        with pytest.raises(ValueError, match=words):
            build_model(config | {"fpn": {**config["fpn"], "widths": widths}})
    for norm, width in (("none", 65), ("layer", 128)):
        wide = {"model.fpn.widths": (("fpn_output", width),), "model.fpn.norm": norm}
        words = f"model.fpn.widths has {width} for 'fpn_output', expected at most 64"
        with pytest.raises(ValueError, match=words):
            make_model(load_config("quickstart", wide), 3)
    norms = dict(channels=64, norm="group", widths=(("fpn_output", 7),))
    with pytest.raises(ValueError, match="has 7 for 'fpn_output', expected a multiple of 2"):
        build_model(config | {"fpn": norms})
    changed = load_config(workdir, {"model.fpn.widths": (("fpn_output", 16),)})
    with pytest.raises(
        ValueError, match=r"params/fpn/fpn_output2/.* misshapen|misshapen .*fpn_output2"
    ):
        load_variables(workdir, changed)
    with pytest.raises(ValueError, match="was trained with model.fpn.widths="):
        restore(changed, workdir)


class Plain(nn.Module):
    """A trunk from outside, which declares no channels and has `widths` of its own."""

    widths: tuple[int, ...] = (8, 8, 8, 8)

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.Conv(8, (2, 2), 2)(x)
        return [x := nn.Conv(width, (2, 2), 2)(x) for width in self.widths]


def test_widths_of_others_are_their_own():
    trunk = {"name": "tests.pruning.test_prune:Plain", "widths": (8, 16, 24, 32)}
    config = load_config("quickstart", {"model.backbone": trunk})
    assert make_model(config, 3).backbone.widths == trunk["widths"]


def resnet_of(**entries):
    """A trunk from outside that does not name its entries."""
    return resnet.ResNet(**entries)


def test_a_trunk_of_others_may_take_widths_without_naming_them():
    trunk = {"name": "tests.pruning.test_prune:resnet_of", "depth": 10, "norm": "frozen"}
    changes = {"model.backbone": trunk, "model.num_classes": 2}
    groups = find_groups(load_config("quickstart", changes).model)
    assert groups["backbone/res2"].channels == Channels(64, 1, 64)


@pytest.mark.slow
def test_a_trunk_of_others_is_left_alone(tmp_path):
    config = tiny_config()
    config.model.backbone = dict(name="tests.pruning.test_prune:Plain")
    variables = random_variables(build_model(config.model))
    write_workdir(tmp_path / "run", as_recipe(config), CLASSES)
    write_checkpoint(tmp_path / "run", variables)
    limits = Limits(min_channels=16)
    lines = prune_run(tmp_path / "run", tmp_path / "half", target_operations=0.3, limits=limits)
    assert lines[-1] == "backbone left alone: its module declares no channels (`prunable`)"
    pruned = restore(None, tmp_path / "half").variables
    jax.tree.map(
        np.testing.assert_array_equal, pruned["params"]["backbone"], variables["params"]["backbone"]
    )
    assert pruned["params"]["fpn"]["fpn_output3"]["kernel"].shape[3] < 32


def test_a_config_without_widths_is_the_model_of_before():
    """Of runs of earlier versions, and every recipe."""
    names = {name for name in flatten(load_config("coco").to_dict()) if name.endswith(".widths")}
    expected = {"backbone", "fpn", "rpn", "box_head", "cascade", "mask_head"}
    assert names == {f"model.{part}.widths" for part in expected}
    config = to_section(whole()[0].model)
    for part in expected:
        config[part].pop("widths")
    assert build_model(config) == build_model(whole()[0].model)
    narrower = with_widths(ModelOptions.read(config), {"fpn/fpn_lateral": 16})
    assert narrower.fpn.widths == (("fpn_lateral", 16),)
    assert json.loads(json.dumps(config))

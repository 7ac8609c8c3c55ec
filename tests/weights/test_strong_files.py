"""Files of torchvision's version 2, of detectron2's zoo and of Faster R-CNN find their places."""

import re

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.config import load_tree
from mask_rcnn_jax.models.build import abstract_variables, build_model
from mask_rcnn_jax.weights.convert import identify, to_detectron2, to_flax, to_torchvision
from mask_rcnn_jax.weights.expected_model import mismatches
from mask_rcnn_jax.weights.pretrained import merge_into
from tests.helpers import shared
from tests.weights.system_names import CLASSES, system


def published_v2():
    """Zeros under the 432 published names."""
    lines = shared("goldens/modern/torchvision_v2_keys.txt").read_text().splitlines()
    rows = [line.split("\t") if "\t" in line else line.split(None, 1) for line in lines]
    return {name: tuple(map(int, re.findall(r"\d+", shape))) for name, shape in rows}


def half_to_one(rng, shape):
    return 0.5 + 0.5 * rng.random(shape, np.float32)


def config_for(recipe, **changes):
    config = load_tree(recipe)
    config.model.num_classes = CLASSES
    config.model.update(changes)
    return config


def check_fit(arrays, config):
    """Converted, they are exactly the model's variables; returns them and the source."""
    model = config.model
    form = dict(norm=model.backbone.norm, eps=model.backbone.norm_eps, model=model)
    loaded, source = to_flax(arrays, **form)
    expected = abstract_variables(build_model(model))
    merged, _ = merge_into(expected, loaded, reinit=())
    assert flatten_dict(merged).keys() == flatten_dict(loaded).keys()
    assert mismatches(source, model) == []
    return loaded, source


@pytest.mark.slow
def test_all_published_names_of_version_2_and_nothing_else():
    shapes = published_v2()
    assert len(shapes) == 432
    config = load_tree("coco_torchvision:v2")
    config.model.num_classes = 90
    rng = np.random.default_rng(0)
    arrays = {name: half_to_one(rng, shape) for name, shape in shapes.items()}
    loaded, source = check_fit(arrays, config)
    assert source == "torchvision_v2"
    assert sum(leaf.size for leaf in jax.tree.leaves(loaded["params"])) == 46_359_409
    back = to_torchvision(loaded, norm_eps=1e-5)
    counters = {name for name in shapes if name.endswith("num_batches_tracked")}
    assert set(back) == set(shapes) - counters and len(counters) == 69
    for name, array in back.items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)


def test_fine_tuning_keeps_the_statistics_of_version_2():
    rng = np.random.default_rng(0)
    arrays = {name: half_to_one(rng, shape) for name, shape in published_v2().items()}
    config = load_tree("finetune")
    config.model.num_classes = 90
    loaded, _ = check_fit(arrays, config)
    norms = {
        "backbone.body.bn1": ("backbone", "stem_norm"),
        "backbone.fpn.layer_blocks.1.1": ("fpn", "fpn_output3_norm"),
        "roi_heads.box_head.3.1": ("box_head", "norm4"),
    }
    for theirs, (part, ours) in norms.items():
        statistics = loaded["batch_stats"][part][ours]
        np.testing.assert_array_equal(statistics["mean"], arrays[f"{theirs}.running_mean"])
        np.testing.assert_array_equal(statistics["var"], arrays[f"{theirs}.running_var"])
    assert not build_model(config.model).trains_batch_stats


def test_frozen_norms_of_version_2_have_its_names():
    config = load_tree("coco_torchvision:v2")
    for part in ("backbone", "fpn", "box_head", "mask_head"):
        config.model[part].norm = "frozen"
    arrays = {n: np.broadcast_to(np.float32(0.5), s) for n, s in published_v2().items()}
    loaded, _ = to_flax(arrays, norm="frozen", eps=1e-5, model=config.model)
    back = to_torchvision(loaded, norm_eps=1e-5)
    assert set(back) == {n for n in arrays if not n.endswith("num_batches_tracked")}
    assert {name: array.shape for name, array in back.items()}.items() <= published_v2().items()


def detectron2_shapes(config):
    """Our variables under detectron2's names, by an account of its own: {name: shape}."""
    shapes, variables = {}, abstract_variables(build_model(config.model))
    leaves = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean",
              "var": "running_var"}  # fmt: skip
    for path, leaf in flatten_dict(dict(variables)).items():
        module, *layers, array = path[1:]
        is_norm, shape = "norm" in layers[-1], leaf.shape
        if not is_norm and array == "kernel":
            shape = shape[::-1][:2] + shape[:-2] if len(shape) == 4 else shape[::-1]
        name = ".".join(layers)
        if module == "backbone":
            name = re.sub(r"^res(\d)_(\d+)", r"res\1.\2", name)
            name = re.sub(r"shortcut_norm$", "shortcut.norm", name)
            name = re.sub(r"norm(\d)$", r"conv\1.norm", name)
            name = name.replace("stem_conv", "stem.conv1").replace("stem_norm", "stem.conv1.norm")
            name = f"backbone.bottom_up.{name}"
        elif module == "fpn":
            name = "backbone." + name.replace("_norm", ".norm")
        elif module == "rpn_head":
            if config.model.rpn.num_convs > 1:
                name = re.sub(r"^conv(\d?)$", lambda m: f"conv.conv{int(m[1] or 1) - 1}", name)
            name = f"proposal_generator.rpn_head.{name}"
        elif module == "box_head":
            place = "box_predictor" if name in ("cls_score", "bbox_pred") else "box_head"
            name = f"roi_heads.{place}." + re.sub(r"^norm(\d)$", r"conv\1.norm", name)
        else:
            name = name.replace("_norm", ".norm").replace("mask_deconv", "deconv")
            name = "roi_heads.mask_head." + name.replace("mask_predictor", "predictor")
        if name.endswith("bbox_pred") and not config.model.box_head.class_agnostic:
            shape = (shape[0] - 4, *shape[1:])
        if name.endswith("mask_head.predictor"):
            shape = (shape[0] - 1, *shape[1:])
        shapes[f"{name}.{leaves[array]}"] = shape
    return shapes


@pytest.mark.parametrize(
    ("variant", "changes", "count"),
    [
        pytest.param("lsj_100ep", {}, 432 - 69, marks=pytest.mark.slow),
        pytest.param("lsj_400ep_r101", {}, 738 - 120, marks=pytest.mark.slow),
        pytest.param("gn_3x", {}, None, marks=pytest.mark.slow),
        ("lsj_100ep", {"box_head": {"class_agnostic": True, "channels": 16}}, None),
        pytest.param("lsj_100ep", {"mask_head": {"name": "none"}}, None, marks=pytest.mark.slow),
    ],
)
def test_files_of_detectron2(variant, changes, count):
    config = config_for(f"coco_detectron2:{variant}", **changes)
    shapes = detectron2_shapes(config)
    assert count in (None, len(shapes))
    rng = np.random.default_rng(0)
    arrays = {name: half_to_one(rng, shape) for name, shape in shapes.items()}
    loaded, source = check_fit(arrays, config)
    assert source == "detectron2"
    back = to_detectron2(loaded, norm_eps=1e-5)
    assert back.keys() == arrays.keys()
    for name, array in back.items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)


@pytest.mark.slow
def test_a_resnext_of_detectron2():
    """Names as of a ResNet-101; statistics are folded, so that they are spelled out here."""
    config = config_for("coco_detectron2:x101_3x", backbone=dict(norm="affine"))
    shapes = detectron2_shapes(config)
    assert shapes["backbone.bottom_up.res2.0.conv2.weight"] == (256, 8, 3, 3)
    arrays = {name: np.broadcast_to(np.float32(0.5), shape) for name, shape in shapes.items()}
    config.model.backbone.norm = "frozen"
    check_fit(arrays, config)
    config.model.backbone.groups = 1
    with pytest.raises(
        ValueError, match=r"has 32 groups of channels; model\.backbone\.groups is 1"
    ):
        check_fit(arrays, config)


@pytest.mark.parametrize(
    ("variant", "count"),
    [
        ("lsj_100ep", 46_301_232),
        pytest.param("lsj_200ep_r101", 65_293_360, marks=pytest.mark.slow),
        ("x101_3x", 107_427_760),
    ],
)
def test_the_published_number_of_parameters(variant, count):
    config = load_tree(f"coco_detectron2:{variant}")
    config.model.num_classes = 80
    params = abstract_variables(build_model(config.model))["params"]
    background = 4 * (1024 + 1) + 256 + 1  # box deltas and mask, which detectron2 does not have
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count + background


@pytest.mark.parametrize(
    ("source", "recipe"),
    [("torchvision", "coco_torchvision"), ("torchvision_old", "coco_torchvision:coco_v1"),
     ("detectron2", "coco_detectron2")],
)  # fmt: skip
def test_faster_rcnn(source, recipe):
    """Their names with two channels everywhere, without the mask head."""
    names, arrays = system(source)
    arrays = {name: array for name, array in arrays.items() if "mask" not in name}
    config = config_for(recipe, mask_head=dict(name="none"))
    form = dict(norm="frozen", eps=1e-5, model=config.model)
    loaded, found = to_flax(arrays, **form)
    assert found == source
    expected = abstract_variables(build_model(config.model))
    assert flatten_dict(loaded).keys() == flatten_dict(dict(expected)).keys()


def test_norms_that_do_not_fit_are_named():
    _, arrays = system("detectron2")
    group = {n: a for n, a in arrays.items() if not re.search(r"norm\.running_(mean|var)", n)}
    for norm, file, words in (
        ("frozen", group, r"no statistics, as group or layer norm, but model\.backbone\.norm is"),
        (
            "group",
            arrays,
            r"model\.backbone\.norm is 'group', which detectron2's Mask R-CNN has no",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            to_flax(file, norm=norm, eps=1e-5)
    kept = to_flax(group, norm="group", eps=1e-5)[0]
    assert set(kept["params"]["backbone"]["stem_norm"]) == {"scale", "bias"}
    assert not kept["batch_stats"]


def test_class_agnostic_boxes_are_told_from_others():
    names, arrays = system("detectron2")
    model = {"box_head": {"class_agnostic": True}}
    with pytest.raises(ValueError, match="has 12 outputs, expected 4, as model.box_head.class_agn"):
        to_flax(arrays, norm="frozen", eps=1e-5, model=model)


def test_version_1_and_2_are_told_apart():
    names = list(published_v2())
    assert identify(names)[0] == "torchvision_v2"
    with pytest.raises(ValueError, match="version 2, but 1 .*roi_heads.box_head.fc6.weight"):
        identify([*names, "roi_heads.box_head.fc6.weight"])

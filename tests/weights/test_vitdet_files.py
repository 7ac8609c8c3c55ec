"""Files of detectron2's ViTDet, of its cascades and of MAE find their places and come back."""

import re

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from mask_rcnn_jax.config import as_recipe, load_tree
from mask_rcnn_jax.exporting.weight_file import export_weights
from mask_rcnn_jax.models.build import abstract_variables, build_model
from mask_rcnn_jax.weights import pretrained, published
from mask_rcnn_jax.weights.convert import to_detectron2, to_flax, to_ours_flat
from mask_rcnn_jax.weights.expected_model import mismatches
from mask_rcnn_jax.weights.pretrained import merge_into
from mask_rcnn_jax.weights.restore import load_variables
from tests.helpers import load_golden
from tests.weights.weight_writers import TorchFile

SIZES = {"b": (768, 12, (2, 5, 8, 11)), "l": (1024, 24, (5, 11, 17, 23)),
         "h": (1280, 32, (7, 15, 23, 31))}  # fmt: skip
NORM = ("weight", "bias")


def vit_shapes(width, depth, far, prefix="", side=14, rel_pos=(27, 127), head=64):
    """{name: shape} of the trunk."""
    shapes = {"pos_embed": (1, side**2 + 1, width), "patch_embed.proj.bias": (width,),
              "patch_embed.proj.weight": (width, 3, 16, 16)}  # fmt: skip
    layers = {"attn.qkv": (width, 3 * width), "attn.proj": (width, width),
              "mlp.fc1": (width, 4 * width), "mlp.fc2": (4 * width, width)}  # fmt: skip
    for i in range(depth):
        block = f"blocks.{i}."
        for norm in ("norm1", "norm2"):
            shapes |= {f"{block}{norm}.{leaf}": (width,) for leaf in NORM}
        for layer, (inputs, outputs) in layers.items():
            shapes[f"{block}{layer}.weight"] = (outputs, inputs)
            shapes[f"{block}{layer}.bias"] = (outputs,)
        if rel_pos:
            table = (rel_pos[i in far], head)
            shapes |= {f"{block}attn.rel_pos_{axis}": table for axis in "hw"}
    return {prefix + name: shape for name, shape in shapes.items()}


def pyramid_shapes(width):
    half, quarter = width // 2, width // 4
    shapes = {"2.0.weight": (width, half, 2, 2), "2.0.bias": (half,), "2.1.weight": (half,),
              "2.1.bias": (half,), "2.3.weight": (half, quarter, 2, 2), "2.3.bias": (quarter,),
              "3.0.weight": (width, half, 2, 2), "3.0.bias": (half,)}  # fmt: skip
    places = {2: (quarter, 4), 3: (half, 1), 4: (width, 0), 5: (width, 1)}
    for level, (inputs, first) in places.items():
        shapes[f"{level}.{first}.weight"] = (256, inputs, 1, 1)
        shapes[f"{level}.{first + 1}.weight"] = (256, 256, 3, 3)
        shapes |= {f"{level}.{first + i}.norm.{leaf}": (256,) for i in (0, 1) for leaf in NORM}
    return {f"backbone.simfp_{name}": shape for name, shape in shapes.items()}


def box_head_shapes(stage, classes, boxes):
    head, predictor = f"roi_heads.box_head.{stage}", f"roi_heads.box_predictor.{stage}"
    shapes = {f"{head}fc1.weight": (1024, 12544), f"{head}fc1.bias": (1024,),
              f"{predictor}cls_score.weight": (classes + 1, 1024),
              f"{predictor}cls_score.bias": (classes + 1,),
              f"{predictor}bbox_pred.weight": (4 * boxes, 1024),
              f"{predictor}bbox_pred.bias": (4 * boxes,)}  # fmt: skip
    for i in (1, 2, 3, 4):
        shapes[f"{head}conv{i}.weight"] = (256, 256, 3, 3)
        shapes |= {f"{head}conv{i}.norm.{leaf}": (256,) for leaf in NORM}
    return shapes


def vitdet_shapes(size="b", cascade=False, classes=80):
    """{name: shape} of the whole detector."""
    width, depth, far = SIZES[size]
    head = 80 if size == "h" else 64
    shapes = vit_shapes(width, depth, far, "backbone.net.", head=head) | pyramid_shapes(width)
    rpn = {"conv.conv0": (256, 256, 3, 3), "conv.conv1": (256, 256, 3, 3),
           "objectness_logits": (3, 256, 1, 1), "anchor_deltas": (12, 256, 1, 1)}  # fmt: skip
    for layer, shape in rpn.items():
        shapes[f"proposal_generator.rpn_head.{layer}.weight"] = shape
        shapes[f"proposal_generator.rpn_head.{layer}.bias"] = shape[:1]
    for stage in ("0.", "1.", "2.") if cascade else ("",):
        shapes |= box_head_shapes(stage, classes, 1 if cascade else classes)
    mask = "roi_heads.mask_head."
    for i in (1, 2, 3, 4):
        shapes[f"{mask}mask_fcn{i}.weight"] = (256, 256, 3, 3)
        shapes |= {f"{mask}mask_fcn{i}.norm.{leaf}": (256,) for leaf in NORM}
    shapes |= {f"{mask}deconv.weight": (256, 256, 2, 2), f"{mask}deconv.bias": (256,),
               f"{mask}predictor.weight": (classes, 256, 1, 1),
               f"{mask}predictor.bias": (classes,)}  # fmt: skip
    return shapes


def zeros(shapes):
    """Arrays that need no memory, different from one another."""
    numbers = enumerate(shapes.items())
    return {name: np.broadcast_to(np.float32(i), shape) for i, (name, shape) in numbers}


def config_for(variant, classes=80):
    config = load_tree(f"coco_vitdet:{variant}")
    config.model.num_classes = classes
    return config


def test_the_published_number_of_entries_and_parameters():
    shapes = vitdet_shapes()
    assert len(shapes) == 245
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 110_895_792


def test_names_that_are_unknown_are_named():
    arrays = zeros(vitdet_shapes() | {"backbone.net.register_tokens": (1, 4, 768)})
    with pytest.raises(ValueError, match=r"but 1 \(backbone.net.register_tokens\) have no counter"):
        to_flax(arrays, norm=None, eps=1e-5)


OTHERS = [("b", False), ("l", False), ("l", True), ("h", True)]


@pytest.mark.parametrize(
    ("size", "cascade"),
    [
        ("b", True),
        ("h", False),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS),
    ],
)
@pytest.mark.slow
def test_every_name_finds_a_place_of_its_shape(size, cascade):
    """Of whole models: only shapes are looked at, and where each number comes back."""
    shapes = vitdet_shapes(size, cascade)
    names = {name: i for i, name in enumerate(shapes)}
    config = config_for(f"cascade_{size}" if cascade else size)
    few = {name: np.full([min(side, 98) for side in shape], names[name], np.float32)
           for name, shape in shapes.items()}  # fmt: skip
    expected = flatten_dict(dict(abstract_variables(build_model(config.model))["params"]), sep="/")
    with pytest.MonkeyPatch.context() as patch:  # small arrays have other numbers of classes
        patch.setattr("mask_rcnn_jax.weights.convert.check_classes", lambda *args: None)
        loaded, source = to_flax(few, norm=None, eps=1e-5, model=config.model)
    assert source == "detectron2_vitdet" and not loaded["batch_stats"]
    ours = flatten_dict(loaded["params"], sep="/")
    assert ours.keys() == expected.keys()
    assert mismatches(source, config.model) == []
    for name, array in ours.items():
        theirs = shapes[list(names)[round(float(array.max()))]]
        known = tuple(expected[name].shape)
        if "mask_predictor" in name or ("bbox_pred" in name and not cascade):
            known = (*known[:-1], known[-1] - (4 if "bbox_pred" in name else 1))
        assert sorted(theirs) == sorted(known) or np.prod(theirs) == np.prod(known), name


def small_detector(variant):
    config = config_for(variant, classes=3)
    config.model.backbone.update(width=24, depth=4, num_heads=3, global_blocks=(1, 3), window=4)
    config.model.backbone.update(image_size=64, pretrain_size=32)
    config.model.fpn.channels = config.model.rpn.channels = config.model.mask_head.channels = 8
    config.model.box_head.update(channels=16, conv_channels=8)
    return config


@pytest.mark.parametrize("variant", [pytest.param("b", marks=pytest.mark.slow), "cascade_b"])
@pytest.mark.slow
def test_a_small_model_is_exported(variant, tmp_path, capsys):
    config = as_recipe(small_detector(variant))
    shapes = abstract_variables(build_model(config.model))
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda s: rng.uniform(0.5, 1, s.shape).astype(np.float32), shapes)
    weights, output = tmp_path / "ours.safetensors", tmp_path / "theirs.pkl"
    save_file(to_ours_flat(variables), weights)
    export_weights(config, str(weights), "detectron2", str(output))
    assert "read back, the largest difference is 0" in capsys.readouterr().out
    loaded = load_variables(output, config)
    np.testing.assert_array_equal(
        loaded["params"]["backbone"]["block3"]["attn"]["rel_pos_w"],
        variables["params"]["backbone"]["block3"]["attn"]["rel_pos_w"],
    )
    with pytest.raises(ValueError, match="model.backbone.name is 'vit', torchvision has resnet"):
        export_weights(config, str(weights), "torchvision", str(weights))


@pytest.mark.parametrize("variant", ["b", "cascade_b"])
def test_a_small_model_goes_both_ways(variant):
    config = small_detector(variant)
    model = build_model(config.model)
    shapes = abstract_variables(model)
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda s: rng.uniform(0.5, 1, s.shape).astype(np.float32), shapes)
    theirs = to_detectron2(variables, norm_eps=1e-5)
    expected = vitdet_shapes("b", variant != "b", 3).keys()
    wanted = {name for name in expected if not re.search(r"blocks\.([4-9]|1\d)\.", name)}
    assert theirs.keys() == wanted
    assert theirs["backbone.net.blocks.1.attn.rel_pos_h"].shape == (7, 8)
    assert theirs["backbone.net.blocks.2.attn.qkv.weight"].shape == (72, 24)
    back, _ = to_flax(theirs, norm=None, eps=1e-5, model=config.model)
    again = to_detectron2(back, norm_eps=1e-5)
    jax.tree.map(np.testing.assert_array_equal, again, theirs)
    merged, report = merge_into(shapes, back, reinit=(), optional=())
    assert len(report) == 1 and "arrays loaded for backbone" in report[0]


def mae_arrays(width=24, depth=4, side=2):
    """A file as MAE publishes it, and as it is while pretraining."""
    shapes = vit_shapes(width, depth, (), side=side, rel_pos=None)
    shapes |= {"cls_token": (1, 1, width), "norm.weight": (width,), "norm.bias": (width,)}
    shapes |= {"mask_token": (1, 1, 8), "decoder_pos_embed": (1, 5, 8),
               "decoder_embed.weight": (8, width), "decoder_blocks.0.norm1.weight": (8,),
               "decoder_norm.bias": (8,), "decoder_pred.weight": (768, 8)}  # fmt: skip
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_torch(path, arrays):
    file = TorchFile()
    return file.write(path, {"model": {name: file.tensor(a) for name, a in arrays.items()}})


def small_vit(**changes):
    config = config_for("b", classes=3)
    config.model.backbone.update(width=24, depth=4, num_heads=3, global_blocks=(1, 3))
    config.model.backbone.update(pretrain_size=32, **changes)
    return config


def test_a_run_starts_from_a_file_of_mae(tmp_path):
    config, arrays = small_vit(), mae_arrays()
    path = tmp_path / "mae_pretrain_vit.pth"
    write_torch(path, arrays)
    config.model.init_from = str(path)
    shapes = abstract_variables(build_model(config.model))
    initial = jax.tree.map(lambda s: np.full(s.shape, 0.5, np.float32), shapes)
    variables = pretrained.initialize_from(initial, as_recipe(config).model)
    trunk = variables["params"]["backbone"]
    np.testing.assert_array_equal(trunk["pos_embed"], arrays["pos_embed"])
    theirs = arrays["blocks.3.attn.qkv.weight"].T
    np.testing.assert_array_equal(trunk["block3"]["attn"]["qkv"]["kernel"], theirs)
    assert (trunk["block3"]["attn"]["rel_pos_h"] == 0.5).all()
    assert (variables["params"]["fpn"]["up2_first"]["kernel"] == 0.5).all()
    _, report = merge_into(initial, pretrained.load(path, as_recipe(config).model))
    assert any("8 (params/backbone/block0/attn/rel_pos_h" in line for line in report)


def test_a_file_of_mae_is_no_detector_and_has_one_size(tmp_path):
    path = tmp_path / "mae_pretrain_vit.pth"
    write_torch(path, mae_arrays(side=3))
    config = small_vit()
    config.model.init_from = str(path)
    variables = abstract_variables(build_model(config.model))
    with pytest.raises(ValueError, match=r"misshapen 1 \(params/backbone/pos_embed \(1, 10, 24\)"):
        pretrained.initialize_from(variables, as_recipe(config).model)
    with pytest.raises(ValueError, match="holds a backbone, expected a detector"):
        load_variables(path, config)


def test_a_cascade_of_a_resnet():
    """The names of the reference, with the trunk and mask head of the model it stands on."""
    arrays = dict(load_golden("modern/cascade_small_weights", whole=True))
    loaded, _ = to_flax({"backbone.fpn_lateral2.weight": np.zeros((2, 2, 1, 1)), **arrays},
                        norm="frozen", eps=1e-5,
                        model={"box_head": {"class_agnostic": True}})  # fmt: skip
    params = loaded["params"]
    assert set(params["cascade"]) == {"heads_0", "heads_1"}
    theirs = arrays["roi_heads.box_predictor.2.cls_score.bias"]
    ours = params["cascade"]["heads_1"]["cls_score"]["bias"]
    np.testing.assert_array_equal(ours, np.roll(theirs, 1))
    theirs = arrays["roi_heads.box_head.1.fc2.weight"]
    np.testing.assert_array_equal(params["cascade"]["heads_0"]["fc2"]["kernel"], theirs.T)
    assert params["box_head"]["fc1"]["kernel"].shape == params["cascade"]["heads_0"]["fc1"][
        "kernel"
    ].shape  # fmt: skip


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("detectron2_vitdet_b", "ViTDet/COCO/mask_rcnn_vitdet_b/f325346929/model_final_61ccd1"),
        ("detectron2_vitdet_l", "ViTDet/COCO/mask_rcnn_vitdet_l/f325599698/model_final_6146ed"),
        ("detectron2_vitdet_h", "ViTDet/COCO/mask_rcnn_vitdet_h/f329145471/model_final_7224f1"),
        (
            "detectron2_cascade_3x",
            "Misc/cascade_mask_rcnn_R_50_FPN_3x/144998488/model_final_480dd8",
        ),
    ],
)
def test_published_files_are_known_by_name(name, url, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(published, "download", lambda *args, **options: asked.append(args))
    published.fetch(name, tmp_path)
    ((address, path, checksum),) = asked
    assert address == f"https://dl.fbaipublicfiles.com/detectron2/{url}.pkl"
    assert checksum == f"md5:{url[-6:]}" and path.name == f"{url.rpartition('/')[2]}.pkl"

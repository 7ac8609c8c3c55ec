"""Files of ConvNeXt: classifiers of torchvision, the paper and mmpretrain, and detectors."""

import functools

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.config import as_recipe, load_tree
from mask_rcnn_jax.exporting.weight_file import check_system
from mask_rcnn_jax.models.build import abstract_variables, build_model
from mask_rcnn_jax.models.convnext import ConvNeXt
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.convert import identify, to_flax
from mask_rcnn_jax.weights.expected_model import mismatches
from mask_rcnn_jax.weights.restore import load_variables
from tests.weights.weight_writers import TorchFile

PAIR = ("weight", "bias")
TINY = ((3, 3, 9, 3), 96)
FEW = ((1, 2, 1, 1), 4)


def torchvision_shapes(depths, width):
    """{name: shape} of `torchvision.models.convnext_tiny().state_dict()`, in its order of layers:
    a stem, then stages with a downsampling layer between two of them."""
    shapes = {"features.0.0.weight": (width, 3, 4, 4), "features.0.0.bias": (width,)}
    shapes |= {f"features.0.1.{leaf}": (width,) for leaf in PAIR}
    index = 1
    for stage, depth in enumerate(depths):
        c = width * 2**stage
        if stage:
            down = f"features.{index}."
            shapes |= {f"{down}0.{leaf}": (c // 2,) for leaf in PAIR}
            shapes |= {f"{down}1.weight": (c, c // 2, 2, 2), f"{down}1.bias": (c,)}
            index += 1
        for i in range(depth):
            b = f"features.{index}.{i}."
            shapes |= {b + "layer_scale": (c, 1, 1), b + "block.0.weight": (c, 1, 7, 7),
                       b + "block.0.bias": (c,), b + "block.2.weight": (c,),
                       b + "block.2.bias": (c,), b + "block.3.weight": (4 * c, c),
                       b + "block.3.bias": (4 * c,), b + "block.5.weight": (c, 4 * c),
                       b + "block.5.bias": (c,)}  # fmt: skip
        index += 1
    shapes |= {f"classifier.0.{leaf}": (8 * width,) for leaf in PAIR}
    return shapes | {"classifier.2.weight": (1000, 8 * width), "classifier.2.bias": (1000,)}


PAPER = ("dwconv", "pwconv1", "pwconv2")
MMPRETRAIN = ("depthwise_conv", "pointwise_conv1", "pointwise_conv2")


def trunk_shapes(depths, width, layers=PAPER, prefix=""):
    """{name: shape} of the paper's trunk, without norms of its maps."""
    shapes = {}
    for stage, depth in enumerate(depths):
        c, down = width * 2**stage, f"downsample_layers.{stage}."
        before, conv, norm, side = (c // 2, 1, 0, 2) if stage else (3, 0, 1, 4)
        shapes |= {f"{down}{conv}.weight": (c, before, side, side), f"{down}{conv}.bias": (c,)}
        shapes |= {f"{down}{norm}.{leaf}": (c // 2 if stage else c,) for leaf in PAIR}
        for i in range(depth):
            b = f"stages.{stage}.{i}."
            shapes |= {b + "gamma": (c,), b + "norm.weight": (c,), b + "norm.bias": (c,)}
            for layer, shape in zip(layers, ((c, 1, 7, 7), (4 * c, c), (c, 4 * c)), strict=True):
                shapes |= {f"{b}{layer}.weight": shape, f"{b}{layer}.bias": shape[:1]}
    return {prefix + name: shape for name, shape in shapes.items()}


def classifier_shapes(depths, width):
    """The paper's file: {"model": ..}."""
    shapes = trunk_shapes(depths, width) | {f"norm.{leaf}": (8 * width,) for leaf in PAIR}
    return shapes | {"head.weight": (1000, 8 * width), "head.bias": (1000,)}


def mmpretrain_shapes(depths, width):
    """Its classifier's file: the last norm is the one of the last map."""
    shapes = trunk_shapes(depths, width, MMPRETRAIN, "backbone.")
    shapes |= {f"backbone.norm3.{leaf}": (8 * width,) for leaf in PAIR}
    return shapes | {"head.fc.weight": (1000, 8 * width), "head.fc.bias": (1000,)}


def detector_shapes(depths, width, layers, classes=3, channels=8, hidden=16):
    """A detector of the paper (in mmdetection) or of mmdetection (with mmpretrain)."""
    shapes = trunk_shapes(depths, width, layers, "backbone.")
    for i in range(4):
        shapes |= {f"backbone.norm{i}.{leaf}": (width * 2**i,) for leaf in PAIR}
        for neck, inputs, side in (("lateral", width * 2**i, 1), ("fpn", channels, 3)):
            name = f"neck.{neck}_convs.{i}.conv"
            shapes |= {
                f"{name}.weight": (channels, inputs, side, side),
                f"{name}.bias": (channels,),
            }
        name = f"roi_head.mask_head.convs.{i}.conv"
        shapes |= {f"{name}.weight": (channels, channels, 3, 3), f"{name}.bias": (channels,)}
    inner = {
        "rpn_head.rpn_conv": (channels, channels, 3, 3),
        "rpn_head.rpn_cls": (3, channels, 1, 1),
        "rpn_head.rpn_reg": (12, channels, 1, 1),
        "roi_head.bbox_head.shared_fcs.0": (hidden, channels * 49),
        "roi_head.bbox_head.shared_fcs.1": (hidden, hidden),
        "roi_head.bbox_head.fc_cls": (classes + 1, hidden),
        "roi_head.bbox_head.fc_reg": (4 * classes, hidden),
        "roi_head.mask_head.upsample": (channels, channels, 2, 2),
        "roi_head.mask_head.conv_logits": (classes, channels, 1, 1),
    }
    for name, shape in inner.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


FILES = {
    "torchvision_convnext": torchvision_shapes,
    "convnext": classifier_shapes,
    "convnext of mmpretrain": mmpretrain_shapes,
}


def random_arrays(shapes):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def trunk_paths(depths, width):
    """{path: shape} of our trunk."""
    model, images = ConvNeXt(depths=depths, width=width), np.zeros((1, 32, 32, 3), np.float32)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), images, train=False))
    return {
        f"backbone/{n}": leaf.shape for n, leaf in flatten_dict(shapes["params"], sep="/").items()
    }


@pytest.mark.parametrize("kind", FILES)
def test_a_whole_file_has_every_layer(kind):
    """28,589,128 parameters in 180 arrays (torchvision), of which the classifier's are not used."""
    shapes = FILES[kind](*TINY)
    assert sum(np.prod(shape) for shape in shapes.values()) == 28_589_128
    source, paths = identify(list(shapes))
    assert source == kind.partition(" ")[0]
    ours = trunk_paths(*TINY)
    for name, path in paths.items():
        theirs = [side for side in shapes[name] if side > 1]
        assert sorted(theirs) == sorted(side for side in ours.pop(path) if side > 1), name
    left = {path.split("/")[1] for path in ours}
    assert left == {f"output{stage}_norm" for stage in range(2, 5 if "mm" in kind else 6)}


@pytest.mark.parametrize("kind", FILES)
def test_layers_compute_the_same(kind):
    arrays = random_arrays(FILES[kind](*FEW))
    trunk = to_flax(arrays, norm=None, eps=1e-5)[0]["params"]["backbone"]
    block, down = trunk["res4_0"], trunk["down4_conv"]["kernel"]
    at = {"torchvision_convnext": ("features.5.0.block.0", "features.5.0.block.3",
                                   "features.5.0.layer_scale", "features.4.1"),
          "convnext": ("stages.2.0.dwconv", "stages.2.0.pwconv1", "stages.2.0.gamma",
                       "downsample_layers.2.1")}  # fmt: skip
    at["convnext of mmpretrain"] = tuple(
        f"backbone.{name}".replace("dwconv", MMPRETRAIN[0]).replace("pwconv1", MMPRETRAIN[1])
        for name in at["convnext"]
    )
    depthwise, first, gamma, conv = at[kind]
    assert block["dwconv"]["kernel"].shape == (7, 7, 1, 16)
    assert block["dwconv"]["kernel"][2, 5, 0, 11] == arrays[f"{depthwise}.weight"][11, 0, 2, 5]
    np.testing.assert_array_equal(block["fc1"]["kernel"], arrays[f"{first}.weight"].T)
    np.testing.assert_array_equal(block["gamma"], arrays[gamma].ravel())
    assert down[1, 0, 6, 9] == arrays[f"{conv}.weight"][9, 6, 1, 0]


def small_config(depths=FEW[0]):
    config = load_tree("coco_convnext")
    config.model.num_classes = 3
    config.model.backbone.update(depths=depths, width=FEW[1])
    config.model.fpn.channels = config.model.rpn.channels = config.model.mask_head.channels = 8
    config.model.box_head.channels = 16
    return config


@functools.cache
def small_shapes(depths):
    return abstract_variables(build_model(small_config(depths).model))


def write_torch(path, arrays, key):
    file = TorchFile()
    tensors = {name: file.tensor(array) for name, array in arrays.items()}
    return file.write(path, {key: tensors} if key else tensors)


@pytest.mark.parametrize(
    ("kind", "key"),
    [("torchvision_convnext", ""), ("convnext", "model"), ("convnext of mmpretrain", "state_dict")],
)
def test_a_run_starts_from_a_file(kind, key, tmp_path):
    config, arrays = small_config(), random_arrays(FILES[kind](*FEW))
    config.model.init_from = str(tmp_path / "convnext.pth")
    write_torch(config.model.init_from, arrays, key)
    initial = jax.tree.map(lambda s: np.full(s.shape, 0.5, np.float32), small_shapes(FEW[0]))
    trunk = pretrained.initialize_from(initial, as_recipe(config).model)["params"]["backbone"]
    kept = {name for name, layer in trunk.items() if np.all(jax.tree.leaves(layer)[0] == 0.5)}
    assert kept == {f"output{stage}_norm" for stage in range(2, 5 if "mm" in kind else 6)}
    with pytest.raises(ValueError, match="holds a backbone, expected a detector"):
        load_variables(config.model.init_from, config)
    other = small_shapes((1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"unexpected 9 \(params/backbone/res3_1/"):
        pretrained.initialize_from(other, as_recipe(config).model)


@pytest.mark.parametrize("layers", [PAPER, MMPRETRAIN])
def test_a_detector_is_read(layers, tmp_path):
    config, path = small_config(), tmp_path / "mask_rcnn_convnext.pth"
    arrays = random_arrays(detector_shapes(*FEW, layers))
    write_torch(path, arrays, "state_dict")
    source = identify(list(arrays))[0]
    assert source == "mmdetection_convnext" and mismatches(source, config.model) == []
    params = load_variables(path, config)["params"]
    theirs = arrays["backbone.norm2.weight"]
    np.testing.assert_array_equal(params["backbone"]["output4_norm"]["scale"], theirs)
    theirs = arrays["roi_head.bbox_head.fc_cls.bias"]
    np.testing.assert_array_equal(params["box_head"]["cls_score"]["bias"], np.roll(theirs, 1))


@pytest.mark.parametrize("system", ["torchvision", "detectron2"])
def test_no_other_system_takes_its_weights(system):
    with pytest.raises(ValueError, match=f"model.backbone.name is 'convnext', {system} has resnet"):
        check_system(as_recipe(small_config()).model, system)

"""Files of RegNet: detectron2's detectors, and classifiers of its paper and of torchvision."""

import functools

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.config import as_recipe, load_tree
from mask_rcnn_jax.exporting.weight_file import check_system
from mask_rcnn_jax.models.build import abstract_variables, build_model
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.convert import identify, to_detectron2, to_flax
from mask_rcnn_jax.weights.expected_model import mismatches
from mask_rcnn_jax.weights.restore import load_variables
from tests.weights.weight_writers import TorchFile

SIZES = {  # blocks, widths, group width, share of squeeze-and-excitation
    "x": ((2, 5, 14, 2), (80, 240, 560, 1360), 40, 0.0),
    "y": ((2, 6, 12, 2), (128, 192, 512, 1088), 64, 0.25),
    "few": ((1, 1, 3, 1), (8, 16, 32, 64), 8, 0.25),
}
FEW = dict(depth=6, initial_width=8, slope=8.0, multiplier=2.0, group_width=8, se_ratio=0.25)
NORM = ("weight", "bias", "running_mean", "running_var")
CLASSES, CHANNELS, HIDDEN = 3, 8, 16


def layers(size):
    """(stage from 1, block from 0, layer, shape of its kernel, has a bias and no norm)."""
    blocks, widths, group, ratio = SIZES[size]
    before = 32
    for stage, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
        for block in range(count):
            at, squeezed = (stage, block), round(before * ratio)
            if block == 0:
                yield *at, "proj", (width, before, 1, 1), False
            yield *at, "a", (width, before, 1, 1), False
            yield *at, "b", (width, group, 3, 3), False
            if squeezed:
                yield *at, "se1", (squeezed, width, 1, 1), True
                yield *at, "se2", (width, squeezed, 1, 1), True
            yield *at, "c", (width, width, 1, 1), False
            before = width


def conv_norm(conv, norm, shape):
    counter = {f"{norm}.num_batches_tracked": ()}
    return {f"{conv}.weight": shape} | {f"{norm}.{leaf}": shape[:1] for leaf in NORM} | counter


def layer(name, shape):
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def trunk_shapes(size, prefix=""):
    """{name: shape} of the paper's and detectron2's trunk."""
    shapes = conv_norm("stem.conv", "stem.bn", (32, 3, 3, 3))
    for stage, block, name, shape, is_plain in layers(size):
        at = f"s{stage}.b{block + 1}."
        if is_plain:
            shapes |= layer(f"{at}f.se.f_ex.{2 * int(name[-1]) - 2}", shape)
        elif name == "proj":
            shapes |= conv_norm(f"{at}proj", f"{at}bn", shape)
        else:
            shapes |= conv_norm(f"{at}f.{name}", f"{at}f.{name}_bn", shape)
    return {prefix + name: shape for name, shape in shapes.items()}


def paper_shapes(size):
    return trunk_shapes(size) | layer("head.fc", (1000, SIZES[size][1][-1]))


def torchvision_shapes(size):
    shapes = conv_norm("stem.0", "stem.1", (32, 3, 3, 3))
    for stage, block, name, shape, is_plain in layers(size):
        at = f"trunk_output.block{stage}.block{stage}-{block}."
        if is_plain:
            shapes |= layer(f"{at}f.se.fc{name[-1]}", shape)
        else:
            at += name if name == "proj" else f"f.{name}"
            shapes |= conv_norm(f"{at}.0", f"{at}.1", shape)
    return shapes | layer("fc", (1000, SIZES[size][1][-1]))


def detector_shapes(size, classes=80, channels=256, hidden=1024):
    """The module tree of detectron2's LSJ baselines."""
    shapes = trunk_shapes(size, "backbone.bottom_up.")
    rpn, roi = "proposal_generator.rpn_head.", "roi_heads."
    wide = (channels, channels, 3, 3)
    for i, width in enumerate(SIZES[size][1]):
        for name, shape in (("lateral", (channels, width, 1, 1)), ("output", wide)):
            name = f"backbone.fpn_{name}{i + 2}"
            shapes |= conv_norm(name, f"{name}.norm", shape)
        for name in (f"{roi}box_head.conv{i + 1}", f"{roi}mask_head.mask_fcn{i + 1}"):
            shapes |= conv_norm(name, f"{name}.norm", wide)
    inner = {
        f"{rpn}conv.conv0": wide, f"{rpn}conv.conv1": wide,
        f"{rpn}objectness_logits": (3, channels, 1, 1), f"{rpn}anchor_deltas": (12, channels, 1, 1),
        f"{roi}box_head.fc1": (hidden, channels * 49),
        f"{roi}box_predictor.cls_score": (classes + 1, hidden),
        f"{roi}box_predictor.bbox_pred": (4 * classes, hidden),
        f"{roi}mask_head.deconv": (channels, channels, 2, 2),
        f"{roi}mask_head.predictor": (classes, channels, 1, 1),
    }  # fmt: skip
    for name, shape in inner.items():
        shapes |= layer(name, shape)
    return shapes


FILES = {"regnet": paper_shapes, "torchvision_regnet": torchvision_shapes}


def random_arrays(shapes):
    rng = np.random.default_rng(0)
    return {name: rng.uniform(0.5, 1, shape).astype(np.float32) for name, shape in shapes.items()}


def small_config():
    config = load_tree("coco_detectron2:lsj_100ep_regnety_4gf")
    config.model.num_classes = CLASSES
    config.model.backbone.update(FEW)
    config.model.fpn.channels = config.model.rpn.channels = config.model.mask_head.channels = 8
    config.model.box_head.update(conv_channels=CHANNELS, channels=HIDDEN)
    return config


@functools.cache
def small_variables():
    return abstract_variables(build_model(small_config().model))


def write_torch(path, arrays, key=""):
    file = TorchFile()
    tensors = {name: file.tensor(array) for name, array in arrays.items()}
    return file.write(path, {key: tensors} if key else tensors)


def parameters(shapes):
    statistics = (".running_mean", ".running_var", ".num_batches_tracked")
    return sum(np.prod(shape) for name, shape in shapes.items() if not name.endswith(statistics))


# The paper counts 22.1 and 20.6 million in classifiers, detectron2's models have the others.
@pytest.mark.parametrize(
    ("kind", "millions", "count", "entries"),
    [("x", 22.1, 43_140_848, 558), ("y", 20.6, 41_859_336, 628)],
)
@pytest.mark.slow
def test_all_names_of_detectron2s_models(kind, millions, count, entries):
    shapes = detector_shapes(kind)
    assert len(shapes) == entries and parameters(shapes) == count
    assert round(parameters(paper_shapes(kind)) / 1e6, 1) == millions
    config = load_tree(f"coco_detectron2:lsj_100ep_regnet{kind}_4gf")
    config.model.num_classes = 80
    source, paths = identify(list(shapes))
    assert source == "detectron2_regnet" and mismatches(source, config.model) == []
    expected = flatten_dict(abstract_variables(build_model(config.model)))
    ours = {"/".join(path[1:]): leaf.shape for path, leaf in expected.items()}
    assert set(paths.values()) == set(ours)
    for name, path in paths.items():
        if path.startswith("backbone"):  # the heads' have a place for background
            assert sorted(shapes[name]) == sorted(ours[path]), name


def test_a_detector_is_read_and_written(tmp_path):
    config, path = small_config(), tmp_path / "model_final.pth"
    arrays = random_arrays(detector_shapes("few", CLASSES, CHANNELS, HIDDEN))
    write_torch(path, arrays, "model")
    variables = load_variables(path, config)
    kernel = variables["params"]["backbone"]["res4_1"]["b"]["kernel"]
    theirs = arrays["backbone.bottom_up.s3.b2.f.b.weight"]
    assert kernel.shape == (3, 3, 8, 32) and kernel[0, 2, 5, 20] == theirs[20, 5, 0, 2]
    check_system(as_recipe(config).model, "detectron2")
    back = to_detectron2(variables, norm_eps=1e-5)
    counters = {name for name in arrays if name.endswith("num_batches_tracked")}
    assert back.keys() == arrays.keys() - counters
    for name, array in back.items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    with pytest.raises(ValueError, match="backbone.name is 'regnet', torchvision has resnet only"):
        check_system(as_recipe(config).model, "torchvision")


@pytest.mark.parametrize(("source", "key"), [("regnet", "model_state"), ("torchvision_regnet", "")])
def test_a_run_starts_from_a_classifier(source, key, tmp_path):
    config, arrays = small_config(), random_arrays(FILES[source]("few"))
    assert identify(list(arrays))[0] == source
    config.model.init_from = str(tmp_path / "regnet.pyth")
    write_torch(config.model.init_from, arrays, key)
    initial = jax.tree.map(lambda s: np.full(s.shape, 2.0, np.float32), small_variables())
    loaded = pretrained.initialize_from(initial, as_recipe(config).model)
    for part in ("params", "batch_stats"):
        for name, leaf in flatten_dict(loaded[part]["backbone"], sep="/").items():
            assert np.all(leaf <= 1), name
    differing = [line for line in mismatches(source, config.model) if "channel_order" not in line]
    assert differing == []


def test_both_files_of_a_trunk_are_the_same():
    """Arrays under the paper's names, and as torchvision stores them."""
    arrays = random_arrays(paper_shapes("few"))
    theirs = dict(zip(torchvision_shapes("few"), arrays.values(), strict=True))
    ours, other = (to_flax(each, norm="batch", eps=1e-5)[0] for each in (arrays, theirs))
    jax.tree.map(np.testing.assert_array_equal, ours, other)

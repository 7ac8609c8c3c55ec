"""From a file to variables that compute what the file's own system does, and the merge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from mask_rcnn_jax.models.resnet import ResNet
from mask_rcnn_jax.weights.convert import to_flax, to_ours_flat
from mask_rcnn_jax.weights.pretrained import load_weights, merge_into
from mask_rcnn_jax.weights.trunk_names import google_resnet50
from tests.bounds import assert_within, network_bound
from tests.helpers import shared
from tests.weights.system_names import system

RESNET50 = "data/weights/resnet50_imagenet.safetensors"
BACKBONE = {"norm": "frozen", "norm_eps": 1e-5, "stride_in": "3x3", "padding": "torch"}
MODEL = {"backbone": BACKBONE}


def model_with(**changes):
    """`MODEL` with other entries of its backbone."""
    return {"backbone": BACKBONE | changes}


class Trunk(nn.Module):
    """Our ResNet under the name that it has in the detector."""

    depth: int
    norm: str = "frozen"

    @nn.compact
    def __call__(self, images):
        resnet = ResNet(depth=self.depth, norm=self.norm, frozen_stages=0, name="backbone")
        return resnet(images, train=False)


def init(trunk):
    return jax.eval_shape(trunk.init, jax.random.key(0), jnp.zeros((1, 64, 64, 3)))


def zeros(tree):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)


def torchvision_resnet18(seed=0):
    """Random weights of a ResNet-18 under torchvision's names and in its layout."""
    rng = np.random.default_rng(seed)
    tensors = {}

    def conv_norm(conv, norm, out_channels, in_channels, kernel):
        scale = np.sqrt(2 / (in_channels * kernel**2))
        shape = (out_channels, in_channels, kernel, kernel)
        tensors[f"{conv}.weight"] = rng.normal(0, scale, shape).astype(np.float32)
        for part, low, high in (
            ("weight", 0.5, 1.5),
            ("bias", -0.2, 0.2),
            ("running_mean", -0.2, 0.2),
            ("running_var", 0.5, 2.0),
        ):
            values = rng.uniform(low, high, out_channels).astype(np.float32)
            tensors[f"{norm}.{part}"] = values
        tensors[f"{norm}.num_batches_tracked"] = np.array(7)

    conv_norm("conv1", "bn1", 64, 3, 7)
    channels = 64
    for stage in (1, 2, 3, 4):
        width = 32 * 2**stage
        for block in (0, 1):
            name = f"layer{stage}.{block}"
            conv_norm(f"{name}.conv1", f"{name}.bn1", width, channels, 3)
            conv_norm(f"{name}.conv2", f"{name}.bn2", width, width, 3)
            if channels != width:
                conv_norm(f"{name}.downsample.0", f"{name}.downsample.1", width, channels, 1)
            channels = width
    tensors["fc.weight"] = np.zeros((1000, 512), np.float32)
    tensors["fc.bias"] = np.zeros(1000, np.float32)
    return tensors


def torchvision_forward(tensors, image):
    """C2..C5 of torchvision's ResNet-18 in NCHW, from its own names and layout."""

    def conv(x, name, stride):
        weight = tensors[f"{name}.weight"]
        pad = weight.shape[-1] // 2
        return jax.lax.conv_general_dilated(
            x,
            weight,
            (stride, stride),
            [(pad, pad)] * 2,
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )

    def norm(x, name):
        gamma, beta, mean, var = (
            tensors[f"{name}.{part}"][:, None, None]
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / jnp.sqrt(var + 1e-5)[None] * gamma[None] + beta

    x = nn.relu(norm(conv(image, "conv1", 2), "bn1"))
    x = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1))
    )
    features = []
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            name = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            y = nn.relu(norm(conv(x, f"{name}.conv1", stride), f"{name}.bn1"))
            y = norm(conv(y, f"{name}.conv2", 1), f"{name}.bn2")
            if f"{name}.downsample.0.weight" in tensors:
                x = norm(conv(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
            x = nn.relu(x + y)
        features.append(x)
    return features


@pytest.mark.parametrize(
    ("prefix", "norm"),
    [
        pytest.param("", "frozen", marks=pytest.mark.slow),
        pytest.param("backbone.body.", "affine", marks=pytest.mark.slow),
        ("", "batch"),
    ],
)
def test_converted_resnet18_computes_what_torchvision_does(norm, prefix):
    tensors = torchvision_resnet18()
    tensors = {prefix + name: array for name, array in tensors.items()}
    loaded, _ = to_flax(tensors, norm=norm, eps=1e-5)
    trunk = Trunk(18, norm)
    variables, report = merge_into(zeros(init(trunk)), loaded, source="file")
    assert report == [f"file: {len(flatten_dict(loaded))} arrays loaded for backbone"]
    image = np.random.default_rng(1).normal(size=(1, 64, 64, 3)).astype(np.float32)
    features = jax.jit(trunk.apply)(variables, image)
    with jax.numpy_rank_promotion("allow"):
        forward = jax.jit(torchvision_forward)
        expected = forward(torchvision_resnet18(), image.transpose(0, 3, 1, 2))
    terms = 147 + sum(4 * 9 * width for width in (64, 128, 256, 512))  # products per output
    for ours, theirs in zip(features, expected, strict=True):
        assert_within(ours.transpose(0, 3, 1, 2), theirs, network_bound(terms, theirs))


@pytest.mark.parametrize(("norm", "count"), [("frozen", 159), ("batch", 265)])
@pytest.mark.slow
def test_real_resnet50_covers_the_backbone(norm, count):
    path = shared(RESNET50)
    loaded, lines = load_weights(path, model_with(norm=norm))
    assert lines == [f"{path}: weights of torchvision's ResNet"]
    variables, report = merge_into(init(Trunk(50, norm)), loaded, source=str(path))
    assert report == [f"{path}: {count} arrays loaded for backbone"]
    leaves = jax.tree.leaves(variables)
    assert all(isinstance(leaf, np.ndarray) and np.isfinite(leaf).all() for leaf in leaves)


def test_resnet_of_another_depth_does_not_fit():
    loaded, _ = to_flax(torchvision_resnet18(), norm="frozen", eps=1e-5)
    # A ResNet-34 has 8 blocks more, each of 2 convolutions and 2 norms of 2 arrays.
    with pytest.raises(ValueError, match=r"file: .* missing 48 \(.*\); unexpected 0; misshapen 0"):
        merge_into(init(Trunk(34)), loaded, source="file")
    with pytest.raises(ValueError, match=r"missing 99 \(.*; misshapen 17 \(params/backbone/res2_0"):
        merge_into(init(Trunk(50)), loaded, source="file")


class TestLoadWeights:
    def save(self, arrays, tmp_path):
        path = tmp_path / "weights.safetensors"
        save_file(arrays, path)
        return path

    def test_detector(self, tmp_path):
        names, arrays = system("torchvision")
        path = self.save(arrays, tmp_path)
        loaded, report = load_weights(path, MODEL)
        assert report == [f"{path}: weights of torchvision's Mask R-CNN, 3 classes and background"]
        jax.tree.map(
            np.testing.assert_array_equal, loaded, to_flax(arrays, norm="frozen", eps=1e-5)[0]
        )

    def test_says_which_entries_the_weights_are_not_for(self, tmp_path):
        path = self.save(torchvision_resnet18(), tmp_path)
        _, report = load_weights(path, model_with(padding="same", norm_eps=1e-3))
        assert report[1:] == [
            f"{path}: model.backbone.padding is 'same', torchvision's ResNet has 'torch'",
            f"{path}: model.backbone.norm_eps is 0.001, torchvision's ResNet has 1e-05",
        ]

    def test_epsilon_and_norm_are_those_of_the_model(self, tmp_path):
        tensors = torchvision_resnet18()
        path = self.save(tensors, tmp_path)
        for norm in ("frozen", "affine"):
            loaded, _ = load_weights(path, model_with(norm=norm, norm_eps=0.5))
            expected, _ = to_flax(tensors, norm=norm, eps=0.5)
            jax.tree.map(np.testing.assert_array_equal, loaded, expected)

    def test_our_own_names(self, tmp_path):
        ours, _ = to_flax(system("torchvision")[1], norm="frozen", eps=1e-5)
        path = self.save(to_ours_flat(ours), tmp_path)
        loaded, report = load_weights(path, MODEL)
        assert report == [f"{path}: weights of mask_rcnn_jax, 3 classes and background"]
        jax.tree.map(np.testing.assert_array_equal, loaded, ours)

    def test_mistakes_name_the_file(self, tmp_path):
        path = self.save({"some.weight": np.zeros(2)}, tmp_path)
        with pytest.raises(ValueError, match=rf"{path}: names of no known system: 1 \(some\.wei"):
            load_weights(path, MODEL)
        path = self.save(torchvision_resnet18(), tmp_path)
        with pytest.raises(ValueError, match=rf"{path}: model\.backbone\.norm is 'group'"):
            load_weights(path, model_with(norm="group"))


def model_variables(classes=4):
    """A detector's variables in small: a backbone and heads that depend on the classes."""
    return {
        "params": {
            "backbone": {"conv": {"kernel": np.zeros((3, 3, 2, 2), np.float32)}},
            "box_head": {
                "fc1": {"kernel": np.zeros((5, 6), np.float32)},
                "cls_score": {"kernel": np.zeros((6, classes), np.float32)},
                "bbox_pred": {"kernel": np.zeros((6, 4 * classes), np.float32)},
            },
        },
        "batch_stats": {"backbone": {"norm": {"scale": np.zeros(2, np.float32)}}},
    }


def ones(tree):
    return jax.tree.map(np.ones_like, tree)


def test_heads_of_another_class_count_are_initialized_and_listed():
    loaded = ones(model_variables(classes=91))
    merged, report = merge_into(model_variables(4), loaded, source="file")
    assert merged["params"]["box_head"]["fc1"]["kernel"].all()
    assert merged["batch_stats"]["backbone"]["norm"]["scale"].all()
    assert not merged["params"]["box_head"]["cls_score"]["kernel"].any()
    assert merged["params"]["box_head"]["bbox_pred"]["kernel"].shape == (6, 16)
    assert report[0] == "file: 3 arrays loaded for backbone, box_head"
    assert sorted(report[1:]) == [
        "params/box_head/bbox_pred/kernel: (6, 364) in the file, (6, 16) in the model, initialized",
        "params/box_head/cls_score/kernel: (6, 91) in the file, (6, 4) in the model, initialized",
    ]


def test_heads_of_the_same_class_count_are_taken():
    merged, report = merge_into(model_variables(), ones(model_variables()))
    assert all(leaf.all() for leaf in jax.tree.leaves(merged))
    assert len(report) == 1


def test_backbone_alone_leaves_the_heads_as_they_were():
    loaded = ones(model_variables())
    del loaded["params"]["box_head"]
    merged, report = merge_into(model_variables(), loaded, source="file")
    assert merged["params"]["backbone"]["conv"]["kernel"].all()
    assert not merged["params"]["box_head"]["fc1"]["kernel"].any()
    assert report == [
        "file: 2 arrays loaded for backbone",
        "box_head: not in the file, initialized",
    ]


def test_a_mask_head_is_left_out_of_a_model_of_boxes_alone_and_listed():
    loaded = ones(model_variables())
    loaded["params"]["mask_head"] = {"mask_predictor": {"kernel": np.ones((2, 4), np.float32)}}
    loaded["batch_stats"]["mask_head"] = {"norm": {"mean": np.ones(2, np.float32)}}
    merged, report = merge_into(model_variables(), loaded, source="file")
    assert jax.tree.structure(merged) == jax.tree.structure(model_variables())
    assert all(leaf.all() for leaf in jax.tree.leaves(merged))
    assert report == [
        "file: 5 arrays loaded for backbone, box_head",
        "mask_head: not in the model, left out",
    ]
    with pytest.raises(ValueError, match=r"unexpected 2 \(.*params/mask_head/mask_predictor"):
        merge_into(model_variables(), loaded, unused=())


def test_values_take_the_type_of_the_model():
    loaded = jax.tree.map(lambda leaf: leaf.astype(np.float64), ones(model_variables()))
    merged, _ = merge_into(model_variables(), loaded)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {np.dtype(np.float32)}


def test_what_does_not_fit_is_listed_on_both_sides():
    loaded = ones(model_variables())
    del loaded["batch_stats"]["backbone"]["norm"]["scale"]
    loaded["params"]["backbone"]["extra"] = np.ones(3)
    loaded["params"]["box_head"]["fc1"]["kernel"] = np.ones((5, 7))
    with pytest.raises(ValueError) as error:
        merge_into(model_variables(), loaded, source="some.safetensors")
    assert str(error.value) == (
        "some.safetensors: does not fit the model: "
        "missing 1 (batch_stats/backbone/norm/scale); "
        "unexpected 1 (params/backbone/extra); "
        "misshapen 1 (params/box_head/fc1/kernel (5, 7) in the file, (5, 6) in the model)"
    )


def test_long_lists_are_cut():
    loaded = {"params": {"other": {f"layer{i}": np.ones(2) for i in range(9)}}}
    with pytest.raises(ValueError, match=r"unexpected 9 \(params/other/layer0, .*layer3, \.\.\.\)"):
        merge_into(model_variables(), loaded)


@pytest.mark.parametrize(
    "number, conv, norm",
    [
        ("", "stem_conv", "stem_norm"),
        ("_1", "res2_0/shortcut", "res2_0/shortcut_norm"),
        ("_4", "res2_0/conv3", "res2_0/norm3"),
        ("_11", "res3_0/shortcut", "res3_0/shortcut_norm"),
        ("_24", "res4_0/shortcut", "res4_0/shortcut_norm"),
        ("_52", "res5_2/conv3", "res5_2/norm3"),
    ],
)
def test_googles_layers_are_numbered_as_they_are_created(number, conv, norm):
    """53 convolutions with a norm each; the first block of a stage starts with its shortcut."""
    rows = dict(google_resnet50())
    assert len(rows) == 2 * 53
    assert rows[f"[resnet50/]conv2d{number}"] == f"backbone/{conv}"
    assert rows[f"[resnet50/]batch_normalization{number}"] == f"backbone/{norm}"

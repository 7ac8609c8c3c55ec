import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from mask_rcnn_jax.models.resnet import ResNet
from mask_rcnn_jax.training.pretrained import (
    load_safetensors,
    merge_into,
    torchvision_resnet_to_flax,
)
from tests.helpers import shared

RESNET50 = "data/weights/resnet50_imagenet.safetensors"


class Trunk(nn.Module):
    """Our ResNet under the name that it has in the detector."""

    depth: int
    norm: str = "frozen"

    @nn.compact
    def __call__(self, images):
        return ResNet(self.depth, self.norm, "3x3", "torch", 0, jnp.float32, name="backbone")(
            images, False
        )


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
        return (x - mean) / np.sqrt(var + 1e-5)[None] * gamma[None] + beta

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


@pytest.mark.parametrize("norm", ["frozen", "batch"])
@pytest.mark.parametrize("prefix", ["", "backbone.body."])
def test_converted_resnet18_computes_what_torchvision_does(norm, prefix):
    tensors = torchvision_resnet18()
    loaded = torchvision_resnet_to_flax({prefix + k: v for k, v in tensors.items()}, norm=norm)
    trunk = Trunk(18, norm)
    variables, report = merge_into(zeros(init(trunk)), loaded, source="file")
    assert report == [f"file: {len(flatten_dict(loaded))} arrays taken for backbone"]
    image = np.random.default_rng(1).normal(size=(1, 64, 64, 3)).astype(np.float32)
    features = trunk.apply(variables, image)
    with jax.numpy_rank_promotion("allow"):
        expected = torchvision_forward(tensors, image.transpose(0, 3, 1, 2))
    for ours, theirs in zip(features, expected, strict=True):
        np.testing.assert_allclose(ours.transpose(0, 3, 1, 2), theirs, rtol=1e-4, atol=1e-4)


def test_frozen_norm_is_folded_by_hand():
    tensors = torchvision_resnet18()
    for part, value in (("weight", 3), ("bias", 1), ("running_mean", 4), ("running_var", 2.24)):
        tensors[f"bn1.{part}"] = np.full(64, value, np.float32)
    stem = torchvision_resnet_to_flax(tensors, eps=0.01)["batch_stats"]["backbone"]["stem_norm"]
    np.testing.assert_allclose(stem["scale"], 2.0, rtol=1e-6)  # 3 / sqrt(2.24 + 0.01)
    np.testing.assert_allclose(stem["bias"], -7.0, rtol=1e-6)  # 1 - 4 * 2


def test_kernel_axes_go_from_oihw_to_hwio():
    tensors = torchvision_resnet18()
    kernel = torchvision_resnet_to_flax(tensors)["params"]["backbone"]["stem_conv"]["kernel"]
    assert kernel.shape == (7, 7, 3, 64)
    assert kernel[2, 5, 1, 40] == tensors["conv1.weight"][40, 1, 2, 5]


@pytest.mark.parametrize(("norm", "count"), [("frozen", 159), ("batch", 265)])
def test_real_resnet50_covers_the_backbone(norm, count):
    path = shared(RESNET50)
    tensors = load_safetensors(path)
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}
    loaded = torchvision_resnet_to_flax(tensors, norm=norm)
    variables, report = merge_into(init(Trunk(50, norm)), loaded, source=str(path))
    assert report == [f"{path}: {count} arrays taken for backbone"]
    leaves = jax.tree.leaves(variables)
    assert all(isinstance(leaf, np.ndarray) and np.isfinite(leaf).all() for leaf in leaves)


def test_resnet_of_another_depth_does_not_fit():
    loaded = torchvision_resnet_to_flax(torchvision_resnet18())
    # A ResNet-34 has 8 blocks more, each of 2 convolutions and 2 norms of 2 arrays.
    with pytest.raises(ValueError, match=r"file: .* missing 48 \(.*\); unexpected 0; misshapen 0"):
        merge_into(init(Trunk(34)), loaded, source="file")
    with pytest.raises(ValueError, match=r"missing 99 \(.*; misshapen 17 \(params/backbone/res2_0"):
        merge_into(init(Trunk(50)), loaded, source="file")


def test_group_norm_has_no_counterpart():
    with pytest.raises(ValueError, match=r"model\.norm='group'"):
        torchvision_resnet_to_flax(torchvision_resnet18(), norm="group")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layer1.0.bn2.running_var"), "backbone/res2_0/norm2 lacks running_var"),
        (lambda t: t.update({"rpn.head.conv.weight": np.zeros(3)}), "unexpected 1 (rpn.head.conv"),
        (lambda t: t.update({"layer5.0.conv1.weight": np.zeros(3)}), "unexpected 1 (layer5.0.co"),
        (lambda t: t.clear(), "no convolution"),
    ],
)
def test_arrays_that_are_no_resnet_are_named(change, message):
    tensors = torchvision_resnet18()
    change(tensors)
    with pytest.raises(ValueError, match=re.escape(message)):
        torchvision_resnet_to_flax(tensors)


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


def test_heads_of_another_class_count_are_initialised_and_listed():
    loaded = ones(model_variables(classes=91))
    merged, report = merge_into(model_variables(4), loaded, source="file")
    assert merged["params"]["box_head"]["fc1"]["kernel"].all()
    assert merged["batch_stats"]["backbone"]["norm"]["scale"].all()
    assert not merged["params"]["box_head"]["cls_score"]["kernel"].any()
    assert merged["params"]["box_head"]["bbox_pred"]["kernel"].shape == (6, 16)
    assert report[0] == "file: 3 arrays taken for backbone, box_head"
    assert sorted(report[1:]) == [
        "params/box_head/bbox_pred/kernel: (6, 364) in the file, (6, 16) in the model, initialised",
        "params/box_head/cls_score/kernel: (6, 91) in the file, (6, 4) in the model, initialised",
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
        "file: 2 arrays taken for backbone",
        "box_head: not in the file, initialised",
    ]


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


def test_safetensors_of_half_precision_become_float32(tmp_path):
    path = tmp_path / "weights.safetensors"
    values = np.array([[0.5, -1.25], [3.0, 1e-3]])
    save_file(
        {
            "half": values.astype(np.float16),
            "brain": values.astype(ml_dtypes.bfloat16),
            "full": values.astype(np.float32),
            "count": np.array([3]),
        },
        path,
    )
    tensors = load_safetensors(path)
    kinds = {name: tensor.dtype.name for name, tensor in tensors.items()}
    assert kinds == {"half": "float32", "brain": "float32", "full": "float32", "count": "int64"}
    np.testing.assert_array_equal(tensors["half"], values.astype(np.float16))
    np.testing.assert_array_equal(tensors["brain"][0], [0.5, -1.25])


def test_unreadable_safetensors_are_named(tmp_path):
    path = tmp_path / "weights.safetensors"
    with pytest.raises(OSError, match=r"weights\.safetensors: no such file"):
        load_safetensors(path)
    path.write_bytes(b"not at all")
    with pytest.raises(ValueError, match=r"weights\.safetensors: not a readable safetensors file"):
        load_safetensors(path)

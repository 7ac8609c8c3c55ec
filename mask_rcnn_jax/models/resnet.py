"""ResNet trunks (He et al., "Deep Residual Learning", 2015) that return C2..C5."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.models.conv import Conv
from mask_rcnn_jax.models.frame import Frame
from mask_rcnn_jax.models.init import he_fan_out

BLOCKS_PER_STAGE = {
    10: (1, 1, 1, 1),
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


class FrozenNorm(nn.Module):
    """Batch norm folded into `x * scale + bias`, fixed: both vectors live in `batch_stats`."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[-1],)
        scale = self.variable("batch_stats", "scale", jnp.ones, shape, jnp.float32).value
        bias = self.variable("batch_stats", "bias", jnp.zeros, shape, jnp.float32).value
        scale, bias = scale.astype(self.dtype), bias.astype(self.dtype)
        return x * scale[None, None, None] + bias[None, None, None]


def make_norm(norm: str, eps: float, dtype: DTypeLike, train: bool):
    """The norm layer of that name.

    "frozen": a fixed scale and bias. "affine": fixed statistics, trained scale and bias (what
    TAO's freeze_bn and mmdetection's norm_eval do). "batch": trained. "group": 32 groups.
    """
    if norm == "frozen":
        return partial(FrozenNorm, dtype=dtype)
    if eps <= 0:
        raise ValueError(f"model.norm_eps is {eps}, expected 1e-5 or so with model.norm={norm}")
    if norm in ("batch", "affine"):
        stored = norm == "affine" or not train
        return partial(
            nn.BatchNorm, use_running_average=stored, momentum=0.9, epsilon=eps, dtype=dtype
        )
    if norm == "group":
        return partial(nn.GroupNorm, num_groups=32, epsilon=eps, dtype=dtype)
    raise ValueError(f"model.norm is {norm!r}, expected 'frozen', 'affine', 'batch' or 'group'")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions (depths up to 34)."""

    width: int
    stride: int
    conv: partial
    norm: partial

    expansion = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv(self.width, 3, self.stride, name="conv1")(x)
        y = nn.relu(self.norm(name="norm1")(y))
        y = self.norm(name="norm2")(self.conv(self.width, 3, 1, name="conv2")(y))
        if x.shape != y.shape:
            x = self.conv(self.width, 1, self.stride, name="shortcut")(x)
            x = self.norm(name="shortcut_norm")(x)
        return nn.relu(x + y)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with four times the width at the end (depths from 50)."""

    width: int
    stride: int
    stride_in: str
    conv: partial
    norm: partial

    expansion = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stride1, stride2 = (self.stride, 1) if self.stride_in == "1x1" else (1, self.stride)
        y = nn.relu(self.norm(name="norm1")(self.conv(self.width, 1, stride1, name="conv1")(x)))
        y = nn.relu(self.norm(name="norm2")(self.conv(self.width, 3, stride2, name="conv2")(y)))
        y = self.norm(name="norm3")(self.conv(4 * self.width, 1, 1, name="conv3")(y))
        if x.shape != y.shape:
            x = self.conv(4 * self.width, 1, self.stride, name="shortcut")(x)
            x = self.norm(name="shortcut_norm")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """ResNet of `depth` layers without the classifier.

    stride_in: the convolution of a bottleneck that strides, "3x3" (v1.5, torchvision) or "1x1"
        (the 2015 paper, MSRA weights).
    padding: of the convolutions; "torch" pads k // 2 on both sides, "same" is TensorFlow's rule
        (uneven at stride 2). pool_padding: the same of the stem's max-pooling.
    frozen_stages: how many of stem, res2, .. res5 get no gradient, counted from the stem.
    remat: the backward pass computes what is inside a block again, from the block's input.
    """

    depth: int
    norm: str
    norm_eps: float
    stride_in: str
    padding: str
    pool_padding: str
    frozen_stages: int
    dtype: DTypeLike
    remat: bool = False

    @nn.compact
    def __call__(self, images: jax.Array, train: bool, frame: Frame) -> list[jax.Array]:
        """[B, H, W, 3] normalised images to C2..C5, strides 4..32."""
        _check_choice("model.depth", self.depth, BLOCKS_PER_STAGE)
        _check_choice("model.stride_in", self.stride_in, ("3x3", "1x1"))
        _check_choice("model.padding", self.padding, ("torch", "same"))
        _check_choice("model.pool_padding", self.pool_padding, ("torch", "same"))

        def conv(width, kernel, stride, name):
            padding = "SAME" if self.padding == "same" else kernel // 2
            layer = Conv(width, (kernel, kernel), stride, padding, use_bias=False, dtype=self.dtype,
                         kernel_init=he_fan_out, name=name)  # fmt: skip
            return layer if kernel == 1 else lambda x: layer(frame.keep_inside(x))

        norm = make_norm(self.norm, self.norm_eps, self.dtype, train)
        again = nn.remat if self.remat else lambda block: block
        block = partial(again(BasicBlock), conv=conv, norm=norm)
        if self.depth >= 50:
            block = partial(again(Bottleneck), stride_in=self.stride_in, conv=conv, norm=norm)

        x = conv(64, 7, 2, name="stem_conv")(images.astype(self.dtype))
        x = nn.relu(norm(name="stem_norm")(x))
        x = _max_pool(frame.keep_inside(x), self.pool_padding)
        x = lax.stop_gradient(x) if self.frozen_stages >= 1 else x
        features = []
        for stage, blocks in enumerate(BLOCKS_PER_STAGE[self.depth], start=2):
            for i in range(blocks):
                stride = 2 if stage > 2 and i == 0 else 1
                x = block(32 * 2 ** (stage - 1), stride, name=f"res{stage}_{i}")(x)
            x = lax.stop_gradient(x) if self.frozen_stages >= stage else x
            features.append(x)
        return features


def _max_pool(x: jax.Array, padding: str) -> jax.Array:
    pads = "SAME" if padding == "same" else ((1, 1), (1, 1))
    return nn.max_pool(x, (3, 3), (2, 2), pads)


def _check_choice(name: str, value, choices) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {list(choices)}")

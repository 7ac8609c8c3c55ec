"""ResNet trunks (He et al., "Deep Residual Learning", 2015) that return C2..C5."""

from collections.abc import Callable
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

    @nn.compact
    def __call__(self, features: int) -> tuple[jax.Array, jax.Array]:
        """Scale and bias, [features] each, float32."""
        scale = self.variable("batch_stats", "scale", jnp.ones, (features,), jnp.float32).value
        bias = self.variable("batch_stats", "bias", jnp.zeros, (features,), jnp.float32).value
        return scale, bias


def make_norm(norm: str, eps: float, dtype: DTypeLike, train: bool):
    """The norm layer of that name.

    "frozen": a fixed scale and bias. "affine": fixed statistics, trained scale and bias (what
    TAO's freeze_bn and mmdetection's norm_eval do). "batch": trained. "group": 32 groups.
    """
    if norm == "frozen":
        return FrozenNorm
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
    unit: Callable

    expansion = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(self.unit(x, self.width, 3, self.stride, "conv1", "norm1"))
        y = self.unit(y, self.width, 3, 1, "conv2", "norm2")
        if x.shape != y.shape:
            x = self.unit(x, self.width, 1, self.stride, "shortcut", "shortcut_norm")
        return nn.relu(x + y)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with four times the width at the end (depths from 50)."""

    width: int
    stride: int
    stride_in: str
    unit: Callable

    expansion = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stride1, stride2 = (self.stride, 1) if self.stride_in == "1x1" else (1, self.stride)
        y = nn.relu(self.unit(x, self.width, 1, stride1, "conv1", "norm1"))
        y = nn.relu(self.unit(y, self.width, 3, stride2, "conv2", "norm2"))
        y = self.unit(y, 4 * self.width, 1, 1, "conv3", "norm3")
        if x.shape != y.shape:
            x = self.unit(x, 4 * self.width, 1, self.stride, "shortcut", "shortcut_norm")
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

        make_layer = make_norm(self.norm, self.norm_eps, self.dtype, train)

        def unit(x, width, kernel, stride, conv, norm):
            """Convolution and norm of these names."""
            padding = "SAME" if self.padding == "same" else kernel // 2
            conv = Conv(width, (kernel, kernel), stride, padding, use_bias=False, dtype=self.dtype,
                        kernel_init=he_fan_out, name=conv)  # fmt: skip
            norm = make_layer(name=norm)
            x = x if kernel == 1 else frame.keep_inside(x)
            if isinstance(norm, FrozenNorm):
                return conv(x, norm(width))
            return norm(conv(x))

        again = nn.remat if self.remat else lambda block: block
        block = partial(again(BasicBlock), unit=unit)
        if self.depth >= 50:
            block = partial(again(Bottleneck), stride_in=self.stride_in, unit=unit)

        x = nn.relu(unit(images.astype(self.dtype), 64, 7, 2, "stem_conv", "stem_norm"))
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

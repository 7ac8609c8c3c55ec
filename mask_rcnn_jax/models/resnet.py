"""ResNet backbones (He et al., "Deep Residual Learning", 2015) returning C2..C5."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
from flax import linen as nn
from jax import lax

from mask_rcnn_jax.models.channels import Channels, make_channels, narrow
from mask_rcnn_jax.models.conv_norm import make_conv_norm
from mask_rcnn_jax.models.norm import check_channels
from mask_rcnn_jax.models.relu import relu
from mask_rcnn_jax.models.trunk import ConvTrunk
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.ranges import Count, check

BLOCKS_PER_STAGE = {
    10: (1, 1, 1, 1),
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
STEM_WIDTH = 64


class BasicBlock(nn.Module):
    """Two 3x3 convolutions (depths up to 34)."""

    inner: tuple[Channels, ...]  # of conv1
    output: Channels
    stride: int
    shortcut: bool  # whether the shortcut has a convolution
    conv_norm: Callable

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = relu(self.conv_norm(x, self.inner[0], 3, self.stride, "conv1", "norm1"))
        y = self.conv_norm(y, self.output, 3, 1, "conv2", "norm2")
        if self.shortcut:
            x = self.conv_norm(x, self.output, 1, self.stride, "shortcut", "shortcut_norm")
        return relu(x + y)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions (depths from 50), in ResNeXt the second one in groups."""

    inner: tuple[Channels, ...]  # of conv1 and conv2; one for both if tied
    output: Channels
    stride: int
    shortcut: bool  # whether the shortcut has a convolution
    stride_in: str
    groups: int  # without pruning
    conv_norm: Callable

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stride1, stride2 = (self.stride, 1) if self.stride_in == "1x1" else (1, self.stride)
        first, second = self.inner[0], self.inner[-1]
        groups = second.groups(self.groups) if self.groups > 1 else 1
        y = relu(self.conv_norm(x, first, 1, stride1, "conv1", "norm1"))
        y = relu(self.conv_norm(y, second, 3, stride2, "conv2", "norm2", groups))
        y = self.conv_norm(y, self.output, 1, 1, "conv3", "norm3")
        if self.shortcut:
            x = self.conv_norm(x, self.output, 1, self.stride, "shortcut", "shortcut_norm")
        return relu(x + y)


class ResNet(ConvTrunk, kw_only=True):
    """ResNet without the classifier.

    Attributes:
        depth: layers.
        stride_in: strided convolution in a bottleneck: "3x3" (v1.5, torchvision) or "1x1" (the 2015
            paper, MSRA weights).
        padding: "torch" pads convolutions by k // 2 on both sides, "same" uses TensorFlow's rule
            (uneven at stride 2).
        pool_padding: the same for the stem's max pooling.
        groups: groups of channels of the 3x3 convolution in a bottleneck; above 1 for ResNeXt (Xie
            et al., 2017).
        width_per_group: channels of a group in the first stage.
    """

    depth: Literal[10, 18, 34, 50, 101, 152] = 50
    stride_in: Literal["3x3", "1x1"] = "3x3"
    padding: Literal["torch", "same"] = "torch"
    pool_padding: Literal["torch", "same"] = "torch"
    groups: Count = 1
    width_per_group: Count = 64

    def __post_init__(self):
        check(self)
        if self.depth < 50 and self.groups > 1:
            raise ValueError(f"groups is {self.groups}, expected 1 with depth={self.depth}")
        if self.depth >= 50:
            channels = self.groups * self.width_per_group
            check_channels(self.norm, channels, "groups times width_per_group")
        super().__post_init__()

    @property
    def prunable(self) -> dict[str, Channels]:
        """The stem's channels, each stage's, tied by its sums, and those inside each block."""
        found = {}
        for stage, blocks in enumerate(BLOCKS_PER_STAGE[self.depth], start=2):
            width, is_deep = 32 * 2 ** (stage - 1), self.depth >= 50
            if stage == 2 and is_deep:  # otherwise the stem is added to the first stage
                found["stem"] = make_channels(STEM_WIDTH, self.norm)
            found[f"res{stage}"] = make_channels((4 if is_deep else 1) * width, self.norm)
            inner = width * self.groups * self.width_per_group // 64 if is_deep else width
            # A convolution by groups ties its inputs to its outputs.
            names = ("conv1", "conv2") if is_deep and self.groups == 1 else ("conv1",)
            each = make_channels(inner, self.norm, self.groups)
            found |= {f"res{stage}_{i}/{name}": each for i in range(blocks) for name in names}
        return found

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool, extent: ValidExtent | None = None
    ) -> list[jax.Array]:
        """Map normalized images [B, H, W, 3] to C2..C5; layers read zeros outside `extent`."""
        options: dict[str, Any] = dict(dtype=self.dtype, eps=self.norm_eps, padding=self.padding)
        conv_norm = make_conv_norm(self.norm, train=train, extent=extent, **options)
        maybe_remat = nn.remat if self.remat else lambda block: block
        block = partial(maybe_remat(BasicBlock), conv_norm=conv_norm)
        is_deep = self.depth >= 50
        if is_deep:
            more: dict[str, Any] = dict(stride_in=self.stride_in, groups=self.groups)
            block = partial(maybe_remat(Bottleneck), conv_norm=conv_norm, **more)
        channels = narrow(self.prunable, self.widths)
        stem = channels["stem" if is_deep else "res2"]

        x = relu(conv_norm(x.astype(self.dtype), stem, 7, 2, "stem_conv", "stem_norm"))
        x = _max_pool(x if extent is None else extent.mask(x), self.pool_padding)
        x = lax.stop_gradient(x) if self.frozen_stages >= 1 else x
        features = []
        for stage, blocks in enumerate(BLOCKS_PER_STAGE[self.depth], start=2):
            for i in range(blocks):
                name, stride = f"res{stage}_{i}", 2 if stage > 2 and i == 0 else 1
                names = [f"{name}/{conv}" for conv in ("conv1", "conv2")]
                inner = tuple(channels[each] for each in names if each in channels)
                shortcut = i == 0 and (stage > 2 or is_deep)
                x = block(inner, channels[f"res{stage}"], stride, shortcut, name=name)(x)
            x = lax.stop_gradient(x) if self.frozen_stages >= stage else x
            features.append(x)
        return features


def _max_pool(x: jax.Array, padding: str) -> jax.Array:
    pads = "SAME" if padding == "same" else ((1, 1), (1, 1))
    return nn.max_pool(x, (3, 3), (2, 2), pads)

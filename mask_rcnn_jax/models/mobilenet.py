"""MobileNetV4 backbones (Qin et al., "MobileNetV4: Universal Models for the Mobile Ecosystem",
2024), those of convolutions alone: C2..C5."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
from flax import linen as nn
from jax import lax

from mask_rcnn_jax.models.channels import Channels, make_channels, narrow
from mask_rcnn_jax.models.conv_norm import make_conv_norm
from mask_rcnn_jax.models.norm import check_channels
from mask_rcnn_jax.models.relu import relu
from mask_rcnn_jax.models.trunk import ConvTrunk
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.ranges import Positive, check

WIDTH_UNIT = 8  # widths are multiples of it
MOST_LOST = 0.1  # share of a width by rounding down


class Shape(NamedTuple):
    """A block, of which the first in a stage has a stride of 2.

    "conv" is one convolution. "fused" is a convolution that widens and a 1x1 one that narrows.
    "universal" (the paper's universal inverted bottleneck) has 1x1 convolutions for both, and
    depthwise ones of these sides, 0 for none: before the first, which makes it a ConvNeXt block,
    between them, as in MobileNetV2, at both places, or at none.
    """

    kind: Literal["conv", "fused", "universal"]
    sides: tuple[int, int]  # of "conv" and "fused" only the first
    ratio: int  # channels inside, by those that come in
    width: int


def _conv(side: int, width: int) -> Shape:
    return Shape("conv", (side, 0), 1, width)


def _universal(first: int, second: int, ratio: int, *widths: int) -> tuple[Shape, ...]:
    return tuple(Shape("universal", (first, second), ratio, width) for width in widths)


_FUSED = (Shape("fused", (3, 0), 4, 48),)
# The stem's width, then the blocks of each stage: the paper's tables of its models.
SIZES: dict[str, tuple[int, tuple[tuple[Shape, ...], ...]]] = {
    "small": (
        32,
        (
            (_conv(3, 32), _conv(1, 32)),
            (_conv(3, 96), _conv(1, 64)),
            (
                *_universal(5, 5, 3, 96),
                *_universal(0, 3, 2, *4 * [96]),
                *_universal(3, 0, 4, 96),
            ),
            (
                *_universal(3, 3, 6, 128),
                *_universal(5, 5, 4, 128),
                *_universal(0, 5, 4, 128),
                *_universal(0, 5, 3, 128),
                *_universal(0, 3, 4, 128, 128),
            ),
        ),
    ),
    "medium": (
        32,
        (
            _FUSED,
            (*_universal(3, 5, 4, 80), *_universal(3, 3, 2, 80)),
            (
                *_universal(3, 5, 6, 160),
                *_universal(3, 3, 4, 160, 160),
                *_universal(3, 5, 4, 160),
                *_universal(3, 3, 4, 160),
                *_universal(3, 0, 4, 160),
                *_universal(0, 0, 2, 160),
                *_universal(3, 0, 4, 160),
            ),
            (
                *_universal(5, 5, 6, 256),
                *_universal(5, 5, 4, 256),
                *_universal(3, 5, 4, 256, 256),
                *_universal(0, 0, 4, 256),
                *_universal(3, 0, 4, 256),
                *_universal(3, 5, 2, 256),
                *_universal(5, 5, 4, 256),
                *_universal(0, 0, 4, 256, 256),
                *_universal(5, 0, 2, 256),
            ),
        ),
    ),
    "large": (
        24,
        (
            _FUSED,
            (*_universal(3, 5, 4, 96), *_universal(3, 3, 4, 96)),
            (
                *_universal(3, 5, 4, 192),
                *_universal(3, 3, 4, *3 * [192]),
                *_universal(3, 5, 4, 192),
                *_universal(5, 3, 4, *5 * [192]),
                *_universal(3, 0, 4, 192),
            ),
            (
                *_universal(5, 5, 4, *4 * [512]),
                *_universal(5, 0, 4, 512),
                *_universal(5, 3, 4, 512),
                *_universal(5, 0, 4, 512, 512),
                *_universal(5, 3, 4, 512),
                *_universal(5, 5, 4, 512),
                *_universal(5, 0, 4, *3 * [512]),
            ),
        ),
    ),
}


class Block(nn.Module):
    """Convolutions of a `Shape`; a shortcut beside them where a "universal" one keeps the map's
    size and width."""

    shape: Shape
    given: Channels
    inner: Channels | None  # between the 1x1 convolutions, or the fused one and its 1x1
    output: Channels
    stride: int
    conv_norm: Callable

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [B, H, W, given.count] to [B, h, w, output.count]."""
        (first, second), conv_norm = self.shape.sides, self.conv_norm
        if self.inner is None:
            return relu(conv_norm(x, self.output, first, self.stride, "conv", "norm"))
        if self.shape.kind == "fused":
            y = relu(conv_norm(x, self.inner, first, self.stride, "conv_exp", "norm"))
            return conv_norm(y, self.output, 1, 1, "conv_pwl", "conv_pwl_norm")
        y = x
        if first:
            stride = 1 if second else self.stride
            names = "dw_start", "dw_start_norm"
            y = conv_norm(y, self.given, first, stride, *names, groups=self.given.count)
        y = relu(conv_norm(y, self.inner, 1, 1, "pw_exp", "pw_exp_norm"))
        if second:
            names = "dw_mid", "dw_mid_norm"
            y = conv_norm(y, self.inner, second, self.stride, *names, groups=self.inner.count)
            y = relu(y)
        y = conv_norm(y, self.output, 1, 1, "pw_proj", "pw_proj_norm")
        return x + y if self.stride == 1 and self.given.full == self.output.full else y


class MobileNetV4(ConvTrunk, kw_only=True):
    """MobileNetV4 of convolutions, without the layers behind its last block.

    ReLU is its only activation, and it has no squeeze-and-excitation, so that int8 and accelerators
    without other operations compute all of it.

    Attributes:
        size: the paper's model of convolutions.
        multiplier: widths are those of the paper times it, in multiples of 8; below 1 the stem
            stays.
    """

    size: Literal["small", "medium", "large"] = "small"
    multiplier: Positive = 1.0

    def __post_init__(self):
        check(self)
        for name, channels in self.prunable.items():
            check_channels(self.norm, channels.full, f"width of {name}")
        super().__post_init__()

    @property
    def stem_width(self) -> int:
        """Channels of the first convolution."""
        return self._round(SIZES[self.size][0], max(self.multiplier, 1.0))

    @property
    def stages(self) -> list[list[Shape]]:
        """Blocks of res2..res5, with the model's widths."""
        return [
            [block._replace(width=self._round(block.width, self.multiplier)) for block in blocks]
            for blocks in SIZES[self.size][1]
        ]

    @staticmethod
    def _round(width: int, multiplier: float) -> int:
        exact = width * multiplier
        rounded = max(WIDTH_UNIT, int(exact / WIDTH_UNIT + 0.5) * WIDTH_UNIT)
        return rounded + WIDTH_UNIT * (rounded < (1 - MOST_LOST) * exact)

    @property
    def prunable(self) -> dict[str, Channels]:
        """The stem's channels, each stage's, tied by its sums, and those inside each block, which
        its depthwise convolution ties."""
        found, before = {"stem": make_channels(self.stem_width, self.norm)}, self.stem_width
        for stage, blocks in enumerate(self.stages, start=2):
            for i, block in enumerate(blocks):
                name = f"res{stage}_{i}"
                if block.kind != "conv":
                    inner = {"fused": "conv_exp", "universal": "pw_exp"}[block.kind]
                    found[f"{name}/{inner}"] = make_channels(before * block.ratio, self.norm)
                found[_output(stage, i, blocks)] = make_channels(block.width, self.norm)
                before = block.width
        return found

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool, extent: ValidExtent | None = None
    ) -> list[jax.Array]:
        """Map normalized images [B, H, W, 3] to C2..C5; layers read zeros outside `extent`."""
        options: dict[str, Any] = dict(dtype=self.dtype, eps=self.norm_eps, extent=extent)
        conv_norm = make_conv_norm(self.norm, train=train, **options)
        make_block = partial(nn.remat(Block) if self.remat else Block, conv_norm=conv_norm)

        channels = narrow(self.prunable, self.widths)
        last = channels["stem"]  # channels before a block
        x = relu(conv_norm(x.astype(self.dtype), last, 3, 2, "stem_conv", "stem_norm"))
        x = lax.stop_gradient(x) if self.frozen_stages >= 1 else x
        features = []
        for stage, blocks in enumerate(self.stages, start=2):
            for i, shape in enumerate(blocks):
                name, output = f"res{stage}_{i}", channels[_output(stage, i, blocks)]
                inner = channels.get(f"{name}/pw_exp", channels.get(f"{name}/conv_exp"))
                block = make_block(shape, last, inner, output, 1 if i else 2, name=name)
                x, last = block(x), output
            x = lax.stop_gradient(x) if self.frozen_stages >= stage else x
            features.append(x)
        return features


def _output(stage: int, block: int, blocks: list[Shape]) -> str:
    """Name of a block's output channels: the stage's, but convolutions before its last have their
    own."""
    is_own = blocks[block].kind == "conv" and block + 1 < len(blocks)
    return f"res{stage}_{block}" if is_own else f"res{stage}"

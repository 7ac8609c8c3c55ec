"""RegNet backbones (Radosavovic et al., "Designing Network Design Spaces", 2020): C2..C5."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from mask_rcnn_jax.models.channels import Channels, make_channels, narrow
from mask_rcnn_jax.models.conv import Conv
from mask_rcnn_jax.models.conv_norm import make_conv_norm
from mask_rcnn_jax.models.init import he_fan_out
from mask_rcnn_jax.models.norm import check_channels
from mask_rcnn_jax.models.relu import relu
from mask_rcnn_jax.models.trunk import STAGES, ConvTrunk
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.ranges import Count, NotNegative, Range, Whole, check

STEM_WIDTH = 32
WIDTH_UNIT = 8  # widths are multiples of it, and then of the group width


class Block(nn.Module):
    """1x1, grouped 3x3 and 1x1 convolutions of one width beside a shortcut."""

    inner: Channels
    output: Channels
    groups: int
    stride: int
    shortcut: bool  # whether the shortcut has a convolution
    squeezed: int  # channels between the layers of squeeze-and-excitation; 0: none
    conv_norm: Callable

    @nn.compact
    def __call__(self, x: jax.Array, inside: jax.Array | None) -> jax.Array:
        """Map [B, H, W, C] to [B, h, w, output.count].

        inside: [1, h, w, 1] bool, cells that squeeze-and-excitation sees; None: all.
        """
        y = relu(self.conv_norm(x, self.inner, 1, 1, "a", "a_norm"))
        y = relu(self.conv_norm(y, self.inner, 3, self.stride, "b", "b_norm", self.groups))
        if self.squeezed:
            y = y * self._excite(y, inside)
        y = self.conv_norm(y, self.output, 1, 1, "c", "c_norm")
        if self.shortcut:
            x = self.conv_norm(x, self.output, 1, self.stride, "shortcut", "shortcut_norm")
        return relu(x + y)

    def _excite(self, x: jax.Array, inside: jax.Array | None) -> jax.Array:
        """Return factors [B, 1, 1, C] from the channels' means (Hu et al., 2018)."""
        options: dict[str, Any] = dict(kernel_init=he_fan_out, dtype=x.dtype)
        mean = jnp.mean(x.astype(jnp.float32), (1, 2), keepdims=True, where=inside)
        y = relu(Conv(self.squeezed, (1, 1), name="se_fc1", **options)(mean))
        return nn.sigmoid(Conv(x.shape[-1], (1, 1), name="se_fc2", **options)(y))


class RegNet(ConvTrunk, kw_only=True):
    """RegNet without the classifier: RegNetX, or RegNetY with squeeze-and-excitation.

    Attributes:
        depth: blocks of all four stages.
        initial_width: channels of the first block before rounding, w_0 in the paper.
        slope: channels that every block adds before rounding, w_a.
        multiplier: widths are rounded to its powers times the first one, w_m.
        group_width: channels of a group in the 3x3 convolutions, g.
        se_ratio: channels between the layers of squeeze-and-excitation, as a share of the block's
            input; 0 for RegNetX, 0.25 for RegNetY.
    """

    depth: Whole = 23
    initial_width: Annotated[
        int, Range("a multiple of 8", lambda width: width > 0 and width % WIDTH_UNIT == 0)
    ] = 96
    slope: NotNegative = 38.65
    multiplier: Annotated[float, Range("above 1", lambda factor: factor > 1)] = 2.43
    group_width: Count = 40
    se_ratio: NotNegative = 0.0

    def __post_init__(self):
        check(self)
        widths = [width for width, _, _ in self.stages]
        if len(widths) != STAGES:
            entries = "initial_width, slope and multiplier"
            raise ValueError(f"depth, {entries} give stages of widths {widths}, expected {STAGES}")
        for width in widths:
            check_channels(self.norm, width, "width of a stage")
        super().__post_init__()

    @property
    def stages(self) -> list[tuple[int, int, int]]:
        """Width, blocks and groups of res2..res5 (section 3.3).

        Widths grow linearly by block and are rounded; blocks of one width form a stage.
        """
        widths = self.initial_width + self.slope * np.arange(self.depth)
        powers = np.round(np.log(widths / self.initial_width) / np.log(self.multiplier))
        widths = self.initial_width * self.multiplier**powers
        widths = np.round(widths / WIDTH_UNIT).astype(int) * WIDTH_UNIT
        stages = []
        for width, blocks in zip(*np.unique(widths, return_counts=True), strict=True):
            side = min(self.group_width, int(width))
            groups = round(int(width) / side)
            stages.append((groups * side, int(blocks), groups))
        return stages

    @property
    def prunable(self) -> dict[str, Channels]:
        """The stem's channels, each stage's, tied by its sums, and those inside each block, which
        the convolution by groups ties."""
        found = {"stem": make_channels(STEM_WIDTH, self.norm)}
        for stage, (width, blocks, groups) in enumerate(self.stages, start=2):
            found[f"res{stage}"] = make_channels(width, self.norm)
            for i in range(blocks):
                found[f"res{stage}_{i}/b"] = make_channels(width, self.norm, groups)
        return found

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool, extent: ValidExtent | None = None
    ) -> list[jax.Array]:
        """Map normalized images [B, H, W, 3] to C2..C5; layers read zeros outside `extent`."""
        options: dict[str, Any] = dict(dtype=self.dtype, eps=self.norm_eps, extent=extent)
        conv_norm = make_conv_norm(self.norm, train=train, **options)
        block = partial(nn.remat(Block) if self.remat else Block, conv_norm=conv_norm)

        channels = narrow(self.prunable, self.widths)
        last = channels["stem"]  # channels before a block
        x = relu(conv_norm(x.astype(self.dtype), last, 3, 2, "stem_conv", "stem_norm"))
        x = lax.stop_gradient(x) if self.frozen_stages >= 1 else x
        features = []
        for stage, (_, blocks, full_groups) in enumerate(self.stages, start=2):
            shape = (-(-x.shape[1] // 2), -(-x.shape[2] // 2))
            inside = None if extent is None else extent.inside(shape)
            for i in range(blocks):
                name, output = f"res{stage}_{i}", channels[f"res{stage}"]
                inner = channels[f"{name}/b"]
                groups = inner.groups(full_groups)
                options = dict(stride=1 if i else 2, shortcut=i == 0, groups=groups)
                options["squeezed"] = round(last.full * self.se_ratio)
                x = block(inner, output, **options, name=name)(x, inside)
                last = output
            x = lax.stop_gradient(x) if self.frozen_stages >= stage else x
            features.append(x)
        return features

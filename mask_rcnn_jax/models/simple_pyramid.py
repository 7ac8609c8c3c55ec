"""Feature pyramid from a single map (Li et al., "Exploring Plain Vision Transformer Backbones for
Object Detection", 2022)."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from mask_rcnn_jax.models.conv import Conv, UpConv
from mask_rcnn_jax.models.init import fan_init
from mask_rcnn_jax.models.norm import LIVE, Norm, check_channels, make_norm, normalize
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.ranges import Count, check

STRIDE = 16  # of the maps that it takes, pixels per cell
LEVELS = 4  # P2..P5


class SimplePyramid(nn.Module):
    """A backbone's maps of stride 16 to P2..P6; P6 subsamples P5 by 2.

    Attributes:
        channels: channels per pyramid map.
        maps: of several maps of the backbone (`layers` of "dino"), "last" takes the last one for
            all levels, "mean" their mean, and "each" four of them, the first for P2 and the last
            for P5, as BEiT's pyramid does (Bao et al., 2022).
        norm: norm behind every convolution, which then has no bias, see `models.norm`.
    """

    channels: Count = 256
    norm: Norm = "layer"
    maps: Literal["last", "mean", "each"] = "last"
    dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        check(self)
        check_channels(self.norm, self.channels, "channels")
        super().__post_init__()

    @property
    def trains_batch_stats(self) -> bool:
        """Whether training updates `batch_stats`."""
        return self.norm in LIVE

    @nn.compact
    def __call__(
        self, features: list[jax.Array], extent: ValidExtent, train: bool = False
    ) -> list[jax.Array]:
        """Convert maps of stride 16 to strides 4..64, zero outside the valid extent."""
        make = partial(make_norm, train=train, dtype=self.dtype)
        fan_in = fan_init("linear")

        def conv(kernel: int, name: str, x: jax.Array) -> jax.Array:
            options: dict[str, Any] = dict(dtype=self.dtype, kernel_init=fan_in)
            options |= dict(padding=kernel // 2, use_bias=self.norm == "none", name=name)
            layer = Conv(self.channels, (kernel, kernel), **options)
            norm = None if self.norm == "none" else make(self.norm)(name=f"{name}_norm")
            return normalize(partial(layer, x), norm, self.channels, extent.inside(x.shape[1:3]))

        def up(x: jax.Array, name: str) -> jax.Array:
            batch, height, width, channels = x.shape
            init = nn.initializers.variance_scaling(
                1 / 3, "fan_in", "uniform", in_axis=2, out_axis=3
            )
            x = UpConv(channels // 2, self.dtype, init, name=name)(x)
            return x.swapaxes(2, 3).reshape(batch, 2 * height, 2 * width, channels // 2)

        stride = -(-extent.canvas[0] // features[-1].shape[1])
        if stride != STRIDE:
            raise ValueError(
                f"model.fpn.name is 'simple', which takes a last map of stride {STRIDE}; that of "
                f"the backbone has {stride}"
            )
        first, second, third, fourth = self._sources(features)
        larger = make("layer")(name="up2_norm")(up(first, "up2_first"))
        larger = nn.gelu(larger.astype(jnp.float32), approximate=False).astype(self.dtype)
        maps = {
            2: up(larger, "up2_second"),
            3: up(second, "up3_first"),
            4: third,
            5: nn.max_pool(fourth, (2, 2), (2, 2)),
        }
        pyramid = []
        for level, scaled in maps.items():
            lateral = conv(1, f"fpn_lateral{level}", scaled)
            output = conv(3, f"fpn_output{level}", extent.mask(lateral))
            pyramid.append(extent.mask(output))
        return [*pyramid, pyramid[-1][:, ::2, ::2]]

    def _sources(self, features: list[jax.Array]) -> list[jax.Array]:
        """The maps that P2..P5 are made from."""
        if self.maps == "each":
            if len(features) != LEVELS:
                raise ValueError(
                    f"model.fpn.maps is 'each', which takes {LEVELS} maps; the backbone has "
                    f"{len(features)}"
                )
            return features
        x = features[-1]
        if self.maps == "mean":
            x = jnp.mean(jnp.stack(features).astype(jnp.float32), axis=0).astype(self.dtype)
        return [x] * LEVELS

"""Feature pyramid (Lin et al., "Feature Pyramid Networks", 2017)."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from mask_rcnn_jax.models.channels import Channels, Widths, make_channels, narrow
from mask_rcnn_jax.models.conv import Conv
from mask_rcnn_jax.models.init import fan_init
from mask_rcnn_jax.models.norm import GROUPS, LIVE, Norm, check_channels, make_norm, normalize
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.ranges import Count, check


class FPN(nn.Module):
    """C2..C5 to P2..P6; P6 subsamples P5 by 2.

    Attributes:
        channels: channels per pyramid map.
        init: kernel initializer, see `models.init.fan_init`.
        norm: norm behind every convolution, which then has no bias, see `models.norm`.
        widths: channels where `prune` left fewer, by name, such as (("fpn_lateral", 192),
            ("fpn_output", 128)); (): `channels`.
    """

    channels: Count = 256
    init: Literal["glorot", "xavier_fill", "linear"] = "xavier_fill"  # type: ignore[assignment]
    norm: Norm = "none"
    dtype: DTypeLike = jnp.float32
    widths: Widths = ()

    def __post_init__(self):
        check(self)
        check_channels(self.norm, self.channels, "channels")
        narrow(self.prunable, self.widths)
        super().__post_init__()

    @property
    def prunable(self) -> dict[str, Channels]:
        """The laterals' channels, tied by top-down sums, and the maps', which all heads read."""
        channels = make_channels(self.channels, self.norm)
        return {"fpn_lateral": channels, "fpn_output": channels}

    @property
    def trains_batch_stats(self) -> bool:
        """Whether training updates `batch_stats`."""
        return self.norm in LIVE

    @nn.compact
    def __call__(
        self, features: list[jax.Array], extent: ValidExtent, train: bool = False
    ) -> list[jax.Array]:
        """Convert maps at strides 4..32 to strides 4..64, zero outside the valid extent."""

        channels = narrow(self.prunable, self.widths)

        def conv(kernel: int, name: str, x: jax.Array) -> jax.Array:
            width = channels[name[:-1]]
            options: dict[str, Any] = dict(dtype=self.dtype, kernel_init=fan_init(self.init))
            options |= dict(padding=kernel // 2, use_bias=self.norm == "none", name=name)
            layer = Conv(width.count, (kernel, kernel), **options)
            if self.norm == "none":
                return layer(x)
            options = dict(train=train, dtype=self.dtype, num_groups=width.groups(GROUPS))
            norm = make_norm(self.norm, **options)(name=f"{name}_norm")
            return normalize(partial(layer, x), norm, width.count, extent.inside(x.shape[1:3]))

        if len(features) != 4:
            raise ValueError(
                f"model.fpn.name is 'fpn', which takes 4 maps; the backbone has {len(features)}"
            )
        pyramid, top_down = [], None
        for level in range(5, 1, -1):
            lateral = conv(1, f"fpn_lateral{level}", features[level - 2])
            top_down = lateral if top_down is None else lateral + _upsample(top_down)
            output = conv(3, f"fpn_output{level}", extent.mask(top_down))
            pyramid.insert(0, extent.mask(output))
        return [*pyramid, pyramid[-1][:, ::2, ::2]]


def _upsample(x: jax.Array) -> jax.Array:
    """Double height and width, nearest neighbor."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)

"""Convolutions and norms as a trunk has them, all of one kind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.typing import DTypeLike

from mask_rcnn_jax.models.channels import Channels
from mask_rcnn_jax.models.conv import Conv
from mask_rcnn_jax.models.init import he_depthwise, he_fan_out
from mask_rcnn_jax.models.norm import GROUPS, make_norm, normalize
from mask_rcnn_jax.ops.extent import ValidExtent


def make_conv_norm(
    norm: str,
    *,
    train: bool,
    dtype: DTypeLike,
    eps: float,
    padding: str = "torch",
    extent: ValidExtent | None = None,
) -> Callable[..., jax.Array]:
    """Return a function that adds a convolution and a norm to the module that calls it.

    Args:
        norm: name of a norm with an epsilon `eps`, see `models.norm`.
        padding: "torch" pads by k // 2 on both sides, "same" uses TensorFlow's rule.
        extent: convolutions read zeros outside it, and statistics leave other cells out.
    """

    def conv_norm(
        x: jax.Array,
        channels: Channels,
        side: int,
        stride: int,
        name: str,
        norm_name: str,
        groups: int = 1,
    ) -> jax.Array:
        """Map [B, H, W, C] to [B, h, w, channels.count] by layers of these names."""
        init = he_depthwise if 1 < groups == channels.count else he_fan_out
        options: dict[str, Any] = dict(use_bias=False, dtype=dtype, kernel_init=init)
        options |= dict(groups=groups, name=name)
        pads = "SAME" if padding == "same" else side // 2
        conv = Conv(channels.count, (side, side), stride, pads, **options)
        make_layer = make_norm(
            norm, train=train, dtype=dtype, eps=eps, num_groups=channels.groups(GROUPS)
        )
        cells = None
        if extent is not None:
            x = x if side == 1 else extent.mask(x)
            cells = extent.inside((-(-x.shape[1] // stride), -(-x.shape[2] // stride)))
        return normalize(partial(conv, x), make_layer(name=norm_name), channels.count, cells)

    return conv_norm

"""Feature pyramid (Lin et al., "Feature Pyramid Networks", 2017)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from mask_rcnn_jax.models.conv import Conv
from mask_rcnn_jax.models.frame import Frame
from mask_rcnn_jax.models.init import fan_init


class FPN(nn.Module):
    """C2..C5 to P2..P6, all with `channels`; P6 is every second pixel of P5."""

    channels: int
    kernel_init: str
    dtype: DTypeLike

    @nn.compact
    def __call__(self, features: list[jax.Array], frame: Frame) -> list[jax.Array]:
        """Maps of strides 4..32 to maps of strides 4..64."""

        def conv(kernel, name):
            return Conv(self.channels, (kernel, kernel), padding=kernel // 2, dtype=self.dtype,
                        kernel_init=fan_init(self.kernel_init), name=name)  # fmt: skip

        pyramid = []
        top_down = None
        for level in range(5, 1, -1):
            lateral = conv(1, f"fpn_lateral{level}")(features[level - 2])
            top_down = lateral if top_down is None else lateral + _upsample(top_down)
            output = conv(3, f"fpn_output{level}")(frame.keep_inside(top_down))
            pyramid.insert(0, frame.keep_inside(output))
        return [*pyramid, pyramid[-1][:, ::2, ::2]]


def _upsample(x: jax.Array) -> jax.Array:
    """Twice the height and width, nearest."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)

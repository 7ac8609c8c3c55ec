"""A backbone of four convolutions, for tests of what comes after it: half the time to compile."""

import jax.numpy as jnp
from flax import linen as nn

SECTION = {"name": "tests.small_trunk:FourConvolutions"}


class FourConvolutions(nn.Module):
    """Feature maps of strides 4, 8, 16 and 32, each from the one before."""

    widths: tuple[int, ...] = (8, 12, 16, 24)
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, *, train):
        maps = []
        for i, width in enumerate(self.widths):
            size, stride = ((5, 5), (4, 4)) if i == 0 else ((3, 3), (2, 2))
            x = nn.relu(nn.Conv(width, size, stride, dtype=self.dtype, name=f"conv{i}")(x))
            maps.append(x)
        return maps

"""Swin transformers of the second version (Liu et al., "Swin Transformer V2: Scaling Up Capacity
and Resolution", 2022)."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from mask_rcnn_jax.models.init import normal_dense
from mask_rcnn_jax.models.shifted_windows import distances
from mask_rcnn_jax.models.swin import NORMS, Attention, Swin, split_heads
from mask_rcnn_jax.models.trunk import STAGES, of_stages
from mask_rcnn_jax.ranges import Range

TrainedWindows = Annotated[
    tuple[int, ...],
    Range(
        f"{STAGES} numbers, 0 or at least 2",
        lambda sides: len(sides) == STAGES and all(side == 0 or side >= 2 for side in sides),
    ),
]
HIDDEN = 512  # channels between the layers that compute positions
MOST_SCALE = 100.0  # what multiplies cosines, at most
LEAST_LENGTH = 1e-12  # of queries and keys


class SwinV2(Swin, kw_only=True):
    """Swin transformer whose attention takes the cosine of queries and keys, whose biases are a
    function of two cells' distance on a logarithmic scale, and whose norms are behind layers.

    Otherwise as `Swin`: norms behind the four maps, padding, extent and shifts.

    Attributes:
        pretrained_windows: side of the window in each stage that positions were learned with, where
            it is another one than now; 0: as in `windows`.
    """

    windows: Annotated[tuple[int, ...], of_stages(2)] = (8, 8, 8, 8)
    shift_single: bool = False
    pretrained_windows: TrainedWindows = (0, 0, 0, 0)
    exempt_from_decay: tuple[str, ...] = ("position_fc1", "position_fc2", "logit_scale", *NORMS)

    post_norm = True

    @nn.nowrap
    def make_attention(self, stage: int, shifts: tuple[int, int]) -> Callable[..., nn.Module]:
        """Return what makes the attention of a block of a stage, 2 to 5."""
        at = stage - 2
        heads, window = self.num_heads[at], self.windows[at]
        learned = self.pretrained_windows[at] or window
        return partial(CosineAttention, heads, window, shifts, self.dtype, learned)


class CosineAttention(Attention):
    """Attention in windows by the cosine of queries and keys, times a number per head."""

    learned: int  # side of the window that positions were learned with

    def project(self, windows: jax.Array) -> tuple[jax.Array, ...]:
        """Return queries, keys and values [N, T, heads, c] of windows [N, T, C]; keys have no
        bias."""
        channels, zeros = windows.shape[-1], nn.initializers.zeros
        layer = normal_dense(3 * channels, dtype=self.dtype, use_bias=False, name="qkv")
        biases = [self.param(f"{kind}_bias", zeros, (channels,), jnp.float32) for kind in "qv"]
        bias = jnp.concatenate([biases[0], jnp.zeros_like(biases[0]), biases[1]])
        qkv = layer(windows).astype(jnp.float32) + bias[None, None]
        query, key, value = split_heads(qkv, self.heads)
        scale = self.param("logit_scale", nn.initializers.constant(np.log(10)), (self.heads,))
        scale = jnp.exp(jnp.minimum(scale, np.log(MOST_SCALE)))
        query = unit(query) * scale[None, None, :, None]
        return tuple(x.astype(self.dtype) for x in (query, unit(key), value))

    def position_bias(self) -> jax.Array:
        """Return what is added to the logits of queries and keys, [heads, T, T] float32."""
        dense = partial(normal_dense, dtype=jnp.float32)
        x = log_distances(self.window, self.learned)
        x = nn.relu(dense(HIDDEN, name="position_fc1")(x))
        last = dense(self.heads, use_bias=False, name="position_fc2")
        table = 16 * nn.sigmoid(last(x))
        return jnp.moveaxis(table[distances(self.window)], -1, 0)


def unit(x: jax.Array) -> jax.Array:
    """Divide float32 vectors [.., c] by their lengths; those of almost none stay as they are, with
    gradients that float16 holds."""
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.where(square > LEAST_LENGTH**2, square, 1.0))


def log_distances(window: int, learned: int) -> jax.Array:
    """Return the distances [(2 * window - 1)^2, 2] of two cells of a window, rows first, float32:
    linear to the side of the window that they were learned with, then of their logarithm."""
    side = np.arange(1 - window, window) * 8 / (learned - 1)
    side = np.sign(side) * np.log2(np.abs(side) + 1) / 3
    grid = np.stack(np.meshgrid(side, side, indexing="ij"), axis=-1)
    return jnp.asarray(grid.reshape(-1, 2), jnp.float32)

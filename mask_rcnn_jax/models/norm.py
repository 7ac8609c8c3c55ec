"""Normalization layers, by their names in recipes.

none              the convolution has a bias instead
frozen            fixed scale and bias, folded into the convolution
affine            batch norm with fixed statistics and trained scale and bias (TAO's freeze_bn,
                  mmdetection's norm_eval)
batch             batch norm over a device's images or RoIs
sync_batch        batch norm over those of all devices; every element counts the same
naive_sync_batch  batch norm with the mean over devices of each device's mean and mean square
                  (detectron2's NaiveSyncBatchNorm, but that one stores the biased variance on
                  several devices), whatever their number of elements
group             32 groups of channels, per image or RoI
layer             all channels of one pixel
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.models.parameter import parameter

Norm = Literal[
    "none", "frozen", "affine", "batch", "sync_batch", "naive_sync_batch", "group", "layer"
]
Sync = Literal["none", "elements", "devices"]

LIVE = ("batch", "sync_batch", "naive_sync_batch")  # statistics move in training
EPS, LAYER_EPS = 1e-5, 1e-6
GROUPS = 32
MOMENTUM = 0.1  # of a new value
AXIS = "data"  # mesh axis of the devices


class FrozenNorm(nn.Module):
    """Batch norm folded into a fixed `x * scale + bias`, both stored in `batch_stats`."""

    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array | int, valid: jax.Array | None = None) -> Any:
        """Normalize x [.., C], or, for a number C, return scale and bias, [C] each, float32."""
        shape = (_channels(x),)
        scale = self.variable("batch_stats", "scale", jnp.ones, shape, jnp.float32).value
        bias = self.variable("batch_stats", "bias", jnp.zeros, shape, jnp.float32).value
        return (scale, bias) if isinstance(x, int) else _mapped(x, scale, bias, self.dtype)


class BatchNorm(nn.Module):
    """Batch norm (Ioffe and Szegedy, 2015) as torch computes it.

    Normalizes by the biased variance and stores the unbiased one. Has `nn.BatchNorm`'s variables.

    Attributes:
        train: use the batch's statistics and move the stored ones, which serve otherwise.
        eps: added to the variance.
        sync: on a mesh, statistics are of this device ("none"), of the elements of all devices, or
            means over devices of their means.
    """

    train: bool
    eps: float = EPS
    sync: Sync = "none"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        """Normalize x [.., C]; `valid` [.., 1] broadcasts: statistics leave other places out."""
        scale, bias, mean, var = _batch_norm_variables(self, x.shape[-1])
        used_mean, used_var = mean.value, var.value
        if self.train:
            used_mean, used_var, count = _statistics(x, valid, mean.value, self.sync)
            rate = jnp.where(count > 0, MOMENTUM, 0.0)
            unbiased = used_var * (count / jnp.maximum(count - 1, 1))
            mean.value = (1 - rate) * mean.value + rate * used_mean
            var.value = (1 - rate) * var.value + rate * unbiased
        used_mean, used_var, scale, bias = (
            jnp.expand_dims(v, range(x.ndim - 1)) for v in (used_mean, used_var, scale, bias)
        )
        y = (x - used_mean) * (lax.rsqrt(used_var + self.eps) * scale) + bias
        return y.astype(self.dtype)


class StoredBatchNorm(nn.Module):
    """`BatchNorm` outside of training: an affine map, to be folded into the convolution before."""

    eps: float = EPS
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array | int, valid: jax.Array | None = None) -> Any:
        """Normalize x [.., C], or, for a number C, return scale and bias, [C] each, float32."""
        scale, bias, mean, var = _batch_norm_variables(self, _channels(x))
        scale = scale * lax.rsqrt(var.value + self.eps)
        bias = bias - mean.value * scale
        return (scale, bias) if isinstance(x, int) else _mapped(x, scale, bias, self.dtype)


def _channels(x: jax.Array | int) -> int:
    return x if isinstance(x, int) else x.shape[-1]


def _mapped(x: jax.Array, scale: jax.Array, bias: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return x [.., C] times scale [C] and bias [C] added, in `dtype`."""
    scale, bias = (jnp.expand_dims(v, range(x.ndim - 1)) for v in (scale, bias))
    return (x * scale + bias).astype(dtype)


def _batch_norm_variables(
    norm: nn.Module, features: int
) -> tuple[jax.Array, jax.Array, nn.Variable, nn.Variable]:
    """Scale, bias, mean and variance, [features] each, float32."""
    scale = parameter(norm, "scale", nn.initializers.ones, (features,))
    bias = parameter(norm, "bias", nn.initializers.zeros, (features,))
    mean = norm.variable("batch_stats", "mean", jnp.zeros, (features,), jnp.float32)
    var = norm.variable("batch_stats", "var", jnp.ones, (features,), jnp.float32)
    return scale, bias, mean, var


def _statistics(
    x: jax.Array, valid: jax.Array | None, center: jax.Array, sync: Sync
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return mean [C], biased variance [C] and number of elements, float32.

    center: [C], near the mean, so that subtracting its square from the mean square loses nothing.
    """
    axes, elements = range(x.ndim - 1), x.size / x.shape[-1]
    x = x.astype(jnp.float32) - jnp.expand_dims(lax.stop_gradient(center), axes)
    count = jnp.float32(elements)
    if valid is not None:
        x = jnp.where(valid, x, 0.0)
        count = jnp.sum(valid, dtype=jnp.float32) * (elements / valid.size)
    mean, square = (jnp.sum(v, axes) / jnp.maximum(count, 1) for v in (x, jnp.square(x)))
    # Outside `shard_map`, as in notebooks and tests, there is one device.
    if sync != "none" and AXIS in jax.sharding.get_abstract_mesh().manual_axes:
        weight = count if sync == "elements" else jnp.minimum(count, 1)
        shares = [mean * weight, square * weight, weight[None], count[None]]
        total = lax.pmean(jnp.concatenate(shares), AXIS)  # one collective
        mean, square = jnp.split(total[:-2] / jnp.maximum(total[-2], 1e-6), 2)
        count = total[-1] * lax.axis_size(AXIS)
    return center + mean, jnp.maximum(square - jnp.square(mean), 0.0), count


class GroupNorm(nn.GroupNorm):
    """Group norm (Wu and He, 2018)."""

    def __call__(self, x: jax.Array, valid: jax.Array | None = None) -> jax.Array:  # type: ignore[override]
        """Normalize x [B, h, w, C]; statistics leave out places not in `valid` [1, h, w, 1]."""
        mask = None if valid is None else jnp.broadcast_to(valid, (1, *x.shape[1:]))
        return super().__call__(x, mask=mask)


class LayerNorm(nn.LayerNorm):
    """Layer norm (Ba et al., 2016) of each pixel's channels."""

    def __call__(self, x: jax.Array, valid: jax.Array | None = None) -> jax.Array:  # type: ignore[override]
        """Normalize x [.., C]; `valid` makes no difference, since no place sees another."""
        return super().__call__(x)


def make_norm(
    norm: str,
    *,
    train: bool,
    dtype: DTypeLike,
    eps: float | None = None,
    num_groups: int = GROUPS,
) -> Callable[..., nn.Module]:
    """Return the layer of a name other than "none"; it takes `name`.

    Its modules map x [.., C] and, where statistics leave places out, `valid`; `normalize` folds
    those of fixed statistics into the convolution before.
    num_groups: of channels, for "group"; fewer where pruning removed some.
    """
    if norm == "frozen":
        return partial(FrozenNorm, dtype=dtype)
    eps = (LAYER_EPS if norm == "layer" else EPS) if eps is None else eps
    if eps <= 0:
        raise ValueError(f"norm_eps is {eps}, expected above 0, such as 1e-5, with norm={norm}")
    options: dict[str, Any] = dict(epsilon=eps, dtype=dtype)
    layers: dict[str, Callable] = {
        "group": partial(GroupNorm, num_groups=num_groups, **options),
        "layer": partial(LayerNorm, **options),
    }
    syncs: dict[str, Sync] = {"sync_batch": "elements", "naive_sync_batch": "devices"}
    if norm in ("affine", *LIVE) and not train:
        return partial(StoredBatchNorm, eps=eps, dtype=dtype)
    if norm in ("affine", *LIVE):
        sync = syncs.get(norm, "none")
        return partial(BatchNorm, train=norm in LIVE, eps=eps, sync=sync, dtype=dtype)
    if norm not in layers:
        raise ValueError(f"norm is {norm!r}, expected one of {list(get_args(Norm)[1:])}")
    return layers[norm]


def check_channels(norm: str, channels: int, name: str) -> None:
    """Raise ValueError for channels, those of the entry `name`, that a norm cannot divide."""
    if norm == "group" and channels % GROUPS:
        raise ValueError(f"{name} is {channels}, expected a multiple of {GROUPS} with norm='group'")


def normalize(
    convolve: Callable[..., jax.Array],
    norm: nn.Module | None,
    features: int,
    valid: jax.Array | None = None,
) -> jax.Array:
    """Apply a convolution, called with an affine map to fold in or None, and its norm.

    valid: places that statistics look at, see the norms.
    """
    if isinstance(norm, FrozenNorm | StoredBatchNorm):
        return convolve(norm(features))
    return convolve(None) if norm is None else norm(convolve(None), valid)

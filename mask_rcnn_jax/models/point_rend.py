"""PointRend's mask head (Kirillov et al., "PointRend: Image Segmentation as Rendering", 2020)."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.models.conv import RoIConv
from mask_rcnn_jax.models.init import dense, he_fan_out
from mask_rcnn_jax.models.outputs import PointOutputs
from mask_rcnn_jax.models.relu import relu
from mask_rcnn_jax.models.roi_heads import ClassMask
from mask_rcnn_jax.ops.points import doubled, grid_points, grid_weights
from mask_rcnn_jax.ops.top_k import top_k
from mask_rcnn_jax.ranges import Count, Probability, Range, Whole, check

Sample = Callable[[jax.Array], jax.Array]
_predictor_init = nn.initializers.normal(0.001)


class PointRendHead(nn.Module):
    """A coarse mask by fully connected layers, and a point head that refines it where it is unsure.

    Both read the finest map alone. In prediction, a mask is doubled in size `subdivisions` times,
    each time with the least certain `subdivision_points` of its cells computed again.

    Attributes:
        num_classes: K, without background.
        channels: of the coarse head's convolution.
        fc_channels: width of its fully connected layers.
        num_fcs: their number.
        coarse_size: side of the coarse mask.
        roi_size: side of the features of the coarse head, which the convolution halves; sampled at
            one point a cell.
        point_channels: width of the point head's layers, each of which reads the coarse mask, too.
        num_point_fcs: their number.
        train_points: points of a RoI in training.
        oversample: so many times as many are drawn, of which the least certain are taken.
        importance: share of `train_points` that is taken so; the others are random.
        subdivisions: doublings from `coarse_size` to the masks' side: 5 give 224.
        subdivision_points: cells that are computed again in each; where they are all cells, a
            doubling is saved.
    """

    num_classes: int
    channels: Count = 256
    fc_channels: Count = 1024
    num_fcs: Whole = 2
    coarse_size: Count = 7
    roi_size: Annotated[int, Range("at least 2", lambda side: side >= 2)] = 14
    point_channels: Count = 256
    num_point_fcs: Whole = 3
    train_points: Count = 196
    oversample: Count = 3
    importance: Probability = 0.75
    subdivisions: Whole = 5
    subdivision_points: Count = 784
    dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        check(self)
        super().__post_init__()

    @property
    def mask_size(self) -> int:
        """Side of the masks in prediction."""
        return self.coarse_size * 2**self.subdivisions

    @nn.compact
    def __call__(
        self,
        roi_features: jax.Array,
        classes: jax.Array,
        *,
        sample: Sample,
        keys: jax.Array | None = None,
    ) -> Any:
        """Map RoIs with classes [B, R] to their mask logits [B, R, M, M], float32.

        Logits for class 0 (background and invalid rows) are unspecified.

        Args:
            roi_features: [B, R, P, P, C], not read.
            sample: as in `MaskHeadLike`.
            keys: [B, R] where losses are computed: M is then `coarse_size`, and `PointOutputs` come
                with the logits.
        """
        batch, rois = classes.shape
        features = sample(self._spread(grid_points(self.roi_size), classes))
        coarse = self._coarse(features, classes)
        widths = self.num_classes, self.point_channels, self.num_point_fcs
        points = PointLayers(*widths, self.dtype, name="point_head")
        refine = partial(self._point_logits, points, coarse, classes, sample)
        if keys is None:
            return self._subdivided(refine, classes)
        of_class = jax.nn.one_hot(classes - 1, self.num_classes)
        logits = jnp.einsum("brks,brk->brs", coarse, of_class, precision="highest")
        at = self._training_points(logits, keys)
        side = self.coarse_size
        return logits.reshape(batch, rois, side, side), PointOutputs(at, refine(at))

    def _spread(self, points: Any, classes: jax.Array) -> jax.Array:
        """The same points [P, 2] for each RoI: [B, R, P, 2]."""
        return jnp.broadcast_to(points, (*classes.shape, *points.shape))

    def _coarse(self, features: jax.Array, classes: jax.Array) -> jax.Array:
        """Map [B, R, P * P, C] to coarse logits of all classes [B, R, K, S], float32."""
        batch, rois, cells, width = features.shape
        side = self.roi_size
        x = features.reshape(batch * rois, side, side, width)
        options: dict[str, Any] = dict(stride=2, kernel_init=he_fan_out, dtype=self.dtype)
        conv = RoIConv(self.channels, (2, 2), **options, name="coarse_conv")
        x = relu(conv(x, classes.reshape(-1) > 0)).reshape(batch, rois, -1)
        for i in range(1, self.num_fcs + 1):
            x = relu(dense(x, self.fc_channels, "xavier_fill", f"coarse_fc{i}", self.dtype))
        cells = self.num_classes * self.coarse_size**2
        x = dense(x.astype(jnp.float32), cells, _predictor_init, "coarse_predictor")
        return x.reshape(batch, rois, self.num_classes, self.coarse_size**2)

    def _point_logits(
        self, layers: Any, coarse: jax.Array, classes: jax.Array, sample: Sample, points: jax.Array
    ) -> jax.Array:
        """Return the point head's logits [B, R, P] at points [B, R, P, 2], float32."""
        weights = grid_weights(points, self.coarse_size)
        at_points = jnp.einsum("brps,brks->brpk", weights, coarse, precision="highest")
        return layers(sample(points), at_points.astype(self.dtype), classes)

    def _training_points(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """Draw points [B, R, P, 2], most of them where the coarse logits [B, R, S] are small."""
        count = self.train_points
        unsure = int(self.importance * count)
        drawn = self.oversample * count, count - unsure
        uniform = partial(jax.random.uniform, shape=(sum(drawn), 2))
        points = jax.vmap(jax.vmap(uniform))(keys)
        some, others = points[..., : drawn[0], :], points[..., drawn[0] :, :]
        weights = grid_weights(some, self.coarse_size)
        values = jnp.einsum("brps,brs->brp", weights, lax.stop_gradient(logits))
        _, best = top_k(-jnp.abs(values), unsure)
        some = jnp.take_along_axis(some, best[..., None], axis=2)
        return jnp.concatenate([some, others], axis=2)

    def _subdivided(self, refine: Callable, classes: jax.Array) -> jax.Array:
        """Return mask logits [B, R, M, M] by subdivision."""
        side, steps, count = self.coarse_size, self.subdivisions, self.subdivision_points
        while steps and 4 * side**2 <= count:
            side, steps = 2 * side, steps - 1
        shape = classes.shape
        logits = refine(self._spread(grid_points(side), classes)).reshape(*shape, side, side)
        for _ in range(steps):
            logits, side = doubled(logits), 2 * side
            cells = logits.reshape(*shape, side**2)
            _, index = top_k(-jnp.abs(cells), min(count, side**2))
            width = jnp.full_like(index, side)
            at = jnp.stack([lax.rem(index, width), lax.div(index, width)], axis=-1)
            fresh = refine((at.astype(jnp.float32) + 0.5) / side)
            cells = jax.vmap(jax.vmap(_put))(cells, index, fresh)
            logits = cells.reshape(*shape, side, side)
        return logits


def _put(cells: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    return cells.at[index].set(values, mode="promise_in_bounds", unique_indices=True)


class PointLayers(nn.Module):
    """The point head: fully connected layers that each read the coarse logits, too."""

    num_classes: int
    channels: int
    num_fcs: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, features: jax.Array, coarse: jax.Array, classes: jax.Array) -> jax.Array:
        """Map [B, R, P, C] and [B, R, P, K] to the logits of the classes [B, R]: [B, R, P]."""
        x = features.astype(self.dtype)
        for i in range(1, self.num_fcs + 1):
            x = jnp.concatenate([x, coarse], axis=-1)
            x = relu(dense(x, self.channels, he_fan_out, f"fc{i}", self.dtype))
        x = jnp.concatenate([x, coarse], axis=-1)
        batch, rois = classes.shape
        predictor = ClassMask(self.num_classes, _predictor_init, self.dtype, name="predictor")
        x = x.reshape(batch * rois, *x.shape[2:])
        return predictor(x, classes.reshape(-1)).reshape(batch, rois, -1)

"""Region proposal network (Ren et al., "Faster R-CNN", 2015): head, targets and proposals."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.models.channels import Channels, Widths, make_channels, narrow
from mask_rcnn_jax.models.conv import SparselyTrainedConv, Weights, products
from mask_rcnn_jax.models.relu import relu
from mask_rcnn_jax.models.rpn_gradient import with_gradient_of_few_cells
from mask_rcnn_jax.ops import matching
from mask_rcnn_jax.ops.anchors import Anchors
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.nms import nms
from mask_rcnn_jax.ops.top_k import top_k
from mask_rcnn_jax.platforms import traced_platform
from mask_rcnn_jax.ranges import Count, Fraction, Ranged
from mask_rcnn_jax.structures import Proposals, Targets


class RPNHead(nn.Module):
    """Objectness and box deltas for every anchor, with one head shared by all levels.

    The convolutions are named conv, conv2, conv3, ...
    """

    anchors_per_cell: int
    channels: int
    dtype: DTypeLike = jnp.float32
    num_convs: int = 1
    widths: Widths = ()  # see `RPN`
    cells_per_image: int = 0  # with a gradient, for `rpn_gradient` on NVIDIA GPUs; 0: any number
    implementation: str | None = None  # of that, see ops.dispatch

    @nn.compact
    def __call__(
        self, pyramid: list[jax.Array], cells: list[jax.Array | None] | None = None
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return logits [B, A_l] and deltas [B, A_l, 4] per level, float32, in anchor order.

        cells: valid cells of each map, see `ValidExtent.inside`; the maps are zero elsewhere, and
            so must be what the second convolution reads. None: all are valid.
        """
        init = nn.initializers.normal(0.01)
        options: dict[str, Any] = dict(padding=1, kernel_init=init, dtype=self.dtype)
        channels = narrow(conv_channels(self.channels, self.num_convs), self.widths)
        convs = [
            SparselyTrainedConv(width.count, (3, 3), name=name, **options)
            for name, width in channels.items()
        ]
        outputs = [
            Weights(count * self.anchors_per_cell, init, name=name)(convs[-1].features)
            for name, count in (("objectness_logits", 1), ("anchor_deltas", 4))
        ]
        found: Any = []
        for feature, inside in zip(pyramid, cells or [None] * len(pyramid), strict=True):
            hidden = relu(convs[0](feature))
            for conv in convs[1:]:
                hidden = hidden if inside is None else jnp.where(inside, hidden, 0)
                hidden = relu(conv(hidden))
            found.append(products(hidden, outputs))
        is_known = self.cells_per_image and len(convs) == 1 and traced_platform() == "cuda"
        if is_known and convs[0].has_variable("params", "kernel"):  # no prepared prediction
            first = (
                convs[0].get_variable("params", "kernel"),
                convs[0].get_variable("params", "bias"),
            )
            found = with_gradient_of_few_cells(
                self.cells_per_image,
                self.implementation,
                lax.stop_gradient(found),
                [feature.astype(self.dtype) for feature in pyramid],
                first,
                outputs,
            )
        batch, (logits, deltas) = len(pyramid[0]), zip(*found, strict=True)
        return (
            [level.reshape(batch, -1).astype(jnp.float32) for level in logits],
            [level.reshape(batch, -1, 4).astype(jnp.float32) for level in deltas],
        )


def conv_channels(channels: int, num_convs: int) -> dict[str, Channels]:
    """Return the head's channels by convolution."""
    names = ["conv", *(f"conv{i}" for i in range(2, num_convs + 1))]
    return {name: make_channels(channels) for name in names}


@dataclass(frozen=True)
class RPN(Ranged):
    """RPN targets and proposal selection.

    Attributes:
        channels: channels in the head's 3x3 convolutions.
        fg_iou_thresh: anchors with at least this IoU are foreground.
        bg_iou_thresh: anchors below this IoU are background; those between are ignored.
        low_quality: anchors forced to match a ground truth without a foreground anchor, see
            `ops.matching.match_anchors`.
        straddle_thresh: ignore anchors that extend further beyond the image, pixels; -1: none.
        batch_size_per_image: anchors sampled per image.
        positive_fraction: largest foreground share among them.
        nms_thresh: IoU above which the proposal with the lower score is dropped.
        pre_nms_topk_train: proposals per level before NMS, in training.
        pre_nms_topk_test: the same in prediction.
        post_nms_topk_train: proposals after NMS in training, per `post_nms_scope`.
        post_nms_topk_test: proposals per image after NMS in prediction.
        post_nms_scope: whether `post_nms_topk_train` counts per image or per device batch.
        min_size: drop proposals whose clipped width or height is not above this, pixels; -1 keeps
            all.
        num_convs: the head's 3x3 convolutions.
        widths: channels where `prune` left fewer, by name, such as (("conv", 128),); ():
            `channels`.
    """

    channels: Count = 256
    fg_iou_thresh: Fraction = 0.7
    bg_iou_thresh: Fraction = 0.3
    low_quality: Literal["best", "ties", "none"] = "ties"
    straddle_thresh: float = -1.0
    batch_size_per_image: Count = 256
    positive_fraction: Fraction = 0.5
    nms_thresh: Fraction = 0.7
    pre_nms_topk_train: Count = 2000
    pre_nms_topk_test: Count = 1000
    post_nms_topk_train: Count = 1000
    post_nms_topk_test: Count = 1000
    post_nms_scope: Literal["image", "batch"] = "image"
    min_size: float = 0.0
    num_convs: Count = 1
    widths: Widths = ()

    def __post_init__(self):
        super().__post_init__()
        if self.bg_iou_thresh > self.fg_iou_thresh:
            expected = f"expected up to fg_iou_thresh, {self.fg_iou_thresh}"
            raise ValueError(f"bg_iou_thresh is {self.bg_iou_thresh}, {expected}")
        narrow(self.prunable, self.widths)

    @property
    def prunable(self) -> dict[str, Channels]:
        """Each convolution's channels."""
        return conv_channels(self.channels, self.num_convs)

    def targets(
        self,
        key: jax.Array | None,
        targets: Targets,
        image_size: jax.Array,
        used: jax.Array | None = None,
        *,
        anchors: Anchors,
        coder: BoxCoder,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return labels and regression targets for one image's anchors.

        key: None samples the lowest rows. used: see `ops.matching.match_anchors`.
        Returns labels 1 / 0 / -1 before and after sampling, [A] each, and deltas [A, 4], zero
        unless foreground.
        """
        boxes = jnp.concatenate(anchors.boxes)
        valid = None if anchors.valid is None else jnp.concatenate(anchors.valid)

        def iou(anchors: tuple[jax.Array, jax.Array | None]) -> jax.Array:
            boxes, valid = anchors
            iou = coder.iou(boxes, targets.boxes)
            return iou if valid is None else jnp.where(valid[:, None], iou, 0.0)

        matched_idxs, labels = matching.match_anchors(
            iou,
            (boxes, valid),
            targets.valid,
            used,
            fg_thresh=self.fg_iou_thresh,
            bg_thresh=self.bg_iou_thresh,
            low_quality=self.low_quality,
        )
        if valid is not None:
            labels = jnp.where(valid, labels, -1)
        if self.straddle_thresh >= 0:
            limit = image_size[::-1][None] + self.straddle_thresh
            inside = (boxes[:, :2] >= -self.straddle_thresh) & (boxes[:, 2:] < limit)
            labels = jnp.where(jnp.all(inside, axis=1), labels, -1)
        sampled = matching.sample_mask(
            key, labels, num=self.batch_size_per_image, fg_fraction=self.positive_fraction
        )
        deltas = coder.encode_anchors(targets.boxes[matched_idxs], boxes)
        deltas = jnp.where((labels == 1)[:, None], deltas, 0.0)
        return labels, jnp.where(sampled, labels, -1), deltas

    def proposals(
        self,
        logits: Sequence[jax.Array],
        deltas: Sequence[jax.Array],
        image_sizes: jax.Array,
        *,
        anchors: Anchors,
        coder: BoxCoder,
        train: bool,
        implementation: str | None = None,
    ) -> Proposals:
        """Select the best boxes per level, apply NMS per level, then keep the best over all levels.

        logits [B, A_l] and deltas [B, A_l, 4] per level; image_sizes [B, 2].
        Returns proposals by descending score, clipped to the image: post_nms_topk rows per image,
        or fewer in training if `post_nms_scope` is "batch" and the levels together have fewer. No
        gradient flows through them (paper section 3).
        """
        pre_nms_topk = self.pre_nms_topk_train if train else self.pre_nms_topk_test
        rows = self.post_nms_topk_train if train else self.post_nms_topk_test
        best = partial(self._best_in_level, coder=coder, image_sizes=image_sizes)
        ks = [min(pre_nms_topk, level.shape[1]) for level in logits]
        widest = max(ks)
        anchor_valid: Sequence[Any] = anchors.valid or [None] * len(ks)
        levels = [
            _pad_rows(*best(*level), widest)
            for level in zip(logits, deltas, anchors.boxes, anchor_valid, ks, strict=True)
        ]
        boxes, scores = (jnp.stack(arrays, axis=1) for arrays in zip(*levels, strict=True))
        batch, num_levels = scores.shape[:2]  # boxes [B, L, k, 4], scores [B, L, k]
        keep = nms(
            boxes.reshape(batch * num_levels, widest, 4),
            jnp.isfinite(scores).reshape(batch * num_levels, widest),
            iou_thresh=self.nms_thresh,
            max_out=rows,
            offset=coder.iou_offset,
            implementation=implementation,
        ).reshape(batch, num_levels * widest)
        kept = jnp.where(keep, scores.reshape(batch, -1), -jnp.inf)
        count = min(rows, sum(ks))
        if train and self.post_nms_scope == "batch":
            if batch > 1:  # a single image cannot exceed the batch limit
                kept = _best_in_batch(kept, rows)
            rows = count
        top, index = top_k(kept, count)
        valid = jnp.isfinite(top)
        top_boxes = jnp.take_along_axis(boxes.reshape(batch, -1, 4), index[..., None], axis=1)
        pad = (0, 0), (0, rows - count)
        proposals = Proposals(
            boxes=jnp.pad(jnp.where(valid[..., None], top_boxes, 0.0), (*pad, (0, 0))),
            scores=jnp.pad(jnp.where(valid, nn.sigmoid(top), 0.0), pad),
            valid=jnp.pad(valid, pad),
        )
        return lax.stop_gradient(proposals)

    def _best_in_level(
        self, logits, deltas, anchors, valid, k: int, *, coder: BoxCoder, image_sizes
    ) -> tuple[jax.Array, jax.Array]:
        """Return the boxes [B, k, 4] with the highest logits [B, k]; dropped boxes have -inf."""
        if valid is not None:
            logits = jnp.where(valid[None], logits, -jnp.inf)
        top, index = top_k(logits, k)
        top_deltas = jnp.take_along_axis(deltas, index[..., None], axis=1)

        def decode(deltas, anchors, size):
            return coder.clip(coder.decode_anchors(deltas, anchors), size)

        boxes = jax.vmap(decode)(top_deltas, jnp.asarray(anchors)[index], image_sizes)
        large = jnp.all(coder.sides(boxes) > self.min_size, axis=-1)
        return boxes, jnp.where(large, top, -jnp.inf)


def _pad_rows(boxes: jax.Array, scores: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Pad boxes [B, k, 4] and scores [B, k] to `rows`, with score -inf."""
    pad = (0, 0), (0, rows - scores.shape[1])
    return jnp.pad(boxes, (*pad, (0, 0))), jnp.pad(scores, pad, constant_values=-jnp.inf)


def _best_in_batch(scores: jax.Array, count: int) -> jax.Array:
    """Set all but the `count` highest scores [B, N] in the batch to -inf."""
    flat = scores.reshape(-1)
    _, best = lax.top_k(flat, min(count, flat.shape[0]))  # one row: XLA takes CUB's sort
    chosen = jnp.zeros(flat.shape, bool).at[best].set(True)
    return jnp.where(chosen, flat, -jnp.inf).reshape(scores.shape)

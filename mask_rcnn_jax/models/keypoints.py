"""The task of keypoints (He et al., "Mask R-CNN", 2017, section 5): its head, targets and loss."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

from mask_rcnn_jax.cpu_kernels.convolution import conv
from mask_rcnn_jax.models.channels import Channels, Widths, make_channels, narrow
from mask_rcnn_jax.models.conv import RoIConv, pixel_shuffle
from mask_rcnn_jax.models.init import he_fan_out
from mask_rcnn_jax.models.parameter import parameter
from mask_rcnn_jax.models.relu import relu
from mask_rcnn_jax.models.sampling import MaskRoIs
from mask_rcnn_jax.ops import keypoints as keypoint_ops
from mask_rcnn_jax.ops.distill_losses import softmax_divergence
from mask_rcnn_jax.ops.losses import LossOptions, masked_mean
from mask_rcnn_jax.ranges import Count, Whole, check
from mask_rcnn_jax.structures import Batch

if TYPE_CHECKING:
    from mask_rcnn_jax.models.outputs import TrainOutputs

# As torch counts the inputs of a transposed convolution, [h, w, out, in] here.
he_fan_in_up = nn.initializers.variance_scaling(2.0, "fan_in", "normal", in_axis=3, out_axis=2)


class KeypointHead(nn.Module):
    """3x3 convolutions, an up-convolution to a heatmap per keypoint, and bilinear interpolation.

    It is that of torchvision and detectron2. All classes share the heatmaps.

    Attributes:
        num_keypoints: P; as many as `data.keypoints` names.
        channels: channels per convolution.
        num_convs: 3x3 convolutions.
        roi_size: side of the RoI features; heatmaps have four times as many cells per side.
        score: of a keypoint: "logit": the heatmap's largest value, as in torchvision; "softmax":
            its probability, over the heatmap's cells, as in detectron2.
        widths: channels where `prune` left fewer, by name, such as (("keypoint_fcn1", 256),); ():
            `channels`.
    """

    num_keypoints: Count = 17
    channels: Count = 512
    dtype: DTypeLike = jnp.float32
    num_convs: Whole = 8
    roi_size: Count = 14
    score: Literal["logit", "softmax"] = "logit"
    widths: Widths = ()

    trains_batch_stats = False

    def __post_init__(self):
        check(self)
        narrow(self.prunable, self.widths)
        super().__post_init__()

    @property
    def prunable(self) -> dict[str, Channels]:
        """Each convolution's channels."""
        names = [f"keypoint_fcn{i}" for i in range(1, self.num_convs + 1)]
        return dict.fromkeys(names, make_channels(self.channels))

    @nn.compact
    def __call__(
        self, roi_features: jax.Array, classes: jax.Array, train: bool = False
    ) -> jax.Array:
        """Map [B, R, S, S, C] and classes [B, R] to heatmaps [B, R, P, 4S, 4S], float32 logits.

        Those of class 0 (background and invalid rows) are unspecified.
        """
        batch, rois = roi_features.shape[:2]
        x = roi_features.reshape(batch * rois, *roi_features.shape[2:])
        valid = classes.reshape(-1) > 0
        options: dict[str, Any] = dict(padding=1, kernel_init=he_fan_out, dtype=self.dtype)
        for name, width in narrow(self.prunable, self.widths).items():
            x = relu(RoIConv(width.count, (3, 3), name=name, **options)(x, valid))
        x = Heatmaps(self.num_keypoints, self.dtype, name="keypoint_deconv")(x, valid)
        heatmaps = keypoint_ops.double(x)
        return heatmaps.reshape(batch, rois, *heatmaps.shape[1:])


class Heatmaps(nn.Module):
    """4x4 transposed convolution with stride 2 and padding 1, to twice the side.

    The kernel [4, 4, out, in] is that of torch's `ConvTranspose2d`, [in, out, 4, 4], transposed.
    """

    features: int
    dtype: DTypeLike

    output_axis = 2  # of the kernel

    @nn.compact
    def __call__(self, x: jax.Array, valid: jax.Array | None) -> jax.Array:
        """Map [N, S, S, C] to [N, features, 2S, 2S], float32; `valid` as in `RoIConv`."""
        shape = (4, 4, self.features, x.shape[-1])
        kernel = parameter(self, "kernel", he_fan_in_up, shape)
        bias = parameter(self, "bias", nn.initializers.zeros, (self.features,))
        y = self.contract(x.astype(self.dtype), kernel.astype(self.dtype), valid)
        y = y.reshape(*x.shape[:3], self.features, 2, 2).astype(jnp.float32)
        return pixel_shuffle(jnp.moveaxis(y, 3, 1)) + bias[None, :, None, None]

    def contract(self, x: jax.Array, kernel: jax.Array, valid: jax.Array | None) -> jax.Array:
        """Convolve to the four outputs of each pixel, [N, S, S, features * 4].

        Of output 2i + p along an axis, rows 1 and 3 of the kernel see pixels i and i - 1 for p = 0,
        rows 2 and 0 pixels i and i + 1 for p = 1: four convolutions of 3 x 3, some of it zeros.
        """
        chosen = np.zeros((2, 3, 4), np.float32)  # by parity, place and row of the kernel
        chosen[0, 0, 3] = chosen[0, 1, 1] = chosen[1, 1, 2] = chosen[1, 2, 0] = 1
        rows = jnp.asarray(chosen, kernel.dtype)
        taps = jnp.einsum("pya,qxb,aboi->yxiopq", rows, rows, kernel, precision="highest")
        return conv(x, taps.reshape(3, 3, x.shape[-1], -1), valid, 1, ((1, 1), (1, 1)))


@dataclass(frozen=True)
class KeypointTask:
    """A `tasks.Task`: an object's keypoints as heatmaps over its box.

    The head's logits are [N, P, S, S], with S four times the side of its features.
    """

    score: str  # of `KeypointHead`
    foreground_per_image: float  # RoIs at most

    name = "keypoint"
    result = "keypoints"

    def targets(
        self, batch: Batch, rois: MaskRoIs, logits: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the cell of each keypoint [N, P], and whether it counts; see `ops.keypoints`."""
        keypoints = batch.targets.keypoints
        if keypoints is None:
            raise ValueError("data.keypoints is (), expected names for model.keypoint_head")
        instances = keypoints.shape[1]
        rows = keypoints.reshape(-1, *keypoints.shape[2:])
        matched = rows[rois.images * instances + rois.matched_idxs]
        cells, counts = keypoint_ops.keypoint_targets(matched, rois.boxes, size=logits.shape[-1])
        return cells, counts & rois.foreground[:, None]

    def losses(self, outputs: "TrainOutputs", options: LossOptions) -> dict[str, jax.Array]:
        """Return the cross-entropy over `loss.keypoint_average` keypoints."""
        own = outputs.tasks[self.name]
        cells, counts = own.targets
        budget = len(outputs.class_logits) * self.foreground_per_image * cells.shape[1]
        divisor = {"visible": None, "budget": budget}[options.keypoint_average]
        return {self.name: keypoint_ops.keypoint_loss(own.logits, cells, counts, divisor)}

    def divergence(self, logits: jax.Array, teacher: jax.Array, rois: MaskRoIs) -> jax.Array:
        """Return the mean divergence between the foreground RoIs' heatmaps."""
        if logits.shape != teacher.shape:
            theirs, ours = ("{1} heatmaps of {2} x {3}".format(*x.shape) for x in (teacher, logits))
            raise ValueError(f"distill.teacher finds {theirs}, expected {ours} as in the model")
        flat = [x.reshape(*x.shape[:2], -1) for x in (logits, teacher)]
        each = softmax_divergence(flat[0], flat[1], 1.0)
        return masked_mean(each, jnp.broadcast_to(rois.foreground[:, None], each.shape))

    def found(self, logits: jax.Array, boxes: jax.Array, *, longest: int) -> jax.Array:
        """Return x, y in network pixels and a score for each keypoint, [B, D, P, 3]."""
        find = partial(keypoint_ops.heatmaps_to_points, longest=longest)
        points, scores = jax.vmap(find)(logits, boxes)
        if self.score == "softmax":
            scores = 1 / jnp.sum(jnp.exp(logits - scores[..., None, None]), axis=(3, 4))
        return jnp.concatenate([points, scores[..., None]], axis=-1)

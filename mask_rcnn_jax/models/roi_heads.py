"""Second-stage heads (He et al., "Mask R-CNN", 2017)."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from mask_rcnn_jax.models.channels import Channels, Widths, make_channels, narrow
from mask_rcnn_jax.models.conv import RoIConv, UpConv, pixel_shuffle
from mask_rcnn_jax.models.init import dense, he_fan_out, he_fan_out_up
from mask_rcnn_jax.models.norm import GROUPS, LIVE, Norm, check_channels, make_norm, normalize
from mask_rcnn_jax.models.parameter import parameter
from mask_rcnn_jax.models.relu import relu
from mask_rcnn_jax.ranges import Count, Whole, check


class BoxHead(nn.Module):
    """Convolutions, fully connected layers, then class logits and box deltas.

    Attributes:
        num_classes: K, without background.
        channels: width of the fully connected layers.
        fc_init: their kernel initializer, see `models.init.fan_init`.
        predictor_init: kernel initializer for logits and deltas; "normal" has standard deviations
            0.01 and 0.001, the others are as in `fc_init`.
        num_convs: 3x3 convolutions.
        conv_channels: their channels.
        norm: norm behind each of them, which then has no bias, see `models.norm`.
        num_fcs: fully connected layers.
        class_agnostic: all classes of a RoI share its box deltas.
        roi_size: side of the RoI features.
        widths: channels where `prune` left fewer, by name, such as (("fc1", 512), ("fc2", 896));
            (): all.
    """

    num_classes: int
    channels: Count = 1024
    fc_init: Literal["glorot", "xavier_fill", "linear"] = "xavier_fill"
    predictor_init: Literal["normal", "glorot", "xavier_fill", "linear"] = "normal"
    dtype: DTypeLike = jnp.float32
    num_convs: Whole = 0
    conv_channels: Count = 256
    norm: Norm = "none"
    num_fcs: Whole = 2
    class_agnostic: bool = False
    roi_size: Count = 7
    widths: Widths = ()

    def __post_init__(self):
        check(self)
        if self.num_convs:
            check_channels(self.norm, self.conv_channels, "conv_channels")
        narrow(self.prunable, self.widths)
        super().__post_init__()

    @property
    def prunable(self) -> dict[str, Channels]:
        """Each layer's channels."""
        convs = [f"conv{i}" for i in range(1, self.num_convs + 1)]
        fcs = [f"fc{i}" for i in range(1, self.num_fcs + 1)]
        found = dict.fromkeys(convs, make_channels(self.conv_channels, self.norm))
        return found | dict.fromkeys(fcs, make_channels(self.channels))

    @property
    def trains_batch_stats(self) -> bool:
        """Whether training updates `batch_stats`."""
        return self.num_convs > 0 and self.norm in LIVE

    @nn.compact
    def __call__(
        self, roi_features: jax.Array, valid: jax.Array | None = None, train: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Map [B, R, P, P, C] to logits [B, R, K + 1] and deltas [B, R, K + 1, 4], float32.

        valid: [B, R]; outputs for other rows are unspecified. None: all.
        """
        batch, rois = roi_features.shape[:2]
        x = roi_features.reshape(batch * rois, *roi_features.shape[2:])
        rows = None if valid is None else valid.reshape(-1)
        channels = narrow(self.prunable, self.widths)
        for i in range(1, self.num_convs + 1):
            names, width = (f"conv{i}", f"norm{i}"), channels[f"conv{i}"]
            x = _conv_norm_relu(x, rows, width, self.norm, names, self.dtype, train)
        x = x.reshape(batch, rois, -1)
        for i in range(1, self.num_fcs + 1):
            width = channels[f"fc{i}"]
            x = relu(dense(x, width.count, self.fc_init, f"fc{i}", self.dtype))
        x = x.astype(jnp.float32)
        outputs = self.num_classes + 1
        class_init: Any = self.predictor_init
        box_init = class_init
        if self.predictor_init == "normal":
            class_init, box_init = nn.initializers.normal(0.01), nn.initializers.normal(0.001)
        logits = dense(x, outputs, class_init, "cls_score")
        deltas = dense(x, 4 * (1 if self.class_agnostic else outputs), box_init, "bbox_pred")
        deltas = deltas.reshape(batch, rois, -1, 4)
        return logits, jnp.broadcast_to(deltas, (batch, rois, outputs, 4))


class MaskHead(nn.Module):
    """3x3 convolutions, a 2x2 up-convolution and a 1x1 convolution to class masks.

    Only the mask for each RoI's class is computed.

    Attributes:
        num_classes: K, without background.
        channels: channels per convolution.
        predictor_init: kernel initializer for the 1x1 convolution: "he" (fan-out), or "normal" with
            standard deviation 0.001.
        num_convs: 3x3 convolutions.
        norm: norm behind each of them, which then has no bias, see `models.norm`.
        roi_size: side of the RoI features; masks have twice as many cells per side: 14 gives
            28 x 28, 28 gives 56 x 56, 56 gives 112 x 112, for 4 and 16 times the work.
        widths: channels where `prune` left fewer, by name, such as (("mask_fcn1", 128),
            ("mask_deconv", 96)); (): `channels`.
    """

    num_classes: int
    channels: Count = 256
    predictor_init: Literal["he", "normal"] = "he"
    dtype: DTypeLike = jnp.float32
    num_convs: Whole = 4
    norm: Norm = "none"
    roi_size: Count = 14
    widths: Widths = ()

    def __post_init__(self):
        check(self)
        if self.num_convs:
            check_channels(self.norm, self.channels, "channels")
        narrow(self.prunable, self.widths)
        super().__post_init__()

    @property
    def prunable(self) -> dict[str, Channels]:
        """Each convolution's channels."""
        names = [f"mask_fcn{i}" for i in range(1, self.num_convs + 1)]
        found = dict.fromkeys(names, make_channels(self.channels, self.norm))
        return found | {"mask_deconv": make_channels(self.channels)}

    @property
    def trains_batch_stats(self) -> bool:
        """Whether training updates `batch_stats`."""
        return self.num_convs > 0 and self.norm in LIVE

    @nn.compact
    def __call__(
        self, roi_features: jax.Array, classes: jax.Array, train: bool = False
    ) -> jax.Array:
        """Map [B, R, P, P, C] and classes [B, R] to their mask logits, [B, R, 2P, 2P].

        Logits for class 0 (background and invalid rows) are unspecified.
        """
        batch, rois, size = roi_features.shape[:3]
        classes = classes.reshape(-1)
        x = roi_features.reshape(batch * rois, *roi_features.shape[2:])
        valid = classes > 0
        channels = narrow(self.prunable, self.widths)
        for i in range(1, self.num_convs + 1):
            names, width = (f"mask_fcn{i}", f"mask_fcn{i}_norm"), channels[f"mask_fcn{i}"]
            x = _conv_norm_relu(x, valid, width, self.norm, names, self.dtype, train)
        width = channels["mask_deconv"]
        x = relu(UpConv(width.count, self.dtype, he_fan_out_up, name="mask_deconv")(x, valid))
        init = {"he": he_fan_out, "normal": nn.initializers.normal(0.001)}[self.predictor_init]
        predictor = ClassMask(self.num_classes, init, self.dtype, name="mask_predictor")
        logits = predictor(x, classes)
        return pixel_shuffle(logits).reshape(batch, rois, 2 * size, 2 * size)


def _conv_norm_relu(
    x: jax.Array,
    rows: jax.Array | None,
    channels: Channels,
    norm: str,
    names: tuple[str, str],
    dtype: DTypeLike,
    train: bool,
) -> jax.Array:
    """Apply a 3x3 convolution to [N, P, P, C], its norm and ReLU, in the caller's scope.

    rows: [N] bool; batch norm's statistics leave out the others. names: of convolution and norm.
    """
    options: dict[str, Any] = dict(padding=1, use_bias=norm == "none", dtype=dtype)
    conv = RoIConv(channels.count, (3, 3), kernel_init=he_fan_out, name=names[0], **options)
    layer = None
    if norm != "none":
        options = dict(train=train, dtype=dtype, num_groups=channels.groups(GROUPS))
        layer = make_norm(norm, **options)(name=names[1])
    # Group and layer norm look at one row at a time.
    places = rows[:, None, None, None] if rows is not None and norm in LIVE else None
    return relu(normalize(partial(conv, x, rows), layer, channels.count, places))


class ClassMask(nn.Module):
    """1x1 convolution to one of K + 1 channels per RoI, with `nn.Conv`'s parameters."""

    num_classes: int
    kernel_init: nn.initializers.Initializer
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, classes: jax.Array) -> jax.Array:
        """Map [N, .., C] and classes [N] to [N, ..], float32."""
        num, rows = len(classes), self.num_classes + 1
        shape = (1, 1, x.shape[-1], rows)
        kernel = parameter(self, "kernel", self.kernel_init, shape)
        bias = parameter(self, "bias", nn.initializers.zeros, (rows,))
        # A product, since a gather's gradient would be summed in any order on a GPU. Exact: one
        # factor is 1, the others are 0.
        is_class = nn.one_hot(classes, rows)
        weights = jnp.matmul(is_class, kernel[0, 0].T, precision="highest")  # [N, C]
        bias = jnp.matmul(is_class, bias, precision="highest")
        pixels = x.reshape(num, -1, x.shape[-1])
        logits = jnp.einsum("npc,nc->np", pixels, weights.astype(self.dtype))
        return (logits.astype(jnp.float32) + bias[:, None]).reshape(x.shape[:-1])

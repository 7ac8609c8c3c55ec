"""Normalize images for the backbone."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from mask_rcnn_jax.ops.extent import ValidExtent, valid_extent
from mask_rcnn_jax.ranges import Positives, Ranged, Whole


@dataclass(frozen=True)
class ImageInput(Ranged):
    """Input normalization and padding.

    Attributes:
        mean: subtracted from R, G, B in 0..255, or from each of `data.bands.names`.
        std: then divides them.
        channel_order: channel order expected by the first convolution; "bgr" reverses that of the
            bands.
        pad_multiple: 32 ends feature maps at the largest image in the device batch, rounded up to
            32 pixels, like systems padding a batch to its largest image (torchvision, Detectron2,
            maskrcnn-benchmark). 0 lets maps fill the canvas.
    """

    mean: tuple[float, ...] = (123.675, 116.28, 103.53)
    std: Positives = (58.395, 57.12, 57.375)
    channel_order: Literal["rgb", "bgr"] = "rgb"
    pad_multiple: Whole = 32

    def __post_init__(self):
        super().__post_init__()
        if not len(self.mean) == len(self.std) > 0:
            found = f"std is {self.std} and model.input.mean {self.mean}"
            raise ValueError(f"{found}, expected a value for each band")

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return len(self.mean)

    def __call__(self, images: jax.Array, image_sizes: jax.Array) -> tuple[jax.Array, ValidExtent]:
        """Normalize images [B, H, W, C] in 0..255 with sizes [B, 2]; return them and their extent.

        Pixels outside `image_sizes` become 0, the mean color.
        """
        mean, std = (jnp.asarray(v)[None, None, None] for v in (self.mean, self.std))
        x = (images.astype(jnp.float32) - mean) / std
        if self.channel_order == "bgr":
            x = x[..., ::-1]
        height, width = images.shape[1:3]
        rows = jnp.arange(height)[None, :, None] < image_sizes[:, 0, None, None]
        columns = jnp.arange(width)[None, None, :] < image_sizes[:, 1, None, None]
        extent = valid_extent((height, width), image_sizes, self.pad_multiple)
        return jnp.where((rows & columns)[..., None], x, 0.0), extent

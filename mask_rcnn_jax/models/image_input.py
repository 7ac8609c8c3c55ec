"""Normalize images for the backbone."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from mask_rcnn_jax.ops.extent import ValidExtent, valid_extent


@dataclass(frozen=True)
class ImageInput:
    """What the backbone sees of an image.

    Attributes:
        mean: subtracted from R, G, B in 0..255.
        std: divides R, G, B after that.
        channel_order: order of the channels for the first convolution.
        pad_multiple: 32 ends feature maps at the largest image of the device's batch, rounded up to
            32 pixels, as systems do that pad a batch to its largest image (torchvision, Detectron2,
            maskrcnn-benchmark). 0 lets maps fill the canvas.
    """

    mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    std: tuple[float, float, float] = (58.395, 57.12, 57.375)
    channel_order: Literal["rgb", "bgr"] = "rgb"
    pad_multiple: int = 32

    def __call__(self, images: jax.Array, image_sizes: jax.Array) -> tuple[jax.Array, ValidExtent]:
        """Images [B, H, W, 3] in 0..255 and sizes [B, 2] to float32 images and their extent.

        Pixels outside `image_sizes` become the mean color, 0.
        """
        x = (images.astype(jnp.float32) - jnp.asarray(self.mean)[None, None, None]) / (
            jnp.asarray(self.std)[None, None, None]
        )
        if self.channel_order == "bgr":
            x = x[..., ::-1]
        height, width = images.shape[1:3]
        inside = (jnp.arange(height)[None, :, None] < image_sizes[:, 0, None, None]) & (
            jnp.arange(width)[None, None, :] < image_sizes[:, 1, None, None]
        )
        extent = valid_extent((height, width), image_sizes, self.pad_multiple)
        return jnp.where(inside[..., None], x, 0.0), extent

"""The arrays that travel between the rooms of this package, and the letters for their axes.

Shape letters used in every module:
    B  images in a batch            H, W  pixels of the network input
    C  feature channels             L     pyramid levels
    A  anchors (all levels)         N, R  proposals, sampled RoIs (padded)
    G  ground-truth rows (padded)   D     detections (padded)
    K  foreground classes           M     side of a ground-truth mask crop
    V  polygon vertices (padded)

Padding convention: every axis of variable length has a static size and a `valid` mask. Rows that
are not valid hold zeros, and `valid` is the only truth: nobody infers it from an area, a score or
a class. Valid rows come first.

Boxes are `[x1, y1, x2, y2]`, float32, in pixels of the network input, unless a name says otherwise.
Class 0 is background and padding; foreground classes are 1..K.
"""

import numpy as np
from flax import struct
from jax.typing import ArrayLike


@struct.dataclass
class Targets:
    """Ground truth of one image, or of a batch with a leading B axis."""

    boxes: ArrayLike  # [G, 4] float32, network pixels
    classes: ArrayLike  # [G] int32, 1..K
    # [G, M, M] uint8, 0..255: the object inside its own box, resampled to M x M; or [G, H, W], 0 or
    # 255, on the whole canvas if the recipe cuts its targets from there
    masks: ArrayLike
    valid: ArrayLike  # [G] bool
    # [G, V, 3] float32: x, y in network pixels and the number of the polygon, 0, 1, ..; unused
    # vertices are (0, 0, -1), all of them for an object without polygons or with more vertices
    # than V. V is 0 unless the recipe draws its targets from polygons
    polygons: ArrayLike


@struct.dataclass
class Batch:
    """What a loader ships to the device; all that follows (normalise, flip) is inside jit."""

    # [B, H, W, 3] uint8, or float32 in 0..255, RGB; zero beyond `image_sizes`, right and below
    images: ArrayLike
    image_sizes: ArrayLike  # [B, 2] int32 (height, width) of the resized image inside the canvas
    scales: ArrayLike  # [B, 2] float32 (y, x): network pixels per original pixel
    image_index: ArrayLike  # [B] int32 index into the dataset's images; -1 for a padding image
    targets: Targets


@struct.dataclass
class Proposals:
    """Regions of interest of one image, or of a batch."""

    boxes: ArrayLike  # [N, 4] float32
    scores: ArrayLike  # [N] float32, objectness probability
    valid: ArrayLike  # [N] bool


@struct.dataclass
class Detections:
    """Final detections of one image, or of a batch, by falling score."""

    boxes: ArrayLike  # [D, 4] float32
    scores: ArrayLike  # [D] float32
    classes: ArrayLike  # [D] int32, 1..K
    masks: ArrayLike  # [D, 28, 28] float32 probability inside the box
    valid: ArrayLike  # [D] bool

    def __len__(self) -> int:
        """Number of valid detections of one image."""
        return int(np.sum(np.asarray(self.valid)))

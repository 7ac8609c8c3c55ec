"""Array containers shared across the package, and the letters for their axes.

Shape letters used in every module:
    B  images in a batch            H, W  pixels of the network input
    C  feature channels             L     pyramid levels
    A  anchors (all levels)         N, R  proposals, sampled RoIs (padded)
    G  ground-truth rows (padded)   D     detections (padded)
    K  foreground classes           M     side of a ground-truth mask crop
    V  polygon vertices (padded)    P     keypoints of an object

Padding convention: every variable-length axis has a static size and a `valid` mask. Invalid rows
are zero and come last. `valid` alone decides: never infer validity from an area, score or class.

Boxes are `[x1, y1, x2, y2]`, float32, in network input pixels, unless a name says otherwise.
Class 0 is background and padding; foreground classes are 1..K.
"""

from typing import Any

import numpy as np
from flax import struct

# np.ndarray on the host, jax.Array on a device, and whatever `jax.tree.map` makes of them.
Array = Any


@struct.dataclass
class Targets:
    """Ground truth for one image, or for a batch with a leading B axis."""

    boxes: Array  # [G, 4] float32, network pixels
    classes: Array  # [G] int32, 1..K
    # [G, M, M] uint8, 0..255: the object inside its box, resampled to M x M; or [G, H, W], 0 or
    # 255, on the whole canvas for recipes with whole-image mask targets
    masks: Array
    valid: Array  # [G] bool
    # [G, V, 3] float32: x, y in network pixels and the polygon index, 0, 1, ..; unused vertices are
    # (0, 0, -1), as are all for an object without polygons or with more than V vertices. V is 0
    # unless the recipe's mask targets use polygons
    polygons: Array
    # [G, P, 3] float32: x, y in network pixels and v: 1 labeled but hidden, 2 visible; a point
    # that is not labeled is (0, 0, 0). None where the recipe has no `data.keypoints`
    keypoints: Array | None = None


@struct.dataclass
class Batch:
    """Loader output on the device; all further processing (normalize, flip) happens inside jit."""

    # [B, H, W, 3] uint8, or float32 in 0..255, RGB; zero beyond `image_sizes`, right and below
    images: Array
    image_sizes: Array  # [B, 2] int32 resized (height, width) inside the canvas
    scales: Array  # [B, 2] float32 (y, x): network pixels per original pixel
    image_index: Array  # [B] int32 index into the dataset's images; -1 for a padding image
    targets: Targets


@struct.dataclass
class Proposals:
    """Proposals for one image or a batch."""

    boxes: Array  # [N, 4] float32
    scores: Array  # [N] float32, objectness probability
    valid: Array  # [N] bool


@struct.dataclass
class Detections:
    """Final detections for one image or a batch, by descending score."""

    boxes: Array  # [D, 4] float32
    scores: Array  # [D] float32
    classes: Array  # [D] int32, 1..K
    # [D, M, M] float32 probability inside the box; None for a model of boxes alone
    masks: Array | None
    valid: Array  # [D] bool
    # [D, P, 3] float32: x, y and score; None for a model without a keypoint head
    keypoints: Array | None = None

    def __len__(self) -> int:
        """Number of valid detections in one image."""
        return int(np.sum(np.asarray(self.valid)))

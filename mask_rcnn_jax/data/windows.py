"""Windows of large images, which training reads in place of whole ones."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from mask_rcnn_jax.ranges import Fraction, Range, Ranged
from mask_rcnn_jax.rle import Window

WindowSize = Annotated[
    tuple[int, int],
    Range(
        "(height, width), both multiples of 64, or (0, 0)",
        lambda size: size == (0, 0) or all(side > 0 and side % 64 == 0 for side in size),
    ),
]


@dataclass(frozen=True)
class Windows(Ranged):
    """Windows that training reads in place of whole images, in their own pixels.

    Attributes:
        size: (height, width) of a window, multiples of 64, which is the canvas in training; (0, 0)
            reads whole images. A smaller image is its own window.
        place: "random" takes windows anywhere, "objects" around a random object each, "grid" the
            windows of a grid in turn.
        min_visible: an object that a window cuts stays in it if at least this share of its area is
            inside: of its mask, or of its box if it has none. The rest of it is background.
    """

    size: WindowSize = (0, 0)
    place: Literal["random", "objects", "grid"] = "random"
    min_visible: Fraction = 0.1

    @property
    def is_on(self) -> bool:
        """Whether windows are read, and not whole images."""
        return self.size != (0, 0)

    def counts(self, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """How many windows of a grid cover each image [n], int64: so often it is in an epoch."""
        rows, columns = (
            -(-sides.astype(np.int64) // length)
            for sides, length in zip((heights, widths), self.size, strict=True)
        )
        return rows * columns

    def draw(
        self, size: tuple[int, int], number: int, boxes: np.ndarray, rng: np.random.Generator
    ) -> Window:
        """The window of one example.

        Args:
            size: (height, width) of the image.
            number: of the example among those of the image in an epoch, from 0.
            boxes: [n, 4] of the image's objects; without any, "objects" is "random".
        """
        lengths = [min(side, length) for side, length in zip(size, self.size, strict=True)]
        free = [side - length for side, length in zip(size, lengths, strict=True)]
        if self.place == "grid":
            columns = -(-size[1] // self.size[1])
            rows = -(-size[0] // self.size[0])
            cell = number // columns, number % columns
            y, x = (
                n * most // max(1, count - 1)
                for n, most, count in zip(cell, free, (rows, columns), strict=True)
            )
        elif self.place == "objects" and len(boxes):
            box = boxes[int(rng.integers(len(boxes)))].astype(np.float64)
            center = (box[1] + box[3]) / 2, (box[0] + box[2]) / 2
            shares = rng.random(2)
            y, x = (
                int(np.clip(np.floor(middle - share * length), 0, most))
                for middle, share, length, most in zip(center, shares, lengths, free, strict=True)
            )
        else:
            y, x = (int(rng.integers(most + 1)) for most in free)
        return x, y, x + lengths[1], y + lengths[0]

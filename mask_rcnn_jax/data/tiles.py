"""Cut large images into overlapping tiles, in their own pixels."""

from dataclasses import dataclass

from mask_rcnn_jax.ranges import Range
from mask_rcnn_jax.rle import Window

MAX_TILES = 10_000  # of an image
SIDE = Range("at least 32 pixels", lambda side: side >= 32)
OVERLAP = Range("a fraction from 0 to 0.9", lambda overlap: 0 <= overlap <= 0.9)


@dataclass(frozen=True)
class Tiles:
    """How large images are cut.

    Attributes:
        size: side of a tile, pixels of the image.
        overlap: smallest overlap between neighbors, as a fraction of the side. Objects up to this
            size are whole in a tile, wherever they are.
    """

    size: int
    overlap: float = 0.2

    def __post_init__(self):
        SIDE.check(self.size, "tile")
        OVERLAP.check(self.overlap, "overlap")


def tiling(size: int, overlap: float) -> Tiles | None:
    """Return the tiles that flags or arguments ask for; None for a size of 0, no tiles.

    Raises ValueError for values without meaning.
    """
    return Tiles(size, overlap) if size else None


def view_windows(height: int, width: int, tiles: Tiles | None) -> list[Window]:
    """Return the windows to look at: the whole image, and then its tiles if it exceeds one.

    An image's tiles have the same shape: squares, or strips where the image has a side shorter
    than that. The first and the last end at the border, the rest are spread evenly. Raises
    ValueError for more than `MAX_TILES`.
    """
    whole = 0, 0, width, height
    if tiles is None or max(height, width) <= tiles.size:
        return [whole]
    rows, columns = (_spans(side, tiles) for side in (height, width))
    if len(rows) * len(columns) > MAX_TILES:
        raise ValueError(
            f"an image of {height} x {width} would be cut into {len(rows) * len(columns):,} tiles, "
            f"expected at most {MAX_TILES:,}; --tile larger or --overlap smaller gives fewer"
        )
    return [whole] + [(x0, y0, x1, y1) for y0, y1 in rows for x0, x1 in columns]


def _spans(side: int, tiles: Tiles) -> list[tuple[int, int]]:
    """Return (start, end) of the tiles along one side of an image."""
    length = min(side, tiles.size)
    step = max(1, int(length * (1 - tiles.overlap)))
    count = 1 - (length - side) // step  # rounded up
    starts = [k * (side - length) // max(1, count - 1) for k in range(count)]
    return [(start, start + length) for start in starts]

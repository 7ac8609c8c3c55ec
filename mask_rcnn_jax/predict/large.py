"""Images that are too large to be decoded whole: windows of them, and an overview."""

from collections.abc import Sequence

import numpy as np

from mask_rcnn_jax.annotations.checks import MAX_STATED_PIXELS
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.decode import UndecodableImage
from mask_rcnn_jax.images.opening import open_raster
from mask_rcnn_jax.images.parts import has_parts, is_large, read_part, reduced
from mask_rcnn_jax.rle import Window

OVERVIEW = 2048  # pixels that the shorter side of an overview has at least, if the image has
# Files of `infer --save` that need all pixels of an image at once.
WHOLE = ("masks", "label_images", "labelme")


class LargeImage:
    """A file whose windows are read.

    Attributes:
        path: the file.
        size: (height, width).
    """

    def __init__(self, path: str, size: tuple[int, int], bands: Bands):
        self.path, self.size = path, size
        self._bands = bands
        self._overview: np.ndarray | None = None

    def read(self, window: Window) -> np.ndarray:
        """[h, w, C] of a window, as `images.parts.read_part` gives it."""
        pixels = read_part(self.path, self.path, window, self._bands, self.size)
        if pixels is None:
            raise UndecodableImage(f"{self.path}: it changed while it was read")
        return pixels

    def values(self, window: Window) -> np.ndarray:
        """[h, w, C] of a window in the numbers of the file."""
        named = self._bands.names
        return self._bands.read(self.path, window=window) if named else self.read(window)

    def overview(self, at_least: tuple[int, int] = (0, 0)) -> np.ndarray:
        """The image in few pixels, [h, w, C]: `at_least` so many (height, width) in the first call,
        if it has them. Reads all of it, once."""
        if self._overview is None:
            wanted = [
                min(side, max(OVERVIEW * side // min(self.size), least))
                for side, least in zip(self.size, at_least, strict=True)
            ]
            given = self.read, self.size, (wanted[0], wanted[1]), self._bands
            self._overview = reduced(*given)
        return self._overview

    def shown(self) -> np.ndarray:
        """The overview to look at, uint8 [h, w, 3] RGB."""
        return self._bands.to_rgb(self.overview())


def open_large(path: str, bands: Bands) -> LargeImage | None:
    """An image file, if it is too large to be decoded whole and can be read by windows.

    Raises UndecodableImage for one of more pixels than results can have.
    """
    if "://" in path or not has_parts(path, path, bands):
        return None
    with open_raster(path) as raster:
        size = raster.size
    if not is_large(size, bands):
        return None
    if size[0] * size[1] > MAX_STATED_PIXELS:
        most = f"at most {MAX_STATED_PIXELS:,} are read"
        raise UndecodableImage(f"{path}: {size[0]} x {size[1]} pixels, {most}")
    return LargeImage(path, size, bands)


def check_kinds(path: str, kinds: Sequence[str]) -> None:
    """Raise UndecodableImage if kinds of `infer --save` need all pixels of a large image."""
    if wrong := [kind for kind in kinds if kind in WHOLE]:
        need = f"--save {', '.join(wrong)} would need all of its pixels at once"
        raise UndecodableImage(f"{path}: {need}")

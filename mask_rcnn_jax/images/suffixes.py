"""Which endings the names of image files have."""

import os
from collections import Counter
from collections.abc import Iterable

from mask_rcnn_jax.images.headers import HEIF_SUFFIXES, READ_HEIC, reads_heic

# Endings of images that are decoded. In `infer`, a GIF is a video.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".tif", ".tiff", ".webp", ".avif"),
    *(".jp2", ".pbm", ".pgm", ".ppm", ".pnm", ".gif", *(HEIF_SUFFIXES if reads_heic() else ())),
)
# Of images that are not decoded, so that they are not taken for videos.
OTHER_SUFFIXES = (*HEIF_SUFFIXES, ".jxl", ".psd", ".exr", ".hdr", ".svg", ".pdf", ".npy")
MOST_ENDINGS = 10  # that are listed


def is_image_name(name: str) -> bool:
    """Check a file's name for the ending of an image; `._a.jpg` is macOS's note on `a.jpg`."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def endings(names: Iterable[str]) -> str:
    """Count files by ending, such as "2 .psd, 1 without ending"; hidden files do not count."""
    shown = [name for name in names if not name.startswith(".")]
    counts = Counter(os.path.splitext(name)[1].lower() or "without ending" for name in shown)
    most = sorted(counts.items(), key=lambda found: (-found[1], found[0]))[:MOST_ENDINGS]
    listed = [f"{count} {ending}" for ending, count in most]
    text = ", ".join(listed + ["others"] * (len(counts) > MOST_ENDINGS))
    return f"{text}; {READ_HEIC}" if counts.keys() & set(HEIF_SUFFIXES) else text

"""Find the images and videos named on a command line and name their output files."""

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import cv2

from mask_rcnn_jax.safe_text import file_name

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts"),
    *(".wmv", ".flv", ".ogv", ".3gp", ".gif"),
)


def find_inputs(inputs: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return image paths and video sources, in order and without duplicates.

    Args:
        inputs: files (with any suffix), folders, glob patterns (`**`: any depth) or URLs.

    Raises:
        ValueError: if an input names neither an image nor a video.
    """
    images: dict[Path, None] = {}
    videos: dict[str, None] = {}
    for item in inputs:
        if "://" in item:
            videos[item] = None
            continue
        if os.path.isfile(item):
            names = [item]
        else:
            pattern = os.path.join(glob.escape(item), "*") if os.path.isdir(item) else item
            names = [name for name in glob.glob(pattern, recursive=True) if _has_known_suffix(name)]
        if not names:
            suffixes = ", ".join(IMAGE_SUFFIXES + VIDEO_SUFFIXES)
            raise ValueError(f"--input {item}: no images or videos found ({suffixes})")
        for name in sorted(names):
            if _is_image(name):
                images[Path(name)] = None
            else:
                videos[name] = None
    return list(images), list(videos)


def _has_known_suffix(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES + VIDEO_SUFFIXES) and os.path.isfile(name)


def _is_image(name: str) -> bool:
    if _has_known_suffix(name):
        return name.lower().endswith(IMAGE_SUFFIXES)
    return cv2.haveImageReader(name)


def output_files(
    images: Sequence[Path], videos: Sequence[str], folder: Path
) -> tuple[list[Path], list[Path]]:
    """Return an output file in `folder` for each image and video; name clashes get a number.

    PNG stays PNG, other images become .jpg, videos .mp4. Raises ValueError if an input would be
    overwritten.
    """
    taken: set[str] = set()
    image_files = [
        folder / file_name(path.name, ".png" if path.suffix.lower() == ".png" else ".jpg", taken)
        for path in images
    ]
    video_files = [folder / file_name(_name(source), ".mp4", taken) for source in videos]
    _check_overwrite([*images, *map(Path, videos)], [*image_files, *video_files], folder)
    return image_files, video_files


def _name(source: str) -> str:
    path = PurePosixPath(urlsplit(source).path) if "://" in source else Path(source)
    return path.name or "stream"


def _check_overwrite(inputs: Iterable[Path], outputs: Iterable[Path], folder: Path) -> None:
    overwritten = {path.resolve() for path in inputs} & {path.resolve() for path in outputs}
    if overwritten:
        raise ValueError(
            f"--output {folder} would overwrite {len(overwritten)} files of --input, such as "
            f"{min(overwritten)}; choose another folder"
        )

"""Which pictures and videos the names on a command line mean, and the names of their results."""

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import cv2

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts"),
    *(".wmv", ".flv", ".ogv", ".3gp", ".gif"),
)


def find_inputs(inputs: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Pictures and videos named by files, folders, glob patterns (`**`: any depth) and addresses,
    each once, in order.

    A file that is named itself may have any suffix. Raises ValueError for an input that names
    neither a picture nor a video.
    """
    pictures: dict[Path, None] = {}
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
            raise ValueError(
                f"--input {item}: no pictures or videos there "
                f"({', '.join(IMAGE_SUFFIXES + VIDEO_SUFFIXES)})"
            )
        for name in sorted(names):
            if _is_picture(name):
                pictures[Path(name)] = None
            else:
                videos[name] = None
    return list(pictures), list(videos)


def _has_known_suffix(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES + VIDEO_SUFFIXES) and os.path.isfile(name)


def _is_picture(name: str) -> bool:
    if _has_known_suffix(name):
        return name.lower().endswith(IMAGE_SUFFIXES)
    return cv2.haveImageReader(name)


def output_files(
    pictures: Sequence[Path], videos: Sequence[str], folder: Path
) -> tuple[list[Path], list[Path]]:
    """A file in `folder` for each picture and each video; two of one name get a number.

    PNG stays PNG, other pictures become .jpg, videos .mp4. Raises ValueError if one of the inputs
    would be overwritten.
    """
    taken: set[str] = set()
    picture_files = [
        folder / _free_name(path.stem, ".png" if path.suffix.lower() == ".png" else ".jpg", taken)
        for path in pictures
    ]
    video_files = [folder / _free_name(_stem(source), ".mp4", taken) for source in videos]
    _check_overwrite([*pictures, *map(Path, videos)], [*picture_files, *video_files], folder)
    return picture_files, video_files


def _stem(source: str) -> str:
    path = PurePosixPath(urlsplit(source).path) if "://" in source else Path(source)
    return path.stem or "stream"


def _free_name(stem: str, suffix: str, taken: set[str]) -> str:
    name, count = stem, 1
    while name + suffix in taken:
        count += 1
        name = f"{stem}_{count}"
    taken.add(name + suffix)
    return name + suffix


def _check_overwrite(inputs: Iterable[Path], outputs: Iterable[Path], folder: Path) -> None:
    overwritten = {path.resolve() for path in inputs} & {path.resolve() for path in outputs}
    if overwritten:
        raise ValueError(
            f"--output {folder} would overwrite {len(overwritten)} files of --input, "
            f"{min(overwritten)} for one; choose another folder"
        )

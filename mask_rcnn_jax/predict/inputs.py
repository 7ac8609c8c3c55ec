"""Find the images and videos named on a command line, and name their outputs."""

import glob
import os
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
from absl import logging

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax import stores
from mask_rcnn_jax.annotations.reader import below, listed, raise_unlisted
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.decode import MAX_BYTES, UndecodableImage
from mask_rcnn_jax.images.suffixes import OTHER_SUFFIXES, endings
from mask_rcnn_jax.network import Limits, is_web, open_url, read_url
from mask_rcnn_jax.predict.pixels import RGB_FILES, image_suffixes, is_other_band, read_pixels
from mask_rcnn_jax.predict.tar_inputs import images_in_tars, is_in_tars
from mask_rcnn_jax.terminal.safe_text import file_name

IMAGE_SUFFIXES = tuple(suffix for suffix in image_suffixes(RGB_FILES) if suffix != ".gif")
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts"),
    *(".wmv", ".flv", ".ogv", ".3gp", ".gif"),
)
_LIMITS = Limits(seconds=600.0)  # of a web image


class Input(NamedTuple):
    """An image or a video.

    A folder's files keep their places below it, in `name` and in `target`.
    """

    source: str  # a file, a device or a web address
    name: PurePosixPath | str  # unique among the images, and among the videos; in lists as written
    target: PurePosixPath  # of the annotated copy, below --output; unique without its suffix
    public_only: bool = False  # whether it is read from public addresses alone


def find_inputs(
    inputs: Sequence[str],
    output: Path,
    public_only: bool = False,
    bands: Bands = RGB_FILES,
    *,
    has_targets: bool = True,
) -> tuple[list[Input], list[Input]]:
    """Return images and videos, in order and without duplicates (`a.jpg` is `./a.jpg`).

    Args:
        inputs: files (with any suffix), folders with all their sub-folders, glob patterns (`**`:
            any depth), the same in a store (s3://bucket/photos/*.jpg), web addresses of images or
            videos, and cameras (a number or /dev/video0).
        output: the output folder, in which nothing is looked for.
        public_only: whether to read from public addresses alone, see `network.Limits`.
        bands: what is read of images, which says which files are some. Where each band has a file,
            that of the first is the image.
        has_targets: whether images are drawn.

    Raises:
        ValueError: if an input does not exist or names neither an image nor a video, if a video is
            given for other bands than a video has, or if an output would overwrite an input.
    """
    images: dict[str, PurePosixPath] = {}
    videos: dict[str, PurePosixPath] = {}
    seen: set[str] = set()
    for item in inputs:
        if public_only and stores.is_store(item):
            raise ValueError(f"--input {item}: a store, whose address is not checked to be public")
        found = list(_find(item, output, bands))
        if not found:
            suffixes = ", ".join(_endings(bands) + VIDEO_SUFFIXES)
            hint = f"; @{item} takes a list of paths" if item.lower().endswith(".txt") else ""
            raise ValueError(f"--input {item}: no images or videos found ({suffixes}){hint}")
        for source, name in found:
            place = source if "://" in source else os.path.abspath(source)
            if place not in seen:
                seen.add(place)
                (images if _is_image(source, public_only, bands) else videos)[source] = name
    if videos and (bands.count != 3 or bands.is_scaled):
        names = f"{bands.count} bands ({', '.join(bands.names)})"
        seen_by = f"the model sees {names}{' beyond 8 bits' if bands.is_scaled else ''}"
        raise ValueError(f"{next(iter(videos))} is a video, of 8-bit red, green, blue; {seen_by}")
    found_images = _named(images, public_only)
    found_videos = _named(videos, public_only, ".mp4")
    check_overwrite([*(found_images if has_targets else ()), *found_videos], output)
    return found_images, found_videos


def read_image(
    source: str, public_only: bool = False, bands: Bands = RGB_FILES, upright: bool = True
) -> np.ndarray:
    """Read a file or a web address; the rest and errors as for `pixels.read_pixels`, and OSError
    for one that may pass."""
    if public_only and stores.is_store(source):
        raise UndecodableImage(f"{source}: a store, whose address is not checked to be public")
    if "://" not in source or stores.is_store(source):
        return read_pixels(source, bands, upright)
    try:
        content = read_url(source, MAX_BYTES, replace(_LIMITS, public_only=public_only))
    except OSError as error:
        if stores.may_pass(error):
            raise
        raise UndecodableImage(f"{source}: {error}") from error
    return read_pixels(content, bands, upright, name=source)


def _endings(bands: Bands) -> tuple[str, ...]:
    """Of images, without that of animations."""
    return tuple(suffix for suffix in image_suffixes(bands) if suffix != ".gif")


def _find(item: str, output: Path, bands: Bands) -> Iterator[tuple[str, PurePosixPath]]:
    """Yield the sources of one input, with their names."""
    if is_in_tars(item):
        yield from images_in_tars(item, bands)
    elif stores.is_store(item):
        yield from _in_store(item, bands)
    elif "://" in item:
        path = PurePosixPath(unquote(urlsplit(item).path))
        yield item, PurePosixPath(file_name(path.name or "stream", path.suffix, set()))
    elif os.path.isfile(item):
        yield item, PurePosixPath(os.path.basename(item))
    elif os.path.isdir(item):
        yield from _below(item, item, below(Path(item)), output, bands)
    elif camera := _camera(item):
        yield camera, PurePosixPath(f"camera_{os.path.basename(camera)}")
    elif glob.has_magic(item):
        folders = item if os.path.basename(item) == "**" else os.path.dirname(item)
        for folder in listed(item, glob.iglob(os.path.join(folders, ""), recursive=True)):
            next(os.walk(os.path.normpath(folder), onerror=raise_unlisted), None)
        paths = map(Path, glob.iglob(item, recursive=True))
        yield from _below(item, _fixed_part(item), paths, output, bands)
    else:
        raise ValueError(f"--input {item}: does not exist")


def _below(
    item: str, folder: str, paths: Iterable[Path], output: Path, bands: Bands
) -> Iterator[tuple[str, PurePosixPath]]:
    """Yield the known images and videos of a folder, but for those in the output folder.

    The log has a line that counts the other files, without those that have a band of an image.
    """
    known, others = _endings(bands) + VIDEO_SUFFIXES, list[str]()
    outside = output.resolve() not in (Path(folder).resolve(), *Path(folder).resolve().parents)
    for path in sorted(listed(folder, paths)):
        if not path.is_file() or (outside and path.resolve().is_relative_to(output.resolve())):
            continue
        if is_other_band(path.name, bands):
            continue
        # `._a.jpg` is macOS's note on `a.jpg`.
        if not path.name.lower().endswith(known) or path.name.startswith("."):
            others.append(path.name)
            continue
        yield str(path), PurePosixPath(Path(os.path.relpath(path, folder)).as_posix())
    if counts := endings(others):
        logging.info("--input %s: these files are not read: %s", item, counts)


def _in_store(item: str, bands: Bands) -> Iterator[tuple[str, PurePosixPath]]:
    """Yield the known images and videos of a store, as `_below`."""
    known, others = _endings(bands) + VIDEO_SUFFIXES, list[str]()
    found = stores.find_files(item)
    above = len(os.path.commonprefix([source.split("/")[:-1] for source in found]))
    for source in found:
        name = posixpath.basename(source)
        if source == item or (name.lower().endswith(known) and not name.startswith(".")):
            if not is_other_band(name, bands):
                # Names in a store are any text: none may lead out of the output folder.
                below = [part for part in source.split("/")[above:] if part != ".."]
                yield source, PurePosixPath(*below)
        else:
            others.append(name)
    if counts := endings(others):
        logging.info("--input %s: these files are not read: %s", item, counts)


def _fixed_part(pattern: str) -> str:
    """Return the folders of a pattern before its first wildcard."""
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return str(Path(*parts[:fixed]))


def _camera(item: str) -> str:
    """Return the device of a camera's number or path, "" for anything else."""
    device = f"/dev/video{item}" if item.isdecimal() else item
    return device if device.startswith("/dev/video") and os.path.exists(device) else ""


def _is_image(source: str, public_only: bool, bands: Bands) -> bool:
    endings = _endings(bands)
    if "://" in source and not stores.is_store(source):
        return is_web(source) and _is_web_image(source, public_only, endings)
    if source.lower().endswith(endings + VIDEO_SUFFIXES):
        return source.lower().endswith(endings)
    known = source.lower().endswith(OTHER_SUFFIXES)
    return os.path.isfile(source) and (known or cv2.haveImageReader(source))


def _is_web_image(address: str, public_only: bool, endings: tuple[str, ...]) -> bool:
    """Whether an address is of an image: by its ending, or else by what the server says."""
    path = urlsplit(address).path.lower()
    if path.endswith(endings + VIDEO_SUFFIXES):
        return path.endswith(endings)
    limits = replace(_LIMITS, public_only=public_only)
    try:
        with open_url(address, limits, method="HEAD") as response:
            return response.headers.get_content_maintype() == "image"
    except OSError:
        return False


def _named(found: dict[str, PurePosixPath], public_only: bool, suffix: str = "") -> list[Input]:
    """Give sources unique names, and targets with `suffix`, or else PNG for PNG and JPEG."""
    names: set[str] = set()
    stems: set[str] = set()
    inputs = []
    for source, name in found.items():
        target = unique_target(name, stems, suffix)
        unique = _unique(name.with_suffix(""), name.suffix, names)
        inputs.append(Input(source, unique, target, public_only))
    return inputs


def unique_target(name: PurePosixPath, stems: set[str], suffix: str = "") -> PurePosixPath:
    """Return where a drawing goes, whose stem is not in `stems`; it is added."""
    ending = suffix or (".png" if name.suffix.lower() == ".png" else ".jpg")
    target = _unique(name.with_suffix(""), "", stems)
    return target.with_name(target.name + ending)


def _unique(stem: PurePosixPath, suffix: str, taken: set[str]) -> PurePosixPath:
    """Return stem and suffix, with a number between if that is taken; add it to `taken`.

    Letters in both cases count as equal, as some file systems have it.
    """
    unique, count = stem.with_name(stem.name + suffix), 1
    while str(unique).casefold() in taken:
        count += 1
        unique = stem.with_name(f"{stem.name}_{count}{suffix}")
    taken.add(str(unique).casefold())
    return unique


def resolved(sources: Iterable[str]) -> Iterator[Path]:
    """Yield the files of sources that are no addresses, without those that can be none."""
    for source in sources:
        if "://" not in source:
            with suppress(ValueError, RuntimeError):  # NUL or half a character; a loop of links
                yield Path(source).resolve()


def check_overwrite(inputs: Iterable[Input], output: Path) -> None:
    """Raise ValueError if the drawing of an image or a video would replace an input."""
    sources, targets = set[Path](), set[Path]()
    for one in inputs:
        targets.add((output / one.target).resolve())
        sources.update(resolved([one.source]))
    overwritten = sources & targets
    if overwritten:
        raise ValueError(
            f"--output {output} would overwrite {len(overwritten)} files of --input, such as "
            f"{min(overwritten)}; choose another folder"
        )

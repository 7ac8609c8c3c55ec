"""Which page of an OME-TIFF has which plane. Its text may say anything, and name other files."""

import math
from collections.abc import Iterator
from typing import NamedTuple
from xml.etree import ElementTree

from mask_rcnn_jax.images.decode import UndecodableImage

_MAX_PARTS = 1_000_000  # elements and attributes
_MAX_TIMES = 16  # that a plane is stated, on average


class Planes(NamedTuple):
    """The planes of an image: `pages` of the file, for the lengths of all `axes`."""

    axes: str
    lengths: list[int]
    pages: list[int]
    others: int  # images in the file


def read_planes(
    text: str, path: str, name: str, count: int, shape: tuple[int, int, int]
) -> Planes | None:
    """The planes of the first image that an OME-XML has in its file; None if it tells of none, or
    of other pages.

    Args:
        path: names the file in messages.
        name: of the file.
        count: pages in it.
        shape: height, width and samples of the first.

    Raises UndecodableImage if planes are not there, ValueError for a text without sense.
    """
    if "<!DOCTYPE" in text:  # where entities would be defined
        raise UndecodableImage(f"{path}: an OME-XML with a document type is not read")
    if text.count("<") + text.count("=") > _MAX_PARTS:
        raise UndecodableImage(f"{path}: an OME-XML of more than {_MAX_PARTS:,} parts is not read")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return None
    images = list(_images(root, name))
    if not images or _shape(images[0][0]) != shape:
        return None
    pixels, own, others = images[0]
    axes = pixels.attrib["DimensionOrder"][:1:-1]
    lengths = [int(pixels.attrib[f"Size{axis}"]) for axis in axes]
    if sorted(axes) != ["C", "T", "Z"] or min(lengths) < 1:
        raise ValueError(f"an OME-XML with axes {axes} of {lengths}")
    lengths[axes.index("C")] //= shape[2]
    if others:
        raise UndecodableImage(f"{path}: an OME-TIFF with planes in other files is not read")
    total = math.prod(lengths)
    if total > count:
        raise UndecodableImage(f"{path}: its OME-XML tells of {total:,} pages, {count:,} are there")
    pages = [-1] * total
    left = _MAX_TIMES * total
    for data in own:
        at = 0
        for axis, length in zip(axes, lengths, strict=True):
            place = int(data.get(f"First{axis}", 0))
            at = at * length + place if 0 <= place < length else total
        first = int(data.get("IFD", 0))
        stated = int(data.get("PlaneCount", data.get("NumPlanes", "IFD" in data.attrib)))
        number = min(stated or count, total - at, count - first) if first >= 0 else 0
        left -= max(number, 0)
        if left < 0:
            raise ValueError(f"an OME-XML that states each plane {_MAX_TIMES} times")
        pages[at : at + number] = range(first, first + max(number, 0))
    if missing := pages.count(-1):
        found = f"{missing:,} of the {total:,} pages that its OME-XML tells of"
        raise UndecodableImage(f"{path}: {found} are not there")
    return Planes(axes, lengths, pages, len(images) - 1)


def _images(
    root: ElementTree.Element, name: str
) -> Iterator[tuple[ElementTree.Element, list[ElementTree.Element], bool]]:
    """The `Pixels` of each image with planes in this file, what tells of those, and whether it has
    planes in others."""
    uuid = root.get("UUID")
    for pixels in root.iterfind("{*}Image/{*}Pixels"):
        data = pixels.findall("{*}TiffData")
        own = []
        for one in data:
            file = one.find("{*}UUID")
            is_named = file is not None and file.get("FileName", "").lower() == name.lower()
            if file is None or (file.text == uuid if uuid else is_named):
                own.append(one)
        if own:
            yield pixels, own, len(own) < len(data)


def _shape(pixels: ElementTree.Element) -> tuple[int, int, int]:
    channel = pixels.find("{*}Channel")
    samples = 1 if channel is None else int(channel.get("SamplesPerPixel", 1))
    return int(pixels.attrib["SizeY"]), int(pixels.attrib["SizeX"]), samples

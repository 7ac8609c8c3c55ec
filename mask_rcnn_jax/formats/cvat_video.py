"""Read tracks from "CVAT for video 1.1".

A track lists shapes by frame; from an `outside` shape to the next other one, its object is absent.
In a frame without a shape, it is on the way between the shapes around it, or as the last one.
"""

import bisect
import re
from pathlib import Path
from typing import NamedTuple
from xml.etree.ElementTree import Element

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.coco_build import AnnotatedImage, read_image_size
from mask_rcnn_jax.formats.cvat_shapes import add_shape, polygon_points
from mask_rcnn_jax.formats.image_files import ImageFiles
from mask_rcnn_jax.formats.reading import ImageObjects, Options, check_size, number, on_one_line
from mask_rcnn_jax.formats.xml_tree import child_text

FRAME = re.compile(r"frame_(\d{1,12})$")  # stem of a frame's image, as CVAT names it
EXTRACT = "`ffmpeg -i VIDEO -start_number 0 FOLDER/frame_%06d.png` writes them"
# Attributes that change evenly from one shape to the next.
NUMBERS = {"box": ("xtl", "ytl", "xbr", "ybr"), "ellipse": ("cx", "cy", "rx", "ry")}


class Track(NamedTuple):
    """One object's shapes."""

    where: str  # names it in messages
    label: str
    group: str  # "0" for none
    frames: list[int]  # rising, a shape for each
    shapes: list[Element]


def read_frames(
    root: Element, path: Path, files: ImageFiles, options: Options, left_out: list[str]
) -> list[AnnotatedImage]:
    """Read the tracks in all frames of the task that are images frame_000000 and so on.

    Frames without an image are left out, so a part of a video may be extracted.

    Raises ValueError, naming the file, for tracks that cannot be read or that are of several
    videos, or without any such image.
    """
    videos = [show(child_text(task, "name")) for task in root.iterfind("meta//task")]
    if videos[1:]:
        listed = ", ".join(videos[:5])
        several = f"{path}: a project of the videos {listed}, each with a frame_000000"
        raise ValueError(f"{several}; export each task by itself")
    tracks = [_track(entry, path) for entry in root.iterfind("track")]
    for track in tracks:
        left_out += _jumps(track)
    last_listed = max((frame for track in tracks for frame in track.frames), default=0)
    first, last = (
        int(number(root.findtext(f"meta//{key}", default), f"{path}: {key}"))
        for key, default in (("start_frame", "0"), ("stop_frame", str(last_listed)))
    )
    images = {}
    for name in files.paths:
        found = FRAME.search(Path(name).stem)
        if found and first <= int(found[1]) <= last:
            images[files.find(name, str(path))] = int(found[1])
    if not images:
        raise ValueError(f"{path}: no frame_{first:06d} or later in {files.folder}; {EXTRACT}")
    annotated = []
    for image, frame in images.items():
        objects = ImageObjects(_size(root, path, image), left_out)
        for track in tracks:
            shape = shape_at(track, frame)
            if shape is not None:
                where = f"{track.where}, frame {frame}"
                add_shape(shape, track.label, track.group, where, objects, options)
        annotated.append(AnnotatedImage(image, objects.size, objects.joined()))
    return annotated


def shape_at(track: Track, frame: int) -> Element | None:
    """Return a track's shape in a frame; None if there is none."""
    place = bisect.bisect_right(track.frames, frame) - 1
    if place < 0 or _is_outside(track.shapes[place]):
        return None
    before = track.shapes[place]
    if track.frames[place] == frame or place + 1 == len(track.frames):
        return before
    after = track.shapes[place + 1]
    if _is_outside(after):
        return before
    share = (frame - track.frames[place]) / (track.frames[place + 1] - track.frames[place])
    return _between(before, after, share, track.where)


def _between(before: Element, after: Element, share: float, where: str) -> Element | None:
    """Return the shape at a share of the way to another one; None if there is no such way."""
    kind = before.tag
    if kind != after.tag:
        return None
    if kind == "polygon":
        start, end = polygon_points(before, where), polygon_points(after, where)
        if len(start) != len(end):
            return None
        pairs = zip(start, end, strict=True)
        points = [[a + share * (b - a) for a, b in zip(*pair, strict=True)] for pair in pairs]
        return Element(kind, {"points": ";".join(f"{x},{y}" for x, y in points)})
    if kind not in NUMBERS:
        return before  # masks stay as they are until the next
    values = {}
    for name in NUMBERS[kind]:
        a, b = (number(shape.get(name), f"{where}: {name}") for shape in (before, after))
        values[name] = str(a + share * (b - a))
    a, b = (number(shape.get("rotation", "0"), f"{where}: rotation") for shape in (before, after))
    turn = (b - a + 180) % 360 - 180  # the shorter way round
    return Element(kind, values | {"rotation": str(a + share * turn)})


def _track(entry: Element, path: Path) -> Track:
    label, name = entry.get("label"), entry.get("id", "")
    if not label:
        raise ValueError(f"{path}: track {show(name)} has no label")
    where = f"{path}: track {show(name)}"
    listed = {}
    for shape in entry:
        frame = number(shape.get("frame"), f"{where}: frame")
        if frame != int(frame) or frame < 0 or frame in listed:
            raise ValueError(f"{where}: frame {frame:g}, expected whole numbers, each once")
        listed[int(frame)] = shape
    frames = sorted(listed)
    shapes = [listed[frame] for frame in frames]
    return Track(where, label, entry.get("group_id", "0"), frames, shapes)


def _jumps(track: Track) -> list[str]:
    """Return a line for each gap between shapes that have nothing between them."""
    lines = []
    for place in range(len(track.frames) - 1):
        before, after = track.frames[place : place + 2]
        if after > before + 1 and shape_at(track, before) is not None:
            if shape_at(track, before + 1) is None:
                where = f"{track.where} ({on_one_line(track.label)})"
                kinds = "shapes of different kinds or numbers of points"
                lines.append(f"{where}, frames {before + 1} to {after - 1}, between {kinds}")
    return lines


def _is_outside(shape: Element) -> bool:
    return shape.get("outside", "0") == "1"


def _size(root: Element, path: Path, image: Path) -> tuple[int, int]:
    """Return an image's (height, width), which is that of the video if the XML says so."""
    size, stated = read_image_size(image, path), root.find("meta//original_size")
    if stated is not None:
        height, width = (
            number(child_text(stated, side), f"{path}: {side}") for side in ("height", "width")
        )
        check_size(f"{path}: original_size", (height, width), image, size)
    return size

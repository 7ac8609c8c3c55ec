"""Find every problem of a COCO json and its images, and legal content that ruins a run."""

import hashlib
import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mask_rcnn_jax import stores
from mask_rcnn_jax.annotations import checks
from mask_rcnn_jax.annotations.absent import folded
from mask_rcnn_jax.annotations.checks import show
from mask_rcnn_jax.annotations.ids import ZERO_ID, is_zero
from mask_rcnn_jax.annotations.mask_parts import parts_notice
from mask_rcnn_jax.annotations.reader import (
    GroundTruth,
    normalized,
    read_annotation_file,
    read_regular,
)
from mask_rcnn_jax.data.box_forms import boxes_of, misfits
from mask_rcnn_jax.data.keypoint_checks import keypoint_warnings, other_names
from mask_rcnn_jax.data.unused import Unused
from mask_rcnn_jax.images.bands import RGB_FILES, Bands
from mask_rcnn_jax.images.decode import (
    MAX_BYTES,
    MAX_PIXELS,
    decode_bytes,
    header_size,
    orientation,
    upright_size,
)
from mask_rcnn_jax.images.file_names import find_absent, folders_with_all, is_file
from mask_rcnn_jax.images.opening import open_raster
from mask_rcnn_jax.images.parts import check_parts
from mask_rcnn_jax.images.raster import as_plain
from mask_rcnn_jax.tars.patterns import place_of

ALL_CROWDS = (
    "all %d annotations are crowds, which are not learned from (data.skip_crowd); some tools "
    "export every mask with iscrowd=1, which is 0 for a single object"
)
MANY = 5  # equal messages from here on become one line
MAX_LISTED = 10  # names in a line
FEW = 10  # objects of a class below which it is rare, if another has as many times more


@dataclass
class Findings:
    """Problems, warnings and counts of one json."""

    problems: list[str] = field(default_factory=list)  # training stops
    warnings: list[str] = field(default_factory=list)
    images: int = 0
    classes: int = 0
    objects: Counter = field(default_factory=Counter)  # number by class name, crowds included
    digests: dict[str, str] = field(default_factory=dict)  # hash of each image that decodes


def inspect_coco(
    json_path: str | os.PathLike,
    image_dir: str | os.PathLike,
    *,
    boxes_only: bool = False,
    bands: Bands = RGB_FILES,
    upright: bool = False,
    keypoints: tuple[str, ...] = (),
) -> Findings:
    """Check a COCO json and decode all of its images.

    `boxes_only`, `bands` and `upright` are those of `load_coco`, `keypoints` its names.
    Raises ValueError or OSError if the json cannot be read at all.
    """
    findings, image_dir = Findings(), os.fspath(image_dir)
    content = normalized(read_annotation_file(json_path))
    findings.problems += checks.structure_problems(content, checks.TRAINING_KEYS)
    if findings.problems:
        return findings  # nothing else can be looked up
    findings.images, findings.classes = len(content["images"]), len(content["categories"])
    findings.problems += checks.id_problems(content)
    findings.problems += checks.training_problems(content, image_dir, True)
    others = other_names(content["categories"], keypoints)
    findings.problems += others
    known = {entry["id"] for entry in content["images"]}
    annotations = [entry for entry in content["annotations"] if entry["image_id"] in known]
    sections = content | {"annotations": annotations}
    used = () if others else keypoints  # their faults stop training
    truth = GroundTruth(os.fspath(json_path), sections, boxes_only, keypoints=used)
    findings.problems += truth.faults()
    _decode_images(content["images"], image_dir, findings, bands, upright)
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    ids = [entry["category_id"] for entry in annotations]
    findings.objects.update(names[i] for i in ids if i in names)
    findings.warnings += _warnings(content, truth, image_dir)
    return findings


def _decode_images(
    images: list[dict], image_dir: str, findings: Findings, bands: Bands, upright: bool
) -> None:
    unused, numbers = Unused(), defaultdict(list)
    turned: list[tuple[str, bool, bool]] = []
    for entry in images:
        path = os.path.join(image_dir, entry["file_name"])
        if not (stores.is_address(path) or place_of(path) or os.path.isfile(path)):
            continue  # found by `absent_images`
        size = int(entry["height"]), int(entry["width"])
        try:
            if size[0] * size[1] > MAX_PIXELS:
                check_parts(path, size, bands)
                continue
            content = read_regular(path, MAX_BYTES)
            if orientation(content) > 1:
                stored, upright_one = header_size(content, path), upright_size(io.BytesIO(content))
                turned.append((entry["file_name"], size == stored, size == upright_one))
            if bands.names:
                pixels = bands.read(path, expected_size=size, upright=upright)
                numbers[_stored_type(path, pixels, bands)].append(entry["file_name"])
            else:
                image = decode_bytes(content, path, expected_size=size, upright=upright)
        except FileNotFoundError:  # likewise, in a store or a tar
            continue
        except (OSError, ValueError) as error:
            findings.problems.append(str(error))
        else:
            findings.digests[entry["file_name"]] = hashlib.sha256(content).hexdigest()
            if not bands.names:
                unused.add(entry["file_name"], io.BytesIO(content), image)
    findings.warnings += unused.lines()
    findings.warnings += _mixed(numbers) + _turned(turned)


def _stored_type(path: str, pixels: np.ndarray, bands: Bands) -> str:
    """The type of the numbers in a file: as they are read, unless some are no data."""
    if pixels.dtype != np.float32:
        return str(pixels.dtype)
    with open_raster(bands.paths(path)[0]) as raster:
        return str(as_plain(np.empty(0, raster.dtype)).dtype)


def _mixed(numbers: dict[str, list[str]]) -> list[str]:
    """Name the types of numbers of a set's images, if there are several."""
    listed = [f"{kind} in {len(n)} (first: {n[0]})" for kind, n in sorted(numbers.items())]
    mixed = "numbers of several types, which data.bands.scale may take for others"
    return [f"{mixed}: {'; '.join(listed)}"] if len(listed) > 1 else []


def _turned(images: list[tuple[str, bool, bool]]) -> list[str]:
    """Say which of `data.apply_exif` fits images that have an EXIF entry.

    images: file name, and whether the json has the size as it is stored, and turned.
    """
    if not images:
        return []
    stored = sum(fits and not other for _, fits, other in images)
    always = sum(other and not fits for _, fits, other in images)
    text = f"{len(images)} images are to be turned by their EXIF entry (first: {images[0][0]}); "
    text += f"the json has the size of {stored} as they are stored (data.apply_exif=predict), of "
    text += f"{always} turned (data.apply_exif=always)"
    either = len(images) - stored - always
    return [text + (f", of {either} one that tells nothing" if either else "")]


def _warnings(content: dict[str, Any], truth: GroundTruth, image_dir: str) -> Iterator[str]:
    yield from truth.dropped()
    entries = content["annotations"]
    if entries and all(entry.get("iscrowd") in (1, True) for entry in entries):
        yield ALL_CROWDS % len(entries)
    if any(is_zero(entry.get("id")) for entry in entries):
        yield ZERO_ID
    yield from _wrong_boxes(truth)
    yield from keypoint_warnings(truth)
    sound = [c.entry for c in truth.checked if c.fault is None]
    if notice := parts_notice(content | {"annotations": sound}):
        remedy = "`prepare convert --from masks --split_parts` makes each part an object"
        yield f"{notice} {remedy}"
    yield from _duplicates(truth)
    yield from _similar_classes(content["categories"])
    yield from _rare_classes(content)
    twice = [
        name for name, n in Counter(e["file_name"] for e in content["images"]).items() if n > 1
    ]
    if twice:
        text = "files are listed as several images, so that objects of one are background of others"
        yield f"{len(twice)} {text}, first: {show(twice[0])}"
    yield from _empty_roots(content["categories"], {entry["category_id"] for entry in entries})
    names = [entry["file_name"] for entry in content["images"]]
    absent = [name for name in names if not is_file(os.path.join(image_dir, name))]
    if absent and (folders := folders_with_all(names, image_dir)):
        yield f"all images are in {' and in '.join(folders[:3])}; --images names their folder"
    elif found := find_absent(names, image_dir):
        first, path = next(iter(found.items()))
        yield (
            f"{len(found)} of {len(absent)} absent images are in {image_dir} under another name, "
            f"such as {show(first)} as {show(path)}; `check --by_name --output FILE` writes a json "
            "with these names"
        )


def _wrong_boxes(truth: GroundTruth) -> Iterator[str]:
    """Find boxes that are not [x, y, width, height], or not those of their masks."""
    if found := misfits(boxes_of(truth)):
        text, position = found
        entry = truth.content["annotations"][position]
        yield f"{text}; first: {checks.annotation_name(entry, position)}"


def _duplicates(truth: GroundTruth) -> Iterator[str]:
    """Find sound annotations of the same object."""
    entries = truth.content["annotations"]
    keys = ("image_id", "category_id", "bbox", "segmentation", "iscrowd")
    seen: dict[int, int] = {}
    twice: list[tuple[int, int]] = []
    for position, (entry, checked) in enumerate(zip(entries, truth.checked, strict=True)):
        if checked.fault:
            continue
        # A hash takes a tenth of the memory; of a mask, enough to tell objects apart.
        box = tuple(entry.get("bbox") or ())
        start = "" if box else repr(entry.get("segmentation"))[:80]
        place = entry["image_id"], entry["category_id"], box, start
        first = seen.setdefault(hash(place), position)
        same = entries[first]
        if first != position and all(entry.get(key) == same.get(key) for key in keys):
            twice.append((first, position))
    if twice:
        one, other = (checks.annotation_name(entries[n], n) for n in twice[0])
        yield (
            f"{len(twice)} annotations repeat another of the same image, class, box and mask, such "
            f"as {other} that of {one}"
        )


def _similar_classes(categories: list[dict]) -> Iterator[str]:
    """Find classes that differ in case or blanks only."""
    kinds = defaultdict(list)
    for entry in categories:
        kinds[folded("".join(entry["name"].split()))].append(entry["name"])
    similar = [names for names in kinds.values() if len(set(names)) > 1]
    if similar:
        count = sum(map(len, similar))
        listed = ", ".join(map(show, similar[0][:MAX_LISTED]))
        yield (
            f"{count} classes differ from others in case or blanks only, such as {listed}; "
            "`prepare merge --map old=new` makes them one"
        )


def _rare_classes(content: dict[str, Any]) -> Iterator[str]:
    """Find classes of few objects beside one of many: misspelled names, or classes not to learn."""
    counts = Counter(entry["category_id"] for entry in content["annotations"])
    most = max(counts.values(), default=0)
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    rare = sorted((n, str(names.get(i))) for i, n in counts.items() if n < min(FEW, most / FEW))
    if rare:
        listed = ", ".join(f"{show(name)} ({n})" for n, name in rare[:MAX_LISTED])
        more = ", ..." if rare[MAX_LISTED:] else ""
        yield f"{len(rare)} classes have few objects, where another has {most}: {listed}{more}"


def _empty_roots(categories: list[dict], used: set[int | str]) -> Iterator[str]:
    """Find categories without objects that only group others, as Roboflow exports them."""
    for entry in categories:
        others = [other for other in categories if other is not entry]
        is_root = any(other.get("supercategory") == entry["name"] for other in others)
        if is_root and entry["id"] not in used:
            yield (
                f"category {show(entry['name'])} has no objects and is the supercategory of "
                "others (Roboflow writes such a root); it would be trained as a class; "
                "`prepare merge --other_classes=skip` with the others in --classes removes it"
            )


def compare_sets(train: Findings, val: Findings) -> list[str]:
    """Return warnings about a set to train on and one to validate with."""
    lines = []
    for here, there, one, other in (
        (train, val, "train", "val"),
        (val, train, "val", "train"),
    ):
        alone = sorted(name for name in here.objects if not there.objects[name])
        if alone:
            more = ", ..." if alone[MAX_LISTED:] else ""
            listed = ", ".join(map(show, alone[:MAX_LISTED])) + more
            lines.append(
                f"{len(alone)} classes have objects in {one} and none in {other}: {listed}"
            )
    in_train = {digest: name for name, digest in train.digests.items()}
    twice = {name: in_train[d] for name, d in val.digests.items() if d in in_train}
    if twice:
        name, same = next(iter(twice.items()))
        example = f"such as {show(name)}, which is {show(same)} in train"
        lines.append(f"{len(twice)} images of val are in train, too, {example}")
    return lines


def summarize(lines: Iterable[str]) -> list[str]:
    """Return the lines, with `MANY` or more that differ only in names and numbers as one."""
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kinds.setdefault(_kind(line), []).append(line)
    summary = []
    for found in kinds.values():
        many = len(found) >= MANY
        summary += [f"{len(found)} times, first: {found[0]}"] if many else found
    return summary


_NAMES_AND_NUMBERS = re.compile(r"""'[^']*'|"[^"]*"|[^\s:]*[/.][^\s:]*|\d+|-""")


def _kind(line: str) -> str:
    """A line without quoted names, paths and numbers."""
    return _NAMES_AND_NUMBERS.sub("#", line)

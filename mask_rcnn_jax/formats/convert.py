"""Convert annotations in any known format to a COCO json."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mask_rcnn_jax.annotations.ids import MAX_NAME
from mask_rcnn_jax.annotations.reader import GroundTruth, listed, read_regular
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.data.checking import summarize
from mask_rcnn_jax.formats.cityscapes import read_cityscapes
from mask_rcnn_jax.formats.coco_build import AnnotatedImage, build_coco, write_json
from mask_rcnn_jax.formats.cvat import read_cvat
from mask_rcnn_jax.formats.datumaro import read_datumaro
from mask_rcnn_jax.formats.geo import read_geo
from mask_rcnn_jax.formats.label_studio import read_label_studio
from mask_rcnn_jax.formats.labelme import read_labelme
from mask_rcnn_jax.formats.masks import read_masks
from mask_rcnn_jax.formats.reading import Converted, Options, Reader, on_one_line
from mask_rcnn_jax.formats.split_parts import split_parts
from mask_rcnn_jax.formats.supervisely import read_supervisely
from mask_rcnn_jax.formats.via import read_via
from mask_rcnn_jax.formats.voc import read_voc
from mask_rcnn_jax.formats.webdataset import read_webdataset
from mask_rcnn_jax.formats.yolo import read_yolo
from mask_rcnn_jax.images.suffixes import endings, is_image_name
from mask_rcnn_jax.tars.patterns import are_tars

# Endings of files that are no surprise among images.
ANNOTATIONS = (
    *(".json", ".xml", ".txt", ".csv", ".yaml", ".yml", ".md", ".html"),
    *(".gpkg", ".geojson", ".shp", ".shx", ".dbf", ".prj", ".cpg"),
)
ERROR, SKIP = "error", "skip"  # what is done with objects of classes that are not listed


def _read_labelme(source: Path, image_dir: Path | None, options: Options) -> Converted:
    images, left_out = read_labelme(source, image_dir, options.output)
    return Converted(images, _common_folder(images, image_dir or source), left_out)


def _common_folder(images: Sequence[AnnotatedImage], folder: Path) -> Path:
    """The folder, or the one above it that holds all images."""
    places = [os.path.abspath(image.path) for image in images]
    if all(Path(place).is_relative_to(os.path.abspath(folder)) for place in places):
        return folder
    return Path(os.path.commonpath([os.path.abspath(folder), *places]))


def _read_via(source: Path, image_dir: Path | None, options: Options) -> Converted:
    classes = {"attribute": options.attribute, "class_name": options.class_name}
    images, left_out = read_via(source, image_dir, **classes)
    return Converted(images, image_dir or source.parent, left_out)


READERS: dict[str, Reader] = {
    "labelme": _read_labelme,
    "via": _read_via,
    "yolo": read_yolo,
    "voc": read_voc,
    "cvat": read_cvat,
    "cityscapes": read_cityscapes,
    "masks": read_masks,
    "labelstudio": read_label_studio,
    "datumaro": read_datumaro,
    "supervisely": read_supervisely,
    "geo": read_geo,
    "webdataset": read_webdataset,
}


def convert(
    kind: str,
    source: Path,
    image_dir: Path | None,
    options: Options,
    *,
    other_classes: str = ERROR,
) -> tuple[dict[str, Any], Path, list[str]]:
    """Read annotations, with all their images.

    Args:
        kind: a key in `READERS`.
        source: file or folder with the annotations.
        image_dir: image folder, where it is not the usual one.
        options: `classes` are all that the json has, in their order.
        other_classes: "skip" leaves out objects in other classes.

    Returns:
        A COCO json's content, whose annotations are all sound, the image folder, and a line for
        each object that is left out.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read or is inconsistent.
    """
    if not (source.exists() or are_tars(source)):
        raise FileNotFoundError(f"no file or folder {str(source)!r}, expected {kind} annotations")
    found = READERS[kind](source, image_dir, options)
    if options.split_parts:
        found = split_parts(found, options.min_area)
    try:
        content = build_coco(found.images, found.image_dir, found.classes)
    except ValueError as error:  # of an image that is there twice
        raise ValueError(f"{source}: {error}") from error
    if not content["images"]:
        raise ValueError(f"{source}: no annotated image")
    left_out = found.left_out + remove_faulty(content)
    if options.classes:
        content, others = with_classes(content, options.classes, other_classes, str(source))
        left_out += others
    return content, found.image_dir, left_out


def write_converted(
    path: Path, content: dict[str, Any], image_dir: Path, left_out: Sequence[str]
) -> None:
    """Write a COCO json, and print what it holds and what is left out."""
    for line in summarize(left_out):
        print(f"left out: {line}")
    write_json(path, content)
    if others := endings(_other_files(content, image_dir)):
        print(f"{image_dir}: these files are not read: {others}")
    counts = f"{len(content['annotations'])} objects, {len(content['categories'])} classes"
    print(f"{path}: {counts}, {len(left_out)} left out; the images are in {image_dir}")


def files_passed_over(source: Path, image_dir: Path) -> str:
    """Count the files of a folder of annotations that are of no kind that is read, such as masks in
    `.npy`, outside of the image folder; "" without any."""
    if not source.is_dir():
        return ""
    images = os.path.abspath(image_dir)
    names: list[str] = []
    for folder, _, files in listed(source, os.walk(source)):
        if not Path(os.path.abspath(folder)).is_relative_to(images):
            names += [name for name in files if not _is_known(name)]
    return endings(names)


def _is_known(name: str) -> bool:
    return is_image_name(name) or name.lower().endswith(ANNOTATIONS)


def _other_files(content: dict[str, Any], image_dir: Path) -> Iterator[str]:
    """Names of files beside the images that seem to be neither images nor annotations."""
    names = [entry["file_name"] for entry in content["images"]]
    for folder in {os.path.dirname(os.path.join(image_dir, name)) for name in names}:
        for entry in os.scandir(folder) if os.path.isdir(folder) else ():
            if not _is_known(entry.name) and entry.is_file():
                yield entry.name


def remove_faulty(content: dict[str, Any]) -> list[str]:
    """Remove annotations that cannot be trained on, such as those outside their image.

    Returns a line for each.
    """
    images = {entry["id"]: entry["file_name"] for entry in content["images"]}
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    sound, left_out = [], []
    checks = GroundTruth("", content).checked
    for entry, checked in zip(content["annotations"], checks, strict=True):
        if checked.fault is None:
            sound.append(entry)
            continue
        image, name = images[entry["image_id"]], on_one_line(names[entry["category_id"]])
        left_out.append(f"{image}: an object ({name}), {checked.fault.text}")
    content["annotations"] = sound
    return left_out


def with_classes(
    content: dict[str, Any], classes: Sequence[str], other_classes: str, source: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the content with these classes, numbered from 1, and a line for each object left out.

    Raises ValueError for an object in another class, unless `other_classes` is "skip".
    """
    new = {name: number for number, name in enumerate(classes, start=1)}
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    kept, others = [], Counter[str]()
    for entry in content["annotations"]:
        name = names[entry["category_id"]]
        if name in new:
            kept.append(entry | {"category_id": new[name]})
        else:
            others[name] += 1
    if others and other_classes != SKIP:
        listed = ", ".join(f"{show(name)} ({count})" for name, count in sorted(others.items())[:10])
        advice = "add them to --classes, or leave them out with --other_classes=skip"
        raise ValueError(f"{source}: objects of other classes: {listed}; {advice}")
    old = {entry["name"]: entry for entry in reversed(content["categories"])}
    categories = [old.get(name, {}) | {"id": number, "name": name} for name, number in new.items()]
    lines = [
        f"{source}: {count} objects ({on_one_line(name)}), not in --classes"
        for name, count in sorted(others.items())
    ]
    return content | {"categories": categories, "annotations": kept}, lines


def read_classes(text: str | None) -> tuple[str, ...]:
    """Class names, separated by commas, or one per line in a text file.

    Raises ValueError for a name that is empty, too long or there twice.
    """
    if not text:
        return ()
    path = Path(text)
    names = text.split(",")
    if "," not in text and os.path.isfile(text):
        try:
            lines = read_regular(path, 1 << 24).decode("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not a text in UTF-8") from error
        names = [line for line in lines if line.strip()]
    elif path.suffix == ".txt":
        raise FileNotFoundError(f"no file {text!r}, expected a class per line")
    names = [name.strip() for name in names]
    for name, count in Counter(names).items():
        if not name or count > 1 or len(name) > MAX_NAME:
            raise ValueError(f"--classes: {show(name)} is empty, too long or there twice")
    return tuple(names)

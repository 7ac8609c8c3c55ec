"""Read Ultralytics' YOLO segments, one text file per image."""

import os
from pathlib import Path
from typing import Any

import yaml
from absl import logging

from mask_rcnn_jax.annotations.absent import folded
from mask_rcnn_jax.annotations.reader import below, read_regular
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.coco_build import AnnotatedImage, read_image_size, rectangle
from mask_rcnn_jax.formats.image_files import ImageFiles
from mask_rcnn_jax.formats.reading import (
    BOX_LEFT_OUT,
    Converted,
    ImageObjects,
    Options,
    number,
)
from mask_rcnn_jax.formats.yaml_config import check_nesting

NAMES = ("data.yaml", "dataset.yaml", "data.yml", "dataset.yml")
MAX_BYTES = 1 << 26  # of a text file with labels
MAX_NAMES = 1 << 20  # bytes of data.yaml, which takes long to read
NOT_LABELS = ("classes.txt", "notes.txt")


def read_yolo(source: Path, image_dir: Path | None, options: Options) -> Converted:
    """Read all images below a folder, and their labels.

    Labels are in the same folders with `labels` for `images`, below `source` if there is
    an image folder, or beside the images. An image without labels has no objects.

    Args:
        source: the folder, or its data.yaml.
        image_dir: image folder; None for `source`.
        options: `classes` name the numbers if there is no data.yaml; of `split`, only the folder
            that data.yaml names for it is read.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read or is inconsistent.
    """
    names_file = source if source.is_file() else _names_file(source)
    folder = source.parent if source.is_file() else source
    if options.split:
        folder = _split_folder(source, options.split)
    names = _read_names(names_file) if names_file else dict(enumerate(options.classes))
    if not names:
        raise ValueError(f"{source}: no data.yaml names its classes, name them with --classes")
    files = ImageFiles(image_dir or _image_folder(folder))
    listings: dict[Path, dict[str, list[str]]] = {}
    labels = {path: _label_file(path, files, folder, image_dir, listings) for path in files.paths}
    read: dict[Path, str] = {}
    for name, path in labels.items():
        if path is not None and read.setdefault(path, name) != name:
            raise ValueError(f"{path} may be of {show(read[path])} or {show(name)}")
    rest = [path for path in _label_files(folder, image_dir) if path not in read]
    if not read or rest:
        missing = f"{rest[0]} has no image" if rest else "no labels"
        stems = [path.stem for path in rest[:1]]
        unread = [p for p in files.others if Path(p).stem in stems and not p.endswith(".txt")]
        if unread:
            raise ValueError(f"{folder}: {missing} but {show(unread[0])}, whose kind is not read")
        more = f", nor have {len(rest) - 1} others" if rest[1:] else ""
        raise ValueError(f"{folder}: {missing} in {files.folder}{more}; --images names its folder")
    left_out: list[str] = []
    images, emptied = [], []
    for name, path in labels.items():
        image = files.folder / name
        size = read_image_size(image, folder)
        objects = ImageObjects(size, left_out)
        if path is not None:
            before = len(left_out)
            _read_labels(path, size, names, options.boxes, objects)
            if len(left_out) > before and not objects.joined():
                emptied.append(name)
        images.append(AnnotatedImage(image, size, objects.joined()))
    if emptied:
        text = "%s: %d images of which all objects are left out become negative examples: %s, .."
        logging.warning(text, folder, len(emptied), show(emptied[0]))
    return Converted(images, files.folder, left_out, tuple(names.values()))


def _split_folder(source: Path, split: str) -> Path:
    """The folder of images that a data.yaml names for a split."""
    if not source.is_file():
        raise ValueError(f"{source} is a folder, expected its data.yaml with --split")
    content = _read_yaml(source)
    root, value = content.get("path") or "", content.get(split)
    if not isinstance(value, str) or not isinstance(root, str):
        # Aliases can make a list of lists too long to print.
        kind = {type(None): "missing", list: "a list"}.get(type(value), "no text")
        raise ValueError(f"{source}: {split} is {kind}, expected the name of a folder")
    # As Ultralytics has it: some tools write ../train/images for ./train/images.
    names = [Path(root) / value, Path(value), Path(value.removeprefix("../"))]
    places = [source.parent / name for name in names]
    found = next((place for place in places if os.path.isdir(place)), None)
    if found is None:
        raise NotADirectoryError(f"{source}: {split} is {show(value)}, which is no folder")
    return found


def _image_folder(folder: Path) -> Path:
    """The folder with `images` for `labels`, where there is one."""
    parts = folder.absolute().parts
    if "labels" not in parts:
        return folder
    last = len(parts) - 1 - parts[::-1].index("labels")
    other = Path(*parts[:last], "images", *parts[last + 1 :])
    return other if other.is_dir() else folder


def _names_file(folder: Path) -> Path | None:
    """Find data.yaml in a folder, or above it for a folder with labels."""
    if not folder.is_dir():
        raise NotADirectoryError(f"no folder {str(folder)!r}, expected labels of YOLO")
    places = [folder, *folder.absolute().parents[:2]]
    found = [place / name for place in places for name in NAMES]
    return next((path for path in found if path.is_file()), None)


def _read_yaml(path: Path) -> dict[Any, Any]:
    """What is in a data.yaml; {} for what is none."""
    text = read_regular(path, MAX_NAMES)
    try:
        check_nesting(text.decode("latin-1"))
        content = yaml.safe_load(text)
    except Exception:  # whatever its constructors raise for a tag of another kind of value
        return {}
    return content if isinstance(content, dict) else {}


def _read_names(path: Path) -> dict[int, str]:
    names: Any = _read_yaml(path).get("names")
    try:
        names = dict(enumerate(names)) if isinstance(names, list) else dict(names)
        names = {k: str(v) if type(v) in (int, float) else v for k, v in names.items()}
    except (TypeError, ValueError):
        names = {}
    if any(isinstance(name, bool) for name in names.values()):
        raise ValueError(f"{path}: 'names' has true, yes, on or such; write class names in quotes")
    if not names or not all(type(k) is int and isinstance(v, str) for k, v in names.items()):
        raise ValueError(f"{path}: no 'names' of classes, expected a list or numbers with names")
    if len(set(names.values())) < len(names):
        raise ValueError(f"{path}: a name of 'names' occurs twice")
    return dict(sorted(names.items()))


def _label_file(
    name: str,
    files: ImageFiles,
    folder: Path,
    image_dir: Path | None,
    listings: dict[Path, dict[str, list[str]]],
) -> Path | None:
    """An image's labels, in the other case if need be; None if there are none.

    `listings` are filled with folders that were looked into.
    """
    image = files.folder / name
    parts = list(image.parts)
    places = [image]
    if "images" in parts[:-1]:
        last = len(parts) - 2 - parts[-2::-1].index("images")
        places.insert(0, Path(*parts[:last], "labels", *parts[last + 1 :]))
    if image_dir is not None:
        roots = (folder, folder / "labels")
        places = [root / end for end in (name, image.name) for root in roots] + places
    found = [place.with_suffix(".txt") for place in places]
    exact = next((path for path in found if path.is_file()), None)
    if exact:
        return exact
    for path in found:
        if path.parent not in listings:
            listings[path.parent] = _folded_names(path.parent)
        same = listings[path.parent].get(folded(path.name), [])
        if len(same) == 1:
            return path.with_name(same[0])
    return None


def _folded_names(folder: Path) -> dict[str, list[str]]:
    """Names in a folder by themselves, folded."""
    found: dict[str, list[str]] = {}
    for name in os.listdir(folder) if folder.is_dir() else ():
        found.setdefault(folded(name), []).append(name)
    return found


def _label_files(folder: Path, image_dir: Path | None) -> list[Path]:
    """Files that must be labels: all in folders of labels."""
    files = below(folder)
    texts = [path for path in files if path.suffix.lower() == ".txt"]
    paths = [path for path in texts if path.name not in NOT_LABELS]
    within = [path for path in paths if "labels" in path.relative_to(folder).parts[:-1]]
    is_labels = image_dir is not None or folder.absolute().name == "labels"
    return paths if is_labels and not within else within


def _read_labels(
    path: Path, size: tuple[int, int], names: dict[int, str], boxes: bool, objects: ImageObjects
) -> None:
    height, width = size
    try:
        lines = read_regular(path, MAX_BYTES).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8") from error
    for place, line in enumerate(lines, start=1):
        first, *rest = line.split() or [""]
        if not first:
            continue
        where = f"{path}: line {place}"
        index = number(first, f"{where}: the class")
        if index not in names:
            raise ValueError(f"{where}: class {show(first, 40)}, expected one of {_range(names)}")
        values = [number(value, f"{where}: a coordinate") for value in rest]
        label = names[int(index)]
        if len(values) == 4:
            if not boxes:
                objects.leave_out(where, label, BOX_LEFT_OUT)
                continue
            x, y, w, h = values
            points = rectangle(x - w / 2, y - h / 2, x + w / 2, y + h / 2)
        elif len(values) % 2:
            raise ValueError(f"{where}: {len(values)} numbers after the class, expected x y x y ..")
        else:
            points = [values[n : n + 2] for n in range(0, len(values), 2)]
        scaled = [[x * width, y * height] for x, y in points]
        objects.add_outline(where, label, scaled, "polygon")


def _range(names: dict[int, str]) -> str:
    return f"{min(names)} to {max(names)}"

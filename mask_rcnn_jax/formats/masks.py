"""Read image files that are masks with instances, all in one class."""

import re
from pathlib import Path

from mask_rcnn_jax.formats.coco_build import AnnotatedImage, read_image_size
from mask_rcnn_jax.formats.image_files import ImageFiles, is_image
from mask_rcnn_jax.formats.label_image import instances, read_label_image
from mask_rcnn_jax.formats.reading import Converted, ImageObjects, Options

# What tools put behind the name of the image.
_ENDING = re.compile(r"[_-](masks?|labels?|instances?|instance_?ids|seg|annotation|gt)$", re.I)


def read_masks(source: Path, image_dir: Path | None, options: Options) -> Converted:
    """Read label images or folders with binary masks.

    A label image, such as `a_mask.png` for `a.png`, has 0 for the background, and another value or
    color for each instance. Where there are folders named `masks` beside folders named `images`
    with one image each, as in the 2018 Data Science Bowl, each file is one instance's mask.

    Args:
        source: folder with the masks.
        image_dir: image folder; None for `source`.
        options: `class_name` is the class for all objects.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read or is inconsistent.
    """
    if not options.class_name:
        raise ValueError(f"{source}: masks have no class, name it with --class_name")
    if not source.is_dir():
        raise NotADirectoryError(f"no folder {str(source)!r}, expected masks")
    folders = [path for path in sorted(source.rglob("masks")) if (path.parent / "images").is_dir()]
    left_out: list[str] = []
    if folders:
        images = [_of_folder(folder, options.class_name, left_out) for folder in folders]
        return Converted(images, source, left_out)
    files = ImageFiles(image_dir or source)
    paths = [path for path in sorted(source.rglob("*")) if is_image(path.name)]
    paths = [p for p in paths if _ENDING.search(p.stem) or not p.is_relative_to(files.folder)]
    if not paths:
        raise ValueError(f"{source}: no masks; beside their images they end in _mask or _masks")
    images = [_of_file(path, files, options.class_name, left_out) for path in paths]
    return Converted(images, files.folder, left_out)


def _of_file(path: Path, files: ImageFiles, label: str, left_out: list[str]) -> AnnotatedImage:
    plain = _ENDING.sub("", path.stem)
    found = [files.find_stem(stem, str(path)) for stem in (plain, f"{plain}_img", path.stem)]
    image = next((other for other in found if other and other.resolve() != path.resolve()), None)
    if image is None:
        raise ValueError(f"{path}: no image {plain!r} in {files.folder}")
    size = read_image_size(image, path)
    objects = ImageObjects(size, left_out)
    for value, rle in instances(read_label_image(path, size), str(path)):
        if value:
            objects.add_rle(f"{path}: value {value}", label, rle)
    return AnnotatedImage(image, size, objects.joined())


def _of_folder(folder: Path, label: str, left_out: list[str]) -> AnnotatedImage:
    files = ImageFiles(folder.parent / "images")
    if len(files.paths) != 1:
        raise ValueError(f"{files.folder}: {len(files.paths)} images beside {folder}, expected one")
    image = files.folder / files.paths[0]
    size = read_image_size(image, folder)
    objects = ImageObjects(size, left_out)
    for path in sorted(folder.iterdir()):
        if not is_image(path.name):
            continue
        found = dict(instances(read_label_image(path, size) > 0, str(path)))
        if True in found:
            objects.add_rle(str(path), label, found[True])
        else:
            objects.leave_out(str(path), label, "a mask without a pixel")
    return AnnotatedImage(image, size, objects.joined())

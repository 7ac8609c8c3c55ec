"""Read image files that are masks with instances, all in one class."""

import re
from pathlib import Path

from mask_rcnn_jax.annotations.reader import below
from mask_rcnn_jax.formats.coco_build import AnnotatedImage, read_image_size
from mask_rcnn_jax.formats.image_files import ImageFiles
from mask_rcnn_jax.formats.label_image import instances, read_label_image
from mask_rcnn_jax.formats.reading import Converted, ImageObjects, Options
from mask_rcnn_jax.images.suffixes import is_image_name

# What tools put behind the name of the image.
_ENDING = re.compile(r"[_-](masks?|labels?|instances?|instance_?ids|seg|annotation|gt)$", re.I)


def read_masks(source: Path, image_dir: Path | None, options: Options) -> Converted:
    """Read label images or folders with binary masks.

    A label image, such as `a_mask.png` for `a.png`, has 0 for the background, and another value or
    color for each instance. Folders named `masks` beside folders named `images` have label images,
    too, if these have the images' names. Otherwise each is for the only image beside it, and each
    file is one instance's mask, as in the 2018 Data Science Bowl.

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
    folders = [path for path in below(source, "masks") if (path.parent / "images").is_dir()]
    left_out: list[str] = []
    if folders:
        found = [_read_folder(folder, options.class_name, left_out) for folder in folders]
        return Converted([image for images in found for image in images], source, left_out)
    files = ImageFiles(image_dir or source)
    paths = below(source)
    paths = [path for path in paths if is_image_name(path.name)]
    paths = [p for p in paths if _ENDING.search(p.stem) or not p.is_relative_to(files.folder)]
    if not paths:
        raise ValueError(f"{source}: no masks; beside their images they end in _mask or _masks")
    images = [_read_mask_file(path, files, options.class_name, left_out) for path in paths]
    return Converted(images, files.folder, left_out)


def _find_image(path: Path, files: ImageFiles) -> Path | None:
    """The image that a mask is named like."""
    plain, folder = _ENDING.sub("", path.stem), path.parent.as_posix()
    names = [f"{folder}/{stem}" for stem in (plain, f"{plain}_img", path.stem)]
    found = [files.find_stem(name, str(path)) for name in names]
    return next((image for image in found if image and image.resolve() != path.resolve()), None)


def _read_mask_file(
    path: Path, files: ImageFiles, label: str, left_out: list[str]
) -> AnnotatedImage:
    image = _find_image(path, files)
    if image is None:
        plain = _ENDING.sub("", path.stem)
        advice = "" if path.parent != files.folder else "; --images names the images' folder"
        found = f"no image {plain!r} in {files.folder}{files.hint(plain)}{advice}"
        raise ValueError(f"{path}: {found}")
    size = read_image_size(image, path)
    objects = ImageObjects(size, left_out)
    for value, rle in instances(read_label_image(path, size), size, str(path)):
        if value:
            objects.add_rle(f"{path}: value {value}", label, rle)
    return AnnotatedImage(image, size, objects.joined())


def _read_folder(folder: Path, label: str, left_out: list[str]) -> list[AnnotatedImage]:
    files = ImageFiles(folder.parent / "images")
    paths = below(folder)
    paths = [path for path in paths if is_image_name(path.name)]
    others = [path for path in paths if _find_image(path, files) is None]
    if paths and not others:
        return [_read_mask_file(path, files, label, left_out) for path in paths]
    if len(files.paths) != 1:
        unlike = f", or masks with the images' names, unlike {others[0]}" if others else ""
        count = f"{len(files.paths)} images beside {folder}, expected one"
        raise ValueError(f"{files.folder}: {count}{unlike}")
    image = files.folder / files.paths[0]
    size = read_image_size(image, folder)
    objects = ImageObjects(size, left_out)
    for path in paths:
        values = instances(read_label_image(path, size), size, str(path))
        found = [rle for value, rle in values if value]
        if found[1:]:
            advice = f"expected one object per file, or a label image with the name of {image.name}"
            raise ValueError(f"{path}: {len(found)} values besides 0, {advice}")
        if found:
            objects.add_rle(str(path), label, found[0])
        else:
            objects.leave_out(str(path), label, "a mask without a pixel")
    return [AnnotatedImage(image, size, objects.joined())]

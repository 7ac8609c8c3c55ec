"""Read CVAT's XML: "CVAT for images 1.1" and "CVAT for video 1.1"."""

from pathlib import Path
from xml.etree.ElementTree import Element

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.coco_build import AnnotatedImage, read_image_size
from mask_rcnn_jax.formats.cvat_shapes import add_shape
from mask_rcnn_jax.formats.cvat_video import FRAME, read_frames
from mask_rcnn_jax.formats.image_files import ImageFiles
from mask_rcnn_jax.formats.reading import Converted, ImageObjects, Options, check_size, number
from mask_rcnn_jax.formats.xml_tree import child_text, read_xml
from mask_rcnn_jax.images.suffixes import is_image_name
from mask_rcnn_jax.terminal.safe_text import cut


def read_cvat(source: Path, image_dir: Path | None, options: Options) -> Converted:
    """Read an exported XML, or `annotations.xml` in a folder.

    Polygons, masks and ellipses become objects, those with one label and group a single one. Of a
    video, images are the frames that lie in a folder, see `read_frames`.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read or is inconsistent.
    """
    path = source / "annotations.xml" if source.is_dir() else source
    root = read_xml(path)
    is_video = root.find("track") is not None
    if root.tag != "annotations" or not (is_video or root.find("image") is not None):
        expected = "'CVAT for images 1.1' or 'CVAT for video 1.1'"
        raise ValueError(f"{path}: <{cut(root.tag)}>, expected an export as {expected}")
    files = ImageFiles(image_dir or path.parent)
    left_out: list[str] = []
    if is_video:
        images = read_frames(root, path, files, options, left_out)
    else:
        found = root.findall("image")
        frames = [entry for entry in found if FRAME.search(entry.get("name", ""))]
        if tasks := sorted({entry.get("task_id", "") for entry in frames})[1:]:
            several = f"{path}: frames of {len(tasks) + 1} tasks, each with a frame_000000"
            raise ValueError(f"{several}; export each task by itself")
        images = [_image(entry, path, files, options, left_out) for entry in found]
    labels = [
        label for label in root.iterfind("meta//labels/label") if not child_text(label, "parent")
    ]
    declared = [
        child_text(label, "name") for label in labels if child_text(label, "type") != "skeleton"
    ]
    used = sorted({entry.label for image in images for entry in image.objects})
    return Converted(images, files.folder, left_out, tuple(dict.fromkeys(declared + used)))


def _image(
    entry: Element, path: Path, files: ImageFiles, options: Options, left_out: list[str]
) -> AnnotatedImage:
    name = entry.get("name", "")
    where = f"{path}: image {show(name)}"
    # CVAT writes no endings for the frames of a video.
    found = None if is_image_name(name) else files.find_stem(name, str(path))
    image = found or files.find(name, str(path))
    size = read_image_size(image, path)
    stated = tuple(number(entry.get(key), f"{where}: {key}") for key in ("height", "width"))
    check_size(where, (stated[0], stated[1]), image, size)
    objects = ImageObjects(size, left_out)
    for place, shape in enumerate(entry, start=1):
        if shape.tag == "tag":
            continue
        at = f"{where}: shape {place}"
        label = shape.get("label")
        if not label:
            raise ValueError(f"{at}, a {show(shape.tag)}, has no label")
        add_shape(shape, label, shape.get("group_id", "0"), at, objects, options)
    return AnnotatedImage(image, size, objects.joined())

"""Make objects of the connected parts of masks, as binary masks and brushes need it."""

from dataclasses import replace
from typing import Any

from mask_rcnn_jax.annotations.mask_parts import SPECK, mask_parts
from mask_rcnn_jax.formats.coco_build import AnnotatedObject
from mask_rcnn_jax.formats.label_image import MAX_INSTANCES
from mask_rcnn_jax.formats.mask_codes import check_codes
from mask_rcnn_jax.formats.reading import Converted, on_one_line


def split_parts(found: Converted, min_area: int) -> Converted:
    """Make an object of each connected part of each mask; polygons and crowds stay as they are.

    Args:
        found: annotated images.
        min_area: parts of fewer pixels are left out, and named.

    Raises:
        ValueError: a mask has more than MAX_INSTANCES parts.
    """
    left_out = list(found.left_out)
    images = []
    for image in found.images:
        objects: list[AnnotatedObject] = []
        for entry in image.objects:
            objects += _parts(entry, str(image.path), min_area, left_out)
        codes = (o.segmentation["counts"] for o in objects if isinstance(o.segmentation, dict))
        check_codes(sum(map(len, codes)), str(image.path))
        images.append(replace(image, objects=objects))
    return replace(found, images=images, left_out=left_out)


def _parts(
    entry: AnnotatedObject, where: str, min_area: int, left_out: list[str]
) -> list[AnnotatedObject]:
    if entry.crowd or not isinstance(entry.segmentation, dict):
        return [entry]
    try:
        parts, specks = mask_parts(entry.segmentation, min_area, MAX_INSTANCES)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; --min_area leaves out small ones") from error
    label = on_one_line(entry.label)
    left_out += [f"{where} ({label}), a part of {size} pixels" for size in specks]
    return [replace(entry, segmentation=part) for part in parts]


def specks_notice(content: dict[str, Any]) -> str | None:
    """Say how many masks of a COCO json's content are of very few pixels; None if none is."""
    areas = [e["area"] for e in content["annotations"] if isinstance(e["segmentation"], dict)]
    specks = sum(area < SPECK for area in areas)
    if not specks:
        return None
    advice = f"--min_area={SPECK} leaves them out"
    return f"{specks} of {len(areas)} parts have fewer than {SPECK} pixels; {advice}"

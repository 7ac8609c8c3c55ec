"""Sets that other libraries wrote, converted and compared with what they show, image by image."""

from collections import defaultdict
from pathlib import Path

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.data.checking import inspect_coco
from mask_rcnn_jax.formats.coco_build import write_json
from mask_rcnn_jax.formats.convert import convert
from mask_rcnn_jax.formats.reading import Options
from tests.formats.converting import write_image
from tests.formats.samples import scene

SAMPLES = Path(__file__).parent / "samples"
EXACT = {
    "datumaro": "datumaro",
    "cvat": "cvat/default.xml",
    "voc": "voc",
    "labelstudio": "labelstudio.json",
}


def converted(kind, place, tmp_path):
    """What is converted, which `check` finds no fault with."""
    options = Options(tmp_path / "out.json")
    content, folder, left_out = convert(kind, SAMPLES / place, SAMPLES / "images", options)
    assert (folder, left_out) == (SAMPLES / "images", [])
    write_json(tmp_path / "out.json", content)
    findings = inspect_coco(tmp_path / "out.json", folder)
    assert (findings.problems, findings.warnings) == ([], [])
    return content


def objects_of(content):
    """(class, mask, segmentation) of the objects of each image, by its name without suffix."""
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    images = {entry["id"]: entry for entry in content["images"]}
    found = defaultdict(list)
    for entry in content["annotations"]:
        image = images[entry["image_id"]]
        mask = segmentation_to_mask(entry["segmentation"], image["height"], image["width"])
        label = names[entry["category_id"]]
        found[image["file_name"].removesuffix(".png")].append((label, mask, entry["segmentation"]))
    return found


@pytest.mark.parametrize("kind", EXACT)
def test_masks_keep_holes_and_parts_and_polygons_stay_polygons(kind, tmp_path):
    content = converted(kind, EXACT[kind], tmp_path)
    assert [entry["name"] for entry in content["categories"]] == list(scene.CLASSES)
    found = objects_of(content)
    for name, expected in scene.objects().items():
        assert [label for label, _, _ in found[name]] == [label for label, _, _ in expected]
        for (_, mask, segmentation), (_, other, polygon) in zip(found[name], expected, strict=True):
            if polygon is None or kind == "voc":
                np.testing.assert_array_equal(mask, other)
            else:
                # CVAT's file has two digits.
                assert isinstance(segmentation, list)
                np.testing.assert_allclose(segmentation, [polygon], atol=0.006)


@pytest.mark.parametrize("kind, place", [("yolo", "yolo"), ("voc", "voc_xml")])
def test_outlines_of_supervision_show_the_same_pixels(kind, place, tmp_path):
    """It writes a polygon for each part, through the centers of the outermost pixels, and leads a
    hole's outline to the outer one."""
    content = converted(kind, place, tmp_path)
    assert [entry["name"] for entry in content["categories"]] == list(scene.CLASSES)
    found = objects_of(content)
    for name, expected in scene.objects().items():
        for label in {label for label, _, _ in expected}:
            ours, theirs = (
                np.any([mask for other, mask, _ in shown if other == label], axis=0)
                for shown in (found[name], expected)
            )
            theirs = theirs.astype(np.uint8)
            around = np.ones((3, 3), np.uint8)
            assert (cv2.erode(theirs, around) <= ours).all()
            assert (ours <= cv2.dilate(theirs, around)).all()  # the middle of the hole is empty
    assert len(found["street one"]) == 4 and len(found["b"]) == 1


def test_tracks_of_fiftyone_show_the_same_outlines_in_each_frame(tmp_path):
    """It calls no shape a key frame, and rounds coordinates to pixels."""
    height, width = scene.SIZES["street one"]
    for frame in range(7):
        write_image(tmp_path / "images" / f"frame_{frame:06d}.png", (height, width))
    options = Options(tmp_path / "out.json")
    content, _, left_out = convert("cvat", SAMPLES / "cvat_video.xml", tmp_path / "images", options)
    assert not left_out and [c["name"] for c in content["categories"]] == list(scene.CLASSES)
    found = objects_of(content)
    for frame in range(7):
        expected = [(label, seen[frame]) for label, seen in scene.tracks() if seen[frame]]
        shown = [(label, *parts) for label, _, parts in found.get(f"frame_{frame:06d}", [])]
        assert shown == expected

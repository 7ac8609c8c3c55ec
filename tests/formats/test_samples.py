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
    "labelme": "labelme",
    "supervisely": "supervisely",
}
# Two digits; whole pixels, rounded down.
ROUNDING = {"cvat": 0.006, "datumaro": 0.006, "supervisely": 0.76}


def converted(kind, place, tmp_path, **options):
    """What is converted, which `check` finds no fault with."""
    options = Options(tmp_path / "out.json", **options)
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


def assert_same_inside(mask, other):
    """Masks [H, W] may differ in pixels at the borders of the second."""
    other, around = other.astype(np.uint8), np.ones((3, 3), np.uint8)
    assert (cv2.erode(other, around) <= mask).all()
    assert (mask <= cv2.dilate(other, around)).all()


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
                assert isinstance(segmentation, list)
                rounding = ROUNDING.get(kind, 1e-9)
                np.testing.assert_allclose(segmentation, [polygon], atol=rounding)


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
            assert_same_inside(ours, theirs)  # the middle of the hole is empty
    assert len(found["street one"]) == 4 and len(found["b"]) == 1


def test_label_images_of_skimage_show_the_same_pixels(tmp_path):
    """Their values have 16 bits."""
    found = objects_of(converted("masks", "label_images", tmp_path, class_name="animal"))
    for name, expected in scene.objects().items():
        for (label, mask, _), (_, other, _) in zip(found[name], expected, strict=True):
            assert label == "animal"
            np.testing.assert_array_equal(mask, other)


@pytest.mark.parametrize("kind", ["instance", "polygons"])
def test_instances_of_cityscapes_are_what_its_scripts_draw(kind, tmp_path):
    """Those draw a polygon's border, too, and what is nearer over what is behind it."""
    found = objects_of(converted("cityscapes", f"cityscapes/{kind}", tmp_path))
    known = {"person": 24, "car": 26, "bicycle": 33}
    for name, outlines in scene.STREETS.items():
        path = SAMPLES / "cityscapes" / "instance" / f"{name}_gtFine_instanceIds.png"
        drawn = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        values = [known.get(label.removesuffix("group"), 0) for label, _ in outlines]
        crowds = [label.endswith("group") for label, _ in outlines]
        expected = {v if crowd else 1000 * v for v, crowd in zip(values, crowds, strict=True) if v}
        shown = set()
        for label, mask, _ in found[name]:
            (value,) = (v for v in np.unique(drawn[mask > 0]) if v in expected - shown)
            assert known[label] == value // (1000 if value >= 1000 else 1)
            if kind == "instance":
                np.testing.assert_array_equal(mask, drawn == value)
            else:
                assert_same_inside(mask, drawn == value)
            shown.add(value)
        assert shown == expected


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

"""Masks that are images to COCO: label images, folders of binary masks, Pascal VOC, Cityscapes."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.formats.converting import (
    SIZE,
    box,
    convert_set,
    objects_of,
    refuses,
    write_image,
    write_values,
)

# Two objects that touch, one of them with a hole.
LABELS = box(5, 5, 40, 30) + box(40, 5, 60, 30)
LABELS[10:20, 10:20] = 0
LABELS[5:30, 40:60] = 2


def expected(values=LABELS):
    return [(values == value).astype(np.uint8) for value in range(1, values.max() + 1)]


def check(content, masks, labels):
    found = objects_of(content)
    assert [label for label, _ in found] == labels
    for (_, mask), other in zip(found, masks, strict=True):
        np.testing.assert_array_equal(mask, other)


@pytest.mark.parametrize("values", [
    LABELS, LABELS.astype(np.uint16) * 300, LABELS * 100,
    np.stack([LABELS * 0, LABELS * 90, LABELS], axis=-1),
])  # fmt: skip
def test_every_value_or_color_is_an_instance(values, tmp_path):
    write_image(tmp_path / "PNGImages" / "a.png")
    write_values(tmp_path / "PedMasks" / "a_mask.png", values)
    source, folder = tmp_path / "PedMasks", tmp_path / "PNGImages"
    content, left_out = convert_set("masks", source, folder, class_name="nucleus")
    check(content, expected(), ["nucleus"] * 2)
    assert not left_out and content["images"][0]["file_name"] == "a.png"


def test_palettes_and_masks_beside_images(tmp_path):
    write_image(tmp_path / "a_img.png")
    image = Image.fromarray(LABELS, "L").convert("P")
    image.putpalette([7] * 768)
    image.putdata(LABELS.ravel().tolist())
    image.save(tmp_path / "a_masks.png")
    check(convert_set("masks", tmp_path, class_name="x")[0], expected(), ["x"] * 2)


def test_a_folder_of_masks_per_image(tmp_path):
    for name in ("one", "two"):
        write_image(tmp_path / name / "images" / f"{name}.png")
        for number, mask in enumerate([*expected(), np.zeros(SIZE, np.uint8)]):
            write_values(tmp_path / name / "masks" / f"{number}.png", mask * 255)
    content, left_out = convert_set("masks", tmp_path, class_name="nucleus")
    check(content, expected() * 2, ["nucleus"] * 4)
    assert [line.rpartition("/")[2] for line in left_out] == [
        "2.png (nucleus), a mask without a pixel"
    ] * 2
    write_image(tmp_path / "two" / "images" / "more.png")
    refuses("2 images beside .*masks, expected one", "masks", tmp_path, class_name="x")


@pytest.mark.parametrize("names", [["a.png"], ["a.png", "b.png"], ["one/a.png", "two/a.png"]])
@pytest.mark.parametrize("ending", ["", "_mask"])
def test_masks_named_like_the_images_beside_them_are_label_images(names, ending, tmp_path):
    for name in names:
        write_image(tmp_path / "train" / "images" / name)
        write_values(tmp_path / "train" / "masks" / name.replace(".", f"{ending}."), LABELS)
    content, left_out = convert_set("masks", tmp_path, class_name="x")
    check(content, expected() * len(names), ["x"] * 2 * len(names))
    found = [entry["file_name"] for entry in content["images"]]
    assert found == [f"train/images/{name}" for name in names] and not left_out


def test_masks_that_fit_neither_layout_are_named(tmp_path):
    write_image(tmp_path / "images" / "a.png")
    write_values(tmp_path / "masks" / "other.png", LABELS)
    words = "other.png: 2 values besides 0, expected one object per file, or a label .* of a.png"
    refuses(words, "masks", tmp_path, class_name="x")
    write_values(tmp_path / "masks" / "a.png", LABELS)
    write_image(tmp_path / "images" / "b.png")
    words = "2 images beside .*masks, expected one, or masks with the images' names, unlike .*other"
    refuses(words, "masks", tmp_path, class_name="x")


def test_wrong_masks_are_one_line(tmp_path):
    def refused(words, **options):
        refuses(words, "masks", tmp_path, tmp_path / "images", **{"class_name": "x"} | options)

    write_image(tmp_path / "images" / "a.png")
    refused("name it with --class_name", class_name=None)
    refused("no masks; beside their images they end in")
    write_values(tmp_path / "a_mask.jpg", LABELS)
    refused("a_mask.jpg: damaged, or no PNG, TIFF, BMP or GIF")
    (tmp_path / "a_mask.jpg").unlink()
    path = tmp_path / "a_mask.png"
    path.write_bytes(b"nothing")
    refused("a_mask.png: damaged, or no PNG, TIFF")
    write_values(path, LABELS[:50])
    refused(r"a_mask.png: 50 x 80 \(height x width\), the image is 60 x 80")
    write_values(path, np.dstack([LABELS] * 4))
    refused("a_mask.png: pixels of mode RGBA, expected whole numbers or colors")
    path.rename(tmp_path / "b_mask.png")
    refused("b_mask.png: no image 'b' in")


def test_a_photo_is_no_mask(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)
    write_image(tmp_path / "a.png", (200, 200))
    write_values(tmp_path / "a_mask.png", noise)
    refuses("different values, at most 20,000 are read; is it a", "masks", tmp_path, class_name="x")


# Pascal VOC


def write_voc(folder, values=LABELS, boxes=((6, 6, 40, 30), (41, 6, 60, 30)), extra=""):
    write_image(folder / "JPEGImages" / "a.png")
    write_image(folder / "JPEGImages" / "other.png")
    if values is not None:
        write_values(folder / "SegmentationObject" / "a.png", values)
    keys = ("xmin", "ymin", "xmax", "ymax")
    text = "".join(
        f"<object><name>{name}</name><bndbox>"
        + "".join(f"<{key}>{value}</{key}>" for key, value in zip(keys, corners, strict=True))
        + "</bndbox></object>"
        for name, corners in zip(("dog", "cat"), boxes, strict=False)
    )
    (folder / "Annotations").mkdir(exist_ok=True)
    size = "<size><width>80</width><height>60</height><depth>3</depth></size>"
    xml = f"<annotation><filename>a.png</filename>{size}{text}{extra}</annotation>"
    (folder / "Annotations" / "a.xml").write_text(xml)


def test_values_of_voc_are_objects_of_the_xml_and_255_is_none(tmp_path):
    values = LABELS.copy()
    values[40:, :] = 255
    write_voc(tmp_path, values)
    content, left_out = convert_set("voc", tmp_path)
    check(content, expected(), ["dog", "cat"])
    assert not left_out and len(content["images"]) == 1  # the other has no masks


def test_an_object_outside_its_box_is_left_out(tmp_path):
    write_voc(tmp_path, boxes=((6, 6, 40, 30), (70, 50, 80, 60)))
    content, left_out = convert_set("voc", tmp_path)
    check(content, expected()[:1], ["dog"])
    assert left_out[0].endswith("a.png: object 2 (cat), outside its box in a.xml")


def test_voc_without_masks_has_boxes_where_asked_and_polygons(tmp_path):
    points = "<x1>11</x1><y1>11</y1><x2>21</x2><y2>11</y2><x3>21</x3><y3>31</y3>"
    polygon = f"<object><name>bird</name><polygon>{points}</polygon></object>"
    write_voc(tmp_path, None, extra=polygon)
    content, left_out = convert_set("voc", tmp_path)
    assert [label for label, _ in objects_of(content)] == ["bird"] and len(left_out) == 2
    assert content["annotations"][0]["segmentation"] == [[10, 10, 20, 10, 20, 30]]
    content, left_out = convert_set("voc", tmp_path, boxes=True)
    masks = [box(5, 5, 40, 30), box(40, 5, 60, 30), objects_of(content)[2][1]]
    check(content, masks, ["dog", "cat", "bird"])
    assert not left_out


@pytest.mark.parametrize("keys, words", [
    ({"values": LABELS * 2}, "a.png: object 4, but .*a.xml has 2"),
    ({"values": LABELS[:, 1:]}, "60 x 79 .*, the image is 60 x 80"),
    ({"values": np.dstack([LABELS * 3] * 3)}, "a.png: the color 030303 is not in the palette"),
    ({"boxes": ((1, 1, "x", 9),) * 2}, "a.xml: object 1: xmax is 'x', expected a finite"),
    ({"extra": "<object/>", "values": None}, "a.xml: object 3 has no <name>"),
    ({"extra": "<size/>"}, "height is"),
])  # fmt: skip
def test_wrong_voc_is_one_line(keys, words, tmp_path):
    write_voc(tmp_path, **keys)
    if "<size/>" in keys.get("extra", ""):
        path = tmp_path / "Annotations" / "a.xml"
        path.write_text(path.read_text().replace("<height>60</height>", ""))
    refuses(words, "voc", tmp_path)


def test_folders_without_voc(tmp_path):
    refuses("no XML in it or in 'Annotations'", "voc", tmp_path)
    write_voc(tmp_path)
    (tmp_path / "Annotations" / "a.xml").write_text("<annotations/>")
    refuses("a.xml: <annotations>, expected an <annotation>", "voc", tmp_path)
    (tmp_path / "SegmentationObject" / "a.png").unlink()
    refuses("SegmentationObject: no PNG", "voc", tmp_path)


# Cityscapes

CITY = "gtFine/val/city/city_0_1_gtFine"


def write_city(folder, objects=None, values=None):
    write_image(folder / "leftImg8bit/val/city/city_0_1_leftImg8bit.png")
    (folder / CITY).parent.mkdir(parents=True, exist_ok=True)
    if values is not None:
        write_values(folder / f"{CITY}_instanceIds.png", values)
    content = {"imgHeight": 60, "imgWidth": 80, "objects": objects or []}
    (folder / f"{CITY}_polygons.json").write_text(json.dumps(content))


def square(label, x1, y1, x2, y2, **keys):
    return {"label": label, "polygon": [[x1, y1], [x2, y1], [x2, y2], [x1, y2]], **keys}


def test_pixels_of_cityscapes_are_label_times_1000_and_the_instance(tmp_path):
    parts = box(0, 0, 9, 9), box(20, 0, 30, 9), box(40, 0, 50, 9), box(60, 20, 70, 40)
    values = sum(
        part.astype(np.uint16) * value for part, value in zip(parts, (7, 26, 26003, 24000),
                                                              strict=True))  # fmt: skip
    write_city(tmp_path, [square("car", 0, 0, 80, 60)], values)
    content, left_out = convert_set("cityscapes", tmp_path / "gtFine" / "val")
    check(content, [parts[1], parts[3], parts[2]], ["car", "person", "car"])  # by value
    assert [entry["iscrowd"] for entry in content["annotations"]] == [1, 0, 0] and not left_out
    assert len(content["categories"]) == 10


@pytest.mark.parametrize("source", ["gtFine", "gtFine/val", "gtFine/val/city"])
@pytest.mark.parametrize("inside", ["", "gtFine"])
def test_images_of_cityscapes_are_beside_the_last_gtfine(source, inside, tmp_path, monkeypatch):
    root = tmp_path / "gtFine" / "gt_data"
    write_city(root, [square("car", 0, 0, 9, 9)])
    monkeypatch.chdir(root / inside)
    for path in (root / source, Path(os.path.relpath(root / source))):
        content, _ = convert_set("cityscapes", path)
        assert content["images"][0]["file_name"].endswith("city_0_1_leftImg8bit.png")


def test_polygons_of_cityscapes_lose_what_later_ones_cover(tmp_path):
    write_city(tmp_path, [
        square("road", 0, 0, 80, 60),
        square("car", 10, 10, 40, 40),
        square("person", 30, 10, 50, 40),
        square("cargroup", 60, 0, 80, 20),
        square("car", 0, 50, 9, 59),
        square("rider", 0, 0, 9, 59, deleted=1),
        square("busgroup", 3, 3, 3, 9),
    ])  # fmt: skip
    content, left_out = convert_set("cityscapes", tmp_path / "gtFine")
    masks = [box(10, 10, 30, 40), box(30, 10, 50, 40), box(60, 0, 80, 20), box(0, 50, 9, 59)]
    check(content, masks, ["car", "person", "car", "car"])
    assert [entry["iscrowd"] for entry in content["annotations"]] == [0, 0, 1, 0]
    assert len(left_out) == 1 and left_out[0].endswith("object 7 (bus), a polygon without area")
    kinds = [type(entry["segmentation"]) for entry in content["annotations"]]
    assert kinds == [dict, list, dict, list]


@pytest.mark.parametrize("objects, words", [
    ([{"label": "car"}], "object 1: label 'car', expected one and a polygon"),
    ([{"label": 3, "polygon": []}], "object 1: label 3"),
    ([square("car", 0, 0, "x", 9)], "object 1: a coordinate is 'x'"),
    ([{"label": "car", "polygon": [[1, 2, 3]]}], "object 1: a point is not"),
    ([7], "'objects' is not a list of objects"),
])  # fmt: skip
def test_wrong_cityscapes_is_one_line(objects, words, tmp_path):
    write_city(tmp_path, objects)
    refuses(words, "cityscapes", tmp_path / "gtFine")


def test_cityscapes_without_images_or_annotations(tmp_path):
    write_city(tmp_path, [])
    (tmp_path / "leftImg8bit/val/city/city_0_1_leftImg8bit.png").unlink()
    refuses("no image city_0_1_leftImg8bit", "cityscapes", tmp_path / "gtFine")
    refuses("no [*]_gtFine_instanceIds.png", "cityscapes", tmp_path / "leftImg8bit")

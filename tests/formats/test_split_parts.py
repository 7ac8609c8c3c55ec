"""Binary masks: noticed, and split into objects."""

import json
from dataclasses import replace

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.annotations.mask_parts import mask_parts, parts_notice
from mask_rcnn_jax.annotations.segmentation import mask_to_rle, segmentation_to_mask
from mask_rcnn_jax.data.checking import inspect_coco
from mask_rcnn_jax.rle import compressed_rle
from tests.commands.command import error_line, run_inside
from tests.formats.converting import SIZE, box, convert_set, objects_of, write_image, write_values

SPOTS = [box(2, 3, 9, 12), box(20, 0, 30, 60), box(40, 5, 44, 30), box(60, 40, 80, 60)]
BINARY = sum(SPOTS)


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (23, 31), (64, 64)])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_parts_are_those_of_opencv(shape, share):
    mask = (np.random.default_rng(7).random(shape) < share).astype(np.uint8)
    parts, _ = mask_parts(compressed_rle(mask))
    count, labels = cv2.connectedComponents(mask, connectivity=8)
    expected = {(labels == n).tobytes() for n in range(1, count)}
    found = [segmentation_to_mask(part, *shape) for part in parts]
    assert {(part > 0).tobytes() for part in found} == expected and len(found) == count - 1
    large, small = mask_parts(compressed_rle(mask), min_area=5)
    assert large == [p for p, m in zip(parts, found, strict=True) if m.sum() >= 5]
    assert small == [m.sum() for m in found if m.sum() < 5]


def write_masks(folder, values=BINARY * 255, count=3):
    for n in range(count):
        write_image(folder / "images" / f"{n}.png")
        write_values(folder / "masks" / f"{n}_mask.png", values)


def convert(folder, *flags):
    given = ["--from=masks", "--input", folder, "--output", folder / "a.json", "--class_name=cell"]
    return run_inside("prepare", "convert", *given, *flags)


def test_binary_masks_are_noticed_and_split(tmp_path, capsys):
    write_masks(tmp_path)
    assert not convert(tmp_path)
    words = "3 of 3 images have few objects in separate parts (such as 1 in 4 parts in images/0.png"
    said = capsys.readouterr().out
    assert f"{words}): binary masks? --split_parts makes each part an object\n" in said
    warnings = inspect_coco(tmp_path / "a.json", tmp_path).warnings
    assert any("--split_parts" in line for line in warnings)
    assert not convert(tmp_path, "--split_parts")
    assert "binary masks?" not in capsys.readouterr().out
    content = json.loads((tmp_path / "a.json").read_text())
    found = objects_of(content)
    assert len(found) == 3 * len(SPOTS)
    for (label, mask), spot in zip(found, SPOTS * 3, strict=True):
        assert label == "cell"
        np.testing.assert_array_equal(mask, spot)
    assert [entry["area"] for entry in content["annotations"]] == [s.sum() for s in SPOTS * 3]
    assert not any(
        "--split_parts" in w for w in inspect_coco(tmp_path / "a.json", tmp_path).warnings
    )


def test_specks_are_counted_and_left_out(tmp_path, capsys):
    write_masks(tmp_path, (BINARY + box(50, 50, 51, 52) + box(5, 50, 8, 53)) * 255)
    assert not convert(tmp_path, "--split_parts")
    assert "6 of 18 parts have fewer than 10 pixels; --min_area=10" in capsys.readouterr().out
    assert not convert(tmp_path, "--split_parts", "--min_area=9")
    said = capsys.readouterr().out
    assert "3 of 15 parts have fewer than 10 pixels" in said and "a part of 2 pixels" in said
    code = convert(tmp_path, "--min_area=9")
    assert "--split_parts" in error_line(code, capsys.readouterr().err)


def test_values_of_classes_and_files_of_masks_are_noticed_too(tmp_path):
    classes = BINARY + np.roll(BINARY, 10, axis=1) * (1 - BINARY) * 2
    write_masks(tmp_path / "values", classes)
    write_image(tmp_path / "files" / "one" / "images" / "a.png")
    write_values(tmp_path / "files" / "one" / "masks" / "m.png", BINARY * 255)
    for name in ("values", "files"):
        content, _ = convert_set("masks", tmp_path / name, class_name="x")
        assert "binary masks?" in (parts_notice(content) or "")


def test_brushes_of_other_formats_are_split(tmp_path):
    """A bitmap of Datumaro stands for them; its crowd stays one."""
    from mask_rcnn_jax.formats.coco_build import AnnotatedImage, AnnotatedObject
    from mask_rcnn_jax.formats.reading import Converted
    from mask_rcnn_jax.formats.split_parts import split_parts

    code = mask_to_rle(BINARY > 0)
    one = AnnotatedObject("cell", {"size": list(SIZE), "counts": code["counts"].decode()})
    polygon = AnnotatedObject("cell", [[0, 0, 9, 0, 9, 9], [20, 20, 29, 20, 29, 29]])
    objects = [one, replace(one, crowd=True), polygon]
    found = split_parts(Converted([AnnotatedImage(tmp_path, SIZE, objects)], tmp_path), 0)
    assert len(found.images[0].objects) == len(SPOTS) + 2
    assert list(found.images[0].objects[-2:]) == objects[1:]


@pytest.mark.parametrize("values", [
    (box(2, 3, 9, 12) + box(20, 0, 30, 60)) * 1,  # an object that something covers
    box(2, 3, 9, 12) + 2 * box(20, 0, 30, 60) + 3 * box(40, 5, 44, 30),
    box(2, 3, 50, 50) + box(60, 1, 61, 2) + box(70, 1, 71, 2) + box(60, 9, 61, 10),  # specks
])  # fmt: skip
def test_objects_and_specks_are_no_binary_masks(values, tmp_path):
    write_masks(tmp_path, values)
    content, _ = convert_set("masks", tmp_path, class_name="x")
    assert parts_notice(content) is None


def test_noise_is_no_mask(tmp_path, capsys):
    noise = np.zeros((400, 400), np.uint8)
    noise[::2, ::2] = 255
    write_image(tmp_path / "images" / "0.png", noise.shape)
    write_values(tmp_path / "masks" / "0_mask.png", noise)
    code = convert(tmp_path, "--split_parts")
    assert "more than 20,000 parts" in error_line(code, capsys.readouterr().err)


def test_files_beside_masks_that_are_not_read_are_counted(tmp_path, capsys):
    write_masks(tmp_path, BINARY * 255)
    for name in ("3_mask.npy", "readme.md", ".hidden"):
        (tmp_path / "masks" / name).write_bytes(b"")
    assert not convert(tmp_path / "masks", "--images", tmp_path / "images")
    line = f"{tmp_path / 'masks'}: these files are not read: 1 .npy\n"
    assert line in capsys.readouterr().out

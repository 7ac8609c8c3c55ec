"""Files of other tools, read back: by their readers here, by hand, or as their format says."""

import csv
import json
from pathlib import PurePosixPath

import cv2
import numpy as np
import pytest

from mask_rcnn_jax import infer
from mask_rcnn_jax.evaluation.visualize import write_pixels
from mask_rcnn_jax.formats.coco_build import build_coco
from mask_rcnn_jax.formats.labelme import read_labelme
from mask_rcnn_jax.predict.inputs import Input
from mask_rcnn_jax.predict.outlines import join_parts, outer_parts
from mask_rcnn_jax.predict.saving import FOLDERS, KINDS, ResultFiles, check_replaced
from tests.predict.test_result import HEIGHT, WIDTH, boxes_alone, make_result

IMAGE = Input("photos/deep/a.jpg", PurePosixPath("deep/a.jpg"), PurePosixPath("deep/a_2.jpg"))


def square(x, y, side, reverse=False):
    corners = np.array([[x, y], [x + side, y], [x + side, y + side], [x, y + side]], np.float32)
    return corners[::-1] if reverse else corners


def drawn(*polygons):
    canvas = np.zeros((40, 60), np.uint8)
    cv2.fillPoly(canvas, [np.round(polygon).astype(int) for polygon in polygons], 1)
    return canvas


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("parts", "outer"),
    [
        ([(2, 3, 20)], 1),
        ([(2, 3, 30), (8, 8, 10)], 1),  # a hole
        ([(2, 3, 30), (8, 8, 6), (20, 20, 6)], 1),  # two holes
        ([(2, 3, 10), (30, 3, 10), (2, 20, 10)], 3),
        ([(0, 0, 36), (5, 5, 26), (10, 10, 14)], 2),  # an island in a hole
    ],
)
def test_one_line_around_holes_and_parts_covers_what_they_do(parts, outer, reverse):
    polygons = [square(*part, reverse) for part in parts]
    assert len(outer_parts(polygons)) == outer
    joined = join_parts(polygons)
    difference = drawn(joined) != drawn(*polygons)
    # Lines of no width are drawn one pixel wide.
    assert difference.sum() <= 40 * (len(parts) - 1)
    area = cv2.contourArea(joined)
    signs = {1: (1,), 2: (1, -1), 3: (1, -1, -1) if outer == 1 else (1, 1, 1)}[len(parts)]
    if outer == 2:
        signs = (1, -1, 1)
    exact = sum(sign * side**2 for sign, (_, _, side) in zip(signs, parts, strict=True))
    assert area == pytest.approx(exact)


def test_polygons_that_cross_do_no_harm():
    rng = np.random.default_rng(0)
    for _ in range(200):
        parts = [rng.uniform(0, 50, (5, 2)).astype(np.float32) for _ in range(4)]
        assert np.isfinite(join_parts(parts)).all()
    within_each_other = [square(0, 0, 20), square(-10, -10, 20)[[2, 3, 0, 1]]]
    assert len(outer_parts(within_each_other)) == 2


@pytest.fixture
def saved(tmp_path):
    result = make_result()
    with ResultFiles(tmp_path, KINDS) as files:
        files.add(files.write(result, IMAGE, 5))
        assert files.count == 4
    return result, tmp_path


def test_every_file_has_the_place_of_its_image(saved):
    _, folder = saved
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {
        *("detections.json", "detections.csv", ".written"),
        *("masks/deep/a_2.png", "labels/deep/a_2.txt", "label_images/deep/a_2.tif"),
        *("labelme/deep/a_2.jpg", "labelme/deep/a_2.json", "geojson/deep/a_2.geojson"),
        "gpkg/deep/a_2.gpkg",
    }


LABELS = ("labels/deep/a_2.txt", "labelme/deep/a_2.json", "geojson/deep/a_2.geojson")


def test_labels_as_infer_wrote_them_are_replaced(saved):
    result, folder = saved
    for _ in range(2):  # also those that a second run replaced
        check_replaced([IMAGE.source], [IMAGE], folder, KINDS)
        with ResultFiles(folder, KINDS) as files:
            files.write(result[:2], IMAGE, 5)
    (folder / LABELS[0]).write_text("0 0 0 1 0 1 1\n")
    check_replaced([IMAGE.source], [IMAGE], folder, ["labelme", "masks"])  # labels stay


@pytest.mark.parametrize("how", ["corrected", "corrected, then infer without it", "of others"])
@pytest.mark.parametrize("label", LABELS)
def test_other_labels_are_never_replaced(how, label, saved):
    result, folder = saved
    path = folder / label
    if how == "of others":
        (folder / ".written").unlink()
    else:
        path.write_text(path.read_text().replace("1", "2"))
    if how == "corrected, then infer without it":
        with ResultFiles(folder, ["masks"]) as files:
            files.add(files.write(result, IMAGE, 5))
    with pytest.raises(ValueError, match=f"such as {path.parent}|3 files .* such as {folder}"):
        check_replaced([IMAGE.source], [IMAGE], folder, KINDS)


@pytest.mark.parametrize(("kind", "place"), FOLDERS.items())
def test_infer_refuses_to_save_where_its_inputs_are(kind, place, tmp_path):
    """Before it reads a model."""
    (tmp_path / place / "deep").mkdir(parents=True)
    (tmp_path / place / "deep" / "a.png").touch()
    inputs, output = [str(tmp_path / place)], str(tmp_path)
    with pytest.raises(ValueError, match=f"--save {kind} writes to {tmp_path / place}, which"):
        infer.infer(None, "nowhere", inputs, output, infer.Options(save=["csv", kind]))


def test_detections_are_cocos_results_with_names(saved):
    result, folder = saved
    entries = json.loads((folder / "detections.json").read_text())
    for entry, expected, name in zip(entries, result.to_coco(5), result.names, strict=True):
        assert entry == {"file_name": "deep/a.jpg", "category": name, **expected}


def test_masks_are_numbered_by_score(saved):
    result, folder = saved
    image = cv2.imread(str(folder / "masks/deep/a_2.png"), cv2.IMREAD_UNCHANGED)
    assert image.shape == (HEIGHT, WIDTH) and image.dtype == np.uint16
    np.testing.assert_array_equal(image == 1, result.masks[0])
    np.testing.assert_array_equal(image == 2, result.masks[1] & ~result.masks[0])
    np.testing.assert_array_equal(image > 0, result.masks.any(axis=0))


def test_yolo_has_a_line_per_object_in_fractions(saved):
    result, folder = saved
    lines = [line.split() for line in (folder / "labels/deep/a_2.txt").read_text().splitlines()]
    assert [int(line[0]) for line in lines] == [0, 1, 1, 0]
    for line, mask in zip(lines[:3], result.masks[:3], strict=True):
        values = np.array(line[1:], float).reshape(-1, 2)
        assert (values >= 0).all() and (values <= 1).all()
        area = cv2.contourArea((values * (WIDTH, HEIGHT)).astype(np.float32))
        assert area == pytest.approx(mask.sum(), rel=0.1)


def test_labelme_reads_its_own_file(saved, tmp_path):
    result, folder = saved
    images, left_out = read_labelme(folder / "labelme", None, tmp_path / "out.json")
    content = build_coco(images, folder / "labelme")
    assert [entry["file_name"] for entry in content["images"]] == ["deep/a_2.jpg"]
    names = {one["id"]: one["name"] for one in content["categories"]}
    assert [names[entry["category_id"]] for entry in content["annotations"]] == result.names[:3]
    assert len(left_out) == 1  # the box without area
    for entry, mask in zip(content["annotations"], result.masks, strict=False):
        assert entry["area"] == pytest.approx(mask.sum(), rel=0.1)


def test_csv_has_a_row_per_object(saved):
    result, folder = saved
    with open(folder / "detections.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["category"] for row in rows] == result.names
    assert [int(row["mask_area"]) for row in rows] == result.masks.sum(axis=(1, 2)).tolist()
    assert rows[0]["x"] == "10.0" and rows[0]["width"] == "40.0" and rows[0]["score"] == "0.9"


def test_names_that_are_no_text_are_escaped_in_tables(tmp_path):
    odd = Input("b", PurePosixPath("b\udcff.jpg"), PurePosixPath("b.jpg"))
    with ResultFiles(tmp_path, ["csv"]) as files:
        files.add(files.write(make_result(), odd, 1))
    with open(tmp_path / "detections.csv", newline="", encoding="utf-8") as file:
        assert [row["file_name"] for row in csv.DictReader(file)] == ["b\\udcff.jpg"] * 4


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_names_that_are_no_text_name_files(tmp_path, ending):
    path = tmp_path / f"b\udcff.{ending}"
    write_pixels(path, np.zeros((HEIGHT, WIDTH, 3), np.uint8))
    odd = Input(str(path), PurePosixPath(path.name), PurePosixPath("b\udcff.png"))
    result = make_result(path=str(path))
    result.save(tmp_path / "found" / odd.target)
    with ResultFiles(tmp_path / "found", KINDS) as files:
        files.add(files.write(result, odd, 1))
    written = [path for path in (tmp_path / "found").rglob("*") if "\udcff" in path.name]
    folders = {path.relative_to(tmp_path / "found").parts[0] for path in written}
    assert folders == {odd.target.name, *FOLDERS.values()}
    assert all(path.stat().st_size for path in written)


def test_boxes_alone_become_rectangles(tmp_path):
    with ResultFiles(tmp_path, KINDS) as files:
        files.add(files.write(boxes_alone(), IMAGE, 1))
    label = (tmp_path / "labels/deep/a_2.txt").read_text().splitlines()[0]
    assert len(label.split()) == 9
    shapes = json.loads((tmp_path / "labelme/deep/a_2.json").read_text())["shapes"]
    assert {shape["shape_type"] for shape in shapes} == {"rectangle"}
    assert not cv2.imread(str(tmp_path / "masks/deep/a_2.png"), cv2.IMREAD_UNCHANGED).any()


def test_lists_are_valid_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), ResultFiles(tmp_path, KINDS) as files:
        files.add(files.write(make_result(), IMAGE, 1))
        raise KeyboardInterrupt
    assert len(json.loads((tmp_path / "detections.json").read_text())) == 4


def test_nothing_found_gives_empty_files(tmp_path):
    with ResultFiles(tmp_path, KINDS) as files:
        files.add(files.write(make_result()[:0], IMAGE, 1))
    assert json.loads((tmp_path / "detections.json").read_text()) == []
    assert (tmp_path / "labels/deep/a_2.txt").read_text() == ""

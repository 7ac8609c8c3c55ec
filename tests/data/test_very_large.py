"""Annotations and files of images that nobody decodes whole."""

import json
import tracemalloc

import numpy as np
import pytest

from mask_rcnn_jax.annotations.reader import read_ground_truth
from mask_rcnn_jax.data.checking import inspect_coco
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.window_examples import objects_in
from mask_rcnn_jax.evaluation import coco as coco_evaluation
from mask_rcnn_jax.report.browser import _mask_path
from mask_rcnn_jax.report.error_images import Instance, _box_and_mask
from mask_rcnn_jax.rle import edges_to_rle

tifffile = pytest.importorskip("tifffile")

SIDE, COUNT = 30_000, 12
MEMORY = 64 << 20  # bytes; a mask of the image has 900 million


@pytest.fixture
def no_full_mask():
    """Refuse what takes as much memory as a mask of the image."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MEMORY


def square(n):
    """Corner and side of an object."""
    return 2400 * n, 29_000 - 2450 * n, 100


def annotations():
    """Polygons, strings of runs, and lists of runs."""
    for n in range(COUNT):
        x, y, side = square(n)
        corners = [x, y, x + side, y, x + side, y + side, x, y + side]
        edges = [(x + column) * SIDE + y + end for column in range(side) for end in (0, side)]
        code = edges_to_rle(np.array(edges), SIDE, SIDE)
        runs = np.diff([0, *edges, SIDE * SIDE]).tolist()
        segmentation = ([corners], code, {"size": [SIDE, SIDE], "counts": runs})[n % 3]
        entry = {"id": n + 1, "image_id": 1, "category_id": 1, "iscrowd": 0}
        yield entry | {"segmentation": segmentation}


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, shape=(64, 64, 3), dtype=np.uint8, tile=(64, 64), photometric="rgb")
    image = {"id": 1, "file_name": "a.tif", "height": SIDE, "width": SIDE}
    content = {"images": [image], "categories": [{"id": 1, "name": "a"}]}
    (tmp_path / "a.json").write_text(json.dumps(content | {"annotations": list(annotations())}))
    return tmp_path / "a.json", tmp_path


def test_annotations_are_read_cut_and_scored(files, no_full_mask):
    dataset = load_coco(*files)
    (record,) = dataset.images
    assert [one.area for one in record.annotations] == [10_000] * COUNT
    for n in (0, 1, 2, 11):
        x, y, side = square(n)
        window = x - 10 if x else 0, y - 20, x + side, y + side + 50
        (one,) = objects_in(dataset.images, 0, window, 0.5)
        assert one.area == 10_000 and one.box[1] == 20
    truth = read_ground_truth(files[0], scoring=True)
    results = [
        {"image_id": 1, "category_id": 1, "score": 0.9, "segmentation": entry["segmentation"]}
        for entry in annotations()
    ]
    boxes = [
        {"image_id": 1, "category_id": 1, "score": 0.9, "bbox": [*square(n)[:2], 100, 100]}
        for n in range(COUNT)
    ]
    metrics = coco_evaluation.score(truth, boxes, results)
    assert metrics["AP"] == metrics["mask_AP"] == 1


def test_reports_draw_no_mask_of_the_image(no_full_mask):
    x, y, side = 20_000, 10_000, 100
    edges = [(x + column) * SIDE + y + end for column in range(side) for end in (0, side)]
    code = edges_to_rle(np.array(edges), SIDE, SIDE)
    code = code | {"counts": code["counts"].encode()}
    assert _mask_path(code, 0.1) == "M2000 1000L2000 1010L2010 1010L2010 1000z"
    corners, mask = _box_and_mask(Instance((x, y, side, side), code, "a", None, False))
    assert corners == (x, y, x + side, y + side) and mask.shape == (100, 100) and mask.all()


def write_sparse(path, side):
    """A TIFF of zeros whose tiles are not there."""
    rasterio = pytest.importorskip("rasterio")
    given = dict(height=side, width=side, count=3, dtype="uint8", photometric="rgb")
    given |= dict(tiled=True, sparse_ok=True, crs="EPSG:32633")
    transform = rasterio.Affine(2, 0, 0, 0, -2, 0)
    with rasterio.open(path, "w", driver="GTiff", transform=transform, **given):
        pass


def test_check_decodes_large_files_by_parts(files):
    json_path, folder = files
    side = 14_000  # more pixels than are decoded whole
    square = [[10, 10, 20, 10, 20, 20, 10, 20]]
    entry = {"id": 1, "image_id": 1, "category_id": 1, "segmentation": square, "area": 100}
    image = {"id": 1, "file_name": "a.tif", "height": side, "width": side}
    content = {"images": [image], "categories": [{"id": 1, "name": "a"}], "annotations": [entry]}
    json_path.write_text(json.dumps(content))
    write_sparse(folder / "a.tif", side)
    assert inspect_coco(json_path, folder).problems == []
    write_sparse(folder / "a.tif", side + 1)
    (line,) = inspect_coco(json_path, folder).problems
    assert line.endswith(f"the file is {side + 1} x {side + 1} (height x width), the json says "
                         f"{side} x {side}")  # fmt: skip
    (folder / "a.tif").write_bytes(b"II*\0" + bytes(60))
    (line,) = inspect_coco(json_path, folder).problems
    assert "a.tif: more than the 178,956,970 pixels that are read at once" in line


@pytest.mark.parametrize("plain", [True, False])
def test_coordinates_stay_within_32_bits(tmp_path, plain):
    """pycocotools counts fifths of a pixel."""
    far = 5e8
    outline = [far, 0, far + 1, 0, far + 1, 1, far, 1]
    entry = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 1], "iscrowd": 0}
    entry |= {"segmentation": [[0, 0, 9, 0, 9, 1], outline], "area": 9 if plain else None}
    image = {"id": 1, "file_name": "a.tif", "height": 1, "width": 100_000_000}
    content = {"images": [image], "categories": [{"id": 1, "name": "a"}], "annotations": [entry]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    (tmp_path / "a.tif").touch()
    (one,) = load_coco(tmp_path / "a.json", tmp_path).images[0].annotations
    assert len(one.segmentation) == 1
    (line,) = read_ground_truth(tmp_path / "a.json").dropped()
    assert "the coordinate 500000000.0, expected -400000000 to 400000000" in line

"""Large images in tiles: the predictor, its results and what is made of them."""

import cv2
import jax
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.data.resize import resize_image
from mask_rcnn_jax.evaluation.encode import ImageDetections
from mask_rcnn_jax.evaluation.merge import merge_views
from mask_rcnn_jax.models.build import build_model, init_variables
from mask_rcnn_jax.predict import predictor as predictor_module
from mask_rcnn_jax.predict import saving
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.predict.tiles import TiledImage
from mask_rcnn_jax.structures import Detections
from tests.helpers import tiny_config
from tests.predict.conftest import CATEGORIES, two_canvas_config

HEIGHT, WIDTH, TILE = 330, 520, 150
# Gray values of objects, and their boxes; each is in its own pixels, so that none hides another.
BOXES = {
    40: (10, 20, 60, 50),
    60: (100, 10, 180, 140),  # over a seam
    80: (5, 160, 515, 180),  # over all tiles of a row
    100: (130, 200, 160, 280),  # over a corner
    120: (200, 190, 420, 325),  # larger than a tile
    140: (519, 0, 520, 330),  # one pixel wide
    160: (440, 200, 510, 320),
}


class ExactPredictor(Predictor):
    """Finds the gray rectangles of what it looks at, without a network."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.batches = []

    def _run(self, images):
        self.batches.append([image.image.shape[:2] for image in images])
        rows = [self._look(image) for image in images]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

    def _look(self, image):
        found = Detections(
            boxes=np.zeros((10, 4), np.float32),
            scores=np.zeros(10, np.float32),
            classes=np.zeros(10, np.int32),
            masks=np.zeros((10, 28, 28), np.float32),
            valid=np.zeros(10, bool),
        )
        scale_y, scale_x = image.plan.scale
        for k, gray in enumerate(BOXES):
            mask = (image.image[..., 0] == gray).astype(np.uint8)
            if mask.any():
                x, y, width, height = cv2.boundingRect(mask)
                box = np.array([x, y, x + width, y + height])
                found.boxes[k] = box * (scale_x, scale_y, scale_x, scale_y)
                found.scores[k], found.classes[k] = 0.95 - 0.1 * k, 1 + k % 2
                found.masks[k], found.valid[k] = 1, True
        return found


@pytest.fixture(scope="module")
def image():
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    for gray, (x0, y0, x1, y1) in BOXES.items():
        image[y0:y1, x0:x1] = gray
    return image


def make(tile, batch_size=2, **options):
    number_of_classes = {"params": {"box_head": {"cls_score": {"bias": np.zeros(3)}}}}
    given = two_canvas_config(), number_of_classes, batch_size, CATEGORIES
    return ExactPredictor(*given, tile, **options)


@pytest.fixture(scope="module")
def untiled(image):
    return make(0)(image)


@pytest.fixture(scope="module")
def tiled(image):
    return make(TILE)(image)


def assert_same_masks(masks, others):
    """But for the corners, which a grid of 28 x 28 rounds the more, the larger it is."""
    assert masks.shape == others.shape and masks.any(axis=(1, 2)).all()
    assert ((masks != others).sum(axis=(1, 2)) <= 0.001 * others.sum(axis=(1, 2))).all()


def test_seams_leave_no_trace(tiled, untiled):
    assert len(untiled) == len(BOXES) and tiled.window_masks is not None
    for name in ("scores", "classes"):
        np.testing.assert_array_equal(getattr(tiled, name), getattr(untiled, name))
    np.testing.assert_allclose(tiled.boxes, untiled.boxes, atol=1e-3)
    np.testing.assert_array_equal(tiled.boxes.round(), list(BOXES.values()))
    assert_same_masks(tiled.masks, untiled.masks)
    np.testing.assert_array_equal(np.stack([*map(coco_mask.decode, tiled.rle())]), tiled.masks)
    for one, other in zip(tiled.to_coco(7), untiled.to_coco(7), strict=True):
        assert one.pop("bbox") == pytest.approx(other.pop("bbox"), abs=2e-3)
        assert one.pop("segmentation")["size"] == other.pop("segmentation")["size"]
        assert one == other


def test_outlines_follow_the_merged_masks(tiled):
    for parts, mask in zip(tiled.polygons(), tiled.masks, strict=True):
        drawn = np.zeros((HEIGHT, WIDTH), np.uint8)
        cv2.fillPoly(drawn, [np.round(part - 0.5).astype(int) for part in parts], 1)
        assert (drawn & mask).sum() / (drawn | mask).sum() > 0.9 or mask.sum() < 400


def test_a_selection_keeps_its_masks(tiled, untiled):
    for rows in ([2], slice(1, 4), [3, 0], np.arange(7) > 4, []):
        np.testing.assert_array_equal(tiled[rows].masks, tiled.masks[rows])
    assert [one.names for one in tiled] == [one.names for one in untiled]
    assert tiled[:0].to_coco() == tiled[:0].polygons() == []


def test_drawings_and_files_are_those_of_the_untiled_image(tiled, untiled, tmp_path):
    difference = np.abs(tiled.plot().astype(int) - untiled.plot()).max(axis=2)
    assert (difference > 128).mean() < 0.001
    tiled.save(tmp_path / "a.png")
    for name, result in (("tiled", tiled), ("untiled", untiled)):
        for kind, write in saving.WRITERS.items():
            write(result, tmp_path / name / kind, saving.PurePosixPath("a.png"))
    paths = (tmp_path / name / "masks" / "masks" / "a.png" for name in ("tiled", "untiled"))
    one, other = (cv2.imread(str(path), cv2.IMREAD_UNCHANGED) for path in paths)
    assert one.shape == other.shape and (one != other).mean() < 0.002


@pytest.mark.parametrize("batch_size", [1, 4])
def test_tiles_fill_batches_and_images_keep_their_order(image, untiled, batch_size):
    predictor = make(TILE, batch_size)
    small = np.ascontiguousarray(image[:100, :140])
    several = [small, image, np.ascontiguousarray(image.transpose(1, 0, 2)), small]
    found = predictor(several)
    assert [result.image.shape for result in found] == [one.shape for one in several]
    assert_same_masks(found[1].masks, untiled.masks)
    assert_same_masks(found[2].masks, untiled.masks.transpose(0, 2, 1))
    for result in (found[0], found[3]):
        assert result.window_masks is None and result.mask_grids.shape[1:] == (28, 28)
    sizes = [len(rows) for rows in predictor.batches]
    assert max(sizes) == predictor.images_at_once
    assert sum(sizes) == 2 + 2 * len(predictor.prepare(image).windows)
    assert len(sizes) <= 4 + sum(sizes) // max(sizes)


def test_an_image_that_fits_a_tile_is_predicted_as_ever(image):
    small = np.ascontiguousarray(image[:TILE, :TILE])
    predictor = make(TILE)
    assert not isinstance(predictor.prepare(small), TiledImage)
    assert isinstance(predictor.prepare(image), TiledImage)
    found, expected = predictor(small), make(0)(small)
    np.testing.assert_array_equal(found.mask_grids, expected.mask_grids)


def test_a_model_of_boxes_alone(image, monkeypatch):
    look = ExactPredictor._look
    monkeypatch.setattr(ExactPredictor, "_look", lambda *a: look(*a).replace(masks=None))
    found = make(TILE)(image)
    np.testing.assert_array_equal(found.boxes.round(), list(BOXES.values()))
    assert found.masks is None and found.rle() == [] and list(found.crops()) == []
    assert not found.has_masks and found.polygons() == [[]] * len(BOXES)


@pytest.mark.parametrize(
    ("tile", "overlap", "message"), [(10, 0.2, "tile is 10"), (64, 0.95, "overlap is 0.95")]
)
def test_tiles_without_meaning_are_refused(tile, overlap, message):
    with pytest.raises(ValueError, match=message):
        make(tile, overlap=overlap)


def test_few_pixels_wait_for_the_network(monkeypatch):
    """Only the tiles of the batches at work are resized: of an image of 120 tiles, two or so."""
    predictor, waiting = make(100, overlap=0.0), []

    def resize(*arguments, **options):
        waiting.append(1 + len(waiting) - sum(map(len, predictor.batches)))
        return resize_image(*arguments, **options)

    monkeypatch.setattr(predictor_module, "resize_image", resize)
    predictor(np.zeros((1000, 1200, 3), np.uint8))
    assert len(waiting) >= 120 and max(waiting) <= 2 * predictor.images_at_once


@pytest.mark.slow
def test_a_network_finds_in_tiles_what_it_finds_in_them_one_by_one():
    config = tiny_config()
    variables = init_variables(build_model(config.model), 0)
    image = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
    predictor = Predictor(config, variables, 3, CATEGORIES, 128, 0.25)
    found, windows = predictor(image), predictor.prepare(image).windows
    alone, views = Predictor(config, variables, 1, CATEGORIES), []
    for x0, y0, x1, y1 in windows:
        one = alone(np.ascontiguousarray(image[y0:y1, x0:x1]))
        arrays = one.boxes, one.scores, one.classes.tolist(), one.mask_grids
        views.append(ImageDetections(1, y1 - y0, x1 - x0, *arrays))
    expected = merge_views(views, windows, config.eval.paste)
    assert len(found) == len(expected.scores) > len(windows)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
    np.testing.assert_allclose(found.boxes, expected.boxes, atol=2e-3)
    assert found.masks.shape == (len(found), 200, 300)

"""Scores of large images in tiles, with a detector that makes no mistake."""

from dataclasses import replace
from types import SimpleNamespace

import cv2
import jax
import numpy as np
import pytest

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data.dataset import Annotation, ImageRecord
from mask_rcnn_jax.data.tile_loader import TileLoader
from mask_rcnn_jax.data.tiles import Tiles
from mask_rcnn_jax.data.windows import Windows
from mask_rcnn_jax.recipe.options import EvalOptions
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.training import scoring, validation
from mask_rcnn_jax.training.batches import make_train_loader
from mask_rcnn_jax.training.encoding import Rules
from mask_rcnn_jax.training.evaluator import score
from mask_rcnn_jax.training.tiles import detect_in_tiles
from tests.helpers import tiny_config
from tests.training.test_step import mesh_of

# (x0, y0, x1, y1) by color channel. Canvases of 128 x 192 show tiles of 120 pixels as they are.
OBJECTS = {
    1: {0: (10, 10, 60, 90), 1: (80, 40, 240, 70), 2: (100, 100, 300, 290)},
    2: {0: (5, 5, 45, 35)},
    3: {},
    4: {1: (20, 90, 60, 380), 2: (66, 100, 118, 330)},
}
SIZES = {1: (300, 350), 2: (60, 80), 3: (130, 400), 4: (400, 125)}


class Rectangles:
    class_names = ("even", "odd")
    category_ids = (4, 9)

    def __init__(self):
        self.images = [
            ImageRecord(number, f"{number}.png", *SIZES[number], tuple(self._objects(number)))
            for number in OBJECTS
        ]

    def _objects(self, number):
        for channel, (x0, y0, x1, y1) in OBJECTS[number].items():
            mask = np.zeros(SIZES[number], np.uint8)
            mask[y0:y1, x0:x1] = 1
            yield Annotation.from_mask(mask, 1 + channel % 2)

    def decode(self, index):
        number = index + 1
        image = np.zeros((*SIZES[number], 3), np.uint8)
        for channel, (x0, y0, x1, y1) in OBJECTS[number].items():
            image[y0:y1, x0:x1, channel] = 255
        return image


def predict(variables, batch):
    """Find the rectangles, in pixels of the network."""
    rows = [_find(image) for image in np.asarray(batch.images)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def _find(image):
    found = Detections(
        boxes=np.zeros((3, 4), np.float32),
        scores=np.float32([0.9, 0.8, 0.7]),
        classes=np.int32([1, 2, 1]),
        masks=np.ones((3, 28, 28), np.float32),
        valid=np.zeros(3, bool),
    )
    for channel in range(3):
        mask = (image[..., channel] > 127).astype(np.uint8)
        if mask.any():
            x, y, width, height = cv2.boundingRect(mask)
            found.boxes[channel] = x, y, x + width, y + height
            found.valid[channel] = True
    return found


@pytest.fixture
def recipe():
    config = tiny_config()
    config.data.update(image_size=(128, 192), resize="keep")
    return as_recipe(config)


@pytest.mark.parametrize("batch_size", [2, 6])
def test_an_exact_detector_scores_as_if_there_were_no_seams(recipe, batch_size):
    dataset = Rectangles()
    loader = TileLoader(dataset, recipe.data, Tiles(120), batch_size=batch_size)
    found = detect_in_tiles(predict, {}, loader, dataset, mesh_of(2), Rules.of(recipe))
    boxes, masks, ids = found.boxes, found.masks, found.image_ids
    assert ids == [1, 2, 3, 4] and len(boxes) == len(masks) == 6
    assert {entry["category_id"] for entry in boxes} == {4, 9}
    metrics = score(dataset, found, EvalOptions())
    assert metrics["AP"] == metrics["mask_AP"] == 1.0


def test_the_number_of_images_is_limited(recipe):
    dataset = Rectangles()
    loader = TileLoader(dataset, recipe.data, Tiles(120), batch_size=2, max_images=2)
    found = detect_in_tiles(predict, {}, loader, dataset, mesh_of(2), Rules.of(recipe))
    assert found.image_ids == [1, 2]


def test_what_does_not_go_with_tiles_is_refused(recipe):
    recipe = replace(recipe, eval=replace(recipe.eval, tta_flip=True))
    with pytest.raises(ValueError, match="^eval.tta_scales and eval.tta_flip are set, expected"):
        scoring._detect(recipe, 2, {}, Rectangles(), Tiles(120))


def on_windows(recipe, size):
    return replace(recipe, data=replace(recipe.data, windows=Windows(size)))


def test_evaluations_of_runs_on_windows_cut_tiles(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(validation.step, "make_predict_step", lambda *given: predict)
    monkeypatch.setattr(validation.step, "make_loss_step", lambda *given, **options: None)
    given = on_windows(recipe, (128, 128)), Rectangles(), None, mesh_of(2), tmp_path
    metrics, pictures = validation.make_validation(*given)(SimpleNamespace(step=3, evaluated={}))
    assert metrics["ap/box"] == metrics["ap/mask"] == 1.0
    assert not pictures and not any(name.startswith("val_loss") for name in metrics)


@pytest.mark.parametrize(("size", "says"), [((128, 128), False), ((192, 192), True)])
def test_a_scale_that_differs_from_training_is_warned_of(recipe, caplog, size, says):
    recipe = on_windows(recipe, size)
    make_train_loader(recipe.data, recipe.train, Rectangles(), 0, ()).close()
    expected = "data.image_size=(128, 192) makes 128 x 128 pixels of tiles as large as"
    assert (expected in caplog.text) == says

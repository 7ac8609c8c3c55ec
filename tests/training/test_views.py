"""Test-time augmentation against views that are looked at one by one and merged in numpy."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import linen as nn
from safetensors.numpy import save_file

from mask_rcnn_jax import parts
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.views import ViewLoader, scaled_options
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.recipe.options import EvalOptions, Views
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.training import scoring
from mask_rcnn_jax.training.batches import view_sizes
from mask_rcnn_jax.training.step import make_predict_step, shard_batch
from mask_rcnn_jax.training.views import make_views_step
from mask_rcnn_jax.weights.convert import to_ours_flat
from tests import small_trunk
from tests.helpers import any_variables, tiny_config
from tests.memory_set import ShapeSet
from tests.training.test_step import mesh_of

DETECT = Detect(score_threshold=0.0, pre_nms_topk=40, detections_per_image=6)
SIZE = (60, 90)  # images are 64 x 96, so that they are narrower than their canvas


def small_config():
    config = tiny_config()
    config.model.num_classes = 4
    config.model.backbone = small_trunk.SECTION
    config.model.mask_head.num_convs = 1
    return config


@pytest.fixture(scope="module")
def model():
    return build_model(small_config().model)


@pytest.fixture(scope="module")
def variables(model):
    return any_variables(model)


@pytest.fixture(scope="module")
def batches():
    """Two images in two sizes, as the loaders make them."""
    dataset = ShapeSet("val", 2, size=(64, 96))
    options = ExampleOptions(SIZE, "shortest_edge", max_instances=4)
    sizes = [options, scaled_options(options, 1.5)]
    loaders = [EvalLoader(dataset, o, batch_size=2, num_workers=0) for o in sizes]
    (views,) = ViewLoader(loaders)
    assert [v.images.shape[1:3] for v in views] == [(64, 128), (128, 192)]
    assert [v.image_sizes[0].tolist() for v in views] == [[60, 90], [90, 135]]
    return views


def mirrored(batch):
    images = batch.images.copy()
    for image, (_, width) in zip(images, batch.image_sizes, strict=True):
        image[:, :width] = image[:, :width][:, ::-1]
    return batch.replace(images=images)


def mirrored_boxes(boxes, batch):
    width = batch.image_sizes[:, 1, None].astype(np.float32)
    x1, y1, x2, y2 = np.moveaxis(boxes, -1, 0)
    return np.stack([width - x2, y1, width - x1, y2], axis=-1)


def greedy(rows, thresh, limit):
    """The rows (score, class, box) that per-class NMS keeps, one at a time."""
    kept = []
    for row in sorted(rows, key=lambda row: -row[0]):
        for other in kept:
            side = np.minimum(row[2][2:], other[2][2:]) - np.maximum(row[2][:2], other[2][:2])
            inter = np.prod(np.maximum(side, 0))
            areas = [np.prod(box[2:] - box[:2]) for box in (row[2], other[2])]
            if other[1] == row[1] and inter > thresh * (sum(areas) - inter):
                break
        else:
            kept.append(row)
    return kept[:limit]


def expected_detections(model, variables, batches, flip):
    """Per image: (score, class, box in the first size, mask), by descending score."""

    @jax.jit
    def predict(variables, batch):
        arguments = batch.images, batch.image_sizes, DETECT
        return model.apply(variables, *arguments, method="predict")

    @jax.jit
    def masks_of(variables, batch, boxes, classes):
        def masks(module):
            pyramid, extent = module.pyramid(batch.images, batch.image_sizes, train=False)
            pooled = module.pool(pyramid, boxes, 14, extent)
            return nn.sigmoid(module.mask_head(pooled, classes))

        return nn.apply(masks, model)(variables)

    first, views = batches[0], []
    for batch in batches:
        views.append((batch, False))
        if flip:
            views.append((mirrored(batch), True))
    rows = [[] for _ in first.images]
    for batch, is_mirrored in views:
        found = jax.device_get(predict(variables, batch))
        boxes = mirrored_boxes(found.boxes, batch) if is_mirrored else found.boxes
        factors = np.tile((first.scales / batch.scales)[:, ::-1], 2)[:, None]
        for image in range(len(rows)):
            for k in np.flatnonzero(found.valid[image]):
                row = found.scores[image, k], found.classes[image, k], (boxes * factors)[image, k]
                rows[image].append(row)
    merged = [greedy(found, DETECT.nms_thresh, DETECT.detections_per_image) for found in rows]
    limit = DETECT.detections_per_image
    boxes = np.zeros((len(rows), limit, 4), np.float32)
    classes = np.zeros((len(rows), limit), np.int32)
    for image, found in enumerate(merged):
        boxes[image, : len(found)] = [row[2] for row in found]
        classes[image, : len(found)] = [row[1] for row in found]
    masks = []
    for batch, is_mirrored in views:
        factors = np.tile((batch.scales / first.scales)[:, ::-1], 2)[:, None]
        there = boxes * factors
        there = mirrored_boxes(there, batch) if is_mirrored else there
        seen = np.asarray(masks_of(variables, batch, there.astype(np.float32), classes))
        masks.append(seen[..., ::-1] if is_mirrored else seen)
    return merged, np.mean(masks, axis=0)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "flip"), [(1, True), (2, False), (2, True)])
def test_views_are_merged_as_one_by_one(model, variables, batches, sizes, flip):
    mesh, given = mesh_of(2), batches[:sizes]
    step = make_views_step(model, mesh, DETECT, flip=flip)
    found = jax.device_get(step(variables, shard_batch(given, mesh)))
    expected, masks = expected_detections(model, variables, given, flip)
    for image, rows in enumerate(expected):
        count = int(found.valid[image].sum())
        assert 2 <= count == len(rows)
        scores, classes, boxes = (np.array(column) for column in zip(*rows, strict=True))
        np.testing.assert_allclose(found.scores[image, :count], scores, rtol=1e-4)
        np.testing.assert_array_equal(found.classes[image, :count], classes)
        np.testing.assert_allclose(found.boxes[image, :count], boxes, atol=1e-2)
        np.testing.assert_allclose(found.masks[image, :count], masks[image, :count], atol=1e-3)
        assert not found.masks[image, count:].any() and not found.boxes[image, count:].any()


SLOW_NMS = [pytest.param(name, marks=pytest.mark.slow) for name in ("hard", "linear")]


@pytest.mark.parametrize("nms", ["gaussian", *SLOW_NMS])
@pytest.mark.slow
def test_one_view_is_plain_prediction(model, variables, batches, nms):
    """Suppression of what was suppressed already drops nothing; soft-NMS comes once."""
    mesh, (batch, *_), detect = mesh_of(2), batches, replace(DETECT, nms=nms)
    step = make_views_step(model, mesh, detect, flip=False)
    found = step(variables, shard_batch((batch,), mesh))
    plain = make_predict_step(model, mesh, detect)(variables, shard_batch(batch, mesh))
    assert plain.boxes.shape == (2, 6, 4) and plain.masks.shape == (2, 6, 28, 28)
    np.testing.assert_array_equal(found.valid, plain.valid)
    np.testing.assert_array_equal(found.classes, plain.classes)
    np.testing.assert_allclose(found.scores, plain.scores, rtol=1e-5)
    np.testing.assert_allclose(found.boxes, plain.boxes, atol=1e-3)
    np.testing.assert_allclose(found.masks, plain.masks, atol=1e-4)


@pytest.mark.slow
def test_a_mirror_image_gives_mirrored_detections(model, variables, batches):
    """With flips, the sum over both views knows no left and right."""
    mesh, (batch, *_) = mesh_of(2), batches
    step = make_views_step(model, mesh, DETECT, flip=True)
    one, other = (
        jax.device_get(step(variables, shard_batch((b,), mesh))) for b in (batch, mirrored(batch))
    )
    np.testing.assert_array_equal(one.valid, other.valid)
    np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4)
    boxes = np.where(one.valid[..., None], mirrored_boxes(other.boxes, batch), 0.0)
    np.testing.assert_allclose(one.boxes, boxes, atol=1e-2)
    np.testing.assert_allclose(one.masks, other.masks[..., ::-1], atol=1e-3)


@pytest.mark.parametrize(
    ("resize", "size", "scale", "expected"),
    [
        ("fit", (64, 128), 1.5, (128, 192)),
        ("fit", (64, 128), 0.3, (64, 64)),
        ("keep", (832, 1344), 0.8, (640, 1088)),
        ("keep", (64, 128), 1.0, (64, 128)),
        ("shortest_edge", (800, 1333), 1.5, (1200, 2000)),
        ("shortest_edge", (800, 1333), 0.5, (400, 666)),
    ],
)
def test_sizes_of_views(resize, size, scale, expected):
    options = ExampleOptions(size, resize, max_instances=4)
    assert scaled_options(options, scale).image_size == expected


def test_a_choice_of_short_sides_is_of_training_alone():
    options = ExampleOptions((100, 200), "shortest_edge", max_instances=4, short_sides=(80, 100))
    assert scaled_options(options, 0.5) == replace(options, image_size=(50, 100), short_sides=())


class Mixed(ShapeSet):
    """Every second image is upright."""

    def _record(self, index):
        self.size = (64, 96) if index % 2 else (96, 64)
        return super()._record(index)

    def decode(self, index):
        return np.zeros((*((64, 96) if index % 2 else (96, 64)), 3), np.uint8)


def test_every_image_comes_once_in_every_size():
    options = ExampleOptions((60, 90), "shortest_edge", max_instances=4)
    sizes = [scaled_options(options, scale) for scale in (1.0, 2.0)]
    loaders = [EvalLoader(Mixed("val", 7), o, batch_size=2, num_workers=0) for o in sizes]
    loader, seen = ViewLoader(loaders), []
    assert loader.num_images == 7
    for first, second in loader:
        np.testing.assert_array_equal(first.image_index, second.image_index)
        seen += [i for i in first.image_index.tolist() if i >= 0]
    assert sorted(seen) == list(range(7))


def test_sizes_that_divide_the_images_differently_are_refused():
    """Both orientations share a canvas of 128 x 128, and have one each from 129 on."""
    options = ExampleOptions((100, 128), "shortest_edge", max_instances=4)
    sizes = [scaled_options(options, scale) for scale in (1.0, 1.01)]
    loaders = [EvalLoader(Mixed("val", 4), o, batch_size=2, num_workers=0) for o in sizes]
    with pytest.raises(ValueError, match="eval.tta_scales: landscapes and portraits share"):
        list(ViewLoader(loaders))


def test_a_canvas_that_enlarges_no_image_has_no_larger_size():
    config = tiny_config()
    config.data.update(image_size=(128, 192), resize="keep")
    data = as_recipe(config).data
    sizes = [options.image_size for options in view_sizes(data, Views((1.0, 0.5)))]
    assert sizes == [(128, 192), (64, 128)]
    with pytest.raises(ValueError, match="^eval.tta_scales has 1.5, expected at most 1 with data"):
        view_sizes(data, Views((1.0, 1.5)))


@pytest.mark.parametrize("scales", [(), (1.0, 0.0), (float("nan"),), ("1",)])
def test_scales_without_meaning_are_refused(scales):
    with pytest.raises(ValueError, match="^eval.tta_scales is"):
        parts.build(EvalOptions, {"tta_scales": scales, "batch_size": 1}, "eval")


def test_an_evaluation_looks_at_the_views_of_its_config(variables, tmp_path, monkeypatch):
    """One batch of both images, and what the detector is given of it; it finds nothing."""
    config, seen = small_config(), []
    config.eval.batch_size = 1  # on each of two devices
    save_file(to_ours_flat(variables), tmp_path / "weights.safetensors")

    def make_step(model, mesh, detect, flip=None):
        def step(variables, given):
            batches = [given] if flip is None else given
            seen.append((flip, [batch.images.shape for batch in batches]))
            zeros = np.zeros((2, 5), np.float32)
            boxes, masks = zeros[..., None].repeat(4, -1), np.zeros((2, 5, 28, 28), np.float32)
            return Detections(boxes, zeros, zeros.astype(np.int32), masks, zeros.astype(bool))

        return step

    for name in ("make_predict_step", "make_views_step"):
        monkeypatch.setattr(scoring, name, make_step)
    own = {"val_set": ShapeSet("val", 2), "output": tmp_path}
    for scales, flip in (((1.0,), False), ((1.0,), True), ((1.0, 2.0), False)):
        config.eval.update(tta_scales=scales, tta_flip=flip)
        scoring.evaluate(tmp_path / "weights.safetensors", config, **own)
    small, large = (2, 64, 64, 3), (2, 128, 128, 3)
    assert seen == [(None, [small]), (True, [small]), (False, [small, large])]
    assert Views((0.5, 1.0, 2.0), True).views == 6

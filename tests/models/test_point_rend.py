"""PointRend's head computes what detectron2's does, and learns where it is unsure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.build import build_model, name_part
from mask_rcnn_jax.models.point_rend import PointRendHead
from mask_rcnn_jax.ops.points import doubled, grid_points, in_image, point_targets, sample_map
from mask_rcnn_jax.training.step import loss_terms
from mask_rcnn_jax.weights.convert import to_detectron2, to_flax
from mask_rcnn_jax.weights.pretrained import merge_into
from tests import small_trunk
from tests.helpers import (
    any_variables,
    assert_finite_with_grad,
    load_golden,
    tiny_batch,
    tiny_config,
)
from tests.models.pointrend_case import CASES, CLASSES, SIZES, STRIDE, inputs

SIGN = "backbone.fpn_lateral2.weight"  # of detectron2's files


def golden_weights(prefix="roi_heads.mask_head.", change=lambda name: name):
    golden = load_golden("pointrend/head")
    names = [name for name in golden if name.startswith("weights/")]
    arrays = {prefix + change(name.partition("/")[2]): golden[name] for name in names}
    return arrays | {SIGN: np.zeros((8, 8, 1, 1), np.float32)}


def head_of(points=784, steps=5):
    options = dict(channels=8, **SIZES, subdivision_points=points, subdivisions=steps)
    return PointRendHead(CLASSES, **options)


def run_head(head, given, **options):
    params = to_flax(golden_weights(), norm=None, eps=1e-5)[0]["params"]["mask_head"]

    def sample(points):
        return sample_map(given["map"], in_image(points, given["boxes"]) / STRIDE)

    features = jnp.zeros((2, 3, 14, 14, 8))
    run = jax.jit(lambda params: head.apply({"params": params}, features, given["classes"],
                                            sample=sample, **options))  # fmt: skip
    return run(params)


@pytest.mark.parametrize("case", CASES)
def test_masks_are_those_of_detectron2(case):
    given = jax.tree.map(jnp.asarray, inputs())
    head = head_of(*CASES[case])
    masks = run_head(head, given)
    assert masks.shape[-1] == head.mask_size == 56
    np.testing.assert_allclose(masks, load_golden("pointrend/head")[case], atol=1e-4, rtol=1e-5)


def test_training_outputs_are_those_of_detectron2(monkeypatch):
    given, golden = jax.tree.map(jnp.asarray, inputs()), load_golden("pointrend/head")
    points = given["points"]
    monkeypatch.setattr(PointRendHead, "_training_points", lambda *_: points)
    keys = jax.random.split(jax.random.key(0), (2, 3))
    coarse, found = run_head(head_of(), given, keys=keys)
    close = dict(atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(coarse.reshape(6, 7, 7), golden["coarse"], **close)
    np.testing.assert_allclose(found.logits.reshape(6, -1), golden["point_logits"], **close)
    at = in_image(points, given["boxes"])
    for image in range(2):
        rows = given["masks"][image] * 255, None, given["matched"][image], at[image]
        labels = golden["labels"][3 * image : 3 * image + 3]
        np.testing.assert_allclose(point_targets(*rows), labels, atol=1e-5)


def test_the_first_files_names_are_read_too():
    def old(name):
        name = name.replace("coarse_head.fc", "coarse_head.coarse_mask_fc")
        return f"mask_{name}".replace("mask_mask_", "mask_")

    now, before = (
        to_flax(arrays, norm=None, eps=1e-5)
        for arrays in (golden_weights(), golden_weights("roi_heads.", old))
    )
    assert now[1] == before[1] == "detectron2"
    jax.tree.map(np.testing.assert_array_equal, now[0], before[0])


def config():
    config = tiny_config()
    config.model.backbone = small_trunk.SECTION
    config.model.mask_head = dict(
        name="pointrend", channels=16, fc_channels=16, point_channels=16, train_points=12,
        subdivisions=2, subdivision_points=40,
    )  # fmt: skip
    return config


def forward(model, variables, batch, keys):
    return model.apply(variables, batch, keys, train=True, method="forward_train")


@pytest.fixture(scope="module")
def trained():
    """Outputs in training of a whole model: of a batch, and of its images alone."""
    model = build_model(as_recipe(config()).model)
    batch, variables = jax.tree.map(jnp.asarray, tiny_batch(2)), any_variables(model)
    keys = jax.random.split(jax.random.key(3), 2)
    run = jax.jit(lambda batch, keys: forward(model, variables, batch, keys))
    alone = [run(jax.tree.map(lambda x, i=i: x[i : i + 1], batch), keys[i : i + 1])
             for i in range(2)]  # fmt: skip
    return model, run(batch, keys), alone


@pytest.mark.slow
def test_points_depend_on_their_image_alone(trained):
    _, both, alone = trained
    start = 0
    for one in alone:
        count = int(one.mask_rois.foreground.sum())
        for name in ("point_logits", "point_targets", "mask_targets"):
            ours, theirs = getattr(both, name), getattr(one, name)
            np.testing.assert_allclose(ours[start : start + count], theirs[:count], atol=1e-5)
        start += count
    assert start > 1


@pytest.mark.slow
def test_the_losses_are_two(trained):
    model, outputs, _ = trained
    recipe = as_recipe(config())
    terms = loss_terms(outputs, recipe.loss, 16)
    assert outputs.mask_logits.shape[1:] == (7, 7)
    rows = np.asarray(outputs.mask_rois.foreground)
    logits, truth = (np.asarray(x)[rows] for x in (outputs.point_logits, outputs.point_targets))
    expected = np.mean(np.logaddexp(0, logits) - logits * truth)
    assert terms["loss/mask_point"] == pytest.approx(expected, rel=1e-5)
    assert 0 <= truth.min() < truth.max() <= 1


@pytest.mark.slow
def test_gradients_are_finite_and_reach_both_heads_and_the_map():
    given = jax.tree.map(jnp.asarray, inputs())
    head, keys = head_of(), jax.random.split(jax.random.key(0), (2, 3))
    params = to_flax(golden_weights(), norm=None, eps=1e-5)[0]["params"]["mask_head"]
    classes = given["classes"].at[0, 1].set(0)
    boxes = given["boxes"].at[1, 1].set(0.0)  # of no area

    def loss(params, map):
        def sample(points):
            return sample_map(map, in_image(points, boxes) / STRIDE)

        coarse, found = head.apply({"params": params}, jnp.zeros((2, 3, 14, 14, 8)), classes,
                                   sample=sample, keys=keys)  # fmt: skip
        return jnp.sum(jnp.sin(coarse)) + jnp.sum(jnp.sin(found.logits))

    assert_finite_with_grad(loss, params, given["map"])
    grads = jax.tree.leaves(jax.grad(loss, (0, 1))(params, given["map"]))
    assert all(np.abs(np.asarray(grad)).max() > 0 for grad in grads)


def test_most_points_are_where_the_coarse_mask_is_unsure():
    head = PointRendHead(2, train_points=40)
    at = (np.arange(7) + 0.5) / 7
    logits = np.broadcast_to(20 * (at - 0.5)[None], (7, 7)).reshape(1, 1, 49)  # 0 in the middle
    keys = jax.random.split(jax.random.key(1), (1, 1))
    points = np.asarray(head._training_points(jnp.asarray(logits, jnp.float32), keys))[0, 0]
    away = np.abs(points[:, 0] - 0.5)
    assert points.shape == (40, 2) and (points >= 0).all() and (points < 1).all()
    # The best of 120, and 10 at random; at the grid's edge, logits go to 0, too.
    assert away[:30].mean() < 0.12 and away[30:].mean() > 0.17


def test_samples_equal_a_slow_walk():
    rng = np.random.default_rng(0)
    map = rng.normal(size=(2, 5, 7, 3)).astype(np.float32)
    points = rng.uniform(-2, 9, (2, 4, 6, 2)).astype(np.float32)
    expected = np.zeros((2, 4, 6, 3))
    for place in np.ndindex(2, 4, 6):
        x, y = points[place] - 0.5
        for row in range(5):
            for column in range(7):
                weight = max(0, 1 - abs(x - column)) * max(0, 1 - abs(y - row))
                expected[place] += weight * map[place[0], row, column]
    found = sample_map(jnp.asarray(map), jnp.asarray(points))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    rows = jnp.array([[1, 0, 1, 1]])
    one = sample_map(jnp.asarray(map), jnp.asarray(points[:1]), rows)
    for r, image in enumerate(rows[0]):
        own = sample_map(jnp.asarray(map[image : image + 1]), jnp.asarray(points[:1, r : r + 1]))
        np.testing.assert_allclose(one[0, r], own[0, 0], atol=1e-6)


def test_doubling_repeats_the_edge():
    x = jnp.arange(6.0).reshape(1, 2, 3)[:, :, :2]
    rows = [0, 0.25, 0.75, 1]
    expected = [[3 * a + b for b in rows] for a in rows]
    np.testing.assert_allclose(doubled(x)[0], expected, atol=1e-6)
    assert grid_points(2).tolist() == [[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75]]


def test_a_whole_model_goes_to_detectron2_and_back():
    made = tiny_config()
    made.model.mask_head = config().model.mask_head
    made.model.backbone.depth = 50
    variables = any_variables(build_model(made.model))
    arrays = to_detectron2(variables, norm_eps=1e-5)
    shapes = {name: array.shape for name, array in arrays.items() if "mask_head" in name}
    assert shapes["roi_heads.mask_head.point_head.fc1.weight"] == (16, 34, 1)
    assert shapes["roi_heads.mask_head.point_head.predictor.weight"] == (2, 18, 1)
    assert shapes["roi_heads.mask_head.coarse_head.prediction.weight"] == (98, 16)
    form = dict(norm=made.model.backbone.norm, model=made.model.to_dict())
    back, source = to_flax(arrays, eps=1e-5, **form)
    assert source == "detectron2"
    for ours, theirs in zip(
        jax.tree.leaves(back["params"]["mask_head"]),
        jax.tree.leaves(variables["params"]["mask_head"]),
        strict=True,
    ):
        np.testing.assert_array_equal(ours[..., 1:], np.asarray(theirs)[..., 1:])


def test_weights_of_other_classes_start_a_run():
    """All that reads the coarse masks of all classes is drawn anew, the rest is taken."""

    def head(classes, value):
        run = jax.eval_shape(
            lambda: PointRendHead(classes, channels=8, **SIZES).init(
                jax.random.key(0),
                jnp.zeros((1, 2, 14, 14, 8)),
                jnp.ones((1, 2), int),
                sample=lambda points: jnp.zeros((*points.shape[:-1], 8)),
            )
        )
        params = jax.tree.map(lambda leaf: np.full(leaf.shape, value, leaf.dtype), run["params"])
        return {"params": {"mask_head": params}, "batch_stats": {}}

    merged, report = merge_into(head(2, 0.0), head(CLASSES, 1.0))
    params = merged["params"]["mask_head"]
    drawn = {
        name
        for name, layer in {**params, **params["point_head"]}.items()
        if name != "point_head" and not np.any(layer["kernel"])
    }
    assert drawn == {"coarse_predictor", "fc1", "fc2", "fc3", "predictor"}
    assert sum(line.endswith("in the model, initialized") for line in report) == 7


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (dict(importance=1.5), "mask_head.importance is 1.5, expected 0 to 1"),
        (dict(subdivisions=-1), "mask_head.subdivisions is -1, expected at least 0"),
    ],
)
def test_mistakes_are_named(entries, words):
    part = name_part("mask_head", dict(name="pointrend", **entries))
    with pytest.raises(ValueError, match=words):
        part.make(num_classes=2)

"""The task of keypoints: weights, training, and what it cannot do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mask_rcnn_jax.annotations.keypoints import mirror_places
from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.configs import coco_keypoints
from mask_rcnn_jax.models.build import abstract_variables, build_model, named_section
from mask_rcnn_jax.models.keypoints import Heatmaps, KeypointHead, KeypointTask
from mask_rcnn_jax.models.sampling import MaskRoIs
from mask_rcnn_jax.training.step import StepOptions, TrainState, make_train_step
from mask_rcnn_jax.weights.categories import guess_categories
from mask_rcnn_jax.weights.convert import to_detectron2, to_flax, to_torchvision
from tests.helpers import (
    any_variables,
    assert_finite_tree,
    assert_tree_close,
    drawn,
    tiny_batch,
    tiny_config,
)
from tests.parity import systems
from tests.small_trunk import SECTION

NAMES = ("nose", "left_hand", "right_hand", "left_foot", "right_foot")


def small_config():
    config = coco_keypoints.get_config()
    config.data.update(image_size=(128, 128), keypoints=NAMES, short_sides=())
    config.model.update(
        backbone=dict(depth=10, frozen_stages=0),
        fpn=dict(channels=16),
        rpn=dict(channels=16, pre_nms_topk_test=100, post_nms_topk_test=30),
        box_head=dict(channels=32),
        keypoint_head=dict(num_keypoints=5, channels=12),
    )
    config.eval.detections_per_image = 12
    return config


@pytest.fixture(scope="module")
def weights():
    """In torchvision's names."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape), abstract_variables(build_model(small())))
    shapes = to_torchvision(zeros, norm_eps=1e-5)
    return systems.draw({name: array.shape for name, array in shapes.items()})


def small():
    return small_config().model


def test_the_only_class_of_cocos_keypoints_is_a_person(weights):
    variables, _ = to_flax(weights, norm="frozen", eps=1e-5)
    data = load_config("coco_keypoints", {"data.val_json": ""}).data
    assert guess_categories(data, variables) == [{"id": 1, "name": "person"}]
    other = dataclasses.replace(data, keypoints=NAMES)
    assert guess_categories(other, variables) == [{"id": 1, "name": "class 1"}]


def test_weights_go_to_both_systems_and_back(weights):
    variables, _ = to_flax(weights, norm="frozen", eps=1e-5)
    back, _ = to_flax(to_torchvision(variables, norm_eps=1e-5), norm="frozen", eps=1e-5)
    assert_tree_close(back, variables, atol=1e-6)
    theirs = to_detectron2(variables, norm_eps=1e-5)
    assert theirs["roi_heads.keypoint_head.conv_fcn8.weight"].shape == (12, 12, 3, 3)
    assert theirs["roi_heads.keypoint_head.score_lowres.weight"].shape == (12, 5, 4, 4)
    back, source = to_flax(theirs, norm="frozen", eps=1e-5)
    assert source == "detectron2"
    assert_tree_close(back["params"]["keypoint_head"], variables["params"]["keypoint_head"])


def test_up_convolution_is_that_of_flax():
    layer, rng = Heatmaps(3, jnp.float32), np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 5, 5, 4)), jnp.float32)
    params = drawn(layer, x, None)["params"]
    # Each input pixel adds the kernel to 4 x 4 places, the first at 2i - 1.
    expected = np.zeros((2, 12, 12, 3))
    for i, j in np.ndindex(5, 5):
        added = np.einsum("abok,nk->nabo", params["kernel"], x[:, i, j])
        expected[:, 2 * i : 2 * i + 4, 2 * j : 2 * j + 4] += added
    expected = (
        expected[:, 1:11, 1:11].transpose(0, 3, 1, 2) + np.asarray(params["bias"])[:, None, None]
    )
    found = jax.jit(layer.apply)({"params": params}, x, None)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_scores_are_values_or_probabilities():
    heatmaps = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 3, 12, 12)), jnp.float32)
    boxes = jnp.asarray([[[0, 0, 12, 12], [4, 5, 40, 31]]], jnp.float32)
    logit, softmax = (
        KeypointTask(score, 4.0).found(heatmaps, boxes, longest=40)
        for score in ("logit", "softmax")
    )
    np.testing.assert_array_equal(logit[..., :2], softmax[..., :2])
    np.testing.assert_allclose(logit[0, 0, :, 2], heatmaps[0, 0].max((1, 2)), atol=1e-5)
    shares = jax.nn.softmax(heatmaps[0, 0].reshape(3, -1)).max(1)
    np.testing.assert_allclose(softmax[0, 0, :, 2], shares, rtol=1e-5)


def tiny(masks=False):
    config = tiny_config()
    config.data.keypoints = NAMES
    head = dict(num_keypoints=5, channels=8, num_convs=2, roi_size=6)
    config.model.backbone = SECTION
    config.model.update(fpn=dict(channels=8), box_head=dict(channels=16))
    config.model.keypoint_head = named_section("keypoint_head", "conv_deconv", **head)
    config.model.mask_head = named_section(
        "mask_head",
        "four_conv" if masks else "none",
        **dict(channels=8, num_convs=1) if masks else {},
    )
    return config


def batch_with_keypoints(count=2):
    batch, rng = tiny_batch(count), np.random.default_rng(1)
    boxes, valid = batch.targets.boxes, batch.targets.valid
    share = rng.uniform(0, 1, (*valid.shape, 5, 2))
    places = boxes[..., None, :2] + share * (boxes[..., None, 2:] - boxes[..., None, :2])
    seen = rng.integers(0, 3, (*valid.shape, 5, 1)) * valid[..., None, None]
    keypoints = np.concatenate([places * (seen > 0), seen], axis=-1).astype(np.float32)
    return batch.replace(targets=batch.targets.replace(keypoints=keypoints))


def losses_of(config, steps):
    recipe = as_recipe(config)
    model = build_model(recipe.model)
    tx = optax.adam(1e-2)
    options = StepOptions(recipe.loss, 0, 0.0, keypoint_mirror=mirror_places(NAMES))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    step = make_train_step(model, tx, None, mesh, options)
    params = any_variables(model)["params"]
    state = TrainState(jnp.int32(0), params, {}, tx.init(params), None)
    batch, found = jax.tree.map(jnp.asarray, batch_with_keypoints()), []
    for _ in range(steps):
        state, terms = step(state, batch)
        found.append(jax.device_get(terms))
    assert_finite_tree(found)
    return found


@pytest.mark.slow
def test_the_loss_falls_beside_that_of_masks():
    found = losses_of(tiny(masks=True), 40)
    assert {"loss/mask", "loss/keypoint"} < found[0].keys()
    parts = [value for name, value in found[0].items() if name.startswith("loss/")]
    np.testing.assert_allclose(2 * found[0]["loss/total"], sum(parts), rtol=1e-5)
    np.testing.assert_allclose(found[0]["loss/keypoint"], np.log(24**2), rtol=0.1)
    assert found[-1]["loss/keypoint"] < 0.9 * found[0]["loss/keypoint"]


@pytest.mark.slow
def test_divisors_of_the_loss():
    config = tiny()
    outputs = None
    model = build_model(config.model)
    run = jax.jit(functools.partial(model.apply, train=True, method="forward_train"))
    outputs = run(any_variables(model), batch_with_keypoints(), None)
    own, loss = outputs.tasks["keypoint"], as_recipe(config).loss
    counted = int(np.sum(own.targets[1]))
    assert outputs.mask_rois is None and 0 < counted < own.targets[1].size
    visible = own.task.losses(outputs, loss)["keypoint"]
    loss = dataclasses.replace(loss, keypoint_average="budget")
    budget = own.task.losses(outputs, loss)["keypoint"]
    # 2 images of 16 RoIs, a quarter of them foreground, and 5 keypoints.
    assert model.sampling.max_foreground == 4
    np.testing.assert_allclose(budget * 2 * 4 * 5, visible * counted, rtol=1e-5)


def test_a_teacher_with_the_same_heatmaps_adds_nothing():
    task, rng = KeypointTask("logit", 4.0), np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 2, 8, 8)), jnp.float32)
    rows = jnp.zeros(3, jnp.int32)
    rois = MaskRoIs(jnp.zeros((3, 4)), rows, rows, rows, jnp.array([True, True, False]))
    np.testing.assert_allclose(task.divergence(logits, logits, rois), 0, atol=1e-6)
    other = logits.at[0].set(0.0)
    p = jax.nn.softmax(other.reshape(3, 2, -1)[:2])
    q = jax.nn.softmax(logits.reshape(3, 2, -1)[:2])
    expected = jnp.mean(jnp.sum(p * jnp.log(p / q), axis=-1))
    np.testing.assert_allclose(task.divergence(logits, other, rois), expected, rtol=1e-4)
    with pytest.raises(ValueError, match="finds 3 heatmaps of 8 x 8, expected 2 heatmaps of 8 x 8"):
        task.divergence(logits, jnp.zeros((3, 3, 8, 8)), rois)


def test_recipes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="num_keypoints is 17, but data.keypoints names 2"):
        load_config("coco_keypoints", {"data.keypoints": ("nose", "tail")})
    with pytest.raises(ValueError, match="keypoint_head.channels is 0, expected at least 1"):
        build_model(load_config("coco_keypoints", {"model.keypoint_head.channels": 0}).model)
    with pytest.raises(ValueError, match="model.keypoint_head.score is 'sigmoid', expected one of"):
        load_config("coco_keypoints", {"model.keypoint_head.score": "sigmoid"})


def test_padding_rows_have_no_gradient():
    head, rng = KeypointHead(3, 8, num_convs=2, roi_size=6), np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(1, 4, 6, 6, 8)), jnp.float32)
    classes = jnp.array([[1, 2, 0, 0]])
    params = drawn(head, features, classes)

    def loss(params, features):
        logits = head.apply(params, features, classes)
        assert logits.shape == (1, 4, 3, 24, 24)
        return jnp.sum(jnp.where((classes > 0)[..., None, None, None], logits, 0.0) ** 2)

    gradients, of_features = jax.jit(jax.grad(loss, (0, 1)))(params, features)
    assert not of_features[:, 2:].any() and of_features[:, :2].any()
    changed, _ = jax.jit(jax.grad(loss, (0, 1)))(params, features.at[:, 2:].set(7.0))
    assert_tree_close(changed, gradients, atol=1e-3, rtol=1e-5)


def test_channels_of_each_convolution_can_be_pruned():
    from mask_rcnn_jax.pruning.channel_groups import find_groups

    groups = find_groups(as_recipe(tiny()).model)
    axes = groups["keypoint_head/keypoint_fcn2"].axes
    layer = "params/keypoint_head/keypoint"
    assert {(axis.path, axis.axis, axis.is_output) for axis in axes} == {
        (f"{layer}_fcn2/kernel", 3, True),
        (f"{layer}_fcn2/bias", 0, True),
        (f"{layer}_deconv/kernel", 3, False),
    }


@pytest.mark.slow
def test_a_stablehlo_program_finds_the_same_keypoints(weights):
    from jax import export

    from mask_rcnn_jax.exporting.stablehlo import export_stablehlo

    recipe = as_recipe(small_config())
    variables, _ = to_flax(weights, norm="frozen", eps=1e-5)
    model = build_model(small(), implementation="xla")
    predict = functools.partial(model.apply, detect=recipe.eval, method="predict")
    options = dict(canvas=(128, 128), batch=None, dtype=jnp.uint8, platforms=("cpu",))
    program = export.deserialize(bytearray(export_stablehlo(predict, variables, **options)))
    images = np.random.default_rng(0).integers(0, 256, (1, 128, 128, 3), np.uint8)
    sizes = np.array([[128, 128]], np.int32)
    found, exported = jax.jit(predict)(variables, images, sizes), program.call(images, sizes)
    assert np.sum(found.valid) > 0 and "masks" not in exported
    np.testing.assert_allclose(exported["keypoints"], found.keypoints, atol=1e-3)


@pytest.mark.slow
def test_int8_rounds_the_head_but_for_its_last_layer():
    config = tiny()
    config.model.quantization.int8 = True
    variables = abstract_variables(build_model(config.model))
    ranges = variables["batch_stats"]["keypoint_head"]
    assert set(ranges) == {"keypoint_fcn1", "keypoint_fcn2"}

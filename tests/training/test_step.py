"""The jitted steps: devices, flips, compilations, and that they learn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

from mask_rcnn_jax.models.mask_rcnn import build_model, predict_options
from mask_rcnn_jax.training.step import (
    TrainState,
    init_variables,
    loss_options,
    make_loss_step,
    make_mesh,
    make_predict_step,
    make_train_step,
    random_flip,
    replicate,
    shard_batch,
)
from tests.helpers import assert_finite_tree, assert_tree_close, tiny_batch, tiny_config

LOSS = loss_options(tiny_config())


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


@functools.cache
def initial_variables(model):
    return jax.device_get(init_variables(model, 0))


def new_state(model, tx, mesh):
    variables = initial_variables(model)
    return replicate(
        TrainState(step=jnp.int32(0), params=variables["params"],
                   batch_stats=variables["batch_stats"], opt_state=tx.init(variables["params"])),
        mesh,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained():
    """A model, its optimiser and a compiled step on two devices."""
    model = build_model(tiny_config().model)
    tx = optax.adam(2e-3)
    mesh = mesh_of(2)
    step = make_train_step(model, tx, lambda _: 2e-3, mesh, loss=LOSS, seed=0, flip_probability=0.0)
    return model, tx, mesh, step


def test_two_devices_equal_one_with_flips_and_sampling():
    """Plain SGD makes the new parameters tell the gradients. The halves of the batch are the same
    images, so that normalising over a device and over all of them is the same number."""
    model = build_model(tiny_config().model)
    tx = optax.sgd(1e-2)
    batch = jax.tree.map(lambda x: np.concatenate([x, x]), tiny_batch(2))
    results = []
    for devices in (1, 2):
        mesh = mesh_of(devices)
        step = make_train_step(
            model, tx, lambda _: 1e-2, mesh, loss=LOSS, seed=0, flip_probability=0.5
        )
        state, metrics = step(new_state(model, tx, mesh), shard_batch(batch, mesh))
        results.append((jax.device_get(state.params), jax.device_get(metrics)))
    (one, one_metrics), (two, two_metrics) = results
    start = jax.device_get(new_state(model, tx, mesh_of(1)).params)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), one, start)
    assert min(jax.tree.leaves(moved["box_head"])) > 0
    assert_tree_close(two, one, atol=1e-5)
    assert_tree_close(two_metrics, one_metrics, rtol=1e-4, atol=1e-5)


def test_flips_follow_the_image_and_not_its_row(trained):
    """The same images in another order give the same step."""
    model, tx, mesh, _ = trained
    step = make_train_step(model, optax.sgd(1e-2), lambda _: 1e-2, mesh, loss=LOSS, seed=0,
                           flip_probability=0.5)  # fmt: skip
    state = lambda: new_state(model, optax.sgd(1e-2), mesh)  # noqa: E731
    batch = tiny_batch(4)
    swapped = jax.tree.map(lambda x: x[[1, 0, 3, 2]], batch)
    one, other = (step(state(), shard_batch(b, mesh))[0].params for b in (batch, swapped))
    assert_tree_close(other, one, atol=1e-5)


def test_steps_lower_the_loss_without_compiling_again(trained):
    model, tx, mesh, step = trained
    state = new_state(model, tx, mesh)
    batches = [shard_batch(tiny_batch(4, seed=seed), mesh) for seed in (0, 0, 1, 2)]
    crowded = tiny_batch(4)
    targets = crowded.targets.replace(valid=np.zeros_like(crowded.targets.valid))
    empty = shard_batch(crowded.replace(targets=targets), mesh)
    totals = []
    for i in range(24):
        state, metrics = step(state, empty if i == 5 else batches[i % 4])
        assert_finite_tree(metrics)
        totals.append(float(metrics["loss/total"]))
    assert int(state.step) == 24
    assert np.mean(totals[-4:]) < 0.7 * np.mean(totals[:4]), totals
    assert step._cache_size() == 1


def test_same_state_and_batch_give_the_same_bits(trained):
    model, tx, mesh, step = trained
    batch = shard_batch(tiny_batch(4), mesh)
    first, second = (step(new_state(model, tx, mesh), batch) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def test_validation_loss_and_prediction_run_on_all_devices(trained):
    model, tx, mesh, _ = trained
    state = new_state(model, tx, mesh)
    batch = shard_batch(tiny_batch(4), mesh)
    losses = make_loss_step(model, mesh, loss=LOSS, seed=0)(state.variables, batch)
    assert_finite_tree(losses)
    parts = sum(float(v) for name, v in losses.items() if name != "loss/total")
    assert float(losses["loss/total"]) == pytest.approx(parts, rel=1e-6)
    detections = make_predict_step(model, mesh, **predict_options(tiny_config().eval))(
        state.variables, batch
    )
    assert detections.boxes.shape == (4, 5, 4) and detections.masks.shape == (4, 5, 28, 28)


def test_flip_mirrors_image_boxes_and_masks_inside_the_image_width():
    batch = tiny_batch(2)
    batch = batch.replace(image_sizes=np.array([[64, 50], [64, 64]], np.int32))
    masks = np.random.default_rng(0).integers(0, 256, batch.targets.masks.shape, dtype=np.uint8)
    batch = batch.replace(targets=batch.targets.replace(masks=masks))
    keys = jax.random.split(jax.random.key(0), 2)
    flipped = random_flip(batch, keys, 1.0)
    for row, width in enumerate((50, 64)):
        image = np.asarray(flipped.images[row])
        np.testing.assert_array_equal(image[:, :width], batch.images[row][:, :width][:, ::-1])
        np.testing.assert_array_equal(image[:, width:], batch.images[row][:, width:])
        valid = batch.targets.valid[row]
        x1, y1, x2, y2 = batch.targets.boxes[row].T
        expected = np.stack([width - x2, y1, width - x1, y2], axis=1)[valid]
        np.testing.assert_allclose(flipped.targets.boxes[row][valid], expected, atol=1e-5)
        assert not np.asarray(flipped.targets.boxes[row])[~valid].any()
    np.testing.assert_array_equal(flipped.targets.masks, masks[..., ::-1])
    same = random_flip(batch, keys, 0.0)
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(batch), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_mesh_has_every_device():
    assert make_mesh().devices.size == jax.device_count() == 2

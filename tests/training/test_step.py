"""The jitted steps: devices, flips, compilations, and that they learn."""

import functools
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

from mask_rcnn_jax.annotations.keypoints import mirror_places
from mask_rcnn_jax.benchmarking import inputs
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.build import (
    abstract_variables,
    build_model,
    init_variables,
)
from mask_rcnn_jax.ops.losses import LossOptions
from mask_rcnn_jax.training.flip import random_flip
from mask_rcnn_jax.training.step import (
    StepOptions,
    TrainState,
    make_loss_step,
    make_mesh,
    make_train_step,
    replicate,
    shard_batch,
)
from tests import small_trunk
from tests.bounds import assert_gradients_close, kink_bound, sum_bound
from tests.helpers import (
    assert_finite_tree,
    assert_tree_close,
    tiny_batch,
    tiny_config,
)

XLA_DEFAULTS = True

LOSS = as_recipe(tiny_config()).loss
# Of the model of `small_config`, for the bounds of bounds.py: trunk, pyramid, box head.
TERMS = 5 * 5 * 3 + 9 * (8 + 12 + 16) + 800 + 1632


def small_config(**model):
    config = tiny_config()
    config.model.backbone = small_trunk.SECTION
    config.model.mask_head.num_convs = 1
    config.model.update(model)
    return config


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


@functools.cache
def initial_variables(model):
    return init_variables(model, 0)


def new_state(model, tx, mesh):
    return replicate(TrainState.start(initial_variables(model), tx), mesh)


def detectron2_loss() -> LossOptions:
    """Sums over a number of samples that the recipe fixes, and means over RoIs."""
    from mask_rcnn_jax.configs import coco_detectron2

    return as_recipe(coco_detectron2.get_config()).loss


# The parts that a batch of four different images is worked through in, by the number of devices.
# "parts": losses divide by what is found in a part, so that the parts must be the same ones.
# "whole": counts are the same in every image, so that a part's size is of no matter. All proposals
# survive and are sampled: a decision that rounding tips would change the gradients.
DIVISIONS = {
    "parts": (LOSS, {"batch_size_per_image": 24}, [(1, 4), (2, 2), (4, 1)]),
    "whole": (
        detectron2_loss(),
        # Ground truth is foreground and all else background: two and twenty in every image.
        {"batch_size_per_image": 24, "fg_iou_thresh": 0.99, "bg_iou_range": (0.0, 0.99)},
        [(1, 1), (2, 1), (4, 1)],
    ),
}


@functools.cache
def program_of_division(kind: str, devices: int, parts: int):
    """A model, its optimizer, devices and a step that divides its batch so.

    After the first step the momentum is the gradient.
    """
    loss, changes, _ = DIVISIONS[kind]
    config = small_config(sampling=changes, rpn=dict(nms_thresh=1.0))
    model, mesh = build_model(config.model), mesh_of(devices)
    tx = optax.sgd(1e-2, momentum=0.9)
    step = make_train_step(model, tx, lambda _: 1e-2, mesh, StepOptions(loss, 0, 0.5, parts))
    return model, tx, mesh, step


@pytest.fixture(scope="module")
def trained():
    """On two devices, a part each."""
    return program_of_division("whole", 2, 1)


def first_step(program, batch):
    """State and metrics of a step from new parameters."""
    model, tx, mesh, step = program
    return step(new_state(model, tx, mesh), shard_batch(batch, mesh))


@functools.cache
def step_of_division(kind: str, devices: int, parts: int):
    """Gradients and metrics of a batch divided so; parameters follow the gradients."""
    program = program_of_division(kind, devices, parts)
    batch = tiny_batch(5)  # its last image is empty
    state, metrics = first_step(program, jax.tree.map(lambda x: x[:4], batch))
    gradients = jax.device_get(state.opt_state[0].trace)
    before = initial_variables(program[0])["params"]
    follow = jax.tree.map(lambda p, g: p - 1e-2 * g, before, gradients)
    assert_tree_close(state.params, follow, rtol=1e-6, atol=1e-8)
    largest = jax.tree.map(lambda leaf: np.abs(leaf).max(), gradients)
    assert min(jax.tree.leaves(largest["box_head"])) > 1e-4
    assert min(jax.tree.leaves(largest["mask_head"])) > 1e-4
    return gradients, jax.device_get(metrics)


def check_divisions(kind: str, devices: set[int]) -> None:
    """All divisions of a batch over so many devices give one step."""
    first, *others = [d for d in DIVISIONS[kind][2] if d[0] in devices]
    for division in others:
        assert_same_step(step_of_division(kind, *division), step_of_division(kind, *first))


def assert_same_step(actual, expected) -> None:
    """Results of `step_of_division` differ by rounding."""
    (actual_gradients, actual_metrics), (gradients, metrics) = actual, expected
    assert actual_metrics.keys() == metrics.keys()
    assert_gradients_close(actual_gradients, gradients, TERMS)
    for name, value in metrics.items():
        bound = kink_bound(TERMS) if name == "grad_norm" else sum_bound(TERMS)
        np.testing.assert_allclose(actual_metrics[name], value, rtol=bound, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DIVISIONS)
def test_devices_and_parts_of_a_batch_make_no_difference(kind):
    check_divisions(kind, {1, 2})


@pytest.mark.slow
@pytest.mark.parametrize("kind", DIVISIONS)
def test_four_devices_make_no_difference_either(kind):
    program = f"""
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
from tests.training.test_step import check_divisions
check_divisions({kind!r}, {{1, 2, 4}})
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_flips_follow_the_image_and_not_its_row(trained):
    """The same images in another order give the same gradients."""
    batch = tiny_batch(4)
    swapped = jax.tree.map(lambda x: x[[1, 0, 3, 2]], batch)
    one, other = (first_step(trained, b)[0].opt_state[0].trace for b in (batch, swapped))
    assert_gradients_close(other, one, TERMS)


@pytest.mark.slow
def test_one_gpu_takes_the_same_step_as_two_cpus(monkeypatch):
    """The default of every choice by platform, with XLA's own convolutions, run on the CPU."""
    expected = step_of_division("whole", 2, 1)
    taken = []

    def choose_default(*args, default, **platforms):
        taken.append(default)
        return default(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", choose_default)
    # Not what was traced without the patch.
    monkeypatch.setitem(globals(), "program_of_division", program_of_division.__wrapped__)
    assert_same_step(step_of_division.__wrapped__("whole", 1, 1), expected)
    assert len(taken) > 20


def test_steps_lower_the_loss_without_compiling_again(trained):
    model, tx, mesh, step = trained
    state = new_state(model, tx, mesh)
    batches = [shard_batch(tiny_batch(4, seed=seed), mesh) for seed in (0, 0, 1, 2)]
    crowded = tiny_batch(4)
    targets = crowded.targets.replace(valid=np.zeros_like(crowded.targets.valid))
    empty = shard_batch(crowded.replace(targets=targets), mesh)
    totals = []
    for i in range(8):
        state, metrics = step(state, empty if i == 5 else batches[i % 4])
        assert_finite_tree(metrics)
        totals.append(float(metrics["loss/total"]))
    assert int(state.step) == 8
    assert np.mean(totals[-4:]) < 0.7 * np.mean(totals[:4]), totals
    assert step._cache_size() == 1


def test_same_state_and_batch_give_the_same_bits(trained):
    first, second = (first_step(trained, tiny_batch(4)) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_validation_losses_of_all_devices(trained):
    model, tx, mesh, _ = trained
    state = new_state(model, tx, mesh)
    batch = shard_batch(tiny_batch(4), mesh)
    losses = make_loss_step(model, mesh, loss=LOSS, seed=0)(state.variables, batch)
    assert_finite_tree(losses)
    parts = sum(float(v) for name, v in losses.items() if name != "loss/total")
    assert float(losses["loss/total"]) == pytest.approx(parts, rel=1e-6)  # four additions


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


def test_polygons_of_inclusive_boxes_are_mirrored_as_maskrcnn_benchmark_does():
    batch = tiny_batch(1).replace(image_sizes=np.array([[64, 50]], np.int32))
    polygons = np.zeros((*batch.targets.valid.shape, 4, 3), np.float32)
    polygons[..., 2] = -1  # unused
    polygons[0, 0, :3] = [(10, 5, 0), (20.5, 5, 0), (0, 9, 0)]
    batch = batch.replace(targets=batch.targets.replace(polygons=polygons))
    keys = jax.random.split(jax.random.key(0), 1)
    for offset, expected in ((0, (40, 29.5, 50)), (1, (39, 28.5, 49))):
        found = np.asarray(random_flip(batch, keys, 1.0, box_offset=offset).targets.polygons)
        np.testing.assert_array_equal(found[0, 0, :3, 0], expected)
        np.testing.assert_array_equal(found[..., 1:], polygons[..., 1:])
        assert not found[0, 1:, :, 0].any() and found[0, 0, 3, 0] == 0


def test_flip_swaps_left_and_right_keypoints_and_leaves_unlabeled_ones_zero():
    batch = tiny_batch(2)
    batch = batch.replace(image_sizes=np.array([[64, 50], [64, 64]], np.int32))
    names = ("nose", "left_eye", "right_eye")
    points = np.zeros((*batch.targets.valid.shape, 3, 3), np.float32)
    points[:, 0] = [(10, 5, 2), (12, 4, 1), (0, 0, 0)]
    batch = batch.replace(targets=batch.targets.replace(keypoints=points))
    keys = jax.random.split(jax.random.key(0), 2)
    flip = functools.partial(random_flip, keypoint_mirror=mirror_places(names))
    flipped = np.asarray(flip(batch, keys, 1.0).targets.keypoints)
    np.testing.assert_array_equal(flipped[0, 0], [(40, 5, 2), (0, 0, 0), (38, 4, 1)])
    np.testing.assert_array_equal(flipped[1, 0], [(54, 5, 2), (0, 0, 0), (52, 4, 1)])
    assert not flipped[:, 1:].any()
    inclusive = flip(batch, keys, 1.0, box_offset=1.0).targets.keypoints
    np.testing.assert_array_equal(inclusive, flipped)
    np.testing.assert_array_equal(flip(batch, keys, 0.0).targets.keypoints, points)


def abstract_state(model, tx) -> TrainState:
    """The shapes of `new_state`."""

    def state(variables):
        return TrainState(step=jnp.int32(0), opt_state=tx.init(variables["params"]), **variables)

    return jax.eval_shape(state, abstract_variables(model))


def primitives_of(jaxpr, inside: bool = False):
    """(name, whether it is inside a loop) of every operation of a program."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        yield name, inside
        for value in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives_of(inner, inside or name in ("scan", "while"))


@pytest.mark.slow
def test_parts_of_a_batch_share_one_all_reduce():
    """It comes after the loop over the parts."""
    model, tx, mesh = build_model(small_config().model), optax.sgd(1e-2), mesh_of(2)
    step = make_train_step(model, tx, lambda _: 1e-2, mesh, StepOptions(LOSS, 0, 0.5, 2))
    traced = step.trace(abstract_state(model, tx), tiny_batch(4))
    found = [inside for name, inside in primitives_of(traced.jaxpr.jaxpr) if "psum" in name]
    assert found and not any(found)
    assert "scan" in {name for name, _ in primitives_of(traced.jaxpr.jaxpr)}


@pytest.mark.slow
def test_computing_again_changes_no_number():
    """Four residual blocks, three heads. What memory it saves is seen on a GPU's compiler: the
    CPU's finds out that the same is computed twice, and keeps it."""
    batch, tx, mesh = tiny_batch(4), optax.sgd(1e-2, momentum=0.9), mesh_of(1)
    results, again = {}, {}
    for remat in ("none", "backbone", "heads", "all"):
        model = build_model(tiny_config().model, remat=remat)
        step = make_train_step(model, tx, lambda _: 1e-2, mesh, StepOptions(LOSS, 0, 0.5))
        traced = step.trace(abstract_state(model, tx), batch)
        names = [name for name, _ in primitives_of(traced.jaxpr.jaxpr)]
        again[remat] = names.count("remat2")  # what JAX calls a part that is computed again
        results[remat] = step(new_state(model, tx, mesh), shard_batch(batch, mesh))[0].opt_state
        assert_gradients_close(results[remat], results["none"], TERMS)
    assert again["none"] == 0 < again["backbone"] and again["heads"] > 0
    assert again["all"] == again["backbone"] + again["heads"]


@pytest.mark.slow
def test_no_long_sum_is_made_in_bfloat16():
    """A sum over many positions, such as the gradient of a bias, would lose its small terms."""
    config = tiny_config()
    config.model.mask_head.num_convs = 1
    config.train.update(precision="bfloat16", batch_size=1)
    mesh = mesh_of(1)
    program = inputs.lower_step(as_recipe(config), mesh, mesh, 1).as_text()
    sums = re.findall(
        r"applies stablehlo.add across dimensions = \[(.+)\] : \(tensor<([\dx]+)xbf16>", program
    )
    for axes, shape in sums:
        sides = [int(side) for side in shape.split("x")]
        assert math.prod(sides[int(axis)] for axis in axes.split(",")) <= 4, (axes, shape)
    assert sums  # the gradient of a map that was upsampled sums two


def test_the_mesh_has_every_device():
    assert make_mesh().devices.size == jax.device_count() == 2

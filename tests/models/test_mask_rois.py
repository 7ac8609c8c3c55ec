"""The mask head's RoIs in training: packed over the images, all of them or the largest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.models.mask_targets import MaskTargets
from mask_rcnn_jax.models.sampling import RoISampling, SampledRoIs, pack_foreground
from mask_rcnn_jax.ops import masks as mask_ops
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.ops.losses import mask_loss
from mask_rcnn_jax.structures import Targets
from tests.bounds import assert_gradients_close, sum_bound
from tests.helpers import (
    drawn,
    random_boxes,
    tiny_config,
)

pack = jax.jit(pack_foreground, static_argnums=1)
SLOTS = 4  # foreground RoIs per image in `tiny_config`


def sampled(counts, slots, *, seed=0, size=60.0, instances=5):
    """RoIs of images with so many foreground ones each, which come first."""
    rng = np.random.default_rng(seed)
    foreground = np.arange(slots)[None] < np.reshape(counts, (-1, 1))
    return SampledRoIs(
        boxes=random_boxes(rng, foreground.size, size).reshape(*foreground.shape, 4),
        classes=rng.integers(1, 3, foreground.shape, np.int32) * foreground,
        deltas=np.zeros((*foreground.shape, 4), np.float32),
        matched_idxs=rng.integers(0, instances, foreground.shape, np.int32),
        foreground=foreground,
        valid=np.ones_like(foreground),
    )


def slow_pack(rois, count):
    """Rows (image, slot) that are kept, one by one."""
    rows = [(image, slot) for image, slot in np.ndindex(*rois.foreground.shape)
            if rois.foreground[image, slot]]  # fmt: skip
    sides = rois.boxes[..., 2:] - rois.boxes[..., :2]
    by_size = sorted(rows, key=lambda row: -sides[row].prod())  # stable
    return sorted(by_size[:count])


@pytest.mark.parametrize(
    ("counts", "slots", "count"),
    [((3, 0, 5), 5, 15), ((3, 0, 5), 5, 9), ((3, 0, 5), 5, 8), ((3, 0, 5), 5, 4), ((2, 7), 7, 1),
     ((0, 0), 3, 4), ((6, 6), 6, 12), ((6, 6), 6, 0), ((1,), 1, 1)],
)  # fmt: skip
def test_foreground_is_packed_in_order_and_the_largest_is_kept(counts, slots, count):
    rois = sampled(counts, slots)
    packed = jax.tree.map(np.asarray, pack(jax.tree.map(jnp.asarray, rois), count))
    kept = slow_pack(rois, count)
    np.testing.assert_array_equal(packed.foreground, np.arange(count) < len(kept))
    assert not packed.boxes[len(kept) :].any() and not packed.classes[len(kept) :].any()
    assert ((packed.images >= 0) & (packed.images < len(counts))).all()
    assert ((packed.matched_idxs >= 0) & (packed.matched_idxs < 5)).all()
    for row, (image, slot) in enumerate(kept):
        assert packed.images[row] == image
        for name in ("boxes", "classes", "matched_idxs"):
            expected = getattr(rois, name)[image, slot]
            np.testing.assert_array_equal(getattr(packed, name)[row], expected, err_msg=name)


def test_of_equal_boxes_the_first_are_kept():
    rois = sampled((3, 3), 3)
    boxes = np.broadcast_to(np.float32([1, 2, 5, 9]), rois.boxes.shape)
    packed = pack(jax.tree.map(jnp.asarray, rois.replace(boxes=boxes)), 4)
    np.testing.assert_array_equal(packed.images, [0, 0, 0, 1])
    np.testing.assert_array_equal(packed.classes, rois.classes.reshape(-1)[:4])


@pytest.mark.parametrize(
    ("entry", "limit", "rows"), [(0, True, 8), (3, True, 6), (3, False, 8), (100, True, 8)]
)
def test_rows_of_the_mask_head(entry, limit, rows):
    sampling = RoISampling(16, mask_rois_per_image=entry)
    rois = jax.tree.map(jnp.asarray, sampled((4, 2), 16))
    packed, dropped = sampling.mask_rois(rois, limit=limit)
    assert len(packed.boxes) == rows and (dropped is None) == (rows == 8)


def test_a_negative_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="mask_rois_per_image is -1, expected at least 0"):
        RoISampling(mask_rois_per_image=-1)


@pytest.mark.parametrize(("entry", "dropped"), [(3, 0.0), (2, 1.0), (1, 2.0)])
def test_dropped_masks_are_counted_per_image(entry, dropped):
    rois = jax.tree.map(jnp.asarray, sampled((2, 4), 16))
    assert RoISampling(16, mask_rois_per_image=entry).mask_rois(rois)[1] == dropped


def image_targets(rng, images, instances, crop, vertices):
    boxes = random_boxes(rng, images * instances, 60.0).reshape(images, instances, 4)
    polygons = rng.uniform(0, 60, (images, instances, vertices, 3)).astype(np.float32)
    polygons[..., 2] = 0
    polygons[:, ::2, :, 2] = -1  # every other object has none
    targets = Targets(
        boxes=boxes,
        classes=rng.integers(1, 3, boxes.shape[:2], np.int32),
        masks=rng.integers(0, 256, (images, instances, *crop), np.uint8),
        valid=np.ones(boxes.shape[:2], bool),
        polygons=polygons,
    )
    return jax.tree.map(jnp.asarray, targets)


@pytest.mark.parametrize(
    "kind", ["whole", *(pytest.param(k, marks=pytest.mark.slow) for k in ("soft", "polygons"))]
)
def test_targets_are_those_of_each_image(kind):
    """Two images of other sizes: each alone, without packing, has the same targets."""
    rng = np.random.default_rng(0)
    crop = (40, 56) if kind == "whole" else (28, 28)
    targets = image_targets(rng, 2, 5, crop, vertices=6 if kind == "polygons" else 0)
    sizes = jnp.array([[40, 31], [25, 56]])
    rois = jax.tree.map(jnp.asarray, sampled((3, 5), 6, size=40.0))
    make = jax.jit(functools.partial(MaskTargets(kind), min_size=1.0, size=7))
    packed = pack(rois, 9)
    together = np.asarray(make(targets, packed, sizes))
    assert together.shape == (9, 7, 7) and 0.0 < together.mean() < 1.0
    start = 0
    for image, count in enumerate((3, 5)):
        one = jax.tree.map(lambda x, i=image: x[i : i + 1], (targets, rois, sizes))
        alone = make(one[0], pack(one[1], 6), one[2])[:count]
        np.testing.assert_allclose(together[start : start + count], alone, atol=1e-6)
        start += count


def slotwise(model, pyramid, rois, targets, extent):
    """The mask loss of all slots of all images, as without packing."""
    rois = jax.tree.map(lambda x: x[:, :SLOTS], rois)
    pooled = model.pool(pyramid, rois.boxes, model.roi_size("mask"), extent)
    logits = model.mask_head(pooled, rois.classes, train=True)
    crops = functools.partial(mask_ops.mask_targets, size=2 * model.roi_size("mask"))
    masks = jax.vmap(crops)(targets.masks, targets.boxes, rois.boxes, rois.matched_idxs)
    return mask_loss(logits, masks, rois.foreground)


def packed(model, pyramid, rois, targets, extent):
    rois, _ = model.sampling.mask_rois(rois)
    pooled = model.pool_rois(pyramid, rois, extent, model.roi_size("mask"))
    logits = model.mask_head(pooled, rois.classes[None], train=True)[0]
    masks = model.mask_targets(targets, rois, extent.size[None], min_size=1.0,
                               size=2 * model.roi_size("mask"))  # fmt: skip
    return mask_loss(logits, masks, rois.foreground)


def mask_model(norm, per_image):
    config = tiny_config()
    config.model.mask_head.update(norm=norm, num_convs=1, roi_size=6)
    config.model.sampling.mask_rois_per_image = per_image
    return build_model(config.model)


@functools.cache
def loss_and_gradients(branch, norm, per_image, counts):
    """Loss, gradients in parameters and maps, and batch statistics."""
    model = mask_model(norm, per_image)
    shapes = [(len(counts), 64 // stride, -(-96 // stride), 32) for stride in (4, 8, 16, 32, 64)]
    rng = np.random.default_rng(0)
    pyramid = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    rois = jax.tree.map(jnp.asarray, sampled(counts, 16))
    targets = image_targets(np.random.default_rng(1), len(counts), 5, (28, 28), vertices=0)
    extent = ValidExtent((64, 96), jnp.array([64, 90]))
    pooled = jnp.zeros((1, 1, 6, 6, 32))
    head = drawn(model.mask_head, pooled, jnp.ones((1, 1), jnp.int32))

    @jax.jit
    def run(params, pyramid):
        def loss(params, pyramid):
            variables = {"params": {"mask_head": params}}
            if "batch_stats" in head:
                variables["batch_stats"] = {"mask_head": head["batch_stats"]}
            return model.apply(variables, pyramid, rois, targets, extent, method=branch,
                               mutable=["batch_stats"])  # fmt: skip

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, pyramid)

    return jax.device_get(run(head["params"], pyramid))


@pytest.mark.parametrize(
    "norm", ["batch", *(pytest.param(n, marks=pytest.mark.slow) for n in ("none", "group"))]
)
@pytest.mark.parametrize("per_image", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_packing_changes_no_loss_and_no_gradient(norm, per_image):
    """Three images with four, none and three: 7 RoIs in 9 or 12 rows instead of 12 slots."""
    counts = (4, 0, 3)
    (loss, stats), grads = loss_and_gradients(packed, norm, per_image, counts)
    (expected_loss, expected_stats), expected = loss_and_gradients(slotwise, norm, 0, counts)
    assert loss > 0.1
    np.testing.assert_allclose(loss, expected_loss, rtol=sum_bound(32 * 9))
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(grads[0]))
    assert_gradients_close(grads[0], expected[0], 32 * 9)
    for ours, theirs in zip(grads[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), stats, expected_stats)

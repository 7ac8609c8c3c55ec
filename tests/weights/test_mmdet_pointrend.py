"""Weights of mmdetection's PointRend give the masks of its head, computed here in numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from mask_rcnn_jax.models.point_rend import PointRendHead
from mask_rcnn_jax.ops.points import in_image, sample_map
from mask_rcnn_jax.weights.convert import to_flax
from tests.models.pointrend_case import CHANNELS, CLASSES, STRIDE, inputs

FC, POINT = 12, 10
POINTS, STEPS = 200, 3  # of a subdivision; masks of 14, 28 and 56
MASK, HEAD = "roi_head.mask_head.", "roi_head.point_head."
WIDTHS = CHANNELS + CLASSES, POINT + CLASSES, POINT + CLASSES
SHAPES = {  # of kernels
    MASK + "downsample_conv.conv": (CHANNELS, CHANNELS, 2, 2),
    MASK + "fcs.0": (FC, CHANNELS * 49),
    MASK + "fcs.1": (FC, FC),
    MASK + "fc_logits": (CLASSES * 49, FC),
    **{f"{HEAD}fcs.{i}.conv": (POINT, width, 1) for i, width in enumerate(WIDTHS)},
    HEAD + "fc_logits": (CLASSES, POINT + CLASSES, 1),
}


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {f"{name}.weight": shape for name, shape in SHAPES.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in SHAPES.items()}
    drawn = {name: 0.4 * rng.normal(size=shape) for name, shape in shapes.items()}
    # By which the system is known.
    trunk = {"neck.lateral_convs.0.conv.weight": np.zeros((4, 4, 1, 1))}
    trunk |= {"backbone.conv1.weight": np.zeros((4, 3, 7, 7))}
    return {name: np.float32(array) for name, array in (drawn | trunk).items()}


def sampled(map, points):
    """A map [C, H, W] at points [P, 2] as fractions of it, [C, P]; cells' centers at +0.5."""
    found = np.zeros((len(map), len(points)))
    for i, (x, y) in enumerate(points * np.array(map.shape[:0:-1]) - 0.5):
        for row in (int(np.floor(y)), int(np.floor(y)) + 1):
            for column in (int(np.floor(x)), int(np.floor(x)) + 1):
                if 0 <= row < map.shape[1] and 0 <= column < map.shape[2]:
                    weight = (1 - abs(y - row)) * (1 - abs(x - column))
                    found[:, i] += weight * map[:, row, column]
    return found


def centers(side, cells=None):
    rows, columns = np.divmod(np.arange(side**2) if cells is None else cells, side)
    return (np.stack([columns, rows], axis=1) + 0.5) / side


def layer(arrays, name, x):
    kernel = arrays[f"{name}.weight"]
    return kernel.reshape(len(kernel), -1) @ x + arrays[f"{name}.bias"].reshape(-1, 1)


def masks_of(arrays, map, box, label):
    """The class's mask logits [56, 56] of one RoI on a map [C, H, W]."""

    def fine(points):
        at = (box[:2] + points * (box[2:] - box[:2])) / STRIDE
        return sampled(map, at / np.array(map.shape[:0:-1]))

    patches = fine(centers(14)).reshape(CHANNELS, 7, 2, 7, 2).transpose(0, 2, 4, 1, 3)
    x = np.maximum(layer(arrays, MASK + "downsample_conv.conv", patches.reshape(-1, 49)), 0)
    x = x.reshape(-1, 1)
    for i in range(2):
        x = np.maximum(layer(arrays, f"{MASK}fcs.{i}", x), 0)
    coarse = mask = layer(arrays, MASK + "fc_logits", x).reshape(CLASSES, 7, 7)
    for _ in range(STEPS):
        side = 2 * mask.shape[1]
        padded = np.pad(mask, ((0, 0), (1, 1), (1, 1)), mode="edge")
        mask = sampled(padded, (centers(side) * (side // 2) + 1) / (side // 2 + 2))
        cells = np.argsort(np.abs(mask[label]))[:POINTS]
        at, beside = centers(side, cells), sampled(coarse, centers(side, cells))
        x = np.concatenate([fine(at), beside])
        for i in range(3):
            x = np.maximum(layer(arrays, f"{HEAD}fcs.{i}.conv", x), 0)
            x = np.concatenate([x, beside])
        mask[:, cells] = layer(arrays, HEAD + "fc_logits", x)
        mask = mask.reshape(CLASSES, side, side)
    return mask[label]


def test_masks_are_those_of_mmdetections_heads():
    arrays, given = weights(), jax.tree.map(jnp.asarray, inputs())
    params, source = to_flax(arrays, norm=None, eps=1e-5)
    assert source == "mmdetection"
    options = dict(channels=CHANNELS, fc_channels=FC, point_channels=POINT)
    head = PointRendHead(CLASSES, **options, subdivisions=STEPS, subdivision_points=POINTS)

    def sample(points):
        return sample_map(given["map"], in_image(points, given["boxes"]) / STRIDE)

    features = jnp.zeros((2, 3, 14, 14, CHANNELS))
    run = jax.jit(lambda params: head.apply(params, features, given["classes"], sample=sample))
    found = run({"params": params["params"]["mask_head"]})
    for image, roi in ((0, 1), (1, 2)):  # the second has cells beyond the map
        map, box = (
            np.asarray(x, np.float64) for x in (given["map"][image], given["boxes"][image, roi])
        )
        label = int(given["classes"][image, roi]) - 1
        expected = masks_of(arrays, map.transpose(2, 0, 1), box, label)
        np.testing.assert_allclose(found[image, roi], expected, atol=1e-4, rtol=1e-4)

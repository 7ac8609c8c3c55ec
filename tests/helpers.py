"""Shared by the tests: random inputs, comparisons of trees, reference data."""

import functools
import os
from pathlib import Path

import jax
import numpy as np
import pytest

SHARED = Path(
    os.environ.get("MASK_RCNN_SHARED") or Path(__file__).resolve().parents[1] / ".." / "shared"
)
GOLDENS = Path(__file__).parent / "goldens"


def shared(path: str) -> Path:
    """A file or folder of the shared reference data; skips the test where it is absent."""
    found = SHARED / path
    if not found.exists():
        pytest.skip(f"needs the reference data {path} (folder from MASK_RCNN_SHARED, or ../shared)")
    return found


@functools.cache
def load_golden(name: str, *, whole: bool = False) -> dict[str, np.ndarray]:
    """Arrays of a file of reference outputs, such as "torchvision/ops", see goldens/README.md.

    whole: all of them, from the shared reference data; skips the test where these are absent.
    """
    path = shared(f"goldens/{name}.npz") if whole else GOLDENS / f"{name}.npz"
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files}
    for array in arrays.values():
        array.flags.writeable = False  # all tests of a process have the same ones
    return arrays


def random_boxes(rng: np.random.Generator, n: int, size: float = 100.0) -> np.ndarray:
    """[n, 4] float32 boxes x1, y1, x2, y2 inside a square of `size`, none empty."""
    corner = rng.uniform(0.0, 0.7 * size, (n, 2))
    side = rng.uniform(0.05 * size, 0.3 * size, (n, 2))
    return np.concatenate([corner, corner + side], axis=1).astype(np.float32)


def assert_tree_close(actual, expected, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Two trees of the same structure with leaves that are close; names the leaf that is not."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    expected_leaves = jax.tree.leaves(expected)
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(actual), expected_leaves, strict=True
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(leaf, other, rtol=rtol, atol=atol, err_msg=name)


def assert_finite_tree(tree) -> None:
    """No NaN and no infinity in any floating leaf; names the leaf that has one."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        leaf = np.asarray(leaf)
        if np.issubdtype(leaf.dtype, np.floating) or leaf.dtype.name == "bfloat16":
            name = jax.tree_util.keystr(path) or "the value"
            assert np.isfinite(leaf.astype(np.float32)).all(), f"{name} is not finite"


def assert_finite_with_grad(function, *args) -> None:
    """`function(*args)` and the gradients of its sum with respect to all `args` are finite."""

    def total(*args):
        value = function(*args)
        return sum(jax.numpy.sum(leaf) for leaf in jax.tree.leaves(value)), value

    grad = jax.grad(total, argnums=tuple(range(len(args))), has_aux=True)
    grads, value = jax.jit(grad)(*args)
    assert_finite_tree({"value": value, "gradients": grads})


# Of the model of `tiny_config`, for the bounds of bounds.py: stem, blocks, pyramid, box head.
TINY_TERMS = 147 + sum(2 * 9 * width for width in (64, 128, 256, 512)) + 800 + 1632


def tiny_config():
    """The recipe `quickstart:long` on 64 x 64 pixels with very small layers and two classes."""
    from mask_rcnn_jax.configs import quickstart

    config = quickstart.get_config("long")
    config.data.update(image_size=(64, 64), max_instances=4)
    config.model.update(
        num_classes=2,
        fpn=dict(channels=32),
        rpn=dict(
            channels=32,
            batch_size_per_image=16,
            pre_nms_topk_train=50,
            pre_nms_topk_test=50,
            post_nms_topk_train=20,
            post_nms_topk_test=20,
        ),
        sampling=dict(batch_size_per_image=16),
        box_head=dict(channels=32),
        mask_head=dict(channels=32),
    )
    config.optim.update(warmup_until=0.1)
    config.train.update(batch_size=4, steps=8)
    config.eval.update(batch_size=1, pre_nms_topk=50, detections_per_image=5)
    return config


def any_variables(model, seed: int = 0):
    """Small random numbers for a model without batch statistics; `init_variables` compiles."""
    from mask_rcnn_jax.models.build import abstract_variables

    rng = np.random.default_rng(seed)

    def draw(leaf):
        return jax.numpy.asarray(rng.normal(0, 0.05, leaf.shape), leaf.dtype)

    return jax.tree.map(draw, abstract_variables(model))


def drawn(module, *inputs, **options) -> dict:
    """Random variables of a module, scales and variances around 1; its `init` compiles."""
    init = functools.partial(module.init, **options)
    shapes = jax.eval_shape(lambda key: init(key, *inputs), jax.random.key(0))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        mean = path[-1].key in ("scale", "var")
        return jax.numpy.asarray(rng.normal(mean, 0.2, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def tiny_batch(batch_size: int, side: int = 64, instances: int = 4, seed: int = 0):
    """Noise images with two square objects each (none in the last image) and full masks."""
    from mask_rcnn_jax.structures import Batch, Targets

    rng = np.random.default_rng(seed)
    valid = np.zeros((batch_size, instances), bool)
    valid[: max(batch_size - 1, 1), :2] = True
    corner = rng.uniform(0, side / 2, (batch_size, instances, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(16, side / 2, corner.shape)], axis=-1)
    return Batch(
        images=rng.integers(0, 256, (batch_size, side, side, 3), dtype=np.uint8),
        image_sizes=np.full((batch_size, 2), side, np.int32),
        scales=np.ones((batch_size, 2), np.float32),
        image_index=np.arange(batch_size, dtype=np.int32),
        targets=Targets(
            boxes=(boxes * valid[..., None]).astype(np.float32),
            classes=(rng.integers(1, 3, valid.shape) * valid).astype(np.int32),
            masks=np.where(valid, 255, 0)[..., None, None].astype(np.uint8)
            * np.ones((112, 112), np.uint8),
            valid=valid,
            polygons=np.zeros((*valid.shape, 0, 3), np.float32),
        ),
    )

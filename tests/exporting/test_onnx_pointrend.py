"""PointRend's subdivision in ONNX, and what is no such writing to places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from mask_rcnn_jax.models.point_rend import PointRendHead  # noqa: E402
from mask_rcnn_jax.ops.points import in_image, sample_map  # noqa: E402
from tests.helpers import drawn  # noqa: E402
from tests.jax_to_onnx.traced import converted  # noqa: E402
from tests.models.pointrend_case import CLASSES, SIZES, STRIDE, inputs  # noqa: E402


def test_masks_match_jax():
    head = PointRendHead(CLASSES, 8, **SIZES, subdivision_points=60, subdivisions=2)
    given = inputs()
    features = jnp.zeros((2, 3, 14, 14, 8))
    as_jax = jnp.asarray(given["map"]), jnp.asarray(given["boxes"])

    def sample_of(map, boxes):
        return lambda points: sample_map(map, in_image(points, boxes) / STRIDE)

    made = drawn(head, features, given["classes"], sample=sample_of(*as_jax))

    def masks(map, boxes, classes):
        return head.apply(made, features, classes, sample=sample_of(map, boxes))

    arrays = given["map"], given["boxes"], given["classes"].astype(np.int32)
    nodes, (found,) = converted(masks, *arrays)
    expected = np.asarray(jax.jit(masks)(*arrays))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    assert "ScatterElements" in {node.op_type for node in nodes}


def test_other_writing_is_refused():
    x, rows = np.zeros((2, 5), np.float32), np.array([1, 3], np.int32)
    with pytest.raises(ValueError, match="writing to places"):
        converted(lambda x, rows: x.at[:, rows].set(1.0), x, rows)

"""The tests check every call of `ops` and `models` against its annotations, in all processes."""

import jax.numpy as jnp
import jaxtyping
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.ops import boxes


def test_an_op_refuses_a_shape_that_contradicts_its_annotation():
    with pytest.raises(jaxtyping.TypeCheckError, match="'a'"):
        boxes.pairwise_iou(jnp.zeros((2, 3)), jnp.zeros((5, 4)))


def test_a_model_refuses_a_type_that_contradicts_its_annotation():
    with pytest.raises(jaxtyping.TypeCheckError, match="'model'"):
        mrcnn.build_model(50)

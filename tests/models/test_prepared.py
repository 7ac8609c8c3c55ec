"""Weights of convolutions as a GPU's prediction reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.models.build import (
    abstract_prepared,
    build_model,
    init_variables,
    prepare_for_gpu,
)
from mask_rcnn_jax.models.conv import Conv
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.prepared import PREPARED
from tests.helpers import tiny_config


@pytest.fixture(
    scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"]
)
def model_and_variables(request):
    """A tiny model with fixed norms that are no identity, and all its variables prepared."""
    recipe = tiny_config()
    recipe.model.backbone.norm = "frozen"
    model = build_model(recipe.model, precision=request.param)
    rng, variables = np.random.default_rng(0), init_variables(model, 0)
    assert PREPARED not in variables
    variables["batch_stats"] = jax.tree.map(
        lambda x: x + rng.normal(0, 0.1, x.shape).astype(x.dtype), variables["batch_stats"]
    )
    return model, variables, prepare_for_gpu(model, variables)


@pytest.mark.slow
def test_predictions_are_the_same_but_for_the_order_of_sums(model_and_variables):
    model, variables, prepared = model_and_variables
    if model.precision.dtype != jnp.float32:
        pytest.skip("rounding to 16 bits would exchange detections; the weights are compared below")
    images = np.random.default_rng(1).integers(0, 255, (2, 64, 96, 3), np.uint8)
    sizes = np.array([[64, 96], [50, 70]], np.int32)
    detect = Detect(score_threshold=0.0, detections_per_image=5)

    @jax.jit
    def predict(variables):
        return model.apply(variables, images, sizes, detect, method="predict")

    found, expected = predict(prepared), predict(variables)
    assert np.all(expected.valid)
    np.testing.assert_array_equal(found.classes, expected.classes)
    np.testing.assert_allclose(found.boxes, expected.boxes, atol=2e-3)  # pixels
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
    np.testing.assert_allclose(found.masks, expected.masks, atol=1e-4)


def test_a_kernel_has_its_norm_and_is_rounded_once(model_and_variables):
    model, variables, prepared = model_and_variables
    kernel = variables["params"]["backbone"]["res2_0"]["conv2"]["kernel"]
    norm = variables["batch_stats"]["backbone"]["res2_0"]["norm2"]
    found = prepared[PREPARED]["backbone"]["res2_0"]["conv2"]
    expected = (
        (np.float32(kernel) * norm["scale"]).astype(model.precision.dtype).transpose(3, 0, 1, 2)
    )
    np.testing.assert_array_equal(found["kernel"], expected)
    np.testing.assert_array_equal(found["bias"], norm["bias"].astype(model.precision.dtype))
    both = flatten_dict(prepared[PREPARED]).keys() & flatten_dict(prepared["params"]).keys()
    assert not both  # what it was made of is not kept beside it
    # A product adds its bias in float32.
    assert prepared[PREPARED]["fpn"]["fpn_lateral2"]["bias"].dtype == jnp.float32


def test_shapes_are_known_without_computing(model_and_variables):
    model, _, prepared = model_and_variables
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), prepared)
    assert shapes == abstract_prepared(model)


class Shared(nn.Module):
    """A layer of a user's module with another map each time, one of which depends on the image."""

    @nn.compact
    def __call__(self, x):
        conv, scale = Conv(4, (3, 3), padding=1), self.param("scale", nn.initializers.ones, (4,))
        mean = jnp.mean(x, (0, 1, 2))
        return conv(x, (scale, scale)), conv(x, (2 * scale, scale)), conv(x, (mean, mean))


def test_weights_of_a_users_module_are_computed_each_time():
    x, model = jax.random.normal(jax.random.key(0), (1, 8, 8, 4)), Shared()
    variables = model.init(jax.random.key(1), x)
    _, prepared = model.apply(variables, jnp.zeros_like(x), mutable=[PREPARED])
    expected = model.apply(variables, x)
    found = model.apply({**variables, **prepared}, x)
    jax.tree.map(np.testing.assert_array_equal, found, expected)

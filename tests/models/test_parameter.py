"""Parameters that are given are not drawn, and have the module's shapes."""

import jax
import jax.numpy as jnp
import pytest
from flax import errors
from flax import linen as nn

from mask_rcnn_jax.models.parameter import parameter

DRAWN = []


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
        def draw(key, shape, dtype):
            DRAWN.append(shape)
            return jax.random.normal(key, shape, dtype)

        return x * parameter(self, "scale", draw, (1, 3))


def test_a_parameter_is_drawn_once():
    DRAWN.clear()
    module, x = Scale(), jnp.ones((2, 3))
    variables = module.init(jax.random.key(0), x)
    assert variables["params"]["scale"].dtype == jnp.float32
    assert jnp.array_equal(module.apply(variables, x)[:1], variables["params"]["scale"])
    assert DRAWN == [(1, 3)]


ERRORS = {
    errors.ScopeParamShapeError: {"scale": jnp.ones((1, 2))},
    errors.ScopeParamNotFoundError: {"bias": jnp.ones((1, 3))},
    errors.ScopeCollectionNotFound: {},
}


@pytest.mark.parametrize(("error", "params"), ERRORS.items())
def test_a_parameter_of_another_shape_or_none_is_an_error(error, params):
    with pytest.raises(error, match="scale"):
        Scale().apply({"params": params}, jnp.ones((2, 3)))

"""Parameters of modules."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.errors import ScopeParamShapeError


def parameter(
    module: nn.Module, name: str, init: nn.initializers.Initializer, shape: tuple[int, ...]
) -> jax.Array:
    """Return a float32 parameter, as `module.param` does.

    Flax traces `init` for the shape of each parameter in each program, a tenth of the time that a
    prediction is traced. Raises ScopeParamShapeError if the variables have another shape.
    """
    if module.is_initializing() or not module.has_variable("params", name):
        return module.param(name, init, shape, jnp.float32)
    value = module.get_variable("params", name)
    if value.shape != shape:
        raise ScopeParamShapeError(name, "/".join(module.path), value.shape, shape)
    return value

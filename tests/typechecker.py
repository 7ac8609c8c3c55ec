"""The type checker that holds `ops` and `models` to their annotations while tests run."""

import jax
import numpy as np
from beartype import BeartypeConf, FrozenDict, beartype

# An int may stand for a float, as everywhere in Python's typing, and a NumPy array for a plain
# `jax.Array`, as JAX takes both. `Float[Array, ...]` and the like remain arrays of JAX.
check = beartype(
    conf=BeartypeConf(
        is_pep484_tower=True, hint_overrides=FrozenDict({jax.Array: jax.Array | np.ndarray})
    )
)

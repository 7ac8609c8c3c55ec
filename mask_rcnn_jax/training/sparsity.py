"""Group lasso (Yuan and Lin, 2006) over channels, so that pruning finds some near zero."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from mask_rcnn_jax.pruning.channel_groups import Axis, Group
from mask_rcnn_jax.training.freezing import names_of

PULLED = ("kernel", "scale")  # a bias may stay


def add_group_lasso(strength: float, groups: Mapping[str, Group]) -> optax.GradientTransformation:
    """Add the strength times the gradient that the sum over all channels' norms has.

    A channel's norm is taken over its filters in all layers that write it, since `prune` keeps a
    channel that any layer needs. Norm layers' trained scales count in the same way, frozen
    parameters not at all.

    groups: from `pruning.channel_groups.find_groups`.
    """

    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        arrays = {_name(path): leaf for path, leaf in leaves}
        pulls: dict[str, jax.Array] = {}
        for group in groups.values():
            for kind in PULLED:
                axes = [a for a in group.axes if a.is_output and a.path.endswith(f"/{kind}")]
                pulls |= _pulls(arrays, [a for a in axes if a.path in arrays], group.channels.unit)

        def pulled(path, update: jax.Array) -> jax.Array:
            pull = pulls.get(_name(path))
            return update if pull is None else update + strength * pull

        return jax.tree_util.tree_map_with_path(pulled, updates)

    return optax.stateless(update)


def _pulls(arrays: Mapping[str, jax.Array], axes: list[Axis], unit: int) -> dict[str, jax.Array]:
    """Return the gradient for units along these axes, by path."""
    if not axes:
        return {}
    squares: jax.Array = jnp.zeros(())
    for axis in axes:
        square = jnp.square(arrays[axis.path])
        others = [number for number in range(square.ndim) if number != axis.axis]
        squares = squares + jnp.sum(square, others).reshape(-1, unit).sum(axis=1)
    # 0 where the filters are: they stay there, unless the loss pulls them away.
    inverse = jnp.where(squares > 0, jax.lax.rsqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)
    found = {}
    for axis in axes:
        array = arrays[axis.path]
        others = [number for number in range(array.ndim) if number != axis.axis]
        found[axis.path] = array * jnp.expand_dims(jnp.repeat(inverse, unit), others)
    return found


def _name(path) -> str:
    return "/".join(["params", *names_of(path)])

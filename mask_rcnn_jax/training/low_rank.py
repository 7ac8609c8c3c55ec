"""Low-rank adapters beside the kernels that `optim.lora` names."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.models.protocols import BackboneLike, ability
from mask_rcnn_jax.ops.low_rank import LORA, start_adapter
from mask_rcnn_jax.recipe.optimizer import LowRank
from mask_rcnn_jax.training.freezing import closest, is_in_stages, matches


def add_adapters(
    params: Mapping[str, Any], options: LowRank, backbone: nn.Module, seed: int
) -> Mapping[str, Any]:
    """The parameters, with an adapter that changes nothing yet beside each kernel that is named.

    Raises ValueError for a pattern that matches no kernel, and for a kernel in a frozen stage of
    the backbone.
    """
    if not options.rank:
        return params
    flat, frozen = flatten_dict(dict(params)), ability(backbone, BackboneLike, "frozen")
    names = _adapted(list(flat), options, frozen)
    keys = jax.random.split(jax.random.key(seed), len(names))
    for name, key in zip(names, keys, strict=True):
        made = start_adapter(flat[name].shape, options.rank, options.alpha, key)
        flat |= {(*name[:-1], LORA, part): array for part, array in made.items()}
    return unflatten_dict(flat)


def abstract_adapters(params: Mapping[str, Any], options: LowRank, backbone: nn.Module) -> Any:
    """Shapes and dtypes of what `add_adapters` returns; `params` may be abstract, too."""
    return jax.eval_shape(partial(add_adapters, options=options, backbone=backbone, seed=0), params)


def _adapted(
    leaves: list[tuple[str, ...]], options: LowRank, frozen: tuple[str, ...]
) -> list[tuple[str, ...]]:
    """The names of the kernels that get an adapter, in order."""
    kernels = sorted(names for names in leaves if names[-1] == "kernel")
    for pattern in options.kernels:
        if not any(matches(names, (pattern,)) for names in kernels):
            found = f"optim.lora.kernels has {pattern!r}, which matches no kernel"
            raise ValueError(f"{found}; {closest(pattern, kernels)}")
    chosen = [names for names in kernels if matches(names, options.kernels)]
    if stopped := [names for names in chosen if is_in_stages(names, frozen)]:
        raise ValueError(
            f"optim.lora.kernels names {'/'.join(stopped[0])}, which gets no gradient with "
            "model.backbone.frozen_stages; set that to 0, and optim.freeze to what is to stay"
        )
    return chosen

"""Low-rank adapters of kernels (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models",
2022).

A layer with an adapter has, beside its `kernel` [.., in, out], a dict `kernel_lora` of float32
arrays: `a` [.., in, r], `b` [r, out] and `scale` []. It computes with kernel + scale * a · b.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

LORA = "kernel_lora"


def start_adapter(shape: tuple[int, ...], rank: int, alpha: float, key: jax.Array) -> dict:
    """An adapter that changes nothing yet, for a kernel of this shape.

    As in the paper's code, `a` is uniform within one over the root of the number of inputs, `b` is
    zero, and the scale is alpha / rank.
    """
    *window, out = shape
    bound = 1 / math.sqrt(math.prod(window))
    a = jax.random.uniform(key, (*window, rank), jnp.float32, -bound, bound)
    return {"a": a, "b": jnp.zeros((rank, out)), "scale": jnp.float32(alpha / rank)}


def merge(params: Mapping[str, Any]) -> dict:
    """The parameters that a model takes: each kernel with its adapter in it, all else as it is."""
    merged = {
        name: merge(value) if isinstance(value, Mapping) else value
        for name, value in params.items()
        if name != LORA
    }
    if LORA in params:
        a, b, scale = (params[LORA][name] for name in ("a", "b", "scale"))
        product = jnp.einsum("...r,ro->...o", a, b, precision="highest")
        merged["kernel"] = params["kernel"] + scale * product
    return merged


def adapters(params: Mapping[str, Any]) -> dict:
    """What `merge` lets go: the adapters, and their kernels without them; {} if there are none."""
    flat = flatten_dict(dict(params))
    layers = {names[:-2] for names in flat if LORA in names}
    kept = {n: x for n, x in flat.items() if LORA in n or (n[-1] == "kernel" and n[:-1] in layers)}
    return unflatten_dict(kept)


def split_again(merged: Mapping[str, Any], kept: Mapping[str, Any]) -> dict:
    """The parameters of which `merge` made `merged` and `adapters` `kept`, to the last bit."""
    return unflatten_dict(flatten_dict(dict(merged)) | flatten_dict(dict(kept)))

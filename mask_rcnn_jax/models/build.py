"""A model from a recipe."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mask_rcnn_jax.models.mask_rcnn import MaskRCNN

# Of the trunk and the heads: the dtype, and what matrix products of float32 may be rounded to.
# Left to itself a GPU rounds them to tf32, so float32 has to be asked for.
PRECISIONS = {
    "float32": (jnp.float32, "float32"),
    "tf32": (jnp.float32, "tensorfloat32"),
    "bfloat16": (jnp.bfloat16, None),
    "float16": (jnp.float16, None),
}
IMPLEMENTATIONS = {"auto": None, "xla": "xla", "pallas": "pallas"}
# What is computed again in the backward pass instead of being kept in memory.
REMATS = {
    "none": (),
    "backbone": ("backbone",),
    "heads": ("heads",),
    "all": ("backbone", "heads"),
}


def build_model(
    config: Mapping[str, Any],
    *,
    precision: str = "float32",
    implementation: str = "auto",
    remat: str = "none",
) -> MaskRCNN:
    """The model of a recipe's `model` section, its trunk and heads computing in `precision`.

    implementation: "xla", or "pallas" for GPU kernels, or "auto": kernels where they can be.
    remat: what the backward pass computes again: "none", "backbone" (every residual block),
    "heads" (the three heads) or "all". Changes memory and time, no number.
    Raises ValueError if `num_classes` is still 0 (the commands set it from the json's categories)
    and for an unknown precision, implementation or remat.
    """
    if remat not in REMATS:
        raise ValueError(f"train.remat is {remat!r}, expected one of {list(REMATS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"train.precision is {precision!r}, expected one of {list(PRECISIONS)}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"train.implementation is {implementation!r}, expected one of {list(IMPLEMENTATIONS)}"
        )
    fields = {name: _hashable(value) for name, value in dict(config).items()}
    fields.pop("init_from", None)
    if fields["num_classes"] < 1:
        raise ValueError(f"model.num_classes is {fields['num_classes']}, expected at least 1")
    dtype, matmul_precision = PRECISIONS[precision]
    return MaskRCNN(
        **fields, dtype=dtype, matmul_precision=matmul_precision, remat=REMATS[remat],
        implementation=IMPLEMENTATIONS[implementation],
    )  # fmt: skip


def init_variables(model: MaskRCNN, seed: int) -> dict:
    """Fresh `params` and `batch_stats`."""
    # Runs once and is mostly random numbers: optimising it takes far longer than running it.
    quick = {"xla_backend_optimization_level": 0}
    return jax.jit(partial(_init, model), compiler_options=quick)(jax.random.key(seed))


def abstract_variables(model: MaskRCNN) -> dict:
    """Shapes and dtypes of the model's variables, without computing any."""
    return jax.eval_shape(lambda: _init(model, jax.random.key(0)))


def _init(model: MaskRCNN, key: jax.Array) -> dict:
    images = jnp.zeros((1, 64, 64, 3), jnp.uint8)  # only the shape counts
    sizes = jnp.full((1, 2), 64, jnp.int32)
    return {"batch_stats": {}, **model.init(key, images, sizes, method="init_all")}


def predict_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `MaskRCNN.predict` out of a recipe's `eval` section."""
    names = (
        "score_threshold",
        "min_box_size",
        "nms_thresh",
        "pre_nms_topk",
        "detections_per_image",
    )
    return {name: config[name] for name in names}


def _hashable(value):
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value

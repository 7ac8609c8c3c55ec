"""Find the layers that lose most to int8, and keep as few of them in float as a budget needs."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import linen as nn

from mask_rcnn_jax.evaluation.coco import at_limit
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.precision import in_precision
from mask_rcnn_jax.models.quantization import fake_quantize
from mask_rcnn_jax.models.task_heads import run_head
from mask_rcnn_jax.structures import Detections

LIMITED_AP = ("AP", "mask_AP", "keypoints_AP")


def layer_errors(
    model: MaskRCNN,
    predict: Callable[..., Any],
    variables: dict,
    inputs: Iterable[tuple[np.ndarray, np.ndarray]],
    ranges: dict[str, float],
) -> dict[str, float]:
    """Measure the error that rounding one layer alone to int8 causes in the model's raw outputs.

    Those are the objectness and deltas of all anchors, and the logits, deltas and masks of the
    boxes that the float model detects. The error of an output is the sum of squared differences,
    divided by the sum of squares; a layer's is the mean of its outputs' errors over the images.

    Args:
        model: in float.
        predict: function (variables, images, image_sizes) -> `Detections`.
        inputs: (images, image_sizes) pairs.
        ranges: largest input of each layer by path; 0 leaves its inputs as they are.

    Returns:
        Errors by layer, the largest first.
    """
    layers = list(ranges)
    limits = jnp.array([ranges[layer] for layer in layers], jnp.float32)

    @jax.jit
    def outputs(variables, images, image_sizes, found, rounded):
        with nn.intercept_methods(partial(_round_layer, layers, limits, rounded)):
            return model.apply(variables, images, image_sizes, found, method=_raw_outputs)

    detect, noise = jax.jit(predict), jax.jit(_noise)
    errors = np.zeros(len(layers))
    inputs = list(inputs)
    for images, sizes in inputs:
        found = detect(variables, images, sizes)
        exact = outputs(variables, images, sizes, found, -1)
        for i in range(len(layers)):
            rounded = outputs(variables, images, sizes, found, i)
            errors[i] += float(noise(exact, rounded)) / len(inputs)
    order = np.argsort(-errors, kind="stable")
    return {layers[i]: float(errors[i]) for i in order}


def _round_layer(
    layers: list[str], limits: jax.Array, rounded: jax.Array, call: Callable, args, kwargs, context
) -> Any:
    """Intercept the layers' `contract`, and round kernel and input of that with index `rounded`."""
    layer = context.module
    path = "/".join(layer.path)
    if context.method_name != "contract" or path not in layers:
        return call(*args, **kwargs)
    i, (x, kernel, *rest) = layers.index(path), args
    axes = [axis for axis in range(kernel.ndim) if axis != layer.output_axis % kernel.ndim]
    per_channel = jnp.max(jnp.abs(kernel), axes, keepdims=True).astype(jnp.float32)
    kernel = fake_quantize(kernel, jnp.where(rounded == i, per_channel, 0.0))
    return call(fake_quantize(x, jnp.where(rounded == i, limits[i], 0.0)), kernel, *rest, **kwargs)


@in_precision
def _raw_outputs(
    model: MaskRCNN, images: jax.Array, image_sizes: jax.Array, found: Detections
) -> list[jax.Array]:
    """Return objectness and deltas, and the heads' outputs for detections; zero in padding rows."""
    pyramid, extent = model.pyramid(images, image_sizes, train=False)
    logits, deltas = model.rpn_outputs(pyramid, extent)
    outputs = [jnp.concatenate(logits, 1), jnp.concatenate(deltas, 1)]
    pooled = model.pool(pyramid, found.boxes, model.box_roi_size, extent)
    for head in (model.box_head, *model.cascade.heads):
        outputs += head(pooled)
    for task in model.tasks:
        pooled = model.pool(pyramid, found.boxes, model.roi_size(task.name), extent)
        given = task.name, pooled, found.classes, pyramid, found.boxes
        outputs.append(run_head(model, *given))
    rows = [jnp.where(jnp.expand_dims(found.valid, range(2, x.ndim)), x, 0) for x in outputs[2:]]
    return outputs[:2] + rows


def _noise(exact: list[jax.Array], found: list[jax.Array]) -> jax.Array:
    """Return the mean over outputs of the squared error over the squares."""
    shares = [
        jnp.sum((x - y).astype(jnp.float32) ** 2) / jnp.maximum(jnp.sum(x**2), 1e-12)
        for x, y in zip(exact, found, strict=True)
    ]
    return jnp.mean(jnp.stack(shares))


def keep_budget(
    limit: float,
    layers: Sequence[str],
    add_int8: Callable[[Sequence[str]], None],
    score: Callable[[str], dict[str, float]],
) -> Sequence[str]:
    """Add the int8 model with the fewest layers in float that loses no more AP than `limit`.

    Args:
        limit: of the loss of box, of mask and of keypoints AP, 0..1.
        layers: those with the largest errors first.
        add_int8: function of the layers that stay in float.
        score: function of "float" or "int8", the one added last, to AP by name; its last call is
            for the model that stays.

    Returns:
        The layers in float. A warning is logged if even all of them lose more.
    """
    exact = score("float")
    at = at_limit(exact)
    names = [name + at if name + at in exact else name for name in LIMITED_AP if name in exact]
    tried: list[Sequence[str]] = []

    def holds(in_float: Sequence[str]) -> bool:
        tried.append(in_float)
        add_int8(in_float)
        found = score("int8")
        lost = max(exact[name] - found[name] for name in names)
        logging.info("int8 with %d layers in float loses %.4f AP", len(in_float), lost)
        return lost <= limit

    kept = fewest_in_float(layers, holds)
    if tried[-1:] != [kept] and not holds(kept):
        logging.warning("int8 loses more AP than %g with all layers in float that can be", limit)
    return kept


def fewest_in_float(layers: Sequence[str], holds: Callable[[Sequence[str]], bool]) -> Sequence[str]:
    """Find how many of the first layers must stay in float for `holds` to be true of them.

    Tries none, 1, 2, 4, .. of them, then bisects: `holds` is taken to be monotonic, and true of all
    layers, which are not tried.
    """
    fails, enough = -1, 0
    while enough < len(layers) and not holds(layers[:enough]):
        fails, enough = enough, min(max(2 * enough, 1), len(layers))
    while enough - fails > 1:
        middle = (enough + fails) // 2
        if holds(layers[:middle]):
            enough = middle
        else:
            fails = middle
    return layers[:enough]

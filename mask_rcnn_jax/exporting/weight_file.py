"""Weights alone, in our names or those of another system."""

import pickle
from pathlib import Path

import jax
import numpy as np
from absl import logging
from safetensors.numpy import save

from mask_rcnn_jax import parts
from mask_rcnn_jax.exporting.manifest import dump, make_manifest, write
from mask_rcnn_jax.models.build import PARTS, ModelOptions
from mask_rcnn_jax.models.protocols import PartLike, ability
from mask_rcnn_jax.models.quantization import trained_ranges, without_ranges
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.weights.convert import to_detectron2, to_flax, to_ours_flat, to_torchvision
from mask_rcnn_jax.weights.expected_model import mismatches
from mask_rcnn_jax.weights.layout import WITHOUT_STATISTICS
from mask_rcnn_jax.weights.restore import restore, restore_recipe

WEIGHTS = ("safetensors", "torchvision", "detectron2")


def export_weights(
    recipe: Recipe | None,
    weights: str,
    format: str,
    output: str,
    accept_mismatch: bool = False,
    float16: bool = False,
) -> None:
    """Write weights in a format of `WEIGHTS`.

    float16: of safetensors, store float16; ValueError if a number is too large for it.
    """
    target = Path(output)
    suffix = ".pkl" if format == "detectron2" else ".safetensors"
    if target.suffix != suffix:
        raise ValueError(f"--output is {output}, expected a name that ends in {suffix}")
    if format != "safetensors":
        check_system(restore_recipe(recipe, weights, accept_mismatch)[0].model, format)
    recipe, variables, categories, _ = restore(recipe, weights, accept_mismatch=accept_mismatch)
    eps = recipe.model.backbone.get("norm_eps", 1e-5)
    converters = {"torchvision": to_torchvision, "detectron2": to_detectron2}
    if convert := converters.get(format):
        if ranges := trained_ranges(variables):
            logging.warning("%d ranges of int8 left out: %s has none", len(ranges), format)
            variables = {**variables, "batch_stats": without_ranges(variables["batch_stats"])}
        arrays = convert(variables, norm_eps=eps)
        eps = 1e-5  # theirs, to which the weights are converted
    else:
        arrays = to_ours_flat(variables)
    if float16:
        arrays = {name: _halved(name, array) for name, array in arrays.items()}
    if format == "detectron2":  # as in its model zoo
        content = pickle.dumps({"model": arrays, "__author__": "mask_rcnn_jax"}, protocol=4)
    else:
        content = save(arrays)
    norm, model = recipe.model.backbone.get("norm", None), parts.to_section(recipe.model)
    restored, _ = to_flax(arrays, norm=norm, eps=eps, model=model)
    if format == "detectron2":  # has no boxes and masks of background
        difference = _largest_difference(to_detectron2(restored, norm_eps=eps), arrays)
    else:
        difference = _largest_difference(restored, variables)
    details = {"self_check": {"largest_difference": difference}}
    manifest = make_manifest(
        recipe, categories, format=format, files=[target.name], interface=None, details=details
    )
    manifest_name = f"{target.stem}.manifest.json"
    write(target.parent, {target.name: content, manifest_name: dump(manifest)})
    print(f"{target}: {len(arrays)} arrays in the names of --format={format}")
    print(f"self-check: read back, the largest difference is {difference:.2g}")


def check_system(model: ModelOptions, system: str) -> None:
    """Raise ValueError if torchvision or detectron2 lacks a layer of the model; log all other
    differences.

    torchvision's ResNet has batch normalization and strides in its 3x3 convolutions, and its box
    heads have fixed layers and boxes for each class. The user sets everything else (anchors,
    RoIAlign, input channel order and padding) in the system, if it has the option; remaining
    differences cost accuracy.
    """
    backbone, theirs = model.backbone, "torchvision's ResNet"
    known = {"resnet": system}
    if system == "detectron2":
        known |= {"regnet": "detectron2_regnet", "vit": "detectron2_vitdet"}
    if backbone.name not in known:
        raise ValueError(
            f"model.backbone.name is {backbone.name!r}, {system} has {' and '.join(known)} only"
        )
    if system == "torchvision":
        if backbone.norm in WITHOUT_STATISTICS:
            text = f"model.backbone.norm is {backbone.norm!r}"
            raise ValueError(f"{text}, {theirs} has batch normalization only")
        if backbone.depth >= 50 and backbone.stride_in != "3x3":
            text = f"model.backbone.stride_in is {backbone.stride_in!r}"
            raise ValueError(f"{text}, {theirs} strides in '3x3' only")
        head = model.box_head
        layers = head.get("num_convs", 0), head.get("num_fcs", 2)
        if layers not in ((0, 2), (4, 1)):
            text = "model.box_head.num_convs and num_fcs are {} and {}".format(*layers)
            raise ValueError(f"{text}, torchvision has 0 and 2, or 4 and 1")
        if head.get("class_agnostic", False):
            text = "model.box_head.class_agnostic is True"
            raise ValueError(f"{text}, torchvision has boxes for each class only")
    for name in PARTS:
        if widths := ability(getattr(model, name), PartLike, "widths"):
            text = f"model.{name}.widths is {widths}"
            raise ValueError(f"{text}, {system} has no pruned models; use --format=safetensors")
    # Statistics absorb another epsilon.
    absorbed = () if backbone.get("norm", None) in WITHOUT_STATISTICS else ("backbone.norm_eps",)
    for line in mismatches(known[backbone.name], parts.to_section(model), without=absorbed):
        logging.warning("%s", line)


def _halved(name: str, array: np.ndarray) -> np.ndarray:
    if (largest := np.abs(array).max(initial=0)) > np.finfo(np.float16).max:
        raise ValueError(f"{name} has {largest:g}, too large for --float16")
    return array.astype(np.float16)


def _largest_difference(a: dict, b: dict) -> float:
    gaps = jax.tree.map(lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max()), a, b)
    return max(jax.tree.leaves(gaps))
